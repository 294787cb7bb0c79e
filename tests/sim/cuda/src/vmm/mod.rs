//! Virtual memory management: CUDA Driver API, the section of that name.
//!
//! Physical memory is shared host memory at a home address of the driver's, counted from
//! `cuMemCreate` until its last handle, mapping and import are gone; a mapping is the same memory
//! once more, at the application's reserved address.

mod multicast;

pub use multicast::*;

use crate::abi::{Result, exports, get, put};
use crate::arena;
use crate::driver::{Device, Driver, driver, lock};
use crate::ipc::{self, Header, SharedFile, Tag, VIRTUAL};
use crate::pool::{HANDLE_FABRIC, HANDLE_FD, Location};
use simgpu::memory::ObjectId;
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY, CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation,
};

const CUDA_ERROR_NOT_PERMITTED: i32 = 800;
/// `CU_MEM_CREATE_USAGE_TILE_POOL`, `…_HW_DECOMPRESS`.
const USAGES: u16 = 3;

/// Physical memory, or a multicast object.
struct Physical {
    bytes: u64,
    /// Where the driver has it mapped.
    home: u64,
    location: Location,
    device: Option<&'static Device>,
    handle_types: i32,
    usage: u16,
    /// If it can be exported, or was imported.
    file: Option<SharedFile>,
    /// Once others may hold it.
    object: Option<ObjectId>,
    references: u32,
    /// Mappings of it, and multicast objects that it is bound to.
    uses: u32,
    multicast: Option<multicast::Team>,
}

impl Physical {
    /// With one handle, used by nothing yet.
    fn new(bytes: u64, home: u64, location: Location, device: Option<&'static Device>) -> Physical {
        Physical {
            bytes,
            home,
            location,
            device,
            handle_types: 0,
            usage: 0,
            file: None,
            object: None,
            references: 1,
            uses: 0,
            multicast: None,
        }
    }
}

/// A mapping, by its address.
struct Mapping {
    len: u64,
    handle: u64,
}

struct Vmm {
    reserved: BTreeMap<u64, u64>,
    memory: BTreeMap<u64, Physical>,
    mapped: BTreeMap<u64, Mapping>,
    handles: u64,
}

static VMM: Mutex<Vmm> = Mutex::new(Vmm {
    reserved: BTreeMap::new(),
    memory: BTreeMap::new(),
    mapped: BTreeMap::new(),
    handles: 0,
});

/// The state, locked; before [`Driver::memory`] where both are.
fn vmm() -> MutexGuard<'static, Vmm> {
    lock(&VMM)
}

/// The least and the recommended granularity, for every location.
fn granularity(driver: &Driver) -> u64 {
    driver.session.config().memory.granularity_bytes.max(4096)
}

/// Checks properties: the location.
fn check(driver: &'static Driver, prop: &CUmemAllocationProp) -> Result<Location> {
    if prop.r#type != crate::pool::PINNED || !prop.win32HandleMetaData.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if prop.usage & !USAGES != 0 || prop.compressionType > 1 || prop.gpuDirectRDMACapable > 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match prop.requestedHandleTypes {
        0 | HANDLE_FD => {}
        // No IMEX channel here.
        n if n & HANDLE_FABRIC != 0 => return Err(CUDA_ERROR_NOT_PERMITTED),
        // Windows'.
        2 | 4 => return Err(CUDA_ERROR_NOT_SUPPORTED),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    let location = Location::of(prop.location, driver)?;
    // "HOST allocations are not IPC capable and requestedHandleTypes must be 0".
    match location {
        Location::None => Err(CUDA_ERROR_INVALID_VALUE),
        Location::Host if prop.requestedHandleTypes != 0 => Err(CUDA_ERROR_INVALID_VALUE),
        _ => Ok(location),
    }
}

