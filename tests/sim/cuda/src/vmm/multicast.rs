//! Multicast objects: CUDA Driver API, "Multicast Object Management".
//!
//! What binds to what, and how long memory lives because it is bound. Writes to a mapped multicast
//! object stay in it; they don't reach the bound memory.

use super::{Physical, Vmm, granularity, vmm};
use crate::abi::{Result, exports, get};
use crate::driver::{Driver, driver};
use crate::ipc;
use crate::pool::Location;
use std::ffi::c_ulonglong;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY, CUdevice, CUdeviceptr, CUmemGenericAllocationHandle,
    CUmulticastObjectProp,
};

const CUDA_ERROR_ILLEGAL_STATE: i32 = 401;

/// The devices of a multicast object and the memory bound to it.
pub(super) struct Team {
    size: u32,
    devices: Vec<CUdevice>,
    pub(super) bound: Vec<Bound>,
}

pub(super) struct Bound {
    device: CUdevice,
    offset: u64,
    len: u64,
    pub(super) handle: u64,
}

impl Team {
    pub(super) fn is_complete(&self) -> bool {
        self.devices.len() == self.size as usize
    }
}

fn create(driver: &Driver, prop: &CUmulticastObjectProp) -> Result<u64> {
    let (size, devices) = (prop.size as u64, prop.numDevices as usize);
    if !(1..=driver.devices.len()).contains(&devices)
        || prop.flags != 0
        || size == 0
        || !size.is_multiple_of(granularity(driver))
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // Objects of one process only.
    if prop.handleTypes & !1 != 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let home = ipc::map_anonymous(size).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let team = Team { size: prop.numDevices, devices: Vec::new(), bound: Vec::new() };
    Ok(vmm()
        .add(Physical { multicast: Some(team), ..Physical::new(size, home, Location::None, None) }))
}

fn team(vmm: &mut Vmm, object: u64) -> Result<(&mut Team, u64)> {
    let memory = vmm.get(object)?;
    let bytes = memory.bytes;
    memory.multicast.as_mut().map(|team| (team, bytes)).ok_or(CUDA_ERROR_INVALID_VALUE)
}

fn add_device(driver: &'static Driver, object: u64, dev: CUdevice) -> Result<()> {
    driver.device(dev)?;
    let mut vmm = vmm();
    let (team, _) = team(&mut vmm, object)?;
    if team.devices.contains(&dev) || team.is_complete() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    team.devices.push(dev);
    Ok(())
}

/// Binds memory that a handle means, from its offset `from` on.
fn bind(
    vmm: &mut Vmm,
    object: u64,
    offset: usize,
    (handle, from): (u64, u64),
    len: usize,
    flags: c_ulonglong,
) -> Result<()> {
    let grain = granularity(driver()?);
    let (offset, len) = (offset as u64, len as u64);
    let memory = vmm.memory.get(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let end = from.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if flags != 0
        || len == 0
        || end > memory.bytes
        || [offset, from, len].iter().any(|n| !n.is_multiple_of(grain))
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let device = memory.device.map(|d| d.ordinal).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let (team, bytes) = team(vmm, object)?;
    // The real driver blocks until all devices have been added; here nobody else will add one.
    if !team.is_complete() {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    if !team.devices.contains(&device) {
        return Err(CUDA_ERROR_INVALID_DEVICE);
    }
    let to = offset.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let taken = |b: &Bound| b.device == device && b.offset < to && offset < b.offset + b.len;
    if to > bytes || team.bound.iter().any(taken) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    team.bound.push(Bound { device, offset, len, handle });
    if let Some(memory) = vmm.memory.get_mut(&handle) {
        memory.uses += 1;
    }
    Ok(())
}

fn unbind(object: u64, dev: CUdevice, offset: u64, len: u64) -> Result<()> {
    let driver = driver()?;
    driver.device(dev)?;
    let mut vmm = vmm();
    let (team, _) = team(&mut vmm, object)?;
    let matches = |b: &Bound| b.device == dev && b.offset == offset && b.len == len;
    let at = team.bound.iter().position(matches).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let bound = team.bound.swap_remove(at);
    vmm.unuse(driver, bound.handle);
    Ok(())
}

exports! {
    fn cuMulticastCreate(prop: *const CUmulticastObjectProp) -> CUmemGenericAllocationHandle {
        let driver = driver()?;
        let prop = get(prop)?;
        create(driver, &prop)
    }
    fn cuMulticastAddDevice(object: CUmemGenericAllocationHandle, dev: CUdevice) {
        add_device(driver()?, object, dev)
    }
    fn cuMulticastBindMem(object: CUmemGenericAllocationHandle, offset: usize, memory: CUmemGenericAllocationHandle, from: usize, len: usize, flags: c_ulonglong) {
        let mut vmm = vmm();
        vmm.get(memory)?;
        bind(&mut vmm, object, offset, (memory, from as u64), len, flags)
    }
    fn cuMulticastBindAddr(object: CUmemGenericAllocationHandle, offset: usize, address: CUdeviceptr, len: usize, flags: c_ulonglong) {
        let mut vmm = vmm();
        let (start, mapping) = vmm.at(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let memory = (mapping.handle, address - start);
        bind(&mut vmm, object, offset, memory, len, flags)
    }
    fn cuMulticastUnbind(object: CUmemGenericAllocationHandle, dev: CUdevice, offset: usize, len: usize) {
        unbind(object, dev, offset as u64, len as u64)
    }
}
