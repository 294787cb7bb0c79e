//! What the driver says of its pools (CUDA Driver API, "Stream Ordered Memory Allocator" and "Graph
//! Management"), and asking it to release what is unused.

use crate::real;
use core::ffi::{c_int, c_void};
use tessera_cuda::types::*;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A memory pool.
    Pool(usize),
    /// What a device keeps for graphs: a pool without a handle.
    Graphs(CUdevice),
}

impl Source {
    /// Bytes of device memory that back it.
    pub(crate) fn reserved(self) -> Option<u64> {
        match self {
            Self::Pool(pool) => of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT),
            Self::Graphs(device) => of_graphs(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT),
        }
    }

    /// Bytes in use by the application.
    pub(crate) fn used(self) -> Option<u64> {
        match self {
            Self::Pool(pool) => of_pool(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT),
            Self::Graphs(device) => of_graphs(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT),
        }
    }

    /// Bytes that it holds on to over synchronisations. Graph memory stays until it is trimmed.
    pub(crate) fn release_threshold(self) -> Option<u64> {
        match self {
            Self::Pool(pool) => of_pool(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD),
            Self::Graphs(_) => Some(u64::MAX),
        }
    }

    /// Has the driver give back what is unused: all of whose frees it knows to be complete.
    pub(crate) fn trim(self) {
        match self {
            Self::Pool(pool) => {
                if let Some(trim) = real::cuMemPoolTrimTo.get() {
                    // SAFETY: a pool that the application has not destroyed, by the table.
                    unsafe { trim(handle(pool), 0) };
                }
            }
            Self::Graphs(device) => {
                if let Some(trim) = real::cuDeviceGraphMemTrim.get() {
                    // SAFETY: a device that the driver has named.
                    unsafe { trim(device) };
                }
            }
        }
    }
}

fn handle(pool: usize) -> CUmemoryPool {
    core::ptr::with_exposed_provenance_mut(pool)
}

/// Attributes of pools are "potentially unsafe" to a driver that captures: asked beside a capture, they
/// would end it.
fn of_pool(pool: usize, attribute: c_int) -> Option<u64> {
    let ask = real::cuMemPoolGetAttribute.get()?;
    let _uncaptured = Uncaptured::enter();
    let mut value = 0u64;
    // SAFETY: a live pool's handle and a place for the attribute, which is a cuuint64_t.
    let result = unsafe { ask(handle(pool), attribute, (&raw mut value).cast()) };
    (result == CUDA_SUCCESS).then_some(value)
}

fn of_graphs(device: CUdevice, attribute: c_int) -> Option<u64> {
    let ask = real::cuDeviceGetGraphMemAttribute.get()?;
    let mut value = 0u64;
    // SAFETY: any device may be named; the attribute is a cuuint64_t.
    let result = unsafe { ask(device, attribute, (&raw mut value).cast()) };
    (result == CUDA_SUCCESS).then_some(value)
}

/// Where a pool that nobody saw being made says it is. Drivers before CUDA 13 do not say.
pub(crate) fn location(pool: CUmemoryPool) -> Option<(CUmemLocation, CUmemAllocationType)> {
    let ask = real::cuMemPoolGetAttribute.get()?;
    let _uncaptured = Uncaptured::enter();
    let word = |attribute: c_int| {
        let mut value: c_int = 0;
        let place = (&raw mut value).cast::<c_void>();
        // SAFETY: a live pool's handle and a place for the attribute, which is an int.
        (unsafe { ask(pool, attribute, place) } == CUDA_SUCCESS).then_some(value)
    };
    let location = CUmemLocation {
        r#type: word(CU_MEMPOOL_ATTR_LOCATION_TYPE)?,
        id: word(CU_MEMPOOL_ATTR_LOCATION_ID)?,
    };
    Some((location, word(CU_MEMPOOL_ATTR_ALLOCATION_TYPE)?))
}

/// The pool from which stream-ordered allocations on `device` come.
pub(crate) fn current_pool(device: CUdevice) -> Option<CUmemoryPool> {
    let ask = real::cuDeviceGetMemPool.get()?;
    let mut pool = core::ptr::null_mut();
    // SAFETY: a valid place for a handle.
    (unsafe { ask(&raw mut pool, device) } == CUDA_SUCCESS && !pool.is_null()).then_some(pool)
}

/// The pool that comes with `device`.
pub(crate) fn default_pool(device: CUdevice) -> Option<CUmemoryPool> {
    let ask = real::cuDeviceGetDefaultMemPool.get()?;
    let mut pool = core::ptr::null_mut();
    // SAFETY: a valid place for a handle.
    (unsafe { ask(&raw mut pool, device) } == CUDA_SUCCESS && !pool.is_null()).then_some(pool)
}

/// Whether what is put into `stream` becomes part of a graph. The legacy default stream cannot be
/// captured ("Stream Management", `cuStreamBeginCapture`).
pub(crate) fn is_capturing(stream: CUstream, per_thread: bool) -> bool {
    /// `CU_STREAM_LEGACY`
    const LEGACY: usize = 1;
    let ask = match (stream.addr(), per_thread) {
        (0, false) | (LEGACY, _) => return false,
        (0, true) => real::cuStreamIsCapturing_ptsz.get(),
        _ => real::cuStreamIsCapturing.get(),
    };
    let mut status: c_int = 0;
    // SAFETY: the caller's stream and a valid place for the status. Legal at any time.
    ask.is_some_and(|ask| unsafe { ask(stream, &raw mut status) } == CUDA_SUCCESS && status != 0)
}

/// While it lives, a capture does not mind what this thread calls. Another thread's capture in the
/// global mode forbids calls that may synchronise, and an own one in the thread-local mode too
/// ("Stream Management", `cuThreadExchangeStreamCaptureMode`): the way libraries are given to make
/// such calls that have nothing to do with the capture.
#[derive(Debug)]
pub(crate) struct Uncaptured(Option<c_int>);

impl Uncaptured {
    pub(crate) fn enter() -> Self {
        /// `CU_STREAM_CAPTURE_MODE_RELAXED`
        const RELAXED: c_int = 2;
        Self(exchange(RELAXED))
    }
}

impl Drop for Uncaptured {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            exchange(before);
        }
    }
}

fn exchange(mut mode: c_int) -> Option<c_int> {
    let call = real::cuThreadExchangeStreamCaptureMode.get()?;
    // SAFETY: a valid place for a mode; only this thread's own mode changes.
    (unsafe { call(&raw mut mode) } == CUDA_SUCCESS).then_some(mode)
}
