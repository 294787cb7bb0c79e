//! The pool functions.

use super::props::{HANDLE_NONE, Location, PINNED, Props};
use super::{HOLDING, Pool};
use crate::abi::{exports, exports_both, get, put};
use crate::capture;
use crate::driver::{Driver, driver, lock};
use crate::errors::Result;
use crate::handle::{handle, resolve};
use crate::memory::free;
use crate::stream::{Stream, stream};
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdevice, CUdeviceptr, CUmemLocation,
    CUmemPoolProps, CUmemoryPool, CUstream,
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
    pub(super) const ALLOCATION_TYPE: i32 = 9;
    pub(super) const EXPORT_HANDLE_TYPES: i32 = 10;
    pub(super) const LOCATION_ID: i32 = 11;
    pub(super) const LOCATION_TYPE: i32 = 12;
    pub(super) const MAX_POOL_SIZE: i32 = 13;
    pub(super) const HW_DECOMPRESS_ENABLED: i32 = 14;
    pub(super) const LOCALITY_DOMAIN_ID: i32 = 15;
}

/// Where a pool that is not a device's belongs: the pools of host locations and of managed memory.
struct Place {
    location: CUmemLocation,
    allocation: c_int,
    pool: &'static Pool,
}

static PLACES: Mutex<Vec<Place>> = Mutex::new(Vec::new());

fn allocate(
    pool: &'static Pool,
    out: *mut CUdeviceptr,
    bytes: usize,
    s: &'static Stream,
) -> Result<()> {
    if s.is_capturing() {
        let device = lock(&pool.inner).device.ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
        return capture::alloc(s, device, out, bytes);
    }
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    put(out, pool.allocate(s.context(), s, bytes as u64)?)
}

