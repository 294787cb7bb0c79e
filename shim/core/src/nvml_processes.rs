//! NVML's lists of processes as the tenant sees them: its own, by their pids in its own pid
//! namespace, and no others. They come from the usage page; the driver is asked first, for its
//! errors, and its list is dropped, because it has every tenant's processes.
//!
//! Each is shown with what it was granted and an even share of the overhead that was observed, so
//! that the list adds up to what the memory info calls used. All are compute processes.
//!
//! Utilisation by process is not the tenant's to see either: the driver samples it by pids that
//! cannot be distinguished from the neighbours'. There are no samples, which NVML calls "not found".
#![allow(non_snake_case, reason = "hooks carry NVML's own names")]

use crate::nvml::{missing, of_unknown_version, tenant_of};
use crate::real::Real;
use crate::state;
use crate::thread::Depth;
use core::ffi::{c_uint, c_ulonglong};
use core::ptr;
use tessera_cuda::nvml::*;
use tessera_region::layout::SLOTS;

/// `nvmlProcessDetailList_v1`
const DETAIL_LIST_V1: c_uint = 24 | 1 << 24;
/// `nvmlProcessesUtilizationInfo_v1`
const UTILIZATION_V1: c_uint = 24 | 1 << 24;

type List<T> = Real<unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t>;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    pid: u32,
    bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

impl Entry {
    const NONE: Self = Self {
        pid: 0,
        bytes: 0,
        gpu_instance: NVML_NO_INSTANCE,
        compute_instance: NVML_NO_INSTANCE,
    };
}

/// A tenant's processes on what a handle stands for. A process is on one MIG instance at most, so there
/// are no more than slots.
struct Own {
    entries: [Entry; SLOTS],
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
            let (gpu_instance, compute_instance) = part.instance_ids();
            let entries = holders[..count].iter().map(|&(pid, bytes)| Entry {
                pid,
                bytes,
                gpu_instance,
                compute_instance,
            });
            own.add(entries, tenant.shares().observed_overhead(gpu));
        }
        own
    }

    /// Nobody, for lists of other kinds of processes.
    const NOBODY: Self = Self { entries: [Entry::NONE; SLOTS], count: 0 };

    /// Adds those of one GPU, each with an even share of its `overhead`.
    fn add(&mut self, entries: impl Iterator<Item = Entry>, overhead: u64) {
        let first = self.count;
        for (place, entry) in self.entries[first..].iter_mut().zip(entries) {
            *place = entry;
            self.count += 1;
        }
        Self::share(&mut self.entries[first..self.count], overhead);
    }

    /// Adds an even share of `overhead` to each, what does not divide to the first.
    fn share(entries: &mut [Entry], overhead: u64) {
        let Ok(count @ 1..) = u64::try_from(entries.len()) else { return };
        for entry in entries.iter_mut() {
            entry.bytes = entry.bytes.saturating_add(overhead / count);
        }
        if let Some(entry) = entries.first_mut() {
            entry.bytes = entry.bytes.saturating_add(overhead % count);
        }
    }

    /// NVML's protocol: `room` entries at `to` are filled if that is enough, and the number there
    /// are is the answer's either way.
    ///
    /// # Safety
    /// `to` is valid for `room` entries, or `room` is 0.
    unsafe fn fill<T>(
        &self,
        room: &mut c_uint,
        to: *mut T,
        entry: impl Fn(Entry) -> T,
    ) -> nvmlReturn_t {
        let enough = usize::try_from(*room).is_ok_and(|room| room >= self.count);
        *room = c_uint::try_from(self.count).unwrap_or(c_uint::MAX);
        if !enough {
            return NVML_ERROR_INSUFFICIENT_SIZE;
        }
        if self.count > 0 && to.is_null() {
            return NVML_ERROR_INVALID_ARGUMENT;
        }
        for (at, &own) in self.entries[..self.count].iter().enumerate() {
            // SAFETY: below `room`, for which the caller's array is valid.
            unsafe { to.add(at).write(entry(own)) };
        }
        NVML_SUCCESS
    }
}

/// Whether NVML would have answered: with its list, or with how long it is.
const fn answered(result: nvmlReturn_t) -> bool {
    matches!(result, NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE)
}

