//! Adding nodes, of every kind that is simulated: all but external semaphores; and asking about them.

use super::memory::{self, Allocation};
use super::{Conditional, Graph, HostNode, Kernel, Kind, Memset, Node};
use crate::abi::{Result, exports, get, handle, put, resolve};
use crate::context::{Context, current};
use crate::copy::Copy3d;
use crate::driver::{driver, lock};
use crate::event::Event;
use crate::launch::{Shape, duration};
use crate::module::Function;
use crate::work::HostFn;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEM_ALLOC_NODE_PARAMS, CUdeviceptr,
    CUgraph, CUgraphEdgeData, CUgraphNode, CUmemLocation, CUmemPoolProps,
};

/// Where the union of a `CUgraphNodeParams` is, behind its type, as one of its members.
fn member<T>(params: *mut c_void) -> *mut T {
    params.cast::<u8>().wrapping_add(16).cast()
}

/// A kernel node's work; parameters are copied when the node is made, as far as they matter.
pub(crate) fn kernel(p: CUDA_KERNEL_NODE_PARAMS) -> Result<Kind> {
    let function: &'static Function = resolve(if p.func.is_null() { p.kern } else { p.func })?;
    let [gx, gy, gz, bx, by, bz, shared] = p.shape;
    let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz] };
    shape.check()?;
    let ns = duration(function, p.kernelParams, p.extra)?;
    Ok(Kind::Kernel(Kernel { function, shape, shared, ns }))
}

/// The context for memory on a device: the current one, else the device's primary one.
fn context_on(id: i32) -> Result<&'static Context> {
    let device = driver()?.device(id).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    match current() {
        Ok(context) if std::ptr::eq(context.device, device) => Ok(context),
        _ => lock(&device.primary).context().ok_or(CUDA_ERROR_INVALID_CONTEXT),
    }
}

