//! Graphs of kernel nodes, enough to launch one: CUDA Driver API, "Graph Management".
//!
//! The nodes of a graph run one after another, in the order in which they were added.

use crate::abi::{exports, exports_both, get, put, put_if};
use crate::driver::{driver, lock};
use crate::errors::Result;
use crate::handle::{Header, Object, enliven, handle, kill, resolve};
use crate::launch::{Shape, duration};
use crate::module::Function;
use crate::stream::stream;
use simgpu::engine::Op;
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUfunction, CUgraphExec, CUstream,
};

type CUgraph = *mut c_void;
type CUgraphNode = *mut c_void;

/// A graph, or an executable one.
#[repr(C)]
struct Graph {
    header: Header,
    nodes: Mutex<Vec<&'static Node>>,
}

impl Object for Graph {
    const MAGIC: u32 = 0x4752_5048;
    fn header(&self) -> &Header {
        &self.header
    }
}

/// An executable graph: GPU time of one launch for a GPU with so many SMs is found at launch.
#[repr(C)]
struct Exec {
    header: Header,
    nodes: Vec<&'static Node>,
}

impl Object for Exec {
    const MAGIC: u32 = 0x4745_5845;
    fn header(&self) -> &Header {
        &self.header
    }
}

/// A kernel node; none: an empty node.
#[repr(C)]
struct Node {
    header: Header,
    kernel: Option<(&'static Function, Shape, Option<u64>)>,
}

impl Object for Node {
    const MAGIC: u32 = 0x474e_4f44;
    fn header(&self) -> &Header {
        &self.header
    }
}

/// `CUDA_KERNEL_NODE_PARAMS` v1; v2 appends a kernel and a context.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelNode {
    function: CUfunction,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct KernelNodeV2 {
    v1: KernelNode,
    kernel: CUfunction,
    context: *mut c_void,
}
const _: () = assert!(size_of::<KernelNode>() == 56 && size_of::<KernelNodeV2>() == 72);

fn add(out: *mut CUgraphNode, graph: CUgraph, node: Node) -> Result<()> {
    let graph: &Graph = resolve(graph)?;
    let node = enliven(Box::leak(Box::new(node)));
    put(out, handle(node))?;
    lock(&graph.nodes).push(node);
    Ok(())
}

fn add_kernel(out: *mut CUgraphNode, graph: CUgraph, p: KernelNode) -> Result<()> {
    driver()?;
    let function: &'static Function = resolve(p.function)?;
    let shape = Shape { grid: p.grid, block: p.block };
    shape.check()?;
    // Parameters are copied when the node is added.
    let fixed = match function.duration {
        simgpu::config::Duration::PerWave(_) => None,
        _ => Some(duration(function, shape, 1, p.params, p.extra)?),
    };
    add(out, graph, Node { header: Header::new(), kernel: Some((function, shape, fixed)) })
}

fn instantiate(out: *mut CUgraphExec, graph: CUgraph) -> Result<()> {
    driver()?;
    let nodes = lock(&resolve::<Graph>(graph)?.nodes).clone();
    put(out, handle(enliven(Box::leak(Box::new(Exec { header: Header::new(), nodes })))))
}

exports! {
    fn cuGraphCreate(out: *mut CUgraph, flags: c_uint) {
        driver()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let graph = Graph { header: Header::new(), nodes: Mutex::default() };
        put(out, handle(enliven(Box::leak(Box::new(graph)))))
    }
    fn cuGraphDestroy(graph: CUgraph) {
        driver()?;
        kill(resolve::<Graph>(graph)?);
        Ok(())
    }
    fn cuGraphExecDestroy(exec: CUgraphExec) {
        driver()?;
        kill(resolve::<Exec>(exec)?);
        Ok(())
    }
    fn cuGraphAddKernelNode(out: *mut CUgraphNode, graph: CUgraph, _deps: *const CUgraphNode, _count: usize, params: *const c_void) {
        add_kernel(out, graph, get(params.cast())?)
    }
    fn cuGraphAddKernelNode_v2(out: *mut CUgraphNode, graph: CUgraph, _deps: *const CUgraphNode, _count: usize, params: *const c_void) {
        let p: KernelNodeV2 = get(params.cast())?;
        let function = if p.v1.function.is_null() { p.kernel } else { p.v1.function };
        add_kernel(out, graph, KernelNode { function, ..p.v1 })
    }
    fn cuGraphAddEmptyNode(out: *mut CUgraphNode, graph: CUgraph, _deps: *const CUgraphNode, _count: usize) {
        driver()?;
        add(out, graph, Node { header: Header::new(), kernel: None })
    }
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        driver()?;
        let all = lock(&resolve::<Graph>(graph)?.nodes).clone();
        if nodes.is_null() {
            return put(count, all.len());
        }
        for (i, node) in all.iter().take(get(count)?).enumerate() {
            put(nodes.wrapping_add(i), handle(*node))?;
        }
        put(count, all.len())
    }
    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, _flags: u64) {
        instantiate(out, graph)
    }
    fn cuGraphInstantiate(out: *mut CUgraphExec, graph: CUgraph, error: *mut CUgraphNode, _log: *mut i8, _len: usize) {
        put_if(error, std::ptr::null_mut());
        instantiate(out, graph)
    }
    fn cuGraphInstantiate_v2(out: *mut CUgraphExec, graph: CUgraph, error: *mut CUgraphNode, _log: *mut i8, _len: usize) {
        put_if(error, std::ptr::null_mut());
        instantiate(out, graph)
    }
    fn cuGraphClone(_out: *mut CUgraph, _graph: CUgraph) {
        driver()?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
}

exports_both! {
    fn cuGraphLaunch, cuGraphLaunch_ptsz(graph: CUgraphExec, s: CUstream) |flavour| {
        let launch_ns = driver()?.session.config().costs.launch_ns;
        let exec: &Exec = resolve(graph)?;
        let s = stream(s, flavour)?;
        s.device().check()?;
        let null = std::ptr::null_mut();
        for (function, shape, fixed) in exec.nodes.iter().filter_map(|n| n.kernel) {
            let ns = match fixed {
                Some(ns) => ns,
                None => duration(function, shape, s.device().config.sm_count, null, null)?,
            };
            s.submit(Op::Compute(ns.saturating_add(launch_ns)))?;
        }
        Ok(())
    }

    fn cuGraphUpload, cuGraphUpload_ptsz(graph: CUgraphExec, s: CUstream) |flavour| {
        resolve::<Exec>(graph)?;
        stream(s, flavour).map(|_| ())
    }
}