fn create(driver: &'static Driver, size: u64, prop: &CUmemAllocationProp) -> Result<u64> {
    let location = check(driver, prop)?;
    if size == 0 || !size.is_multiple_of(granularity(driver)) || size >= 1 << 46 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let device = match location {
        Location::Device(ordinal) => Some(driver.device(ordinal)?),
        _ => None,
    };
    if let Some(device) = device {
        device.check()?;
        if !crate::pool::charge(driver, device.gpu, size) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
    }
    let made = if prop.requestedHandleTypes & HANDLE_FD != 0 {
        SharedFile::create(size).and_then(|f| f.map(0, size, None).map(|at| (at, Some(f))))
    } else {
        ipc::map_anonymous(size).map(|at| (at, None))
    };
    let Some((home, file)) = made else {
        if let Some(device) = device {
            driver.session.uncharge(device.gpu, Use::Own, size);
        }
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    };
    Ok(vmm().add(Physical {
        handle_types: prop.requestedHandleTypes,
        usage: prop.usage,
        file,
        ..Physical::new(size, home, location, device)
    }))
}

impl Vmm {
    fn add(&mut self, memory: Physical) -> u64 {
        // Handles are numbers, not addresses: a stale one is refused.
        self.handles += 1;
        let handle = 0x5640_0000_0000 + self.handles * 16;
        self.memory.insert(handle, memory);
        self.note();
        handle
    }

    /// NVML's lists take the longer.
    fn note(&self) {
        if let Ok(driver) = driver() {
            driver.session.note_handles(self.memory.len() as u64);
        }
    }

