//! Device memory: CUDA Driver API, "Memory Management".
//!
//! A device address is the address of host memory in this process, so copies are real. How much of
//! a GPU is in use is counted in the shared state, in chunks; see [`crate::arena`].

use crate::abi::{Object, Result, exports, handle, put, put_if};
use crate::arena::{ALIGN, Arena, forget_pages};
use crate::capture;
use crate::context::{Context, current};
use crate::driver::{Device, Driver, contexts_lock, driver};
use crate::ipc::Exports;
use crate::pool::{self, Pool};
use simgpu::Config;
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_OUT_OF_MEMORY, CUdevice,
    CUdeviceptr, CUdeviceptr_v1, CUresult,
};

const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
const CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: CUresult = 713;
/// `cuMemAllocPitch`: rows begin at multiples of this (texture pitch alignment is less).
const PITCH: usize = 512;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// `cuMemAlloc`, `cuMemAllocPitch`.
    Device,
    /// The same below 4 GiB.
    Low,
    /// `cuMemAllocManaged`; simulated as device memory that is resident from the start.
    Managed,
    Pooled,
    /// Of a graph's allocation node; see [`crate::graph::memory`].
    Graph,
    /// Mapped by `cuMemMap`; see [`crate::vmm`].
    Mapped,
    MappedHost,
    /// Another process's, of [`crate::ipc`].
    Imported,
    /// An array's, which no address means.
    Array,
    /// `cuMemAllocHost`, `cuMemHostAlloc`.
    Host,
    /// `cuMemHostRegister`.
    Registered,
}

impl Kind {
    fn arena(self) -> usize {
        match self {
            Kind::Low => 1,
            Kind::Managed => 2,
            Kind::Array => 3,
            Kind::Graph => 4,
            _ => 0,
        }
    }

    /// `None`: its memory is counted elsewhere.
    fn counts_as(self) -> Option<Use> {
        match self {
            Kind::Managed => Some(Use::Managed),
            Kind::Graph => None,
            _ => Some(Use::Own),
        }
    }

