//! Changing executable graphs: `cuGraphExecUpdate`, `cuGraphExec…SetParams`.

use super::add::{kernel, settable};
use super::exec::{Exec, Step, flatten};
use super::kind::{Kernel, Kind};
use super::memory::Allocation;
use super::{CUgraph, CUgraphNode, Graph, Node};
use crate::abi::{exports, get, put, put_if};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use std::ffi::{c_int, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_KERNEL_NODE_PARAMS,
    CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEM_ALLOC_NODE_PARAMS, CUgraphExec,
    CUgraphExecUpdateResultInfo as Info, CUgraphNodeParams, CUmemLocation, CUmemPoolProps,
    CUresult,
};

const CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE: CUresult = 910;

/// `CU_GRAPH_EXEC_UPDATE_*`.
mod outcome {
    use std::ffi::c_int;
    pub(super) const TOPOLOGY_CHANGED: c_int = 2;
    pub(super) const NODE_TYPE_CHANGED: c_int = 3;
    pub(super) const PARAMETERS_CHANGED: c_int = 5;
}

/// Why an update can't be: a result, the node, and the one it depends on.
type Refused = (c_int, Option<&'static Node>, Option<&'static Node>);

fn compare(old: &[Step], new: &[Step]) -> std::result::Result<(), Refused> {
    if old.len() != new.len() {
        return Err((outcome::TOPOLOGY_CHANGED, None, None));
    }
    for (was, is) in old.iter().zip(new) {
        if was.after.len() != is.after.len() {
            return Err((outcome::TOPOLOGY_CHANGED, Some(is.node), None));
        }
        if let Some((_, &from)) = was.after.iter().zip(&is.after).find(|(a, b)| a != b) {
            return Err((outcome::TOPOLOGY_CHANGED, Some(is.node), Some(new[from].node)));
        }
        if was.kind.number() != is.kind.number() {
            return Err((outcome::NODE_TYPE_CHANGED, Some(is.node), None));
        }
        if !changeable(&was.kind, &is.kind) {
            return Err((outcome::PARAMETERS_CHANGED, Some(is.node), None));
        }
    }
    Ok(())
}

/// Whether a node of an executable graph may become this.
fn changeable(was: &Kind, is: &Kind) -> bool {
    match (was, is) {
        // "For 2d memsets, only address and assigned value may be updated."
        (Kind::Memset(a), Kind::Memset(b)) => {
            (a.height <= 1 && b.height <= 1)
                || (a.height, a.width, a.element, a.pitch)
                    == (b.height, b.width, b.element, b.pitch)
        }
        (Kind::Memcpy(a), Kind::Memcpy(b)) => a.same_kinds(b),
        // The same allocation, or one that needs as much.
        (Kind::MemAlloc(a), Kind::MemAlloc(b)) => a.size == b.size,
        _ => was.number() == is.number(),
    }
}

