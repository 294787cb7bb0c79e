//! Adding nodes, of every kind that is simulated: all but external semaphores.

use super::conditional::Conditional;
use super::kind::{
    ChildParams, ConditionalParams, Edge, EventParams, HostNode, HostParams, Kernel, Kind,
    MemOpsParams, MemcpyParams, Memset, NodeParams,
};
use super::memory::{self, Allocation};
use super::{CUgraph, CUgraphNode, Graph, Node};
use crate::abi::{exports, get, put};
use crate::context::{Context, current};
use crate::copy::Copy3d;
use crate::driver::{driver, lock};
use crate::errors::Result;
use crate::event::Event;
use crate::handle::{handle, resolve};
use crate::launch::{Shape, duration};
use crate::module::Function;
use std::ffi::c_void;
use std::sync::Arc;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEM_ALLOC_NODE_PARAMS, CUdeviceptr,
    CUevent, CUmemPoolProps,
};

/// A kernel node's work; parameters are copied when the node is made, as far as they matter.
pub(crate) fn kernel(p: CUDA_KERNEL_NODE_PARAMS) -> Result<Kind> {
    let function: &'static Function = resolve(if p.func.is_null() { p.kern } else { p.func })?;
    let [gx, gy, gz, bx, by, bz, shared] = p.shape;
    let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz] };
    shape.check()?;
    let fixed_ns = match function.duration {
        simgpu::config::Duration::PerWave(_) => None,
        _ => Some(duration(function, shape, 1, p.kernelParams, p.extra)?),
    };
    Ok(Kind::Kernel(Kernel {
        function,
        shape,
        shared,
        fixed_ns,
        params: p.kernelParams as usize,
        extra: p.extra as usize,
    }))
}

pub(crate) fn memcpy(copy: *const Copy3d) -> Result<Kind> {
    let copy = get(copy)?;
    copy.check()?;
    Ok(Kind::Memcpy(Arc::new(copy)))
}

pub(crate) fn memset(fill: *const Memset) -> Result<Kind> {
    let fill = get(fill)?;
    fill.check()?;
    Ok(Kind::Memset(fill))
}

pub(crate) fn host(p: *const HostParams) -> Result<Kind> {
    let p = get(p)?;
    let function = p.function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok(Kind::Host(HostNode { function, data: p.data as usize }))
}

pub(crate) fn mem_ops(p: &MemOpsParams) -> Result<Kind> {
    Ok(Kind::MemOps(crate::stream_memory::batch(p.count, p.ops, p.flags)?.into()))
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
    if (allocType, handleTypes, location.r#type) != (1, 0, 1) || p.bytesize == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let made = allocate_on(graph, location.id, p.bytesize as u64)?;
    let Kind::MemAlloc(allocation) = &made else { return Err(CUDA_ERROR_INVALID_VALUE) };
    put(params, CUDA_MEM_ALLOC_NODE_PARAMS { dptr: allocation.at, ..p })?;
    Ok(made)
}

/// An allocation of `bytes` on a device for a node of `graph`.
pub(crate) fn allocate_on(graph: &'static Graph, device: i32, bytes: u64) -> Result<Kind> {
    let allocation = Allocation::create(context_on(device)?, bytes, handle(graph) as usize)?;
    memory::remember(&allocation);
    Ok(Kind::MemAlloc(allocation))
}

pub(crate) fn free(graph: &'static Graph, at: CUdeviceptr) -> Result<Kind> {
    let allocation = memory::find(at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    allocation.add_free(handle(graph) as usize)?;
    Ok(Kind::MemFree(allocation))
}

fn event(event: CUevent) -> Result<&'static Event> {
    resolve(event)
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
fn child(parent: &'static Graph, of: CUgraph, ownership: i32) -> Result<Kind> {
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

/// Any node's work, of `CUgraphNodeParams`.
fn of_any_kind(graph: &'static Graph, params: *mut NodeParams) -> Result<Kind> {
    match settable(params)? {
        Some(kind) => Ok(kind),
        None => match get(params.cast::<i32>())? {
            4 => {
                let p: ChildParams = get(NodeParams::member(params))?;
                child(graph, p.graph, p.ownership)
            }
            10 => alloc(graph, NodeParams::member(params)),
            11 => free(graph, get(NodeParams::member(params))?),
            13 => {
                let at = NodeParams::member::<ConditionalParams>(params);
                let p = get(at)?;
                let conditional = Conditional::create(p.handle, p.kind, p.size)?;
                put(at, ConditionalParams { bodies: conditional.handles(), ..p })?;
                Ok(Kind::Conditional(conditional))
            }
            // External semaphores, and what CUDA 13 added.
            _ => Err(CUDA_ERROR_NOT_SUPPORTED),
        },
    }
}

/// The work that a node of an executable graph may be given, too; `None` for other kinds.
pub(crate) fn settable(params: *mut NodeParams) -> Result<Option<Kind>> {
    let number: i32 = get(params.cast())?;
    let kind = match number {
        0 => kernel(get(NodeParams::member(params))?)?,
        1 => {
            let p = NodeParams::member::<MemcpyParams>(params);
            memcpy(p.cast::<u8>().wrapping_add(std::mem::offset_of!(MemcpyParams, copy)).cast())?
        }
        2 => memset(NodeParams::member(params))?,
        3 => host(NodeParams::member(params))?,
        5 => Kind::Empty,
        6 => Kind::EventWait(event(get::<EventParams>(NodeParams::member(params))?.event)?),
        7 => Kind::EventRecord(event(get::<EventParams>(NodeParams::member(params))?.event)?),
        12 => mem_ops(&get(NodeParams::member(params))?)?,
        _ => return Ok(None),
    };
    Ok(Some(kind))
}

pub(crate) fn nodes(list: *const CUgraphNode, count: usize) -> Result<Vec<&'static Node>> {
    (0..count).map(|i| resolve(get(list.wrapping_add(i))?)).collect()
}

fn add(
    out: *mut CUgraphNode,
    graph: CUgraph,
    deps: *const CUgraphNode,
    count: usize,
    kind: impl FnOnce(&'static Graph) -> Result<Kind>,
) -> Result<()> {
    driver()?;
    let graph: &'static Graph = resolve(graph)?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let after = nodes(deps, count)?;
    if after.iter().any(|node| !node.is_in(graph)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    put(out, handle(graph.add(kind(graph)?, after)?))
}

exports! {
    fn cuGraphAddKernelNode(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS_v1) {
        add(out, graph, deps, count, |_| kernel(get(params)?.into()))
    }
    fn cuGraphAddKernelNode_v2(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS) {
        add(out, graph, deps, count, |_| kernel(get(params)?))
    }
    fn cuGraphAddEmptyNode(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize) {
        add(out, graph, deps, count, |_| Ok(Kind::Empty))
    }
    fn cuGraphAddMemAllocNode(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *mut c_void) {
        add(out, graph, deps, count, |graph| alloc(graph, params.cast()))
    }
    fn cuGraphAddMemFreeNode(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, at: CUdeviceptr) {
        add(out, graph, deps, count, |graph| free(graph, at))
    }
    fn cuGraphAddNode(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *mut c_void) {
        add(out, graph, deps, count, |graph| of_any_kind(graph, params.cast()))
    }
    fn cuGraphAddNode_v2, cuGraphAddNode_v3(out: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, _data: *const Edge, count: usize, params: *mut c_void) {
        add(out, graph, deps, count, |graph| of_any_kind(graph, params.cast()))
    }
}
