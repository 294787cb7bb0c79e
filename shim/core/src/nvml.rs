//! NVML's view of memory: the same quota and use as the driver API's, matched by the device's UUID.
//!
//! These hooks only look: a process that asks NVML alone (`nvidia-smi`) takes no slot and opens no
//! session. libnvidia-ml calls its own exports through the PLT, so they re-enter; the depth guard
//! lets its inner calls see the real figures.
#![allow(non_snake_case, reason = "hooks carry NVML's own names")]

use crate::quota::View;
use crate::real::{self, Library, Wanted};
use crate::state::{self, Observed};
use crate::thread::{Answer, Depth};
use core::ffi::{CStr, c_uint, c_ulonglong, c_void};
use core::ptr;
use tessera_cuda::nvml::*;
use tessera_region::layout::{MAX_GPUS, SLOTS};
use tessera_region::share::ShareSet;

/// `nvmlMemory_v2`
const MEMORY_V2: c_uint = 40 | 2 << 24;
const _: () = assert!(size_of::<nvmlMemory_v2_t>() == 40);

/// `NVML_ERROR_LIBRARY_NOT_FOUND`
const LIBRARY_NOT_FOUND: nvmlReturn_t = 12;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`
const FUNCTION_NOT_FOUND: nvmlReturn_t = 13;

/// What a function that NVML lacks answers.
#[cold]
pub fn missing() -> nvmlReturn_t {
    if real::bind(Library::Nvml, Wanted::IfLoaded) { FUNCTION_NOT_FOUND } else { LIBRARY_NOT_FOUND }
}

/// The tenant, and which of its GPUs `device` stands for; `None` where this is no tenant. A device of which NVML does
/// not tell what it is stands for none of them.
pub(crate) fn tenant_of(device: nvmlDevice_t) -> Option<(Observed, Parts)> {
    let observed = state::observed()?;
    Some((observed, Parts::of(device, observed.shares())))
}

/// Inside a hook of a tenant's that asks for something at `place`; else the call is NVML's alone.
pub(crate) fn asked<T>(place: *mut T) -> Option<Depth> {
    Depth::enter().filter(|_| !place.is_null() && state::observed().is_some())
}

/// What the tenant is shown of `device`; `None` where this is no tenant.
fn view(device: nvmlDevice_t, total: u64) -> Option<View> {
    let (observed, parts) = tenant_of(device)?;
    let parts = parts.as_slice().iter().map(|part| View::of(observed, Some(part.gpu), total));
    Some(parts.reduce(View::plus).unwrap_or_else(|| View::of(observed, None, total)))
}

/// What a tenant is answered that asks with a structure of another `version` than is known here, whose figures could not
/// be replaced: NVML's own error, and that the version is none where NVML knows it. `call` asks with a place of ours.
pub(crate) fn of_unknown_version(
    version: c_uint,
    call: impl FnOnce(*mut c_void) -> Answer,
) -> Answer {
    /// Of a version, the bytes of its structure; the rest is a number.
    const SIZE: c_uint = 0x00ff_ffff;
    let mut place = [0u64; 512];
    if (version & SIZE) as usize > size_of_val(&place) {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    // The first member of every such structure.
    place[0] = u64::from(version);
    match call(place.as_mut_ptr().cast()) {
        Ok(()) | Err(NVML_ERROR_INSUFFICIENT_SIZE) => Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH),
        error => error,
    }
}

pub unsafe fn nvmlDeviceGetMemoryInfo(
    real: &dyn Fn(nvmlDevice_t, *mut nvmlMemory_t) -> Answer,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> Answer {
    let Some(_depth) = asked(memory) else { return real(device, memory) };
    // In a place of ours no thread of the tenant sees what NVML says.
    let mut shown = nvmlMemory_t::default();
    real(device, &raw mut shown)?;
    if let Some(view) = view(device, shown.total) {
        shown = nvmlMemory_t { total: view.total, free: view.free(), used: view.used() };
    }
    // SAFETY: not null, the caller's, where NVML would have written.
    unsafe { memory.write_unaligned(shown) };
    Ok(())
}

/// NVML API, "Device Queries". The quota holds nothing back: `reserved` is 0.
pub unsafe fn nvmlDeviceGetMemoryInfo_v2(
    real: &dyn Fn(nvmlDevice_t, *mut nvmlMemory_v2_t) -> Answer,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> Answer {
    let Some(_depth) = asked(memory) else { return real(device, memory) };
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { memory.cast::<c_uint>().read_unaligned() };
    if version != MEMORY_V2 {
        return of_unknown_version(version, |place| real(device, place.cast()));
    }
    let mut shown = nvmlMemory_v2_t { version, ..Default::default() };
    real(device, &raw mut shown)?;
    if let Some(view) = view(device, shown.total) {
        (shown.total, shown.reserved) = (view.total, 0);
        (shown.free, shown.used) = (view.free(), view.used());
    }
    // Member by member: between two of them is whatever our stack had.
    // SAFETY: not null, the caller's, where NVML would have written.
    unsafe {
        (&raw mut (*memory).total).write_unaligned(shown.total);
        (&raw mut (*memory).reserved).write_unaligned(shown.reserved);
        (&raw mut (*memory).free).write_unaligned(shown.free);
        (&raw mut (*memory).used).write_unaligned(shown.used);
    }
    Ok(())
}

// Which of a tenant's GPUs an NVML device handle stands for. A MIG instance is a GPU of the quota page, by its own
// UUID. A GPU in MIG mode is none, and its handle shows "aggregate information" (NVML API,
// `nvmlDeviceGetMemoryInfo`): of those of its instances that the page names.

/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_BYTES: c_uint = 96;
/// More instances than any GPU has: seven.
const INSTANCES: c_uint = 64;

/// One of the page's GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) gpu: u8,
    device: nvmlDevice_t,
}

impl Part {
    /// The ids of GPU instance and compute instance that NVML has for it; of a whole GPU, none.
    pub(crate) fn instance_ids(self) -> (c_uint, c_uint) {
        let [gpu, compute] =
            [&real::nvmlDeviceGetGpuInstanceId, &real::nvmlDeviceGetComputeInstanceId].map(
                |real| {
                    // SAFETY: NVML's own handle, and a valid place for the answer.
                    real.ask(0, |ask, id| unsafe { ask(self.device, id) })
                        .unwrap_or(NVML_NO_INSTANCE)
                },
            );
        (gpu, compute)
    }
}

#[derive(Debug)]
pub(crate) struct Parts {
    parts: [Part; MAX_GPUS],
    count: usize,
}

impl Parts {
    /// Of `device`: none where NVML does not tell what it is.
    pub(crate) fn of(device: nvmlDevice_t, shares: &ShareSet) -> Self {
        let mut parts =
            Self { parts: [Part { gpu: 0, device: ptr::null_mut() }; MAX_GPUS], count: 0 };
        if parts.add(device, shares) == Some(false) {
            parts.add_instances(device, shares);
        }
        parts
    }

    /// The page's GPUs among it; none where it was not given to this tenant.
    pub(crate) fn as_slice(&self) -> &[Part] {
        &self.parts[..self.count]
    }

    fn add(&mut self, device: nvmlDevice_t, shares: &ShareSet) -> Option<bool> {
        let gpu = entry(device, shares)?;
        let Some((gpu, place)) = gpu.zip(self.parts.get_mut(self.count)) else {
            return Some(false);
        };
        *place = Part { gpu, device };
        self.count += 1;
        Some(true)
    }

    fn add_instances(&mut self, device: nvmlDevice_t, shares: &ShareSet) {
        // SAFETY: the caller's handle, which NVML knew just now, and a valid place for the answer.
        let most =
            real::nvmlDeviceGetMaxMigDeviceCount.ask(0, |ask, count| unsafe { ask(device, count) });
        // Drivers before MIG do not tell.
        for index in 0..most.map_or(0, |most| most.min(INSTANCES)) {
            // SAFETY: as above. Indexes without an instance are an error.
            let instance = real::nvmlDeviceGetMigDeviceHandleByIndex
                .ask(ptr::null_mut(), |ask, instance| unsafe { ask(device, index, instance) });
            if let Ok(instance) = instance {
                self.add(instance, shares);
            }
        }
    }
}

/// Which entry of the page `device` is, if any; `None` where NVML does not tell its UUID.
fn entry(device: nvmlDevice_t, shares: &ShareSet) -> Option<Option<u8>> {
    // SAFETY: room for so many bytes; the device is the caller's, or NVML's own.
    let text = real::nvmlDeviceGetUUID
        .ask([0u8; UUID_BYTES as usize], |ask, text| unsafe {
            ask(device, text.cast(), UUID_BYTES)
        })
        .ok()?;
    let uuid = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    Some(shares.find(uuid).and_then(|gpu| u8::try_from(gpu).ok()))
}

// NVML's lists of processes as the tenant sees them: its own, by their pids in its own pid
// namespace, and no others. They come from the usage page; the driver is asked first, for its
// errors, and its list is dropped, because it has every tenant's processes.
//
// Each is shown with what it was granted and an even share of the overhead that was observed, so
// that the list adds up to what the memory info calls used. All are compute processes.
//
// Utilisation by process is not the tenant's to see either: the driver samples it by pids that
// cannot be distinguished from the neighbours'. There are no samples, which NVML calls "not found".

/// `nvmlProcessDetailList_v1`
const DETAIL_LIST_V1: c_uint = 24 | 1 << 24;
/// `nvmlProcessesUtilizationInfo_v1`
const UTILIZATION_V1: c_uint = 24 | 1 << 24;

type List<T> = dyn Fn(nvmlDevice_t, *mut c_uint, *mut T) -> Answer;

const NO_PROCESS: nvmlProcessInfo_t = nvmlProcessInfo_t {
    pid: 0,
    usedGpuMemory: 0,
    gpuInstanceId: NVML_NO_INSTANCE,
    computeInstanceId: NVML_NO_INSTANCE,
};

/// A tenant's processes on what a handle stands for. A process is on one MIG instance at most, so there
/// are no more than slots.
struct Own {
    entries: [nvmlProcessInfo_t; SLOTS],
    count: usize,
}

impl Own {
    /// Those of `device`'s tenant.
    fn on(device: nvmlDevice_t) -> Self {
        let mut own = Self::NOBODY;
        let Some((tenant, parts)) = tenant_of(device) else { return own };
        for part in parts.as_slice() {
            let gpu = usize::from(part.gpu);
            let mut holders = [(0, 0); SLOTS];
            let count = tenant.shares().holders(gpu, &mut holders);
            let (gpuInstanceId, computeInstanceId) = part.instance_ids();
            let entries = holders[..count].iter().map(|&(pid, usedGpuMemory)| nvmlProcessInfo_t {
                pid,
                usedGpuMemory,
                gpuInstanceId,
                computeInstanceId,
            });
            own.add(entries, tenant.shares().observed_overhead(gpu));
        }
        own
    }

    /// Nobody, for lists of other kinds of processes.
    const NOBODY: Self = Self { entries: [NO_PROCESS; SLOTS], count: 0 };

    /// Adds those of one GPU, each with an even share of its `overhead`.
    fn add(&mut self, entries: impl Iterator<Item = nvmlProcessInfo_t>, overhead: u64) {
        let first = self.count;
        for (place, entry) in self.entries[first..].iter_mut().zip(entries) {
            *place = entry;
            self.count += 1;
        }
        let added = &mut self.entries[first..self.count];
        let count = added.len() as u64;
        for (at, entry) in (0..).zip(added) {
            // What does not divide is the first one's.
            let rest = if at == 0 { overhead % count } else { 0 };
            entry.usedGpuMemory = entry.usedGpuMemory.saturating_add(overhead / count + rest);
        }
    }

    /// NVML's protocol: `room` entries at `to` are filled if that is enough, and the number there
    /// are is the answer's either way.
    ///
    /// # Safety
    /// `to` is valid for `room` entries, or `room` is 0.
    unsafe fn fill<T: Listed>(&self, room: &mut c_uint, to: *mut T) -> Answer {
        let enough = usize::try_from(*room).is_ok_and(|room| room >= self.count);
        *room = c_uint::try_from(self.count).unwrap_or(c_uint::MAX);
        if !enough {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        if self.count > 0 && to.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        for (at, &own) in self.entries[..self.count].iter().enumerate() {
            // SAFETY: below `room`, for which the caller's array is valid.
            unsafe { T::put(to.add(at), own) };
        }
        Ok(())
    }
}

/// NVML's own error, unless it would have answered: with its list, or with how long it is.
fn answered(answer: Answer) -> Answer {
    match answer {
        Err(NVML_ERROR_INSUFFICIENT_SIZE) => Ok(()),
        answer => answer,
    }
}

/// Answers a list: the tenant's own, if it is one.
unsafe fn list<T: Listed>(
    real: &List<T>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut T,
    own: impl FnOnce(nvmlDevice_t) -> Own,
) -> Answer {
    let Some(_depth) = asked(count) else { return real(device, count, infos) };
    let mut theirs = 0;
    // A valid count, and no array for no entries.
    answered(real(device, &raw mut theirs, ptr::null_mut()))?; // asked again it might answer with everybody's
    // SAFETY: not null; the caller's array is valid for as many entries as it says.
    unsafe { own(device).fill(&mut *count, infos) }
}

/// What a process is listed as. Member by member: between two of them is whatever our stack had.
pub trait Listed {
    /// # Safety
    /// `to` is valid for a write.
    unsafe fn put(to: *mut Self, own: nvmlProcessInfo_t);
}

macro_rules! listed {
    (|$own:ident| $($info:ty { $($member:ident: $value:expr),+ $(,)? })+) => {
        $(impl Listed for $info {
            unsafe fn put(to: *mut Self, $own: nvmlProcessInfo_t) {
                // SAFETY: the caller's promise.
                unsafe { $((&raw mut (*to).$member).write($value);)+ }
            }
        })+
    };
}
listed! {
    |own|
    nvmlProcessInfo_v1_t { pid: own.pid, usedGpuMemory: own.usedGpuMemory }
    nvmlProcessInfo_t {
        pid: own.pid,
        usedGpuMemory: own.usedGpuMemory,
        gpuInstanceId: own.gpuInstanceId,
        computeInstanceId: own.computeInstanceId,
    }
    nvmlProcessDetail_v1_t {
        pid: own.pid,
        usedGpuMemory: own.usedGpuMemory,
        gpuInstanceId: own.gpuInstanceId,
        computeInstanceId: own.computeInstanceId,
        usedGpuCcProtectedMemory: 0,
    }
}

impl Listed for c_uint {
    unsafe fn put(to: *mut Self, own: nvmlProcessInfo_t) {
        // SAFETY: the caller's promise.
        unsafe { to.write(own.pid) };
    }
}

/// NVML API, "Device Queries", `nvmlDeviceGetComputeRunningProcesses` of any version.
pub unsafe fn nvmlComputeProcesses<T: Listed>(
    real: &List<T>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut T,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, infos, Own::on) }
}

/// NVML API, "Device Queries": graphics and MPS processes, of which a tenant has none to show. And "Accounting
/// Statistics": pids of every tenant since accounting was switched on, of which it is shown none.
pub unsafe fn nvmlOtherProcesses<T: Listed>(
    real: &List<T>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut T,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, infos, |_| Own::NOBODY) }
}

pub unsafe fn nvmlDeviceGetRunningProcessDetailList(
    real: &dyn Fn(nvmlDevice_t, *mut nvmlProcessDetailList_v1_t) -> Answer,
    device: nvmlDevice_t,
    list: *mut nvmlProcessDetailList_v1_t,
) -> Answer {
    let Some(_depth) = asked(list) else { return real(device, list) };
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { list.cast::<c_uint>().read_unaligned() };
    if version != DETAIL_LIST_V1 {
        return of_unknown_version(version, |place| real(device, place.cast()));
    }
    // SAFETY: not null, the caller's.
    let mut theirs = unsafe { *list };
    let (to, mode) = (theirs.procArray, theirs.mode);
    // A list of its own, without room.
    (theirs.numProcArrayEntries, theirs.procArray) = (0, ptr::null_mut());
    answered(real(device, &raw mut theirs))?;
    let computing = matches!(mode, NVML_PROCESS_MODE_COMPUTE | NVML_PROCESS_MODE_ALL);
    let own = if computing { Own::on(device) } else { Own::NOBODY };
    // SAFETY: not null; the caller's array is valid for as many entries as it says.
    unsafe { own.fill(&mut (*list).numProcArrayEntries, to) }
}

/// Answers that there are no samples, unless NVML has an error of its own.
unsafe fn no_samples(answer: Answer, count: *mut c_uint) -> Answer {
    if answer != Err(NVML_ERROR_NOT_FOUND) {
        answered(answer)?;
    }
    // SAFETY: not null, the caller's.
    unsafe { *count = 0 };
    Err(NVML_ERROR_NOT_FOUND)
}

pub unsafe fn nvmlDeviceGetProcessUtilization(
    real: &dyn Fn(
        nvmlDevice_t,
        *mut nvmlProcessUtilizationSample_t,
        *mut c_uint,
        c_ulonglong,
    ) -> Answer,
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut c_uint,
    since_us: c_ulonglong,
) -> Answer {
    let Some(_depth) = asked(count) else { return real(device, samples, count, since_us) };
    let mut theirs = 0;
    // SAFETY: a valid count; without an array it asks for the number.
    unsafe { no_samples(real(device, ptr::null_mut(), &raw mut theirs, since_us), count) }
}

pub unsafe fn nvmlDeviceGetProcessesUtilizationInfo(
    real: &dyn Fn(nvmlDevice_t, *mut nvmlProcessesUtilizationInfo_v1_t) -> Answer,
    device: nvmlDevice_t,
    info: *mut nvmlProcessesUtilizationInfo_v1_t,
) -> Answer {
    let Some(_depth) = asked(info) else { return real(device, info) };
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { info.cast::<c_uint>().read_unaligned() };
    if version != UTILIZATION_V1 {
        return of_unknown_version(version, |place| real(device, place.cast()));
    }
    // SAFETY: not null, the caller's.
    let mut theirs = unsafe { *info };
    // A structure of its own, without room.
    (theirs.processSamplesCount, theirs.procUtilArray) = (0, ptr::null_mut());
    // SAFETY: as above.
    unsafe { no_samples(real(device, &raw mut theirs), &raw mut (*info).processSamplesCount) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(pid: u32, bytes: u64) -> nvmlProcessInfo_t {
        nvmlProcessInfo_t { pid, usedGpuMemory: bytes, ..NO_PROCESS }
    }

    fn entries(list: &[(u32, u64)]) -> impl Iterator<Item = nvmlProcessInfo_t> {
        list.iter().map(|&(pid, bytes)| info(pid, bytes))
    }

    fn own(list: &[(u32, u64)], overhead: u64) -> Own {
        let mut own = Own::NOBODY;
        own.add(entries(list), overhead);
        own
    }

    #[test]
    fn a_caller_with_an_array_that_is_too_small_gets_the_size_needed() {
        let own = own(&[(7, 100), (9, 200)], 0);
        let mut infos = [info(0, 0); 3];
        for room in [0, 1] {
            let mut count = room;
            // SAFETY: three entries.
            let result = unsafe { own.fill(&mut count, infos.as_mut_ptr()) };
            assert_eq!((result, count, infos[0].pid), (Err(NVML_ERROR_INSUFFICIENT_SIZE), 2, 0));
        }
        let mut count = 3;
        // SAFETY: three entries.
        let result = unsafe { own.fill(&mut count, infos.as_mut_ptr()) };
        assert_eq!((result, count), (Ok(()), 2));
        assert_eq!(infos, [info(7, 100), info(9, 200), info(0, 0)]);
        let mut count = 2;
        // SAFETY: nothing is written through a null pointer.
        let result = unsafe { own.fill::<c_uint>(&mut count, ptr::null_mut()) };
        assert_eq!(result, Err(NVML_ERROR_INVALID_ARGUMENT));
    }

    #[test]
    fn nobody_needs_no_room() {
        let mut count = 0;
        // SAFETY: no entries.
        let result = unsafe { Own::NOBODY.fill::<c_uint>(&mut count, ptr::null_mut()) };
        assert_eq!((result, count), (Ok(()), 0));
    }

    #[test]
    fn overhead_is_shared_to_the_last_byte() {
        let mut own = own(&[(1, 10), (2, 20), (3, 30)], 11);
        // Of another instance.
        own.add(entries(&[(4, 40)]), 7);
        own.add(entries(&[]), 11);
        let bytes: Vec<_> = own.entries[..own.count].iter().map(|own| own.usedGpuMemory).collect();
        assert_eq!(bytes, [15, 23, 33, 47]);
    }
}
