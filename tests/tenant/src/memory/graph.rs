//! Memory of a graph's allocation node: the driver takes it when the graph is launched, and keeps
//! it for graphs after it is freed, until a trim is requested.

use std::ptr::{null, null_mut};

use tessera_cuda::types::{CUDA_MEM_ALLOC_NODE_PARAMS, CUdeviceptr, CUgraph, CUgraphExec};

use crate::cuda::{Cuda, Stream};
use crate::driver::call;
use crate::exit::CudaError;

/// A graph of one allocation node, launched once.
#[derive(Debug)]
pub struct Launched {
    graph: CUgraph,
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
    let mut made = Launched { graph: null_mut(), exec: null_mut(), address: 0 };
    let mut params = CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: super::pool::props(cuda.device()),
        accessDescs: null(),
        accessDescCount: 0,
        bytesize: bytes,
        dptr: 0,
    };
    let mut node = null_mut();
    // SAFETY: a live out-parameter.
    unsafe { call!(driver, graph_create(&raw mut made.graph, 0)) }?;
    let mut run = || {
        // SAFETY: live out-parameters; every field of the node's parameters is set.
        unsafe {
            let (node, params) = (&raw mut node, &raw mut params);
            call!(driver, graph_add_mem_alloc(node, made.graph, null(), 0, params))?;
            call!(driver, graph_instantiate(&raw mut made.exec, made.graph, 0))?;
            call!(driver, graph_launch(made.exec, stream.raw()))
        }
    };
    let done = run();
    made.address = params.dptr;
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
    if cuda.driver().graph_mem_trim.pointer.is_none() {
        return Ok(());
    }
    // SAFETY: takes a device's ordinal.
    unsafe { call!(cuda.driver(), graph_mem_trim(cuda.device())) }
}

fn destroy(cuda: &Cuda, launched: &Launched) -> Result<(), CudaError> {
    // SAFETY: made by `launch` and destroyed once.
    unsafe {
        if !launched.exec.is_null() {
            call!(cuda.driver(), graph_exec_destroy(launched.exec))?;
        }
        call!(cuda.driver(), graph_destroy(launched.graph))
    }
}