/// Answers a list: the tenant's own, if it is one.
///
/// # Safety
/// As NVML's.
unsafe fn list<T>(
    real: &List<T>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut T,
    compute: bool,
    entry: impl Fn(Entry) -> T,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let Some(_depth) = Depth::enter() else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, count, infos) };
    };
    if count.is_null() || state::observed().is_none() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, count, infos) };
    }
    let mut theirs = 0;
    // SAFETY: a valid count, and no array for no entries.
    let result = unsafe { real(device, &raw mut theirs, ptr::null_mut()) };
    if !answered(result) {
        return result; // asked again it might answer with everybody's
    }
    let own = if compute { Own::on(device) } else { Own::NOBODY };
    // SAFETY: not null; the caller's array is valid for as many entries as it says.
    unsafe { own.fill(&mut *count, infos, entry) }
}

const fn first(own: Entry) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: own.pid, usedGpuMemory: own.bytes }
}

const fn second(own: Entry) -> nvmlProcessInfo_t {
    nvmlProcessInfo_t {
        pid: own.pid,
        usedGpuMemory: own.bytes,
        gpuInstanceId: own.gpu_instance,
        computeInstanceId: own.compute_instance,
    }
}

/// NVML API, "Device Queries", `nvmlDeviceGetComputeRunningProcesses` as it was first.
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlComputeProcesses_v1(
    real: &List<nvmlProcessInfo_v1_t>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_v1_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, infos, true, first) }
}

/// NVML API, "Device Queries", `nvmlDeviceGetComputeRunningProcesses` since version 2.
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlComputeProcesses(
    real: &List<nvmlProcessInfo_t>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, infos, true, second) }
}

/// NVML API, "Device Queries": graphics and MPS processes, of which a tenant has none to show.
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlOtherProcesses_v1(
    real: &List<nvmlProcessInfo_v1_t>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_v1_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, infos, false, first) }
}

/// As [`nvmlOtherProcesses_v1`].
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlOtherProcesses(
    real: &List<nvmlProcessInfo_t>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, infos, false, second) }
}

/// NVML API, "Device Queries".
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlDeviceGetRunningProcessDetailList(
    real: &Real<
        unsafe extern "C" fn(nvmlDevice_t, *mut nvmlProcessDetailList_v1_t) -> nvmlReturn_t,
    >,
    device: nvmlDevice_t,
    asked: *mut nvmlProcessDetailList_v1_t,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let depth = Depth::enter();
    if depth.is_none() || asked.is_null() || state::observed().is_none() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, asked) };
    }
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { asked.cast::<c_uint>().read_unaligned() };
    if version != DETAIL_LIST_V1 {
        // SAFETY: the caller's device, and a place of as many bytes as the version has.
        return of_unknown_version(version, |place| unsafe { real(device, place.cast()) });
    }
    // SAFETY: not null, the caller's.
    let asked_for = unsafe { *asked };
    let mut theirs = nvmlProcessDetailList_v1_t {
        numProcArrayEntries: 0,
        procArray: ptr::null_mut(),
        ..asked_for
    };
    // SAFETY: a list of its own, without room.
    let result = unsafe { real(device, &raw mut theirs) };
    if !answered(result) {
        return result;
    }
    let computing = matches!(asked_for.mode, NVML_PROCESS_MODE_COMPUTE | NVML_PROCESS_MODE_ALL);
    let own = if computing { Own::on(device) } else { Own::NOBODY };
    let detail = |own: Entry| nvmlProcessDetail_v1_t {
        pid: own.pid,
        usedGpuMemory: own.bytes,
        gpuInstanceId: own.gpu_instance,
        computeInstanceId: own.compute_instance,
        usedGpuCcProtectedMemory: 0,
    };
    // SAFETY: not null; the caller's array is valid for as many entries as it says.
    unsafe { own.fill(&mut (*asked).numProcArrayEntries, asked_for.procArray, detail) }
}

/// NVML API, "Device Queries".
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlDeviceGetProcessUtilization(
    real: &Real<
        unsafe extern "C" fn(
            nvmlDevice_t,
            *mut nvmlProcessUtilizationSample_t,
            *mut c_uint,
            c_ulonglong,
        ) -> nvmlReturn_t,
    >,
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut c_uint,
    since_us: c_ulonglong,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let depth = Depth::enter();
    if depth.is_some() && !count.is_null() && state::observed().is_some() {
        let mut theirs = 0;
        // SAFETY: a valid count; without an array it asks for the number.
        let result = unsafe { real(device, ptr::null_mut(), &raw mut theirs, since_us) };
        if !answered(result) && result != NVML_ERROR_NOT_FOUND {
            return result;
        }
        // SAFETY: not null, the caller's.
        unsafe { *count = 0 };
        return NVML_ERROR_NOT_FOUND;
    }
    // SAFETY: the caller's own arguments.
    unsafe { real(device, samples, count, since_us) }
}

