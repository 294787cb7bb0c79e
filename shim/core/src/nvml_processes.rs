//! NVML's lists of processes as the tenant sees them: its own, by their pids in its own pid
//! namespace, and nobody else's. They come from the usage page; the driver is asked first, for its
//! errors, and what it lists is thrown away, because it lists every tenant's processes.
//!
//! Each is shown with what it was granted and an even share of the overhead that was observed, so
//! that the list adds up to what the memory info calls used. All are compute processes.
//!
//! Utilisation by process is not the tenant's to see either: the driver samples it by pids that
//! cannot be told from the neighbours'. There are no samples, which NVML calls "not found".
#![allow(non_snake_case, reason = "hooks carry NVML's own names")]

use crate::nvml::{missing, tenant_of};
use crate::real::Real;
use crate::thread::Depth;
use core::ffi::{c_uint, c_ulonglong};
use core::ptr;
use tessera_cuda::nvml::*;
use tessera_region::layout::SLOTS;

type List<T> = Real<unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t>;

/// A tenant's processes on one GPU: pids and bytes.
struct Own {
    entries: [(u32, u64); SLOTS],
    count: usize,
}

impl Own {
    /// Those of `device`'s tenant; `None` where this is no tenant.
    fn on(device: nvmlDevice_t) -> Option<Self> {
        let (tenant, gpu) = tenant_of(device)?;
        let mut own = Self { entries: [(0, 0); SLOTS], count: 0 };
        let Some(gpu) = gpu.map(usize::from) else { return Some(own) };
        own.count = tenant.holders(gpu, &mut own.entries);
        own.share(tenant.quota().observed_overhead(gpu));
        Some(own)
    }

    /// Nobody, for lists of other kinds of processes.
    const NOBODY: Self = Self { entries: [(0, 0); SLOTS], count: 0 };

    /// Adds an even share of `overhead` to each, what does not divide to the first.
    fn share(&mut self, overhead: u64) {
        let entries = &mut self.entries[..self.count];
        let Ok(count @ 1..) = u64::try_from(entries.len()) else { return };
        for (_, bytes) in entries.iter_mut() {
            *bytes = bytes.saturating_add(overhead / count);
        }
        if let Some((_, bytes)) = entries.first_mut() {
            *bytes = bytes.saturating_add(overhead % count);
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
        entry: impl Fn(u32, u64) -> T,
    ) -> nvmlReturn_t {
        let enough = usize::try_from(*room).is_ok_and(|room| room >= self.count);
        *room = c_uint::try_from(self.count).unwrap_or(c_uint::MAX);
        if !enough {
            return NVML_ERROR_INSUFFICIENT_SIZE;
        }
        if self.count > 0 && to.is_null() {
            return NVML_ERROR_INVALID_ARGUMENT;
        }
        for (at, &(pid, bytes)) in self.entries[..self.count].iter().enumerate() {
            // SAFETY: below `room`, for which the caller's array is valid.
            unsafe { to.add(at).write(entry(pid, bytes)) };
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
    entry: impl Fn(u32, u64) -> T,
) -> nvmlReturn_t {
    let Some(real) = real.get() else { return missing() };
    let Some(_depth) = Depth::enter() else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, count, infos) };
    };
    let mut theirs = 0;
    // SAFETY: a valid count, and no array for no entries.
    let result = unsafe { real(device, &raw mut theirs, ptr::null_mut()) };
    let own = if count.is_null() || !answered(result) { None } else { Own::on(device) };
    let Some(own) = own else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, count, infos) };
    };
    let own = if compute { own } else { Own::NOBODY };
    // SAFETY: not null; the caller's array is valid for as many entries as it says.
    unsafe { own.fill(&mut *count, infos, entry) }
}

const fn first(pid: u32, bytes: u64) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid, usedGpuMemory: bytes }
}

const fn second(pid: u32, bytes: u64) -> nvmlProcessInfo_t {
    nvmlProcessInfo_t {
        pid,
        usedGpuMemory: bytes,
        gpuInstanceId: NVML_NO_INSTANCE,
        computeInstanceId: NVML_NO_INSTANCE,
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
    if depth.is_none() || asked.is_null() {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, asked) };
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
    let Some(own) = answered(result).then(|| Own::on(device)).flatten() else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, asked) };
    };
    let computing = matches!(asked_for.mode, NVML_PROCESS_MODE_COMPUTE | NVML_PROCESS_MODE_ALL);
    let own = if computing { own } else { Own::NOBODY };
    let detail = |pid, bytes| nvmlProcessDetail_v1_t {
        pid,
        usedGpuMemory: bytes,
        gpuInstanceId: NVML_NO_INSTANCE,
        computeInstanceId: NVML_NO_INSTANCE,
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
    if depth.is_some() && !count.is_null() {
        let mut theirs = 0;
        // SAFETY: a valid count; without an array it asks for the number.
        let result = unsafe { real(device, ptr::null_mut(), &raw mut theirs, since_us) };
        let known = answered(result) || result == NVML_ERROR_NOT_FOUND;
        if known && tenant_of(device).is_some() {
            // SAFETY: not null, the caller's.
            unsafe { *count = 0 };
            return NVML_ERROR_NOT_FOUND;
        }
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
    if depth.is_some() && !info.is_null() {
        // SAFETY: not null, the caller's.
        let mut theirs = unsafe { *info };
        (theirs.processSamplesCount, theirs.procUtilArray) = (0, ptr::null_mut());
        // SAFETY: a structure of its own, without room.
        let result = unsafe { real(device, &raw mut theirs) };
        let known = answered(result) || result == NVML_ERROR_NOT_FOUND;
        if known && tenant_of(device).is_some() {
            // SAFETY: not null, the caller's.
            unsafe { (*info).processSamplesCount = 0 };
            return NVML_ERROR_NOT_FOUND;
        }
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
    unsafe { list(real, device, count, pids, false, |pid, _| pid) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(entries: &[(u32, u64)]) -> Own {
        let mut own = Own { entries: [(0, 0); SLOTS], count: entries.len() };
        own.entries[..entries.len()].copy_from_slice(entries);
        own
    }

    #[test]
    fn an_array_that_is_too_small_is_told_how_much_it_takes() {
        let own = own(&[(7, 100), (9, 200)]);
        let mut infos = [second(0, 0); 3];
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
        assert_eq!(infos, [second(7, 100), second(9, 200), second(0, 0)]);
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
        let mut own = own(&[(1, 10), (2, 20), (3, 30)]);
        own.share(11);
        assert_eq!(own.entries[..3], [(1, 15), (2, 23), (3, 33)]);
        let mut nobody = Own::NOBODY;
        nobody.share(11);
        assert_eq!(nobody.count, 0);
    }
}
