//! The pool functions, and what a pool is made of: `CUmemPoolProps`, `CUmemLocation`.

use super::{HOLDING, Pool};
use crate::abi::{Result, exports, exports_both, get, handle, put, resolve};
use crate::capture;
use crate::driver::{Driver, driver, lock};
use crate::stream::Stream;
use simgpu::memory::Use;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdevice, CUdeviceptr, CUmemLocation,
    CUmemPoolProps, CUmemoryPool, CUstream,
};

const CUDA_ERROR_NOT_PERMITTED: i32 = 800;

/// `CU_MEM_ALLOCATION_TYPE_*`.
pub(crate) const PINNED: c_int = 1;
pub(crate) const MANAGED: c_int = 2;

/// `CU_MEM_HANDLE_TYPE_*`.
pub(crate) const HANDLE_NONE: c_int = 0;
pub(crate) const HANDLE_FD: c_int = 1;
pub(crate) const HANDLE_FABRIC: c_int = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Location {
    /// A GPU, by ordinal.
    Device(CUdevice),
    Host,
    HostNuma(c_int),
    /// None preferred (managed memory).
    None,
}

impl Location {
    pub(crate) fn of(raw: CUmemLocation, driver: &'static Driver) -> Result<Location> {
        match raw.r#type {
            0 => Ok(Location::None),
            1 => driver.device(raw.id).map(|d| Location::Device(d.ordinal)),
            2 => Ok(Location::Host),
            3 if is_node(raw.id, driver) => Ok(Location::HostNuma(raw.id)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// `CU_MEM_LOCATION_TYPE_*` and the id.
    pub(crate) fn raw(self) -> CUmemLocation {
        let (r#type, id) = match self {
            Location::None => (0, 0),
            Location::Device(ordinal) => (1, ordinal),
            Location::Host => (2, 0),
            Location::HostNuma(node) => (3, node),
        };
        CUmemLocation { r#type, id }
    }
}

/// Whether the simulated machine has this NUMA node: node 0, and those of its GPUs.
pub(crate) fn is_node(node: c_int, driver: &Driver) -> bool {
    node == 0 || node > 0 && driver.devices.iter().any(|d| d.config.numa_node == node)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Props {
    pub(super) allocation: c_int,
    pub(super) location: Location,
}

impl Props {
    pub(super) fn counts_as(&self) -> Use {
        if self.allocation == MANAGED { Use::Managed } else { Use::Own }
    }

    /// Checks what a caller gave (`cuMemPoolCreate`).
    fn check(raw: &CUmemPoolProps, driver: &'static Driver) -> Result<Props> {
        let is_managed = raw.allocType == MANAGED && driver.session.config().cuda_version >= 13_000;
        let pinned_or_managed = raw.allocType == PINNED || is_managed;
        if !pinned_or_managed || !raw.win32SecurityAttributes.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let location = Location::of(raw.location, driver).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        match raw.handleTypes {
            HANDLE_NONE => {}
            // No IMEX channel here.
            HANDLE_FABRIC => return Err(CUDA_ERROR_NOT_PERMITTED),
            // Windows'; and no pool is shared (CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES is 0).
            HANDLE_FD | 2 | 4 => return Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        // "maxSize must be set to zero for managed memory pools".
        let wrong = if is_managed {
            raw.maxSize != 0 || raw.usage != 0
        } else {
            location == Location::None
        };
        if wrong {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(Props { allocation: raw.allocType, location })
    }
}

mod attribute {
    pub(super) const REUSE_FOLLOW_EVENT_DEPENDENCIES: i32 = 1;
    pub(super) const REUSE_ALLOW_INTERNAL_DEPENDENCIES: i32 = 3;
    pub(super) const RELEASE_THRESHOLD: i32 = 4;
    pub(super) const RESERVED_MEM_CURRENT: i32 = 5;
    pub(super) const RESERVED_MEM_HIGH: i32 = 6;
    pub(super) const USED_MEM_CURRENT: i32 = 7;
    pub(super) const USED_MEM_HIGH: i32 = 8;
    pub(super) const ALLOCATION_TYPE: i32 = 9;
    pub(super) const LOCATION_ID: i32 = 11;
    pub(super) const LOCATION_TYPE: i32 = 12;
}

/// The default pools of places that are no device's: of host locations, and of managed memory.
static PLACES: Mutex<Vec<(Props, &Pool)>> = Mutex::new(Vec::new());

fn allocate(pool: &'static Pool, bytes: usize, s: &'static Stream) -> Result<CUdeviceptr> {
    if s.is_capturing() {
        let device = lock(&pool.inner).device.ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
        return capture::alloc(s, device, bytes as u64);
    }
    pool.allocate(s.context(), s, bytes as u64)
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
        a::LOCATION_ID if new => put(value.cast::<c_int>(), inner.props.location.raw().id),
        a::LOCATION_TYPE if new => put(value.cast::<c_int>(), inner.props.location.raw().r#type),
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
        (_, PINNED | MANAGED) => Props { allocation, location },
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let mut places = lock(&PLACES);
    if let Some((_, pool)) = places.iter().find(|(known, _)| *known == props) {
        return Ok(pool);
    }
    let pool = Pool::create(driver, props, true)?;
    places.push((props, pool));
    Ok(pool)
}

exports_both! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz(bytes: usize, s: CUstream) -> CUdeviceptr |s| {
        allocate(s.device().current_pool()?, bytes, s)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(bytes: usize, pool: CUmemoryPool, s: CUstream) -> CUdeviceptr |s| {
        allocate(resolve(pool)?, bytes, s)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz(at: CUdeviceptr, s: CUstream) |s| {
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
        crate::memory::free(driver, at).map(|_| ())
    }
}

exports! {
    fn cuDeviceGetDefaultMemPool(dev: CUdevice) -> CUmemoryPool {
        Ok(handle(driver()?.device(dev)?.default_pool()?))
    }
    fn cuDeviceGetMemPool(dev: CUdevice) -> CUmemoryPool {
        Ok(handle(driver()?.device(dev)?.current_pool()?))
    }
    fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) {
        set_current(driver()?, dev, resolve(pool)?)
    }
    fn cuMemPoolCreate(props: *const CUmemPoolProps) -> CUmemoryPool {
        let driver = driver()?;
        let props = Props::check(&get(props)?, driver)?;
        Ok(handle(Pool::create(driver, props, false)?))
    }
    fn cuMemPoolDestroy(pool: CUmemoryPool) {
        resolve::<Pool>(pool)?.destroy(driver()?)
    }
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) {
        resolve::<Pool>(pool)?.trim(driver()?, keep as u64);
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, which: c_int, value: *mut c_void) {
        capture::permit()?;
        get_attribute(resolve(pool)?, which, value)
    }
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, which: c_int, value: *mut c_void) {
        capture::permit()?;
        set_attribute(resolve(pool)?, which, value)
    }

    fn cuMemGetDefaultMemPool(location: *mut CUmemLocation, allocation: c_int) -> CUmemoryPool {
        Ok(handle(pool_of(location, allocation, false)?))
    }
    fn cuMemGetMemPool(location: *mut CUmemLocation, allocation: c_int) -> CUmemoryPool {
        Ok(handle(pool_of(location, allocation, true)?))
    }
}