fn update(exec: CUgraphExec, graph: CUgraph) -> Result<Option<Refused>> {
    driver()?;
    let exec: &'static Exec = resolve(exec)?;
    let graph: &Graph = resolve(graph)?;
    if graph.lock().owned {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut new = Vec::new();
    flatten(graph, &mut new, None);
    let mut state = exec.lock();
    if let Err(refused) = compare(&state.steps, &new) {
        return Ok(Some(refused));
    }
    for (step, from) in state.steps.iter_mut().zip(new) {
        // Memory nodes keep what this graph allocates.
        if !matches!(step.kind, Kind::MemAlloc(_) | Kind::MemFree(_)) {
            step.kind = from.kind;
        }
    }
    Ok(None)
}

fn set(exec: CUgraphExec, node: CUgraphNode, kind: impl FnOnce() -> Result<Kind>) -> Result<()> {
    driver()?;
    let exec: &'static Exec = resolve(exec)?;
    let kind = kind()?;
    let serial = resolve::<Node>(node)?.lock().serial;
    let mut state = exec.lock();
    let step = state.steps.iter_mut().find(|step| step.serial == serial);
    let step = step.filter(|step| changeable(&step.kind, &kind)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    step.kind = kind;
    Ok(())
}

exports! {
    fn cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, node: *mut CUgraphNode, result: *mut c_int) {
        put_if(node, std::ptr::null_mut());
        match update(exec, graph)? {
            None => put(result, 0),
            Some((why, at, _)) => {
                put_if(node, at.map_or(std::ptr::null_mut(), handle));
                put(result, why)?;
                Err(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
            }
        }
    }
    fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: *mut Info) {
        let null = std::ptr::null_mut();
        match update(exec, graph)? {
            None => put(info, Info { result: 0, errorNode: null, errorFromNode: null }),
            Some((result, node, from)) => {
                let (node, from) = (node.map_or(null, handle), from.map_or(null, handle));
                put(info, Info { result, errorNode: node, errorFromNode: from })?;
                Err(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
            }
        }
    }
    fn cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v1) {
        set(exec, node, || kernel(get(params)?.into()))
    }
    fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS) {
        set(exec, node, || kernel(get(params)?))
    }
    fn cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *mut CUgraphNodeParams) {
        set(exec, node, || settable(params.cast())?.ok_or(CUDA_ERROR_NOT_SUPPORTED))
    }
}

// What is asked of nodes: by the shim, of what a graph would launch and obtain; by tests, of what a
// capture made.

fn kind(node: CUgraphNode) -> Result<Kind> {
    driver()?;
    Ok(resolve::<Node>(node)?.kind())
}

impl Kernel {
    fn params(&self) -> CUDA_KERNEL_NODE_PARAMS_v1 {
        let ([gx, gy, gz], [bx, by, bz]) = (self.shape.grid, self.shape.block);
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func: handle(self.function),
            shape: [gx, gy, gz, bx, by, bz, self.shared],
            kernelParams: self.params as *mut *mut c_void,
            extra: self.extra as *mut *mut c_void,
        }
    }
}

fn alloc_params(a: &Allocation) -> CUDA_MEM_ALLOC_NODE_PARAMS {
    CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: CUmemPoolProps {
            allocType: 1,
            handleTypes: 0,
            location: CUmemLocation { r#type: 1, id: a.device.ordinal },
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        },
        accessDescs: std::ptr::null(),
        accessDescCount: 0,
        bytesize: usize::try_from(a.size).unwrap_or(usize::MAX),
        dptr: a.at,
    }
}

/// Writes a list of handles as `cuGraphGetNodes` describes: the number if there is nowhere to
/// write, else as many as fit, null behind the last, and how many there were.
fn put_list(all: Vec<&'static Node>, out: *mut CUgraphNode, count: *mut usize) -> Result<()> {
    if out.is_null() {
        return put(count, all.len());
    }
    let room = get(count)?;
    for i in 0..room {
        let node = all.get(i).map_or(std::ptr::null_mut(), |node| handle(*node));
        put(out.wrapping_add(i), node)?;
    }
    put(count, room.min(all.len()))
}

fn wrong<T>() -> Result<T> {
    Err(CUDA_ERROR_INVALID_VALUE)
}

exports! {
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        driver()?;
        put_list(resolve::<Graph>(graph)?.nodes(), nodes, count)
    }
    fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) {
        driver()?;
        put_list(resolve::<Node>(node)?.after(), nodes, count)
    }
    fn cuGraphNodeGetType(node: CUgraphNode, out: *mut c_int) {
        put(out, kind(node)?.number())
    }
    fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) {
        if let Kind::Child(own) = kind(node)? { put(graph, handle(own)) } else { wrong() }
    }
    fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: *mut CUDA_KERNEL_NODE_PARAMS_v1) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params()) } else { wrong() }
    }
    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: *mut CUDA_KERNEL_NODE_PARAMS) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params().into()) } else { wrong() }
    }
    fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: *mut c_void) {
        if let Kind::MemAlloc(a) = kind(node)? { put(out.cast(), alloc_params(&a)) } else { wrong() }
    }
}
