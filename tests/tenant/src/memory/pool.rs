//! Stream-ordered memory, from the device's pool and from one of this process.
//!
//! A free is waited for: at a synchronisation the driver gives back what its pool holds beyond the
//! release threshold, which is 0 unless set (cuda.h, `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`).

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, PoisonError};

use tessera_cuda::types::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE, CU_MEM_LOCATION_TYPE_DEVICE,
    CUDA_MEM_ALLOC_NODE_PARAMS, CUdeviceptr, CUgraph, CUgraphExec, CUmemLocation, CUmemPoolProps,
    CUmemoryPool,
};

use crate::cuda::{Cuda, Stream, made};
use crate::driver::call;
use crate::exit::CudaError;

pub fn on(device: c_int) -> CUmemLocation {
    CUmemLocation { r#type: CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Memory of a device, not to be shared.
pub fn props(device: c_int) -> CUmemPoolProps {
    CUmemPoolProps {
        allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: CU_MEM_HANDLE_TYPE_NONE,
        location: on(device),
        win32SecurityAttributes: null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    }
}

/// The address of the process's own pool, made when it is first asked of.
pub type OwnPool = Mutex<Option<usize>>;

fn own(cuda: &Cuda) -> Result<CUmemoryPool, CudaError> {
    let mut pool = cuda.own_pool.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = *pool {
        return Ok(pool as CUmemoryPool);
    }
    let props = props(cuda.device);
    let new: CUmemoryPool = made(|at| {
        // SAFETY: a live out-parameter; every field of the properties is set.
        unsafe { call!(cuda.driver, mem_pool_create(at, &raw const props)) }
    })?;
    *pool = Some(new as usize);
    Ok(new)
}

pub fn from_default(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<CUdeviceptr, CudaError> {
    let address = made(|at| {
        // SAFETY: a live out-parameter; a `Stream` is null or made by the driver.
        unsafe { call!(cuda.driver, mem_alloc_async(at, bytes, stream.0)) }
    })?;
    cuda.synchronise(stream)?;
    Ok(address)
}

pub fn from_own(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<CUdeviceptr, CudaError> {
    let pool = own(cuda)?;
    let address = made(|at| {
        // SAFETY: a live out-parameter; the pool lives as long as the process.
        unsafe { call!(cuda.driver, mem_alloc_from_pool(at, bytes, pool, stream.0)) }
    })?;
    cuda.synchronise(stream)?;
    Ok(address)
}

pub fn free(cuda: &Cuda, address: CUdeviceptr, stream: Stream) -> Result<(), CudaError> {
    // SAFETY: made by this module and freed once by its owner.
    unsafe { call!(cuda.driver, mem_free_async(address, stream.0)) }?;
    cuda.synchronise(stream)
}

/// `cuMemPoolTrimTo(…, 0)` for both pools.
pub fn trim(cuda: &Cuda) -> Result<(), CudaError> {
    if cuda.driver.mem_pool_trim.pointer.is_none() {
        return Ok(());
    }
    let default = made(|at| {
        // SAFETY: a live out-parameter.
        unsafe { call!(cuda.driver, default_mem_pool(at, cuda.device)) }
    })?;
    let own = *cuda.own_pool.lock().unwrap_or_else(PoisonError::into_inner);
    for pool in [Some(default), own.map(|pool| pool as CUmemoryPool)].into_iter().flatten() {
        // SAFETY: a pool that the driver named, or that was made here and is never destroyed.
        unsafe { call!(cuda.driver, mem_pool_trim(pool, 0)) }?;
    }
    Ok(())
}

// Memory of a graph's allocation node: the driver takes it when the graph is launched, and keeps
// it for graphs after it is freed, until a trim is requested.

/// A graph of one allocation node, launched once.
#[derive(Debug)]
pub struct Launched {
    graph: CUgraph,
    exec: CUgraphExec,
    pub address: CUdeviceptr,
}
// SAFETY: graphs may be used from any thread, though from one at a time (CUDA Driver API, "Graph
// object thread safety"); each of these has one owner.
unsafe impl Send for Launched {}

pub fn launch(cuda: &Cuda, bytes: usize, stream: Stream) -> Result<Launched, CudaError> {
    let driver = cuda.driver;
    let mut made = Launched { graph: null_mut(), exec: null_mut(), address: 0 };
    let mut params = CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: props(cuda.device),
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
            call!(driver, graph_launch(made.exec, stream.0))
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

pub fn free_graph(cuda: &Cuda, launched: &Launched, stream: Stream) -> Result<(), CudaError> {
    free(cuda, launched.address, stream)?;
    destroy(cuda, launched)?;
    trim_graphs(cuda)
}

/// `cuDeviceGraphMemTrim`.
pub fn trim_graphs(cuda: &Cuda) -> Result<(), CudaError> {
    if cuda.driver.graph_mem_trim.pointer.is_none() {
        return Ok(());
    }
    // SAFETY: takes a device's ordinal.
    unsafe { call!(cuda.driver, graph_mem_trim(cuda.device)) }
}

fn destroy(cuda: &Cuda, launched: &Launched) -> Result<(), CudaError> {
    // SAFETY: made by `launch` and destroyed once.
    unsafe {
        if !launched.exec.is_null() {
            call!(cuda.driver, graph_exec_destroy(launched.exec))?;
        }
        call!(cuda.driver, graph_destroy(launched.graph))
    }
}
