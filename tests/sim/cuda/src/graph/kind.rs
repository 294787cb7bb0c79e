//! What nodes do, and cuda.h's structures that say it.

use super::conditional::Conditional;
use super::memory::Allocation;
use super::{CUgraph, Graph};
use crate::copy::Copy3d;
use crate::event::Event;
use crate::launch::Shape;
use crate::module::Function;
use crate::stream_memory::MemOp;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use tessera_cuda::types::{CUcontext, CUdeviceptr, CUevent};

/// `CUgraphEdgeData`: taken and not kept; all are zero.
pub(crate) type Edge = [u8; 8];

/// What a node does. Cheap to copy: large parts are shared and never change.
#[derive(Clone, Default)]
pub(crate) enum Kind {
    Kernel(Kernel),
    Memcpy(Arc<Copy3d>),
    Memset(Memset),
    Host(HostNode),
    Child(&'static Graph),
    #[default]
    Empty,
    EventWait(&'static Event),
    EventRecord(&'static Event),
    MemAlloc(Arc<Allocation>),
    MemFree(Arc<Allocation>),
    MemOps(Arc<[MemOp]>),
    Conditional(Arc<Conditional>),
}

impl Kind {
    /// `CUgraphNodeType`.
    pub(crate) fn number(&self) -> c_int {
        match self {
            Kind::Kernel(_) => 0,
            Kind::Memcpy(_) => 1,
            Kind::Memset(_) => 2,
            Kind::Host(_) => 3,
            Kind::Child(_) => 4,
            Kind::Empty => 5,
            Kind::EventWait(_) => 6,
            Kind::EventRecord(_) => 7,
            Kind::MemAlloc(_) => 10,
            Kind::MemFree(_) => 11,
            Kind::MemOps(_) => 12,
            Kind::Conditional(_) => 13,
        }
    }
}

/// A kernel, with its parameters as far as they matter: how long it runs.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub function: &'static Function,
    pub shape: Shape,
    /// Dynamic shared memory, bytes of a block.
    pub shared: c_uint,
    /// GPU time in ns, unless it depends on the GPU.
    pub fixed_ns: Option<u64>,
    /// Where the caller's parameters were.
    pub params: usize,
    pub extra: usize,
}

#[derive(Clone, Copy)]
pub(crate) struct HostNode {
    pub function: crate::host_function::HostFn,
    pub data: usize,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemOpsParams {
    pub context: CUcontext,
    pub count: c_uint,
    pub ops: *const MemOp,
    pub flags: c_uint,
}
const _: () = assert!(size_of::<MemOpsParams>() == 32);

/// `CUDA_MEMSET_NODE_PARAMS` v1; v2 appends a context.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Memset {
    pub dst: CUdeviceptr,
    pub pitch: usize,
    pub value: c_uint,
    pub element: c_uint,
    pub width: usize,
    pub height: usize,
}
const _: () = assert!(size_of::<Memset>() == 40);

/// `CUDA_HOST_NODE_PARAMS` v1; v2 appends a synchronisation mode and a context.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct HostParams {
    pub function: Option<crate::host_function::HostFn>,
    pub data: *mut c_void,
}

/// `CUDA_MEMCPY_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemcpyParams {
    pub flags: c_int,
    pub reserved: c_int,
    pub context: CUcontext,
    pub copy: Copy3d,
}

/// `CUDA_CHILD_GRAPH_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ChildParams {
    pub graph: CUgraph,
    /// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_*`: 0 clone, 1 move.
    pub ownership: c_int,
}

/// `CUDA_EVENT_RECORD_NODE_PARAMS` and `_WAIT_`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct EventParams {
    pub event: CUevent,
}

/// `CUDA_CONDITIONAL_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ConditionalParams {
    pub handle: u64,
    pub kind: c_int,
    pub size: c_uint,
    pub bodies: *mut CUgraph,
    pub context: CUcontext,
}

/// `CUgraphNodeParams`: a type, and a union of the above.
#[repr(C)]
pub(crate) struct NodeParams {
    pub kind: c_int,
    pub reserved: [c_int; 3],
    pub data: [u64; 29],
    pub reserved2: u64,
}
const _: () = assert!(size_of::<NodeParams>() == 256);

impl NodeParams {
    /// Where the union of the caller's structure is, as one of its members.
    pub(crate) fn member<T>(params: *mut NodeParams) -> *mut T {
        params.cast::<u8>().wrapping_add(std::mem::offset_of!(NodeParams, data)).cast()
    }
}
