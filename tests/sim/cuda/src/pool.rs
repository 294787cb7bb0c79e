//! Stream-ordered allocation: CUDA Driver API, "Stream Ordered Memory Allocator".
//!
//! So far only each device's default pool, which keeps nothing back: what is reserved is what is
//! used, and a free takes effect when it is submitted.

use crate::abi::{exports, exports_both, get, put};
use crate::capture;
use crate::context::current;
use crate::driver::{Device, driver};
use crate::errors::Result;
use crate::handle::{Header, Object, enliven, handle, resolve};
use crate::memory::{Kind, allocate, free};
use crate::stream::stream;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdevice, CUdeviceptr, CUmemPoolProps,
    CUmemoryPool, CUstream,
};

/// `CU_MEMPOOL_ATTR_*`.
mod attribute {
    pub(super) const REUSE_FOLLOW_EVENT_DEPENDENCIES: i32 = 1;
    pub(super) const REUSE_ALLOW_INTERNAL_DEPENDENCIES: i32 = 3;
    pub(super) const RELEASE_THRESHOLD: i32 = 4;
    pub(super) const RESERVED_MEM_CURRENT: i32 = 5;
    pub(super) const RESERVED_MEM_HIGH: i32 = 6;
    pub(super) const USED_MEM_CURRENT: i32 = 7;
    pub(super) const USED_MEM_HIGH: i32 = 8;
}

/// A pool.
#[repr(C)]
pub(crate) struct Pool {
    header: Header,
    ordinal: c_int,
    used: AtomicU64,
    used_high: AtomicU64,
    release_threshold: AtomicU64,
    reuse: [AtomicU32; 3],
}

impl Object for Pool {
    const MAGIC: u32 = 0x504f_4f4c;
    fn header(&self) -> &Header {
        &self.header
    }
}

impl Pool {
    /// A device's default pool.
    pub(crate) fn of_device(ordinal: c_int) -> Pool {
        Pool {
            header: Header::new(),
            ordinal,
            used: AtomicU64::new(0),
            used_high: AtomicU64::new(0),
            release_threshold: AtomicU64::new(0),
            reuse: [1, 1, 1].map(AtomicU32::new),
        }
    }

    fn taken(&self, bytes: u64) {
        let now = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.used_high.fetch_max(now, Ordering::Relaxed);
    }

    /// Books a free.
    pub(crate) fn returned(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn allocate_from(pool: &Pool, out: *mut CUdeviceptr, bytes: usize) -> Result<()> {
    let context = current()?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let at = allocate(context, bytes as u64, Kind::Pooled)?;
    pool.taken(bytes as u64);
    put(out, at)
}

fn default_pool(device: &'static Device) -> CUmemoryPool {
    handle(enliven(&device.pool))
}

exports_both! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz(out: *mut CUdeviceptr, bytes: usize, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        if s.is_capturing() {
            return capture::alloc(s, s.device(), out, bytes);
        }
        let device = s.device();
        allocate_from(&device.pool, out, bytes)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(out: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, s: CUstream) |flavour| {
        let (s, pool): (_, &Pool) = (stream(s, flavour)?, resolve(pool)?);
        if s.is_capturing() {
            return capture::alloc(s, driver()?.device(pool.ordinal)?, out, bytes);
        }
        allocate_from(pool, out, bytes)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz(at: CUdeviceptr, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        if at == 0 {
            return Ok(());
        }
        if s.is_capturing() {
            return capture::free(s, at);
        }
        if let Some(freed) = crate::graph::memory::free_outside(at) {
            return freed.map(drop);
        }
        let freed = free(driver()?, at)?;
        if freed.kind == Kind::Pooled {
            freed.context.device.pool.returned(freed.size);
        }
        Ok(())
    }
}

exports! {
    fn cuDeviceGetDefaultMemPool(out: *mut CUmemoryPool, dev: CUdevice) {
        put(out, default_pool(driver()?.device(dev)?))
    }
    fn cuDeviceGetMemPool(out: *mut CUmemoryPool, dev: CUdevice) {
        put(out, default_pool(driver()?.device(dev)?))
    }
    fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) {
        let device = driver()?.device(dev)?;
        let pool: &Pool = resolve(pool)?;
        if std::ptr::eq(pool, &device.pool) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
    // Explicit pools are the memory issue's.
    fn cuMemPoolCreate(_out: *mut CUmemoryPool, _props: *const CUmemPoolProps) {
        driver()?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuMemPoolDestroy(pool: CUmemoryPool) {
        driver()?;
        let _: &Pool = resolve(pool)?;
        // "the default pool of a device may not be destroyed".
        Err(CUDA_ERROR_INVALID_VALUE)
    }
    fn cuMemPoolTrimTo(pool: CUmemoryPool, _keep: usize) {
        driver()?;
        resolve::<Pool>(pool).map(|_| ())
    }
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, which: c_int, value: *mut c_void) {
        driver()?;
        let pool: &Pool = resolve(pool)?;
        let chunked = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let _ = pool.ordinal;
        match which {
            attribute::REUSE_FOLLOW_EVENT_DEPENDENCIES..=attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                let i = usize::try_from(which - 1).unwrap_or(0);
                put(value.cast::<u32>(), pool.reuse[i].load(Ordering::Relaxed))
            }
            attribute::RELEASE_THRESHOLD => put(value.cast(), chunked(&pool.release_threshold)),
            attribute::RESERVED_MEM_CURRENT | attribute::USED_MEM_CURRENT => {
                put(value.cast(), chunked(&pool.used))
            }
            attribute::RESERVED_MEM_HIGH | attribute::USED_MEM_HIGH => {
                put(value.cast(), chunked(&pool.used_high))
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, which: c_int, value: *mut c_void) {
        driver()?;
        let pool: &Pool = resolve(pool)?;
        match which {
            attribute::REUSE_FOLLOW_EVENT_DEPENDENCIES..=attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                let i = usize::try_from(which - 1).unwrap_or(0);
                pool.reuse[i].store(get(value.cast::<u32>())?, Ordering::Relaxed);
            }
            attribute::RELEASE_THRESHOLD => {
                pool.release_threshold.store(get(value.cast::<u64>())?, Ordering::Relaxed);
            }
            // "value type = cuuint64_t … can only be reset to zero".
            attribute::RESERVED_MEM_HIGH | attribute::USED_MEM_HIGH if get(value.cast::<u64>())? == 0 => {
                pool.used_high.store(pool.used.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }
}