    fn get(&mut self, handle: u64) -> Result<&mut Physical> {
        let held = self.memory.get_mut(&handle).filter(|m| m.references > 0);
        held.ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn release(&mut self, driver: &Driver, handle: u64) -> Result<()> {
        self.get(handle)?.references -= 1;
        self.collect(driver, handle);
        Ok(())
    }

    fn unuse(&mut self, driver: &Driver, handle: u64) {
        if let Some(memory) = self.memory.get_mut(&handle) {
            memory.uses -= 1;
        }
        self.collect(driver, handle);
    }

    /// "The memory allocation will be freed when all outstanding mappings to the memory are
    /// unmapped and when all outstanding references to the handle … are also released."
    fn collect(&mut self, driver: &Driver, handle: u64) {
        if self.memory.get(&handle).is_none_or(|m| m.references > 0 || m.uses > 0) {
            return;
        }
        let Some(memory) = self.memory.remove(&handle) else { return };
        self.note();
        ipc::unmap(memory.home, memory.bytes);
        match (memory.object, memory.device) {
            (Some(object), _) => ipc::let_go(driver, object),
            (None, Some(device)) if memory.multicast.is_none() => {
                driver.session.uncharge(device.gpu, Use::Own, memory.bytes);
            }
            _ => {}
        }
        for bound in memory.multicast.into_iter().flat_map(|team| team.bound) {
            self.unuse(driver, bound.handle);
        }
    }
}

fn export(driver: &Driver, handle: u64, handle_type: i32) -> Result<i32> {
    let mut vmm = vmm();
    let memory = vmm.get(handle)?;
    if handle_type != HANDLE_FD || memory.handle_types & HANDLE_FD == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let file = memory.file.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if memory.object.is_none() {
        let device = memory.device;
        let id = match device {
            Some(d) => {
                Some(ipc::share(driver, d.gpu, memory.bytes).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?)
            }
            // Host memory is not counted.
            None => None,
        };
        let none = ObjectId { index: u32::MAX, generation: 0 };
        let place = memory.location.raw();
        let of_machine = device.and_then(|d| i32::try_from(d.gpu).ok());
        let header = Header {
            tag: Tag::new(driver, VIRTUAL, id.unwrap_or(none)),
            bytes: memory.bytes,
            location: [place.r#type, of_machine.unwrap_or(place.id)],
            notes: [memory.handle_types.cast_unsigned(), u32::from(memory.usage)],
        };
        memory.object = id;
        if !file.write_header(&header) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
    }
    let (fd, identity) = file.export().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    if let Some(object) = memory.object {
        driver.session.exported(object, identity);
    }
    Ok(fd)
}

fn import(driver: &'static Driver, fd: i32) -> Result<u64> {
    let file = SharedFile::import(fd).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let header =
        file.header().filter(|h| h.tag.is(driver, VIRTUAL)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = match header.location {
        [1, gpu] => {
            let seen = |d: &&Device| i32::try_from(d.gpu) == Ok(gpu);
            // "If the current process cannot support the memory described by this shareable
            // handle, this API will error as CUDA_ERROR_NOT_SUPPORTED": a GPU that is not visible.
            Some(driver.devices.iter().find(seen).ok_or(CUDA_ERROR_NOT_SUPPORTED)?)
        }
        _ => None,
    };
    let location = match (device, header.location) {
        (Some(device), _) => Location::Device(device.ordinal),
        (None, [3, node]) => Location::HostNuma(node),
        _ => Location::Host,
    };
    let home = file.map(0, header.bytes, None).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let object = device.is_some().then_some(header.tag.id());
    // Everybody who held it is gone, and the memory with them.
    if let Some(object) = object
        && ipc::hold(driver, object).is_none()
    {
        ipc::unmap(home, header.bytes);
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(vmm().add(Physical {
        handle_types: header.notes[0].cast_signed(),
        usage: u16::try_from(header.notes[1]).unwrap_or(0),
        file: Some(file),
        object,
        ..Physical::new(header.bytes, home, location, device)
    }))
}

// Reserving addresses, mapping memory at them, and access to it.

const PAGE: u64 = 4096;

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Access {
    location: CUmemLocation,
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE` is 3, `…_READ` 1, `…_NONE` 0.
    flags: u32,
}

impl Vmm {
    fn reserve(&mut self, driver: &Driver, len: u64, align: u64) -> Result<u64> {
        let wrong = len == 0 || !len.is_multiple_of(PAGE) || align != 0 && !align.is_power_of_two();
        if wrong {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if len >= 1 << 46 {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let align = align.max(granularity(driver));
        let want = len.checked_add(align).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // SAFETY: at no fixed address.
        let from = unsafe { arena::map(0, want, libc::PROT_NONE, arena::LAZY, None) };
        let from = from.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let start = from.next_multiple_of(align);
        if start > from {
            ipc::unmap(from, start - from);
        }
        if start + len < from + want {
            ipc::unmap(start + len, from + want - start - len);
        }
        self.reserved.insert(start, len);
        Ok(start)
    }

    /// "The size must match what was given to memAddressReserve and the ptr given must match".
    fn unreserve(&mut self, start: u64, len: u64) -> Result<()> {
        let in_use = self.mapped.range(start..start.saturating_add(len)).next().is_some();
        if self.reserved.get(&start) != Some(&len) || in_use {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.reserved.remove(&start);
        ipc::unmap(start, len);
        Ok(())
    }

    fn map(
        &mut self,
        driver: &Driver,
        start: u64,
        len: u64,
        offset: u64,
        handle: u64,
    ) -> Result<()> {
        let grain = granularity(driver);
        let aligned = [start, len, offset].iter().all(|n| n.is_multiple_of(grain));
        let end = start.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // "Note: currently must be zero" (offset).
        if len == 0 || !aligned || offset != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let inside = self.reserved.range(..=start).next_back().is_some_and(|(s, n)| end <= s + n);
        let taken = self.mapped.range(..end).next_back().is_some_and(|(s, m)| s + m.len > start);
        let memory = self.get(handle)?;
        let usable = memory.multicast.as_ref().is_none_or(multicast::Team::is_complete);
        if !inside || taken || len > memory.bytes || !usable {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if !ipc::map_again(memory.home, len, start) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        memory.uses += 1;
        let device = memory.device;
        self.mapped.insert(start, Mapping { len, handle });
        driver.memory().insert_mapped(start, len, device);
        Ok(())
    }

    /// The mappings that exactly make up a range.
    fn exactly(&self, start: u64, len: u64) -> Result<Vec<u64>> {
        let end = start.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut at = start;
        let mut found = Vec::new();
        while at < end {
            let mapping = self.mapped.get(&at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            found.push(at);
            at += mapping.len;
        }
        if at == end && len > 0 { Ok(found) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    /// "The range must be the entire contiguous address range that was mapped to."
    fn unmap(&mut self, driver: &Driver, start: u64, len: u64) -> Result<()> {
        for at in self.exactly(start, len)? {
            let Some(mapping) = self.mapped.remove(&at) else { continue };
            driver.memory().remove(at);
            ipc::replace(at, mapping.len, false);
            self.unuse(driver, mapping.handle);
        }
        Ok(())
    }

    /// "The range must be a fully mapped address range containing all allocations".
    fn set_access(
        &mut self,
        driver: &'static Driver,
        start: u64,
        len: u64,
        wanted: &[Access],
    ) -> Result<()> {
        let mappings = self.exactly(start, len)?;
        for w in wanted {
            if !matches!(w.flags, 0 | 1 | 3) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let place = Location::of(w.location, driver)?;
            for at in &mappings {
                let memory = self.mapped.get(at).and_then(|m| self.memory.get(&m.handle));
                let memory = memory.ok_or(CUDA_ERROR_INVALID_VALUE)?;
                match (place, memory.device) {
                    // The devices are no peers.
                    (Location::Device(d), Some(own))
                        if d != own.ordinal && memory.multicast.is_none() =>
                    {
                        return Err(CUDA_ERROR_INVALID_DEVICE);
                    }
                    (Location::Device(_), _) | (Location::Host | Location::HostNuma(_), None) => {}
                    _ => return Err(CUDA_ERROR_INVALID_VALUE),
                }
            }
        }
        for at in mappings {
            let most = wanted.iter().map(|w| w.flags).max().unwrap_or(0);
            driver.memory().set_mapped_access(at, most);
        }
        Ok(())
    }

    fn at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mapped.range(..=address).next_back()?;
        (address < start + mapping.len).then_some((start, mapping))
    }
}

exports! {
    fn cuMemGetAllocationGranularity(prop: *const CUmemAllocationProp, option: c_int) -> usize {
        let driver = driver()?;
        check(driver, &get(prop)?)?;
        if !matches!(option, 0 | 1) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(usize::try_from(granularity(driver)).unwrap_or(usize::MAX))
    }

    fn cuMemAddressReserve(len: usize, align: usize, _hint: CUdeviceptr, flags: c_ulonglong) -> CUdeviceptr {
        let driver = driver()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        vmm().reserve(driver, len as u64, align as u64)
    }
    fn cuMemAddressFree(start: CUdeviceptr, len: usize) {
        vmm().unreserve(start, len as u64)
    }

    fn cuMemCreate(size: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) -> CUmemGenericAllocationHandle {
        let driver = driver()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        create(driver, size as u64, &get(prop)?)
    }
    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        vmm().release(driver()?, handle)
    }
    fn cuMemRetainAllocationHandle(address: *mut c_void) -> CUmemGenericAllocationHandle {
        let mut vmm = vmm();
        // "The handle is guaranteed to be the same handle value used to map the memory."
        let handle = vmm.at(address as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?.1.handle;
        vmm.memory.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?.references += 1;
        Ok(handle)
    }
    fn cuMemGetAllocationPropertiesFromHandle(handle: CUmemGenericAllocationHandle) -> CUmemAllocationProp {
        let mut vmm = vmm();
        let memory = vmm.get(handle)?;
        Ok(CUmemAllocationProp {
            r#type: crate::pool::PINNED,
            requestedHandleTypes: memory.handle_types,
            location: memory.location.raw(),
            win32HandleMetaData: std::ptr::null_mut(),
            // A hint that is not followed.
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: memory.usage,
            reserved: [0; 4],
        })
    }

    fn cuMemMap(start: CUdeviceptr, len: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) {
        let driver = driver()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        vmm().map(driver, start, len as u64, offset as u64, handle)
    }
    fn cuMemUnmap(start: CUdeviceptr, len: usize) {
        vmm().unmap(driver()?, start, len as u64)
    }
    fn cuMemSetAccess(start: CUdeviceptr, len: usize, desc: *const Access, count: usize) {
        let driver = driver()?;
        if count == 0 || count > 1024 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let wanted: Vec<Access> =
            (0..count).map(|i| get(desc.wrapping_add(i))).collect::<Result<_>>()?;
        vmm().set_access(driver, start, len as u64, &wanted)
    }

    fn cuMemExportToShareableHandle(out: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: c_ulonglong) {
        let driver = driver()?;
        if out.is_null() || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out.cast::<c_int>(), export(driver, handle, kind)?)
    }
    fn cuMemImportFromShareableHandle(out: *mut CUmemGenericAllocationHandle, handle: *mut c_void, kind: CUmemAllocationHandleType) {
        let driver = driver()?;
        match kind {
            HANDLE_FD if !out.is_null() => {
                put(out, import(driver, ipc::descriptor_in(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?)?)
            }
            // No IMEX channel here.
            HANDLE_FABRIC => Err(800),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
