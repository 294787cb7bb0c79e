//! Initialisation, and the device handles.

use crate::abi::{Result, exports};
use crate::plt;
use simgpu::{GpuConfig, Session};
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_UNINITIALIZED, NVML_SUCCESS, nvmlDevice_t,
};

const NVML_ERROR_DRIVER_NOT_LOADED: i32 = 9;
const NVML_ERROR_GPU_IS_LOST: i32 = 15;

/// Attached once, at the first initialisation, and kept: see [`simgpu::session`].
static SESSION: OnceLock<Session> = OnceLock::new();
static ATTACHING: Mutex<()> = Mutex::new(());
static INITIALISED: AtomicU32 = AtomicU32::new(0);
/// What device handles point into.
static HANDLES: [u64; simgpu::layout::MAX_GPUS] = [0; simgpu::layout::MAX_GPUS];

/// One GPU.
pub(crate) struct Device {
    /// The shared state.
    pub session: &'static Session,
    /// NVML index.
    pub index: usize,
    /// What it is.
    pub config: &'static GpuConfig,
}

/// The shared state, between init and shutdown.
pub(crate) fn session() -> Result<&'static Session> {
    if INITIALISED.load(Ordering::Acquire) == 0 {
        return Err(NVML_ERROR_UNINITIALIZED);
    }
    SESSION.get().ok_or(NVML_ERROR_UNINITIALIZED)
}

/// The GPU behind a handle, even a lost one.
pub(crate) fn device_even_lost(handle: nvmlDevice_t) -> Result<Device> {
    let session = session()?;
    let offset = (handle as usize).wrapping_sub(HANDLES.as_ptr() as usize);
    let index = offset / size_of::<u64>();
    let gpus = &session.config().gpus;
    match gpus.get(index) {
        Some(config) if offset.is_multiple_of(size_of::<u64>()) => {
            Ok(Device { session, index, config })
        }
        _ => Err(NVML_ERROR_INVALID_ARGUMENT),
    }
}

/// The GPU behind a handle; "`NVML_ERROR_GPU_IS_LOST` if the target GPU has fallen off the bus".
pub(crate) fn device(handle: nvmlDevice_t) -> Result<Device> {
    let device = device_even_lost(handle)?;
    if device.session.is_lost(device.index) { Err(NVML_ERROR_GPU_IS_LOST) } else { Ok(device) }
}

/// The handle of a GPU.
pub(crate) fn handle_of(index: usize) -> nvmlDevice_t {
    std::ptr::from_ref(&HANDLES[index]).cast_mut().cast()
}

fn initialise() -> Result<()> {
    let _one = ATTACHING.lock().unwrap_or_else(PoisonError::into_inner);
    if SESSION.get().is_none() {
        let session = Session::open().map_err(|e| {
            eprintln!("{e}");
            NVML_ERROR_DRIVER_NOT_LOADED
        })?;
        let _ = SESSION.set(session);
    }
    INITIALISED.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

exports! {
    fn nvmlInitWithFlags(_flags: c_uint) { initialise() }

    fn nvmlInit() { through_plt() }
    fn nvmlInit_v2() { through_plt() }

    fn nvmlShutdown() {
        let down = |n: u32| n.checked_sub(1);
        INITIALISED
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, down)
            .map(|_| ())
            .map_err(|_| NVML_ERROR_UNINITIALIZED)
    }
}

fn through_plt() -> Result<()> {
    // SAFETY: nvmlInitWithFlags takes an integer.
    match unsafe { plt::init_with_flags(0) } {
        NVML_SUCCESS => Ok(()),
        code => Err(code),
    }
}
