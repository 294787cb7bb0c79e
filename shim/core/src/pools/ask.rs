//! What the driver says of its pools (CUDA Driver API, "Stream Ordered Memory Allocator" and "Graph
//! Management"), and asking it to release what is unused.

use crate::real;
use core::ffi::c_int;
use core::ptr;
use tessera_cuda::types::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Pool(usize),
    /// What a device keeps for graphs: a pool without a handle.
    Graphs(CUdevice),
}

impl Source {
    /// Bytes of device memory that back it.
    pub(crate) fn reserved(self) -> Option<u64> {
        self.bytes(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)
    }

    /// Bytes in use by the application.
    pub(crate) fn used(self) -> Option<u64> {
        self.bytes(CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT)
    }

    /// Bytes that it holds on to over synchronisations. Graph memory stays until it is trimmed.
    pub(crate) fn release_threshold(self) -> Option<u64> {
        match self {
            Self::Pool(pool) => of_pool(handle(pool), CU_MEMPOOL_ATTR_RELEASE_THRESHOLD),
            Self::Graphs(_) => Some(u64::MAX),
        }
    }

    /// Has the driver give back what is unused: all of whose frees it knows to be complete.
    pub(crate) fn trim(self) {
        match self {
            // SAFETY: a pool that the application has not destroyed, by the table.
            Self::Pool(pool) => real::cuMemPoolTrimTo.tell(|trim| unsafe { trim(handle(pool), 0) }),
            // SAFETY: a device that the driver has named.
            Self::Graphs(device) => real::cuDeviceGraphMemTrim.tell(|trim| unsafe { trim(device) }),
        }
    }

    fn bytes(self, of_a_pool: c_int, of_graphs: c_int) -> Option<u64> {
        match self {
            Self::Pool(pool) => of_pool(handle(pool), of_a_pool),
            Self::Graphs(device) => {
                let ask = &real::cuDeviceGetGraphMemAttribute;
                // SAFETY: any device may be named; the attribute is a cuuint64_t.
                ask.ask(0, |ask, value| unsafe { ask(device, of_graphs, value.cast()) }).ok()
            }
        }
    }
}

fn handle(pool: usize) -> CUmemoryPool {
    ptr::with_exposed_provenance_mut(pool)
}

/// An attribute of a live pool. Attributes of pools are "potentially unsafe" to a driver that captures: asked beside a
/// capture, they would end it.
fn of_pool(pool: CUmemoryPool, attribute: c_int) -> Option<u64> {
    let _uncaptured = Uncaptured::enter();
    let ask = &real::cuMemPoolGetAttribute;
    // SAFETY: a live pool's handle and a place for the attribute, which is a cuuint64_t.
    ask.ask(0, |ask, value: *mut u64| unsafe { ask(pool, attribute, value.cast()) }).ok()
}

/// The pool from which stream-ordered allocations on `device` come.
pub(crate) fn current_pool(device: CUdevice) -> Option<CUmemoryPool> {
    // SAFETY: a valid place for a handle.
    let pool =
        real::cuDeviceGetMemPool.ask(ptr::null_mut(), |ask, pool| unsafe { ask(pool, device) });
    pool.ok().filter(|pool| !pool.is_null())
}

pub(crate) fn default_pool(device: CUdevice) -> Option<CUmemoryPool> {
    // SAFETY: a valid place for a handle.
    let pool = real::cuDeviceGetDefaultMemPool
        .ask(ptr::null_mut(), |ask, pool| unsafe { ask(pool, device) });
    pool.ok().filter(|pool| !pool.is_null())
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

fn exchange(mode: c_int) -> Option<c_int> {
    // SAFETY: a valid place for a mode; only this thread's own mode changes.
    real::cuThreadExchangeStreamCaptureMode.ask(mode, |call, mode| unsafe { call(mode) }).ok()
}
