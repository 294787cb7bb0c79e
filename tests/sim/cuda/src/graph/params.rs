//! What nodes do: reading and changing it.

use super::add::{host, kernel, kernel_v2, mem_ops, memcpy, memset, settable};
use super::kind::{
    AllocParams, ChildParams, ConditionalParams, EventParams, HostParams, Kernel, KernelParams,
    KernelParamsV2, Kind, MemOps, MemOpsParams, MemcpyParams, Memset, NodeParams,
};
use super::memory::Allocation;
use super::{CUgraphNode, Node};
use crate::abi::{exports, get, put};
use crate::copy::Copy3d;
use crate::driver::driver;
use crate::errors::Result;
use crate::event::Event;
use crate::handle::{handle, resolve};
use std::ffi::{c_int, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdeviceptr, CUevent,
};

fn kind(node: CUgraphNode) -> Result<Kind> {
    driver()?;
    Ok(resolve::<Node>(node)?.kind())
}

/// Gives a node other work of the same kind.
fn set(node: CUgraphNode, new: impl FnOnce() -> Result<Kind>) -> Result<()> {
    driver()?;
    let node: &Node = resolve(node)?;
    let mut new = new()?;
    let mut state = node.lock();
    if state.kind.number() != new.number() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // Attributes are no parameters.
    if let (Kind::Kernel(old), Kind::Kernel(new)) = (&state.kind, &mut new) {
        (new.priority, new.cooperative) = (old.priority, old.cooperative);
    }
    state.kind = new;
    Ok(())
}

impl Kernel {
    fn params(&self) -> KernelParams {
        KernelParams {
            function: handle(self.function),
            grid: self.shape.grid,
            block: self.shape.block,
            shared: self.shared,
            params: self.params as *mut *mut c_void,
            extra: self.extra as *mut *mut c_void,
        }
    }

    fn params_v2(&self) -> KernelParamsV2 {
        let null = std::ptr::null_mut();
        KernelParamsV2 { v1: self.params(), kernel: null, context: null }
    }
}

fn alloc_params(a: &Allocation) -> AllocParams {
    AllocParams {
        kind: 1,
        handles: 0,
        location: 1,
        location_id: a.device.ordinal,
        security: 0,
        max_size: 0,
        usage: 0,
        reserved: [0; 54],
        access: std::ptr::null(),
        access_count: 0,
        bytes: usize::try_from(a.size).unwrap_or(usize::MAX),
        at: a.at,
    }
}

/// Writes `CUgraphNodeParams`, all unused bytes zero.
fn put_any(kind: &Kind, out: *mut NodeParams) -> Result<()> {
    let empty = NodeParams { kind: kind.number(), reserved: [0; 3], data: [0; 29], reserved2: 0 };
    put(out, empty)?;
    match kind {
        Kind::Kernel(k) => put(NodeParams::member(out), k.params_v2()),
        Kind::Memcpy(copy) => {
            let context = std::ptr::null_mut();
            let params = MemcpyParams { flags: 0, reserved: 0, context, copy: **copy };
            put(NodeParams::member(out), params)
        }
        Kind::Memset(fill) => put(NodeParams::member(out), *fill),
        Kind::Host(host) => put(NodeParams::member(out), host_params(host)),
        Kind::Child(graph) => {
            put(NodeParams::member(out), ChildParams { graph: handle(*graph), ownership: 0 })
        }
        Kind::EventWait(event) | Kind::EventRecord(event) => {
            put(NodeParams::member(out), EventParams { event: handle(*event) })
        }
        Kind::MemAlloc(a) => put(NodeParams::member(out), alloc_params(a)),
        Kind::MemFree(a) => put(NodeParams::member(out), a.at),
        Kind::MemOps(batch) => put(NodeParams::member(out), mem_ops_params(batch)),
        Kind::Conditional(c) => put(
            NodeParams::member(out),
            ConditionalParams {
                handle: c.condition,
                kind: c.kind,
                size: u32::try_from(c.bodies.len()).unwrap_or(u32::MAX),
                bodies: c.handles(),
                context: std::ptr::null_mut(),
            },
        ),
        Kind::Empty => Ok(()),
    }
}

fn host_params(host: &super::kind::HostNode) -> HostParams {
    HostParams { function: Some(host.function), data: host.data as *mut c_void }
}

fn mem_ops_params(batch: &MemOps) -> MemOpsParams {
    MemOpsParams {
        context: batch.context as *mut c_void,
        count: u32::try_from(batch.ops.len()).unwrap_or(u32::MAX),
        ops: batch.ops.as_ptr(),
        flags: batch.flags,
    }
}

fn wrong<T>() -> Result<T> {
    Err(CUDA_ERROR_INVALID_VALUE)
}

