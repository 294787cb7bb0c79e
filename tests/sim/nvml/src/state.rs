//! Initialisation, and the device handles; "System Queries", "Error reporting".

use crate::abi::{Result, exports, put, put_text};
use simgpu::account::ProcessOnGpu;
use simgpu::config::{MAX_GPUS, MAX_UNITS, MigConfig};
use simgpu::{GpuConfig, Session, clock};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tessera_cuda::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_UNINITIALIZED,
    NVML_NO_INSTANCE, NVML_SUCCESS, nvmlDevice_t, nvmlReturn_t,
};

const NVML_ERROR_DRIVER_NOT_LOADED: i32 = 9;
const NVML_ERROR_GPU_IS_LOST: i32 = 15;
const NVML_ERROR_UNKNOWN: i32 = 999;

/// Attached once, at the first initialisation, and kept: see [`simgpu::session`].
static SESSION: OnceLock<Session> = OnceLock::new();
static ATTACHING: Mutex<()> = Mutex::new(());
static INITIALISED: AtomicU32 = AtomicU32::new(0);
/// [`Session::driver_epoch`] at the first of the initialisations that count.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// What device handles point into: the GPUs, then the units, of which instances have handles.
static HANDLES: [u64; MAX_GPUS + MAX_UNITS] = [0; MAX_GPUS + MAX_UNITS];

thread_local! {
    /// The function that is being called; one may call another.
    static CALLED: Cell<&'static str> = const { Cell::new("") };
}

