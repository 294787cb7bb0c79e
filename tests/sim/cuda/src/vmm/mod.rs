//! Virtual memory management: CUDA Driver API, the section of that name.
//!
//! Physical memory is shared host memory at a home address of the driver's, counted from
//! `cuMemCreate` until its last handle, mapping and import are gone; a mapping is the same memory
//! once more, at the application's reserved address.

mod calls;
mod map;
mod multicast;

pub use calls::*;
pub use multicast::*;

use crate::driver::{Device, Driver, driver, lock};
use crate::errors::Result;
use crate::pool::props::{HANDLE_FABRIC, HANDLE_FD, Location};
use crate::shared::{self, Header, SharedFile, What};
use simgpu::memory::ObjectId;
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY,
    CUmemAllocationProp,
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

/// A mapping, by its address.
struct Mapping {
    len: u64,
    handle: u64,
}

#[derive(Default)]
struct Vmm {
    reserved: BTreeMap<u64, u64>,
    memory: BTreeMap<u64, Physical>,
    mapped: BTreeMap<u64, Mapping>,
    handles: u64,
}

static VMM: Mutex<Option<Vmm>> = Mutex::new(None);

/// The state, locked; before [`Driver::memory`] where both are.
struct Locked(MutexGuard<'static, Option<Vmm>>);

impl std::ops::Deref for Locked {
    type Target = Vmm;
    fn deref(&self) -> &Vmm {
        self.0.as_ref().unwrap_or_else(|| unreachable!("made when locked"))
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Vmm {
        self.0.get_or_insert_default()
    }
}

fn vmm() -> Locked {
    let mut guard = lock(&VMM);
    guard.get_or_insert_default();
    Locked(guard)
}

/// The least and the recommended granularity, for every location.
fn granularity(driver: &Driver) -> u64 {
    driver.session.config().memory.granularity_bytes.max(4096)
}

/// Checks properties: the location.
fn check(driver: &'static Driver, prop: &CUmemAllocationProp) -> Result<Location> {
    if prop.r#type != crate::pool::props::PINNED || !prop.win32HandleMetaData.is_null() {
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
        if !crate::pool::charge(driver, device.gpu, Use::Virtual, size) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
    }
    let made = if prop.requestedHandleTypes & HANDLE_FD != 0 {
        SharedFile::create(size).and_then(|f| f.map(0, size, None).map(|at| (at, Some(f))))
    } else {
        shared::map_anonymous(size).map(|at| (at, None))
    };
    let Some((home, file)) = made else {
        if let Some(device) = device {
            driver.session.uncharge(device.gpu, Use::Virtual, size);
        }
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    };
    Ok(vmm().add(Physical {
        bytes: size,
        home,
        location,
        device,
        handle_types: prop.requestedHandleTypes,
        usage: prop.usage,
        file,
        object: None,
        references: 1,
        uses: 0,
        multicast: None,
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
        shared::unmap(memory.home, memory.bytes);
        match (memory.object, memory.device) {
            (Some(object), _) => shared::let_go(driver, object),
            (None, Some(device)) if memory.multicast.is_none() => {
                driver.session.uncharge(device.gpu, Use::Virtual, memory.bytes);
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
            Some(d) => Some(
                shared::share(driver, d.gpu, Use::Virtual, memory.bytes)
                    .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?,
            ),
            // Host memory is not counted.
            None => None,
        };
        let none = ObjectId { index: u32::MAX, generation: 0 };
        let mut header = Header::new(driver, What::Virtual, id.unwrap_or(none), memory.bytes);
        let place = memory.location.raw();
        let of_machine = device.and_then(|d| i32::try_from(d.gpu).ok());
        header.location = [place.r#type, of_machine.unwrap_or(place.id)];
        header.notes = [memory.handle_types.cast_unsigned(), u32::from(memory.usage)];
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
        file.header().filter(|h| h.is(driver, What::Virtual)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
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
    let object = device.is_some().then_some(header.id());
    // Everybody who held it is gone, and the memory with them.
    if let Some(object) = object
        && shared::hold(driver, object).is_none()
    {
        shared::unmap(home, header.bytes);
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(vmm().add(Physical {
        bytes: header.bytes,
        home,
        location,
        device,
        handle_types: header.notes[0].cast_signed(),
        usage: u16::try_from(header.notes[1]).unwrap_or(0),
        file: Some(file),
        object,
        references: 1,
        uses: 0,
        multicast: None,
    }))
}

/// What `cuPointerGetAttribute` says of mapped memory: its handle types.
pub(crate) fn handle_types_at(address: u64) -> u64 {
    let vmm = vmm();
    let found = vmm.mapped.range(..=address).next_back().filter(|(s, m)| address < *s + m.len);
    let memory = found.and_then(|(_, m)| vmm.memory.get(&m.handle));
    memory.map_or(0, |m| u64::from(m.handle_types.cast_unsigned()))
}

/// The reserved addresses around one: their start and length.
pub(crate) fn reserved_at(address: u64) -> Option<(u64, u64)> {
    let vmm = vmm();
    let (&start, &len) = vmm.reserved.range(..=address).next_back()?;
    (address < start + len).then_some((start, len))
}
