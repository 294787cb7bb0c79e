//! Event sets: NVML API Reference, "Event Handling Methods". Only XIDs happen here.

use crate::abi::{Result, exports, put};
use crate::state::{device_even_lost, handle_of, session};
use std::ffi::{c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, nvmlDevice_t,
};

/// `nvmlEventTypeXidCriticalError`.
const XID: c_ulonglong = 8;
/// What can be registered without an error; XIDs are the only ones that happen.
const SUPPORTED: c_ulonglong = XID;

/// `nvmlEventData_t`.
#[repr(C)]
#[allow(missing_docs, reason = "nvml.h's structure")]
pub struct EventData {
    device: nvmlDevice_t,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}
const _: () = assert!(size_of::<EventData>() == 32);

#[derive(Default)]
struct Set {
    alive: bool,
    /// Bit by GPU.
    gpus: u64,
    /// Next XID event to look at.
    next: u64,
}

type SetHandle = *mut c_void;

/// By handle, which is the index plus one.
static SETS: Mutex<Vec<Set>> = Mutex::new(Vec::new());

fn with<T>(handle: SetHandle, act: impl FnOnce(&mut Set) -> T) -> Result<T> {
    let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
    let set = (handle as usize).checked_sub(1).and_then(|i| sets.get_mut(i));
    set.filter(|s| s.alive).map(act).ok_or(NVML_ERROR_INVALID_ARGUMENT)
}

/// The set's next event that has happened.
fn next(handle: SetHandle) -> Result<Option<EventData>> {
    let session = session()?;
    with(handle, |set| {
        let written = session.xids_written();
        while set.next < written {
            let event = session.xid(set.next);
            set.next += 1;
            if let Some(e) = event.filter(|e| set.gpus >> e.gpu & 1 == 1) {
                return Some(EventData {
                    device: handle_of(e.gpu as usize),
                    kind: XID,
                    data: c_ulonglong::from(e.code),
                    gpu_instance: e.gpu_instance.unwrap_or(c_uint::MAX),
                    compute_instance: c_uint::MAX,
                });
            }
        }
        None
    })
}

fn wait(handle: SetHandle, out: *mut EventData, timeout_ms: c_uint) -> Result<()> {
    let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    loop {
        let session = session()?;
        let seen = session.xids_written();
        if let Some(event) = next(handle)? {
            return put(out, event);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NVML_ERROR_TIMEOUT);
        }
        session.wait_for_xid(seen, left);
    }
}

exports! {
    fn nvmlEventSetCreate(out: *mut SetHandle) {
        let next = session()?.xids_written();
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Set { alive: true, gpus: 0, next };
        let index = match sets.iter().position(|s| !s.alive) {
            Some(index) => {
                sets[index] = new;
                index
            }
            None => {
                sets.push(new);
                sets.len() - 1
            }
        };
        put(out, (index + 1) as SetHandle)
    }

    fn nvmlEventSetFree(set: SetHandle) {
        session()?;
        with(set, |s| s.alive = false)
    }

    fn nvmlDeviceGetSupportedEventTypes(handle: nvmlDevice_t, out: *mut c_ulonglong) {
        device_even_lost(handle)?;
        put(out, SUPPORTED)
    }

    // "This API does not currently support per-instance event reporting using MIG device handles."
    fn nvmlDeviceRegisterEvents(handle: nvmlDevice_t, types: c_ulonglong, set: SetHandle) {
        let d = device_even_lost(handle)?;
        if types & !SUPPORTED != 0 {
            return Err(NVML_ERROR_NOT_SUPPORTED);
        }
        with(set, |s| if types & XID != 0 { s.gpus |= 1 << d.index })
    }

    fn nvmlEventSetWait_v2(set: SetHandle, out: *mut EventData, timeout_ms: c_uint) {
        wait(set, out, timeout_ms)
    }
}