/// An allocation node's work; its address is written into the caller's structure.
fn alloc(graph: &'static Graph, params: *mut CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Kind> {
    let p = get(params)?;
    // CU_MEM_ALLOCATION_TYPE_PINNED on a device, "IPC is not supported".
    let CUmemPoolProps { allocType, handleTypes, location, .. } = p.poolProps;
    if (allocType, handleTypes, location.r#type) != (1, 0, 1) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let allocation = allocate_on(graph, location.id, p.bytesize as u64)?;
    put(params, CUDA_MEM_ALLOC_NODE_PARAMS { dptr: allocation.at, ..p })?;
    Ok(Kind::MemAlloc(allocation))
}

/// An allocation of `bytes` on a device for a node of `graph`.
pub(crate) fn allocate_on(
    graph: &'static Graph,
    device: i32,
    bytes: u64,
) -> Result<Arc<Allocation>> {
    let allocation = Allocation::create(context_on(device)?, bytes, handle(graph) as usize)?;
    memory::remember(&allocation);
    Ok(allocation)
}

pub(crate) fn free(graph: &'static Graph, at: CUdeviceptr) -> Result<Kind> {
    let allocation = memory::find(at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    allocation.add_free(handle(graph) as usize)?;
    Ok(Kind::MemFree(allocation))
}

/// Copies all nodes of `original` into `copy`, "child graph nodes … recursively".
fn copy_into(copy: &'static Graph, original: &Graph) -> Result<()> {
    let mut pairs = Vec::<(&'static Node, &'static Node)>::new();
    for node in original.nodes() {
        let kind = match node.kind() {
            Kind::Child(inner) => {
                let own = Graph::create_owned();
                copy_into(own, inner)?;
                Kind::Child(own)
            }
            other => other,
        };
        let copied = |from: &'static Node| pairs.iter().find(|pair| std::ptr::eq(pair.0, from));
        let after = node.after().into_iter().filter_map(copied).map(|pair| pair.1).collect();
        pairs.push((node, copy.add(kind, after)?));
    }
    Ok(())
}

/// The work of a child graph node of `parent` over `of`: a clone of it, or itself if moved.
fn child(parent: &'static Graph, of: CUgraph, ownership: c_int) -> Result<Kind> {
    let of: &'static Graph = resolve(of)?;
    if std::ptr::eq(of, parent) || of.has_conditional_nodes() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match ownership {
        // "memory allocation/free nodes can't be present in the child graph"
        0 if of.has_memory_nodes() => Err(CUDA_ERROR_NOT_SUPPORTED),
        0 => {
            let own = Graph::create_owned();
            copy_into(own, of)?;
            Ok(Kind::Child(own))
        }
        1 => {
            let mut state = of.lock();
            if state.owned {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            state.owned = true;
            Ok(Kind::Child(of))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn conditional(params: *mut c_void) -> Result<Kind> {
    /// `CUDA_CONDITIONAL_NODE_PARAMS`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Params {
        handle: u64,
        kind: c_int,
        size: c_uint,
        bodies: *mut CUgraph,
    }
    let at = member::<Params>(params);
    let p = get(at)?;
    let conditional = Conditional::create(p.handle, p.kind, p.size)?;
    put(at, Params { bodies: conditional.handles(), ..p })?;
    Ok(Kind::Conditional(conditional))
}

/// Any node's work, of `CUgraphNodeParams`.
fn of_any_kind(graph: &'static Graph, params: *mut c_void) -> Result<Kind> {
    match get(params.cast::<c_int>())? {
        4 => {
            // `CUDA_CHILD_GRAPH_NODE_PARAMS`: a graph, and 0 for a clone of it, 1 for itself.
            let of: CUgraph = get(member(params))?;
            let ownership: c_int = get(member::<c_int>(params).wrapping_add(2))?;
            child(graph, of, ownership)
        }
        10 => alloc(graph, member(params)),
        11 => free(graph, get(member(params))?),
        13 => conditional(params),
        _ => settable(params),
    }
}

/// The work that a node of an executable graph may be given, too.
pub(crate) fn settable(params: *mut c_void) -> Result<Kind> {
    match get(params.cast::<c_int>())? {
        0 => kernel(get(member(params))?),
        1 => {
            // `CUDA_MEMCPY_NODE_PARAMS`: flags and a context before the copy.
            let copy: Copy3d = get(member::<Copy3d>(params).wrapping_byte_add(16))?;
            copy.check()?;
            Ok(Kind::Memcpy(Arc::new(copy)))
        }
        2 => {
            let fill: Memset = get(member(params))?;
            fill.check()?;
            Ok(Kind::Memset(fill))
        }
        3 => {
            // `CUDA_HOST_NODE_PARAMS`.
            let function: Option<HostFn> = get(member(params))?;
            let data: usize = get(member::<usize>(params).wrapping_add(1))?;
            let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
            Ok(Kind::Host(HostNode { function, data }))
        }
        5 => Ok(Kind::Empty),
        6 => Ok(Kind::EventWait(resolve::<Event>(get(member(params))?)?)),
        7 => Ok(Kind::EventRecord(resolve::<Event>(get(member(params))?)?)),
        // External semaphores, operations on words, and what CUDA 13 added.
        _ => Err(CUDA_ERROR_NOT_SUPPORTED),
    }
}

pub(crate) fn nodes(list: *const CUgraphNode, count: usize) -> Result<Vec<&'static Node>> {
    (0..count).map(|i| resolve(get(list.wrapping_add(i))?)).collect()
}

fn add(
    graph: CUgraph,
    deps: *const CUgraphNode,
    count: usize,
    kind: impl FnOnce(&'static Graph) -> Result<Kind>,
) -> Result<CUgraphNode> {
    let graph: &'static Graph = resolve(graph)?;
    let after = nodes(deps, count)?;
    Ok(handle(graph.add(kind(graph)?, after)?))
}

exports! {
    fn cuGraphAddKernelNode(graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS_v1) -> CUgraphNode {
        add(graph, deps, count, |_| kernel(get(params)?.into()))
    }
    fn cuGraphAddKernelNode_v2(graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS) -> CUgraphNode {
        add(graph, deps, count, |_| kernel(get(params)?))
    }
    fn cuGraphAddEmptyNode(graph: CUgraph, deps: *const CUgraphNode, count: usize) -> CUgraphNode {
        add(graph, deps, count, |_| Ok(Kind::Empty))
    }
    fn cuGraphAddMemAllocNode(graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *mut c_void) -> CUgraphNode {
        add(graph, deps, count, |graph| alloc(graph, params.cast()))
    }
    fn cuGraphAddMemFreeNode(graph: CUgraph, deps: *const CUgraphNode, count: usize, at: CUdeviceptr) -> CUgraphNode {
        add(graph, deps, count, |graph| free(graph, at))
    }
    fn cuGraphAddNode(graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *mut c_void) -> CUgraphNode {
        add(graph, deps, count, |graph| of_any_kind(graph, params))
    }
    fn cuGraphAddNode_v2(graph: CUgraph, deps: *const CUgraphNode, _data: *const CUgraphEdgeData, count: usize, params: *mut c_void) -> CUgraphNode {
        add(graph, deps, count, |graph| of_any_kind(graph, params))
    }
}

// What is asked of nodes: by the shim, of what a graph would launch and obtain; by tests, of what a
// capture made.

fn kind(node: CUgraphNode) -> Result<Kind> {
    Ok(resolve::<Node>(node)?.kind())
}

impl Kernel {
    fn params(&self) -> CUDA_KERNEL_NODE_PARAMS_v1 {
        let ([gx, gy, gz], [bx, by, bz]) = (self.shape.grid, self.shape.block);
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func: handle(self.function),
            shape: [gx, gy, gz, bx, by, bz, self.shared],
            // Not kept.
            kernelParams: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
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

const WRONG: Result<()> = Err(CUDA_ERROR_INVALID_VALUE);

exports! {
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        put_list(resolve::<Graph>(graph)?.nodes(), nodes, count)
    }
    fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) {
        put_list(resolve::<Node>(node)?.after(), nodes, count)
    }
    fn cuGraphNodeGetType(node: CUgraphNode, out: *mut c_int) {
        put(out, kind(node)?.number())
    }
    fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) {
        if let Kind::Child(own) = kind(node)? { put(graph, handle(own)) } else { WRONG }
    }
    fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: *mut CUDA_KERNEL_NODE_PARAMS_v1) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params()) } else { WRONG }
    }
    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: *mut CUDA_KERNEL_NODE_PARAMS) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params().into()) } else { WRONG }
    }
    fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: *mut c_void) {
        if let Kind::MemAlloc(a) = kind(node)? { put(out.cast(), alloc_params(&a)) } else { WRONG }
    }
}