/// `CU_LAUNCH_ATTRIBUTE_*` that nodes remember.
mod attribute {
    pub(super) const COOPERATIVE: i32 = 2;
    pub(super) const PRIORITY: i32 = 8;
}

fn with_kernel(node: CUgraphNode, act: impl FnOnce(&mut Kernel) -> Result<()>) -> Result<()> {
    driver()?;
    match &mut resolve::<Node>(node)?.lock().kind {
        Kind::Kernel(kernel) => act(kernel),
        _ => wrong(),
    }
}

exports! {
    fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: *mut KernelParams) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params()) } else { wrong() }
    }
    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: *mut KernelParamsV2) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params_v2()) } else { wrong() }
    }
    fn cuGraphKernelNodeSetParams(node: CUgraphNode, params: *const KernelParams) {
        set(node, || kernel(&get(params)?))
    }
    fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: *const KernelParamsV2) {
        set(node, || kernel_v2(&get(params)?))
    }
    fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode) {
        let Kind::Kernel(from) = kind(from)? else { return wrong() };
        with_kernel(to, |to| {
            (to.priority, to.cooperative) = (from.priority, from.cooperative);
            Ok(())
        })
    }
    fn cuGraphKernelNodeGetAttribute(node: CUgraphNode, which: c_int, value: *mut c_int) {
        with_kernel(node, |kernel| match which {
            attribute::COOPERATIVE => put(value, c_int::from(kernel.cooperative)),
            attribute::PRIORITY => put(value, kernel.priority),
            _ => put(value, 0),
        })
    }
    fn cuGraphKernelNodeSetAttribute(node: CUgraphNode, which: c_int, value: *const c_int) {
        with_kernel(node, |kernel| {
            match which {
                attribute::COOPERATIVE => kernel.cooperative = get(value)? != 0,
                attribute::PRIORITY => kernel.priority = get(value)?,
                _ => {}
            }
            Ok(())
        })
    }
    fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, out: *mut Copy3d) {
        if let Kind::Memcpy(copy) = kind(node)? { put(out, *copy) } else { wrong() }
    }
    fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, copy: *const Copy3d) {
        set(node, || memcpy(copy))
    }
    fn cuGraphMemsetNodeGetParams(node: CUgraphNode, out: *mut Memset) {
        if let Kind::Memset(fill) = kind(node)? { put(out, fill) } else { wrong() }
    }
    fn cuGraphMemsetNodeSetParams(node: CUgraphNode, fill: *const Memset) {
        set(node, || memset(fill))
    }
    fn cuGraphHostNodeGetParams(node: CUgraphNode, out: *mut HostParams) {
        if let Kind::Host(own) = kind(node)? { put(out, host_params(&own)) } else { wrong() }
    }
    fn cuGraphHostNodeSetParams(node: CUgraphNode, params: *const HostParams) {
        set(node, || host(params))
    }
    fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, out: *mut CUevent) {
        if let Kind::EventRecord(event) = kind(node)? { put(out, handle(event)) } else { wrong() }
    }
    fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) {
        set(node, || Ok(Kind::EventRecord(resolve::<Event>(event)?)))
    }
    fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, out: *mut CUevent) {
        if let Kind::EventWait(event) = kind(node)? { put(out, handle(event)) } else { wrong() }
    }
    fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) {
        set(node, || Ok(Kind::EventWait(resolve::<Event>(event)?)))
    }
    fn cuGraphBatchMemOpNodeGetParams(node: CUgraphNode, out: *mut MemOpsParams) {
        if let Kind::MemOps(batch) = kind(node)? { put(out, mem_ops_params(&batch)) } else { wrong() }
    }
    fn cuGraphBatchMemOpNodeSetParams(node: CUgraphNode, params: *const MemOpsParams) {
        set(node, || mem_ops(&get(params)?))
    }
    fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: *mut c_void) {
        if let Kind::MemAlloc(a) = kind(node)? { put(out.cast(), alloc_params(&a)) } else { wrong() }
    }
    fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, out: *mut CUdeviceptr) {
        if let Kind::MemFree(a) = kind(node)? { put(out, a.at) } else { wrong() }
    }
    // "Modifying parameters is not supported for node types … MEM_ALLOC and … MEM_FREE."
    fn cuGraphNodeSetParams(node: CUgraphNode, params: *mut c_void) {
        set(node, || settable(params.cast())?.ok_or(CUDA_ERROR_NOT_SUPPORTED))
    }
    fn cuGraphNodeSetParams_v2(node: CUgraphNode, params: *mut c_void) {
        set(node, || settable(params.cast())?.ok_or(CUDA_ERROR_NOT_SUPPORTED))
    }
    fn cuGraphNodeGetParams(node: CUgraphNode, out: *mut c_void) {
        put_any(&kind(node)?, out.cast())
    }
}