/// NVML API, "Device Queries".
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlDeviceGetProcessesUtilizationInfo(
    real: &Real<
        unsafe extern "C" fn(nvmlDevice_t, *mut nvmlProcessesUtilizationInfo_v1_t) -> nvmlReturn_t,
    >,
    device: nvmlDevice_t,
    info: *mut nvmlProcessesUtilizationInfo_v1_t,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let depth = Depth::enter();
    if depth.is_some() && !info.is_null() && state::observed().is_some() {
        // SAFETY: not null; every version begins with its number.
        let version = unsafe { info.cast::<c_uint>().read_unaligned() };
        if version != UTILIZATION_V1 {
            // SAFETY: the caller's device, and a place of as many bytes as the version has.
            return of_unknown_version(version, |place| unsafe { real(device, place.cast()) });
        }
        // SAFETY: not null, the caller's.
        let mut theirs = unsafe { *info };
        (theirs.processSamplesCount, theirs.procUtilArray) = (0, ptr::null_mut());
        // SAFETY: a structure of its own, without room.
        let result = unsafe { real(device, &raw mut theirs) };
        if !answered(result) && result != NVML_ERROR_NOT_FOUND {
            return result;
        }
        // SAFETY: not null, the caller's.
        unsafe { (*info).processSamplesCount = 0 };
        return NVML_ERROR_NOT_FOUND;
    }
    // SAFETY: the caller's own arguments.
    unsafe { real(device, info) }
}

/// NVML API, "Accounting Statistics": pids of every tenant since accounting was switched on. A
/// tenant is shown none.
///
/// # Safety
/// As NVML's.
pub unsafe fn nvmlDeviceGetAccountingPids(
    real: &List<c_uint>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    pids: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: the caller's own arguments.
    unsafe { list(real, device, count, pids, false, |own| own.pid) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(list: &[(u32, u64)]) -> impl Iterator<Item = Entry> {
        list.iter().map(|&(pid, bytes)| Entry { pid, bytes, ..Entry::NONE })
    }

    fn own(list: &[(u32, u64)], overhead: u64) -> Own {
        let mut own = Own::NOBODY;
        own.add(entries(list), overhead);
        own
    }

    fn info(pid: u32, bytes: u64) -> nvmlProcessInfo_t {
        second(Entry { pid, bytes, ..Entry::NONE })
    }

    #[test]
    fn a_caller_with_an_array_that_is_too_small_gets_the_size_needed() {
        let own = own(&[(7, 100), (9, 200)], 0);
        let mut infos = [info(0, 0); 3];
        for room in [0, 1] {
            let mut count = room;
            // SAFETY: three entries.
            let result = unsafe { own.fill(&mut count, infos.as_mut_ptr(), second) };
            assert_eq!((result, count, infos[0].pid), (NVML_ERROR_INSUFFICIENT_SIZE, 2, 0));
        }
        let mut count = 3;
        // SAFETY: three entries.
        let result = unsafe { own.fill(&mut count, infos.as_mut_ptr(), second) };
        assert_eq!((result, count), (NVML_SUCCESS, 2));
        assert_eq!(infos, [info(7, 100), info(9, 200), info(0, 0)]);
        let mut count = 2;
        // SAFETY: nothing is written through a null pointer.
        let result = unsafe { own.fill(&mut count, ptr::null_mut(), second) };
        assert_eq!(result, NVML_ERROR_INVALID_ARGUMENT);
    }

    #[test]
    fn nobody_needs_no_room() {
        let mut count = 0;
        // SAFETY: no entries.
        let result = unsafe { Own::NOBODY.fill(&mut count, ptr::null_mut(), first) };
        assert_eq!((result, count), (NVML_SUCCESS, 0));
    }

    #[test]
    fn overhead_is_shared_to_the_last_byte() {
        let mut own = own(&[(1, 10), (2, 20), (3, 30)], 11);
        // Of another instance.
        own.add(entries(&[(4, 40)]), 7);
        own.add(entries(&[]), 11);
        let bytes: Vec<_> = own.entries[..own.count].iter().map(|own| own.bytes).collect();
        assert_eq!(bytes, [15, 23, 33, 47]);
    }
}