/// A call of an exported function, until it returns; see [`Session::failing`].
pub(crate) struct Call(&'static str);

impl Call {
    pub(crate) fn begin(function: &'static str) -> Self {
        Call(CALLED.replace(function))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLED.set(self.0);
    }
}

/// Whether the function that is being called works for a GPU, or one of its instances.
pub(crate) fn works(session: &Session, gpu: usize, instance: Option<u32>) -> Result<()> {
    session.failing(gpu, instance, CALLED.get()).map_or(Ok(()), Err)
}

/// A GPU, or a MIG instance.
pub(crate) struct Device {
    pub session: &'static Session,
    /// NVML index of the GPU, or of the one that the instance is of.
    pub index: usize,
    pub config: &'static GpuConfig,
    /// Its units; an instance is one.
    pub units: Range<usize>,
    pub instance: Option<&'static MigConfig>,
}

pub(crate) struct Listed {
    pub process: ProcessOnGpu,
    /// The ids of the instance it runs on, or [`NVML_NO_INSTANCE`].
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

impl Device {
    /// Total, usable and used bytes. "In MIG mode, if device handle is provided, the API returns
    /// aggregate information" (`nvmlDeviceGetMemoryInfo`).
    pub(crate) fn memory(&self) -> (u64, u64, u64) {
        let config = self.session.config();
        // One unit of each GPU instance, whose memory the others share.
        let first =
            |unit: &usize| self.instance.is_some() || config.units[*unit].memory.start == *unit;
        let used = self.units.clone().filter(first).map(|unit| self.session.used(unit)).sum();
        if self.config.mig.is_some() && self.instance.is_none() {
            let total = self.config.memory_bytes;
            return (total, total.saturating_sub(config.reserved_bytes(self.config)), used);
        }
        let (total, usable) = config.memory_of(self.units.start);
        (total, usable, used)
    }

    /// Takes what a question for the GPU's memory takes.
    pub(crate) fn ask_for_memory(&self) {
        self.session.await_pinning();
        clock::burn(self.session.config().nvml.memory_info_ns);
    }

    /// Takes what a list of processes takes, of whichever kind: RM walks all clients for it, under its lock.
    pub(crate) fn walk_clients(&self) {
        let costs = self.session.config().nvml;
        let handles = self.session.handles().saturating_mul(costs.handle_ns);
        self.session.occupy(costs.process_list_ns.saturating_add(handles));
    }

    /// Processes that the caller can see, of all instances where the handle is the GPU's.
    pub(crate) fn processes(&self) -> Vec<Listed> {
        let listed = |unit: usize| {
            let mig = self.session.config().instance(unit);
            let id = |id: fn(&MigConfig) -> u32| mig.map_or(NVML_NO_INSTANCE, id);
            let (gi, ci) = (id(|m| m.gpu_instance), id(|m| m.compute_instance));
            let processes = self.session.processes(unit).into_iter().filter(|p| p.pid > 0);
            processes.map(move |process| Listed { process, gpu_instance: gi, compute_instance: ci })
        };
        self.walk_clients();
        self.units.clone().flat_map(listed).collect()
    }

    /// Percent of the last second in which any of it was busy.
    pub(crate) fn utilisation_percent(&self) -> u32 {
        self.units.clone().map(|unit| self.session.utilisation_percent(unit)).max().unwrap_or(0)
    }
}

pub(crate) fn session() -> Result<&'static Session> {
    if INITIALISED.load(Ordering::Acquire) == 0 {
        return Err(NVML_ERROR_UNINITIALIZED);
    }
    let session = SESSION.get().ok_or(NVML_ERROR_UNINITIALIZED)?;
    // The driver's files that this initialisation opened lead nowhere any more.
    if session.driver_epoch() == EPOCH.load(Ordering::Acquire) {
        Ok(session)
    } else {
        Err(NVML_ERROR_UNKNOWN)
    }
}

/// What is behind a handle, even a lost GPU or an instance of one.
pub(crate) fn any_even_lost(handle: nvmlDevice_t) -> Result<Device> {
    let session = session()?;
    let offset = (handle as usize).wrapping_sub(HANDLES.as_ptr() as usize);
    let at = offset / size_of::<u64>();
    if !offset.is_multiple_of(size_of::<u64>()) {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    let machine = session.config();
    if at < MAX_GPUS {
        let config = machine.gpus.get(at).ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
        works(session, at, None)?;
        let units = machine.units_of(at);
        return Ok(Device { session, index: at, config, units, instance: None });
    }
    let unit = at - MAX_GPUS;
    let instance = machine.instance(unit).ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    let index = machine.units[unit].gpu;
    let number = machine.units[unit].instance.and_then(|number| u32::try_from(number).ok());
    works(session, index, number)?;
    let config = &machine.gpus[index];
    Ok(Device { session, index, config, units: unit..unit + 1, instance: Some(instance) })
}

/// The GPU behind a handle, even a lost one. What does not say that it takes MIG device handles does
/// not: "`NVML_ERROR_NOT_SUPPORTED` if the device does not support this feature".
pub(crate) fn device_even_lost(handle: nvmlDevice_t) -> Result<Device> {
    let device = any_even_lost(handle)?;
    if device.instance.is_some() { Err(NVML_ERROR_NOT_SUPPORTED) } else { Ok(device) }
}

fn answering(device: Device) -> Result<Device> {
    if device.session.is_lost(device.index) { Err(NVML_ERROR_GPU_IS_LOST) } else { Ok(device) }
}

/// The GPU behind a handle; "`NVML_ERROR_GPU_IS_LOST` if the target GPU has fallen off the bus".
pub(crate) fn device(handle: nvmlDevice_t) -> Result<Device> {
    answering(device_even_lost(handle)?)
}

pub(crate) fn device_or_instance(handle: nvmlDevice_t) -> Result<Device> {
    answering(any_even_lost(handle)?)
}

pub(crate) fn handle_of(index: usize) -> nvmlDevice_t {
    std::ptr::from_ref(&HANDLES[index]).cast_mut().cast()
}

pub(crate) fn instance_handle(unit: usize) -> nvmlDevice_t {
    handle_of(MAX_GPUS + unit)
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
    let epoch = SESSION.get().map_or(0, Session::driver_epoch);
    if !epoch.is_multiple_of(2) {
        return Err(NVML_ERROR_DRIVER_NOT_LOADED);
    }
    if INITIALISED.fetch_add(1, Ordering::AcqRel) == 0 {
        EPOCH.store(epoch, Ordering::Release);
    }
    Ok(())
}

exports! {
    fn nvmlInitWithFlags(_flags: c_uint) { initialise() }

    fn nvmlInit, nvmlInit_v2() {
        // SAFETY: nvmlInitWithFlags takes an integer.
        match unsafe { crate::abi::init_with_flags(0) } {
            NVML_SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    fn nvmlShutdown() {
        let down = |n: u32| n.checked_sub(1);
        INITIALISED
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, down)
            .map(|_| ())
            .map_err(|_| NVML_ERROR_UNINITIALIZED)
    }
}

const ERRORS: &[(nvmlReturn_t, &CStr)] = &[
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (8, c"Insufficient External Power"),
    (9, c"Driver Not Loaded"),
    (10, c"Timeout"),
    (11, c"Interrupt Request Issue"),
    (15, c"GPU is lost"),
    (16, c"GPU requires reset"),
    (19, c"In use by another client"),
    (21, c"No data"),
    (25, c"Argument version mismatch"),
];

/// The text of an error; as the real one, never null.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVML's own name")]
pub extern "C" fn nvmlErrorString(error: nvmlReturn_t) -> *const c_char {
    let found = ERRORS.binary_search_by_key(&error, |e| e.0);
    found.map_or(c"Unknown Error", |i| ERRORS[i].1).as_ptr()
}

exports! {
    fn nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) {
        put_text(text, len, &session()?.config().driver_version)
    }
    fn nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) {
        put(version, c_int::try_from(session()?.config().cuda_version).unwrap_or(c_int::MAX))
    }
}
