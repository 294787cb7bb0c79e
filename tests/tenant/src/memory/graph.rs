//! Memory of a graph's allocation node: the driver takes it when the graph is launched, and keeps
//! it for graphs after it is freed, until a trim is requested.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use tessera_cuda::types::{CUdeviceptr, CUgraphExec};

use super::pool::PoolProps;
use crate::cuda::{Cuda, Stream, check, need};
use crate::exit::CudaError;

/// `CUDA_MEM_ALLOC_NODE_PARAMS` (cuda.h 12.9).
#[repr(C)]
struct NodeParams {
    props: PoolProps,
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: CUdeviceptr,
}
const _: () = assert!(size_of::<NodeParams>() == 120);

/// A graph of one allocation node, launched once.
#[derive(Debug)]
pub struct Launched {
    graph: *mut c_void,
    exec: CUgraphExec,
    address: CUdeviceptr,
}
// SAFETY: graphs may be used from any thread, though from one at a time (CUDA Driver API, "Graph
// object thread safety"); each of these has one owner.
unsafe impl Send for Launched {}

impl Launched {
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }
}

pub fn launch(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<Launched, CudaError> {
    let driver = cuda.driver();
    let create = need("cuGraphCreate", driver.graph_create)?;
    let add = need("cuGraphAddMemAllocNode", driver.graph_add_mem_alloc)?;
    let instantiate = need("cuGraphInstantiateWithFlags", driver.graph_instantiate)?;
    let launch = need("cuGraphLaunch", driver.graph_launch)?;
    let mut made = Launched { graph: null_mut(), exec: null_mut(), address: 0 };
    let mut params = NodeParams {
        props: PoolProps::of(cuda.device()),
        access: null(),
        access_count: 0,
        bytes,
        address: 0,
    };
    let mut node = null_mut();
    // SAFETY: live out-parameters; every field of the node's parameters is set.
    let done = unsafe {
        check("cuGraphCreate", create(&raw mut made.graph, 0))?;
        let params = (&raw mut params).cast();
        check("cuGraphAddMemAllocNode", add(&raw mut node, made.graph, null(), 0, params))
            .and_then(|()| {
                let exec = &raw mut made.exec;
                check("cuGraphInstantiateWithFlags", instantiate(exec, made.graph, 0))
            })
            .and_then(|()| check("cuGraphLaunch", launch(made.exec, stream.raw())))
    };
    made.address = params.address;
    if let Err(error) = done {
        destroy(cuda, &made)?;
        return Err(error);
    }
    cuda.synchronise(stream)?;
    Ok(made)
}

pub fn free(cuda: &Cuda, launched: &Launched, stream: Stream) -> Result<(), CudaError> {
    super::pool::free(cuda, launched.address, stream)?;
    destroy(cuda, launched)?;
    trim(cuda)
}

/// `cuDeviceGraphMemTrim`.
pub fn trim(cuda: &Cuda) -> Result<(), CudaError> {
    let Some(trim) = cuda.driver().graph_mem_trim else { return Ok(()) };
    // SAFETY: takes a device's ordinal.
    check("cuDeviceGraphMemTrim", unsafe { trim(cuda.device()) })
}

fn destroy(cuda: &Cuda, launched: &Launched) -> Result<(), CudaError> {
    let destroy_exec = need("cuGraphExecDestroy", cuda.driver().graph_exec_destroy)?;
    let destroy = need("cuGraphDestroy", cuda.driver().graph_destroy)?;
    // SAFETY: made by `launch` and destroyed once.
    unsafe {
        if !launched.exec.is_null() {
            check("cuGraphExecDestroy", destroy_exec(launched.exec))?;
        }
        check("cuGraphDestroy", destroy(launched.graph))
    }
}