    pub(crate) fn is_device(self) -> bool {
        !matches!(self, Kind::Host | Kind::Registered | Kind::MappedHost)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Allocation {
    /// Its size as asked for.
    pub size: u64,
    pub kind: Kind,
    pub context: &'static Context,
    /// Number unique in the process (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub id: u64,
    flags: u32,
    pub pool: Option<&'static Pool>,
    /// Whether its pages may have been touched.
    touched: bool,
}

impl Allocation {
    fn is_mapped(&self) -> bool {
        matches!(self.kind, Kind::Mapped | Kind::MappedHost)
    }
}

pub(crate) struct Memory {
    /// By unit, and [`Kind::arena`].
    arenas: Vec<[Arena; 5]>,
    by_start: BTreeMap<u64, Allocation>,
    next_id: u64,
    chunk: u64,
    /// What others may map.
    pub exports: Exports,
}

impl Memory {
    pub(crate) fn new(config: &Config) -> Memory {
        let chunk = config.memory.granularity_bytes;
        let lows = [false, true, false, false, false];
        let arenas = config.units.iter().map(|_| lows.map(|low| Arena::new(chunk, low)));
        Memory {
            arenas: arenas.collect(),
            by_start: BTreeMap::new(),
            next_id: 1,
            chunk,
            exports: Exports::new(),
        }
    }

    /// The allocation that contains `[address, address + len)`, and where it begins.
    pub(crate) fn find(&self, address: u64, len: u64) -> Option<(u64, &Allocation)> {
        self.containing(address, len, len.min(1))
    }

    /// The same where mappings allow this access: `CU_MEM_ACCESS_FLAGS_*`.
    fn containing(&self, address: u64, len: u64, access: u64) -> Option<(u64, &Allocation)> {
        let (&start, a) = self.by_start.range(..=address).next_back()?;
        let end = address.checked_add(len)?;
        let found = match a.is_mapped() {
            true => address < start + a.size && self.spans(start, end, access),
            false => address < start + a.size.max(1) && end <= start + a.size,
        };
        found.then_some((start, a))
    }

    /// Whether adjacent mappings from `start` reach to `end`, each with this access.
    fn spans(&self, start: u64, end: u64, access: u64) -> bool {
        let mut at = start;
        while let Some(a) = self.by_start.get(&at).filter(|a| a.is_mapped()) {
            if u64::from(a.flags) & access != access {
                return false;
            }
            at += a.size;
            if at >= end {
                return true;
            }
        }
        false
    }

    /// As [`Memory::find`], and notes that the memory is written.
    pub(crate) fn touch(&mut self, address: u64, len: u64) -> Option<Kind> {
        let (start, _) = self.containing(address, len, 3)?;
        let a = self.by_start.get_mut(&start)?;
        a.touched = true;
        Some(a.kind)
    }

    /// Notes what begins at `start`.
    pub(crate) fn insert(
        &mut self,
        start: u64,
        size: u64,
        kind: Kind,
        context: &'static Context,
        flags: u32,
    ) {
        let id = self.next_id;
        self.next_id += 1;
        let context = context.owner();
        let new = Allocation { size, kind, context, id, flags, pool: None, touched: false };
        self.by_start.insert(start, new);
    }

    pub(crate) fn insert_pooled(
        &mut self,
        start: u64,
        size: u64,
        context: &'static Context,
        pool: &'static Pool,
    ) {
        self.insert(start, size, Kind::Pooled, context, 0);
        if let Some(new) = self.by_start.get_mut(&start) {
            new.pool = Some(pool);
        }
    }

    /// Forgets an allocation of a pool that begins at `start`: the pool and the size.
    pub(crate) fn remove_pooled(&mut self, start: u64) -> Option<(&'static Pool, u64)> {
        let a = self.by_start.get(&start)?;
        let found = (a.pool?, a.size);
        self.by_start.remove(&start);
        Some(found)
    }

    /// The GPU and the size of what `cuMemAlloc` gave at this address.
    pub(crate) fn exportable(&self, start: u64) -> Option<(usize, u64)> {
        let a = self.by_start.get(&start).filter(|a| a.kind == Kind::Device)?;
        Some((a.context.device.gpu, a.size))
    }

    pub(crate) fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Notes a mapping of physical memory, without access.
    pub(crate) fn insert_mapped(&mut self, start: u64, size: u64, device: Option<&'static Device>) {
        let Ok(driver) = driver() else { return };
        let kind = if device.is_some() { Kind::Mapped } else { Kind::MappedHost };
        if let Some(device) = device.or(driver.devices.first()) {
            self.insert(start, size, kind, device.nobodys(), 0);
        }
    }

    /// Sets a mapping's access: `CU_MEM_ACCESS_FLAGS_*`.
    pub(crate) fn set_mapped_access(&mut self, start: u64, flags: u32) {
        if let Some(a) = self.by_start.get_mut(&start) {
            a.flags = flags;
        }
    }

    /// Forgets what begins at `start`; whether its pages may have been touched.
    pub(crate) fn remove(&mut self, start: u64) -> bool {
        self.by_start.remove(&start).is_some_and(|a| a.touched)
    }

    /// Takes address space of a GPU, however the memory is counted.
    pub(crate) fn take_range(&mut self, gpu: usize, bytes: u64) -> Option<u64> {
        self.arenas[gpu][0].take_range(bytes)
    }

    pub(crate) fn give_range(&mut self, gpu: usize, start: u64, bytes: u64) {
        self.arenas[gpu][0].give_range(start, bytes);
    }
}

/// Addresses of a GPU for `size` bytes of a kind, charged if that kind is.
pub(crate) fn place(driver: &Driver, gpu: usize, size: u64, kind: Kind) -> Result<u64> {
    or_release(driver, gpu, || try_place(driver, gpu, size, kind))
}

/// What pools hold unused is given up before anybody is refused.
fn or_release(driver: &Driver, gpu: usize, take: impl Fn() -> Option<u64>) -> Result<u64> {
    let taken = match take() {
        None if pool::release_unused(driver, gpu) > 0 => take(),
        taken => taken,
    };
    taken.ok_or(CUDA_ERROR_OUT_OF_MEMORY)
}

fn try_place(driver: &Driver, gpu: usize, size: u64, kind: Kind) -> Option<u64> {
    let mut memory = driver.memory();
    let arena = &mut memory.arenas[gpu][kind.arena()];
    let need = arena.need(size)?;
    let charge = kind.counts_as().filter(|_| need.charge > 0);
    if charge.is_some_and(|of| !driver.session.charge(gpu, of, need.charge)) {
        return None;
    }
    let start = arena.take(need);
    if let (Some(of), None) = (charge, start) {
        driver.session.uncharge(gpu, of, need.charge);
    }
    start
}

/// Gives such addresses back.
pub(crate) fn displace(driver: &Driver, gpu: usize, start: u64, size: u64, kind: Kind) {
    let mut memory = driver.memory();
    let memory = &mut *memory;
    let freed = memory.arenas[gpu][kind.arena()].give(start, size);
    let (range, _) = Arena::range_of(memory.chunk, start, size);
    if let Some(of) = kind.counts_as().filter(|_| freed > 0)
        && !crate::ipc::withdraw(driver, &mut memory.exports, range)
    {
        driver.session.uncharge(gpu, of, freed);
    }
}

pub(crate) fn allocate(context: &'static Context, size: u64, kind: Kind) -> Result<u64> {
    let driver = driver()?;
    context.device.check()?;
    if size == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    capture::permit()?;
    let gpu = context.device.gpu;
    let start = or_release(driver, gpu, || {
        let _alone = context.owner().calls.alone();
        try_place(driver, gpu, size, kind)
    })?;
    driver.memory().insert(start, size, kind, context, 0);
    Ok(start)
}

/// Frees what begins at `address`; what it was.
pub(crate) fn free(driver: &Driver, address: u64) -> Result<Allocation> {
    let mut memory = driver.memory();
    let own = |a: &&Allocation| {
        a.kind.is_device()
            && !matches!(a.kind, Kind::Pooled | Kind::Graph | Kind::Mapped | Kind::Imported)
    };
    let Some(&a) = memory.by_start.get(&address).filter(own) else {
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    memory.by_start.remove(&address);
    if a.touched {
        forget_pages(address, a.size.next_multiple_of(ALIGN));
    }
    drop(memory);
    displace(driver, a.context.device.gpu, address, a.size, a.kind);
    Ok(a)
}

/// Frees what belongs to a context that ends; pools belong to the device.
pub(crate) fn free_all_of(driver: &Driver, context: &'static Context) {
    let of_it = |a: &Allocation| {
        std::ptr::eq(a.context, context) && !matches!(a.kind, Kind::Pooled | Kind::Graph)
    };
    let memory = driver.memory();
    let gone: Vec<_> =
        memory.by_start.iter().filter(|(_, a)| of_it(a)).map(|(at, a)| (*at, a.kind)).collect();
    drop(memory);
    for (start, kind) in gone {
        if kind.is_device() {
            let _ = free(driver, start);
        } else {
            forget_host(driver, start);
        }
    }
}

/// `cuMemFree`: null is allowed, and waits for the work that may use the memory.
fn free_sync(address: u64) -> Result<()> {
    let driver = driver()?;
    if address == 0 {
        return Ok(());
    }
    let owner = driver.memory().by_start.get(&address).map(|a| (a.context, a.kind));
    let (owner, kind) = owner.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if matches!(kind, Kind::Mapped | Kind::MappedHost) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if matches!(kind, Kind::Pooled | Kind::Imported) {
        // "the driver assumes that all accesses to the allocation are complete and performs no
        // further synchronization" (CUDA C++ Programming Guide).
        return pool::free(driver, address, None).then_some(()).ok_or(CUDA_ERROR_INVALID_VALUE);
    }
    capture::permit()?;
    let _alone = owner.calls.alone();
    owner.wait()?;
    if let Some(freed) = crate::graph::memory::free_outside(address) {
        return freed.map(drop);
    }
    free(driver, address).map(|_| ())
}

/// (free, total) of the current context's GPU.
fn info() -> Result<(u64, u64)> {
    let device = current()?.device;
    device.check()?;
    let session = &driver()?.session;
    session.await_pinning();
    let total = device.config.memory_bytes;
    let free = session.capacity(device.gpu).saturating_sub(session.used(device.gpu));
    Ok((free, total))
}

fn u32_or_max(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn allocate_host(size: usize, flags: c_uint) -> Result<*mut c_void> {
    capture::permit()?;
    let context = current()?;
    if size == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut at = std::ptr::null_mut();
    // SAFETY: `at` is a valid place for the result.
    if unsafe { libc::posix_memalign(&raw mut at, 4096, size) } != 0 {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let driver = driver()?;
    driver.session.pin(size as u64);
    driver.memory().insert(at as u64, size as u64, Kind::Host, context, flags);
    Ok(at)
}

/// Gives back host memory of this `kind` when its context's work is done: NVIDIA/nccl#48. Where none begins at
/// `start`, the answer is `unknown`.
fn unpin_host(start: u64, kind: Kind, unknown: CUresult) -> Result<()> {
    let driver = driver()?;
    let own = driver.memory().by_start.get(&start).filter(|a| a.kind == kind).map(|a| a.context);
    let own = own.ok_or(unknown)?;
    let drains = contexts_lock().then(|| own.owner());
    let _alone = drains.and_then(|context| context.calls.alone());
    if let Some(context) = drains {
        // A lost GPU's work is over, too.
        let _ = context.wait();
    }
    forget_host(driver, start);
    Ok(())
}

/// Forgets host memory that begins at `start`, and frees what `cuMemAllocHost` gave.
fn forget_host(driver: &Driver, start: u64) {
    let Some(gone) = driver.memory().by_start.remove(&start) else { return };
    driver.session.unpin(gone.size);
    if gone.kind == Kind::Host {
        // SAFETY: it came from posix_memalign in `allocate_host`, and was just forgotten.
        unsafe { libc::free(start as *mut c_void) };
    }
}

fn host_pointer(address: *mut c_void) -> Result<u64> {
    current()?;
    let memory = driver()?.memory();
    match memory.find(address as u64, 0) {
        Some((_, a)) if !a.kind.is_device() => Ok(address as u64),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

exports! {
    fn cuMemAlloc_v2(bytes: usize) -> CUdeviceptr { allocate(current()?, bytes as u64, Kind::Device) }
    fn cuMemAlloc(bytes: c_uint) -> CUdeviceptr_v1 {
        Ok(u32_or_max(allocate(current()?, u64::from(bytes), Kind::Low)?))
    }
    fn cuMemAllocPitch_v2(pitch: *mut usize, width: usize, height: usize, element: c_uint) -> CUdeviceptr {
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        put(pitch, row)?;
        allocate(current()?, bytes as u64, Kind::Device)
    }
    fn cuMemAllocManaged(bytes: usize, flags: c_uint) -> CUdeviceptr {
        let context = current()?;
        // CU_MEM_ATTACH_GLOBAL or CU_MEM_ATTACH_HOST.
        if !matches!(flags, 1 | 2) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let at = allocate(context, bytes as u64, Kind::Managed)?;
        // The host writes managed memory behind the driver's back.
        driver()?.memory().touch(at, 0);
        Ok(at)
    }

    fn cuMemFree_v2(address: CUdeviceptr) { free_sync(address) }
    fn cuMemFree(address: CUdeviceptr_v1) { free_sync(u64::from(address)) }

    // The driver takes NULL for either, as OptiX and llama.cpp know (Project-HAMi/HAMi-core#322).
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (f, t) = info()?;
        put_if(free, usize::try_from(f).unwrap_or(usize::MAX));
        put_if(total, usize::try_from(t).unwrap_or(usize::MAX));
        Ok(())
    }
    fn cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) {
        let (f, t) = info()?;
        put_if(free, u32_or_max(f));
        put_if(total, u32_or_max(t));
        Ok(())
    }

    fn cuDeviceTotalMem_v2(dev: CUdevice) -> usize {
        let total = driver()?.device(dev)?.config.memory_bytes;
        Ok(usize::try_from(total).unwrap_or(usize::MAX))
    }
    fn cuDeviceTotalMem(dev: CUdevice) -> c_uint {
        Ok(u32_or_max(driver()?.device(dev)?.config.memory_bytes))
    }

    fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr) {
        current()?;
        let memory = driver()?.memory();
        let (start, len) =
            memory.find(address, 0).map(|(start, a)| (start, a.size)).ok_or(CUDA_ERROR_NOT_FOUND)?;
        put_if(base, start);
        put_if(size, usize::try_from(len).unwrap_or(usize::MAX));
        Ok(())
    }

    fn cuMemAllocHost_v2(bytes: usize) -> *mut c_void {
        allocate_host(bytes, 0)
    }
    fn cuMemHostAlloc(bytes: usize, flags: c_uint) -> *mut c_void {
        if flags & !7 != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        allocate_host(bytes, flags)
    }
    fn cuMemFreeHost(start: *mut c_void) {
        unpin_host(start as u64, Kind::Host, CUDA_ERROR_INVALID_VALUE)
    }
    fn cuMemHostRegister_v2, cuMemHostRegister(start: *mut c_void, len: usize, flags: c_uint) {
        capture::permit()?;
        let context = current()?;
        if start.is_null() || len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let driver = driver()?;
        let mut memory = driver.memory();
        let (from, to) = (start as u64, start as u64 + len as u64);
        let overlaps = memory.by_start.range(..to).next_back().is_some_and(|(s, a)| s + a.size > from);
        if overlaps {
            return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        memory.insert(from, len as u64, Kind::Registered, context, flags);
        drop(memory);
        driver.session.pin(len as u64);
        Ok(())
    }
    fn cuMemHostUnregister(start: *mut c_void) {
        capture::permit()?;
        current()?;
        unpin_host(start as u64, Kind::Registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    }
    fn cuMemHostGetDevicePointer_v2(host: *mut c_void, _flags: c_uint) -> CUdeviceptr {
        host_pointer(host)
    }
}

// What a pointer is: CUDA Driver API, "Unified Addressing".

/// An attribute's value, as wide as the manual has it: what says "boolean" or is an enumeration is an
/// `int`.
#[derive(Clone, Copy)]
enum Value {
    Int(i32),
    Long(u64),
}

impl Value {
    fn put(self, to: *mut c_void) -> Result<()> {
        match self {
            Value::Int(n) => put(to.cast(), n),
            Value::Long(n) => put(to.cast(), n),
        }
    }

    fn boolean(yes: bool) -> Value {
        Value::Int(yes.into())
    }

    fn object<T: Object>(object: Option<&'static T>) -> Value {
        Value::Long(object.map_or(0, |o| handle(o) as u64))
    }
}

/// `CU_POINTER_ATTRIBUTE_*`, and `CU_MEMORYTYPE_*` as the answer to the second.
fn attribute(which: c_int, address: u64) -> Result<Value> {
    // The driver's version that knows it.
    let since = match which {
        1..=17 => 0,
        18..=20 => 11_070,
        21 => 12_080,
        22 => 13_030,
        _ => u32::MAX,
    };
    if driver()?.session.config().cuda_version < since {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let found = driver()?.memory().find(address, 0).map(|(start, a)| (start, *a));
    let (start, a) = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = a.kind.is_device();
    let mapped = matches!(a.kind, Kind::Mapped | Kind::MappedHost);
    Ok(match which {
        1 if mapped => Value::Long(0),
        1 => Value::object(Some(a.context)),
        2 => Value::Int(if device { 2 } else { 1 }),
        3 => Value::Long(address),
        4 if !device || a.kind == Kind::Managed => Value::Long(address),
        // The host can't reach device memory; and nothing is registered with nv-p2p.
        4 | 5 => return Err(CUDA_ERROR_INVALID_VALUE),
        // Synchronous memory operations; GPUDirect.
        6 | 15 => Value::Int(0),
        7 | 20 => Value::Long(a.id),
        8 => Value::boolean(a.kind == Kind::Managed),
        9 => Value::Int(a.context.device.ordinal),
        // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
        10 => Value::boolean(a.kind == Kind::Device),
        11 | 19 => Value::Long(start),
        12 | 18 => Value::Long(a.size),
        13 => Value::Int(1),
        // Handle types.
        14 => Value::Long(0),
        // CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE.
        16 => Value::Int(3),
        17 => Value::object(a.pool),
        21 => Value::Int(0),
        _ => Value::Int(-1),
    })
}

/// What a question costs, whatever it asks: a look-up under the lock of the context that has the address.
fn ask(address: u64) -> Result<()> {
    let driver = driver()?;
    let owner = driver.memory().find(address, 0).map(|(_, a)| a.context);
    let context = owner.or_else(|| current().ok()).map(|c| c.owner());
    let _shared = context.and_then(|c| c.calls.shared());
    simgpu::clock::burn(driver.session.config().costs.pointer_query_cpu_ns);
    Ok(())
}

exports! {
    fn cuPointerGetAttribute(value: *mut c_void, which: c_int, address: CUdeviceptr) {
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        ask(address)?;
        attribute(which, address)?.put(value)
    }
}