fn get_attribute(pool: &'static Pool, which: c_int, value: *mut c_void) -> Result<()> {
    use attribute as a;
    let inner = lock(&pool.inner);
    let new = driver()?.session.config().cuda_version >= 13_000;
    match which {
        a::REUSE_FOLLOW_EVENT_DEPENDENCIES..=a::REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            let i = usize::try_from(which - 1).unwrap_or(0);
            put(value.cast::<u32>(), pool.reuse[i].load(Ordering::Relaxed))
        }
        a::RELEASE_THRESHOLD => {
            put(value.cast::<u64>(), pool.release_threshold.load(Ordering::Relaxed))
        }
        a::RESERVED_MEM_CURRENT => put(value.cast::<u64>(), inner.space.reserved()),
        a::RESERVED_MEM_HIGH => put(value.cast::<u64>(), inner.reserved_high),
        a::USED_MEM_CURRENT => put(value.cast::<u64>(), inner.space.used()),
        a::USED_MEM_HIGH => put(value.cast::<u64>(), inner.used_high),
        a::ALLOCATION_TYPE if new => put(value.cast::<c_int>(), inner.props.allocation),
        a::EXPORT_HANDLE_TYPES if new => put(value.cast::<c_int>(), HANDLE_NONE),
        a::LOCATION_ID if new => put(value.cast::<c_int>(), inner.props.location.raw().id),
        a::LOCATION_TYPE if new => put(value.cast::<c_int>(), inner.props.location.raw().r#type),
        a::MAX_POOL_SIZE if new => put(value.cast::<u64>(), inner.props.max_size),
        a::HW_DECOMPRESS_ENABLED if new => put(value.cast::<c_int>(), 0),
        a::LOCALITY_DOMAIN_ID if new => put(value.cast::<c_int>(), -1),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn set_attribute(pool: &'static Pool, which: c_int, value: *const c_void) -> Result<()> {
    use attribute as a;
    match which {
        a::REUSE_FOLLOW_EVENT_DEPENDENCIES..=a::REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            let i = usize::try_from(which - 1).unwrap_or(0);
            pool.reuse[i].store(get(value.cast::<u32>())?, Ordering::Relaxed);
        }
        a::RELEASE_THRESHOLD => {
            pool.release_threshold.store(get(value.cast::<u64>())?, Ordering::Relaxed);
            HOLDING.store(true, Ordering::Release);
        }
        // "It is illegal to set this attribute to a non-zero value."
        a::RESERVED_MEM_HIGH if get(value.cast::<u64>())? == 0 => {
            let mut inner = lock(&pool.inner);
            inner.reserved_high = inner.space.reserved();
        }
        a::USED_MEM_HIGH if get(value.cast::<u64>())? == 0 => {
            let mut inner = lock(&pool.inner);
            inner.used_high = inner.space.used();
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

fn set_current(driver: &'static Driver, ordinal: CUdevice, pool: &'static Pool) -> Result<()> {
    let device = driver.device(ordinal)?;
    // "pool must be local to the specified device".
    if !lock(&pool.inner).device.is_some_and(|d| std::ptr::eq(d, device)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let default = device.default_pool()?;
    lock(&device.pools).current = (!std::ptr::eq(pool, default)).then_some(pool);
    Ok(())
}

/// The default pool of a place, or with `current` a device's current one.
fn pool_of(
    location: *mut CUmemLocation,
    allocation: c_int,
    current: bool,
) -> Result<&'static Pool> {
    let driver = driver()?;
    let location = Location::of(get(location)?, driver)?;
    let props = match (location, allocation) {
        (Location::None, PINNED) => return Err(CUDA_ERROR_INVALID_VALUE),
        (Location::Device(ordinal), PINNED) => {
            let device = driver.device(ordinal)?;
            return if current { device.current_pool() } else { device.default_pool() };
        }
        (_, PINNED | super::props::MANAGED) => Props { allocation, location, max_size: 0 },
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let mut places = lock(&PLACES);
    let raw = location.raw();
    if let Some(place) = places.iter().find(|p| p.location == raw && p.allocation == allocation) {
        return Ok(place.pool);
    }
    let pool = Pool::create(driver, props, true)?;
    places.push(Place { location: raw, allocation, pool });
    Ok(pool)
}

exports_both! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz(out: *mut CUdeviceptr, bytes: usize, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        allocate(s.device().current_pool()?, out, bytes, s)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(out: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        allocate(resolve(pool)?, out, bytes, s)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz(at: CUdeviceptr, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        let driver = driver()?;
        if at == 0 {
            return Ok(());
        }
        if s.is_capturing() {
            return capture::free(s, at);
        }
        if super::free(driver, at, Some(s)) {
            return Ok(());
        }
        if let Some(freed) = crate::graph::memory::free_outside(at) {
            return freed.map(drop);
        }
        // Memory of cuMemAlloc: at once.
        free(driver, at).map(|_| ())
    }
}

exports! {
    fn cuDeviceGetDefaultMemPool(out: *mut CUmemoryPool, dev: CUdevice) {
        put(out, handle(driver()?.device(dev)?.default_pool()?))
    }
    fn cuDeviceGetMemPool(out: *mut CUmemoryPool, dev: CUdevice) {
        put(out, handle(driver()?.device(dev)?.current_pool()?))
    }
    fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) {
        set_current(driver()?, dev, resolve(pool)?)
    }
    fn cuMemPoolCreate(out: *mut CUmemoryPool, props: *const CUmemPoolProps) {
        let driver = driver()?;
        let props = Props::check(&get(props)?, driver)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, handle(Pool::create(driver, props, false)?))
    }
    fn cuMemPoolDestroy(pool: CUmemoryPool) {
        resolve::<Pool>(pool)?.destroy(driver()?)
    }
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) {
        resolve::<Pool>(pool)?.trim(driver()?, keep as u64);
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, which: c_int, value: *mut c_void) {
        driver()?;
        capture::permit(capture::Call::PoolAttribute)?;
        get_attribute(resolve(pool)?, which, value)
    }
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, which: c_int, value: *mut c_void) {
        driver()?;
        capture::permit(capture::Call::PoolAttribute)?;
        set_attribute(resolve(pool)?, which, value)
    }

    fn cuMemGetDefaultMemPool(out: *mut CUmemoryPool, location: *mut CUmemLocation, allocation: c_int) {
        put(out, handle(pool_of(location, allocation, false)?))
    }
    fn cuMemGetMemPool(out: *mut CUmemoryPool, location: *mut CUmemLocation, allocation: c_int) {
        put(out, handle(pool_of(location, allocation, true)?))
    }
}
