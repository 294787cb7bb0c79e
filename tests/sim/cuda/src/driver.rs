//! The process's driver: initialisation, fork, exit.
//!
//! After `fork` the child's driver is unusable (CUDA C++ Programming Guide, "Initialization": the
//! runtime and driver can't be used across a fork); every call there returns
//! `CUDA_ERROR_NOT_INITIALIZED`. A page that the kernel wipes at fork tells the child.

use crate::abi::{Result, export, put};
use crate::arena;
use crate::context::{Context, Primary};
use crate::memory::Memory;
use crate::pool::DevicePools;
use crate::work::{Caller, Lane};
use simgpu::engine::QUEUES;
use simgpu::{GpuConfig, Session};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{
    Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use tessera_cuda::types::{
    CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN,
};

/// Everything of one process.
pub(crate) struct Driver {
    pub session: Session,
    /// Visible GPUs, by CUDA ordinal.
    pub devices: Vec<Device>,
    pub memory: Mutex<Memory>,
}

pub(crate) struct Device {
    pub ordinal: c_int,
    /// The unit: its number in the shared state.
    pub gpu: usize,
    /// NVML index of the GPU that it is or is an instance of.
    pub physical: usize,
    /// What it is; of a MIG instance, with the instance's name, memory and multiprocessors.
    pub config: GpuConfig,
    pub instance_uuid: Option<[u8; 16]>,
    pub primary: Mutex<Primary>,
    /// This process's queue to it.
    pub lane: Lane,
    /// What belongs to it but to no context is booked on this.
    pub nobody: OnceLock<&'static Context>,
    pub pools: Mutex<DevicePools>,
    /// Its host function threads, by queue.
    pub callers: [Caller; QUEUES],
}

/// The lock of one context's calls: the driver's own is a `pthread_rwlock`, which a record takes for
/// writing (cms-sw/cmssw#37323), and the loading of code for as long as it lasts
/// (meta-pytorch/torchcomms#2334).
#[derive(Default)]
pub(crate) struct CallLock(RwLock<()>);

impl CallLock {
    /// For a call that changes the context or submits to it.
    pub(crate) fn alone(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        contexts_lock().then(|| self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// For a call that asks.
    pub(crate) fn shared(&self) -> Option<RwLockReadGuard<'_, ()>> {
        contexts_lock().then(|| self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether contexts have that lock, and wait for their work where it is held for as long as that.
pub(crate) fn contexts_lock() -> bool {
    driver().is_ok_and(|d| d.session.config().driver.context_lock)
}

const LIVE: u32 = 1;
const EXITED: u32 = 2;

static DRIVER: AtomicPtr<Driver> = AtomicPtr::new(std::ptr::null_mut());
/// Points to a word on a wipe-on-fork page: [`LIVE`] here, 0 in a forked child.
static PHASE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static INIT: Mutex<()> = Mutex::new(());

#[inline]
pub(crate) fn driver() -> Result<&'static Driver> {
    match phase().map(|word| word.load(Ordering::Relaxed)) {
        Some(LIVE) => {
            // SAFETY: set before PHASE, from a leaked box.
            Ok(unsafe { &*DRIVER.load(Ordering::Acquire) })
        }
        Some(EXITED) => Err(CUDA_ERROR_DEINITIALIZED),
        _ => Err(CUDA_ERROR_NOT_INITIALIZED),
    }
}

#[inline]
fn phase() -> Option<&'static AtomicU32> {
    // SAFETY: null, or a page that is never unmapped.
    unsafe { PHASE.load(Ordering::Acquire).as_ref() }
}

impl Driver {
    pub(crate) fn device(&'static self, ordinal: c_int) -> Result<&'static Device> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|i| self.devices.get(i))
            .ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }
}

impl Device {
    pub(crate) fn nobodys(&'static self) -> &'static Context {
        self.nobody.get_or_init(|| Context::stand_in(self, false))
    }

    /// Fails once the GPU has fallen off the bus.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        let session = &driver()?.session;
        if session.is_lost(self.physical) { Err(CUDA_ERROR_UNKNOWN) } else { Ok(()) }
    }
}

/// Locks; a poisoned lock is as good as any here, since nothing unwinds in release builds.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn initialise(flags: c_uint) -> Result<()> {
    if flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let _one = lock(&INIT);
    match phase().map(|word| word.load(Ordering::Relaxed)) {
        Some(LIVE) => return Ok(()),
        Some(EXITED) => return Err(CUDA_ERROR_DEINITIALIZED),
        Some(_) => return Err(CUDA_ERROR_NOT_INITIALIZED),
        None => {}
    }
    let session = Session::open().map_err(|e| {
        eprintln!("{e}");
        CUDA_ERROR_UNKNOWN
    })?;
    let visible = crate::device::units(session.config());
    if visible.is_empty() {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    if !session.claim() {
        eprintln!("simgpu: {} processes use the simulated GPUs already", simgpu::layout::MAX_SLOTS);
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let page = wipe_on_fork_page().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let devices = (0..)
        .zip(visible)
        .map(|(ordinal, gpu)| Device {
            ordinal,
            gpu,
            physical: session.config().units[gpu].gpu,
            config: crate::device::described(session.config(), gpu),
            instance_uuid: session.config().instance(gpu).map(|mig| mig.uuid),
            primary: Mutex::default(),
            lane: Lane::default(),
            nobody: OnceLock::new(),
            pools: Mutex::default(),
            callers: Default::default(),
        })
        .collect();
    let memory = Mutex::new(Memory::new(session.config()));
    let driver = Box::new(Driver { session, devices, memory });
    DRIVER.store(Box::into_raw(driver), Ordering::Release);
    page.store(LIVE, Ordering::Release);
    PHASE.store(std::ptr::from_ref(page).cast_mut(), Ordering::Release);
    Ok(())
}

fn wipe_on_fork_page() -> Option<&'static AtomicU32> {
    const PAGE: usize = 4096;
    // SAFETY: a fresh mapping at no fixed address; madvise on exactly it; never unmapped.
    unsafe {
        let at = arena::map(0, PAGE as u64, arena::READ_WRITE, libc::MAP_PRIVATE, None)?;
        let at = at as *mut libc::c_void;
        (libc::madvise(at, PAGE, libc::MADV_WIPEONFORK) == 0).then(|| &*at.cast::<AtomicU32>())
    }
}

/// At a normal exit the driver gives back what the process holds.
extern "C" fn at_exit() {
    if let Ok(driver) = driver() {
        if let Some(page) = phase() {
            page.store(EXITED, Ordering::Release);
        }
        // A thread that is submitting still would write into the next owner's queue: then the
        // kernel gives everything back when the process is gone, as after a kill.
        if driver.devices.iter().all(|d| d.lane.stop()) {
            driver.session.release();
        }
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static FINI: extern "C" fn() = at_exit;

export! { cuInit(flags: c_uint) { initialise(flags) } }
export! { cuDriverGetVersion(version: *mut c_int) { put(version, c_int::try_from(cuda_version()).unwrap_or(c_int::MAX)) } }

/// The driver's version. Before `cuInit`, where the manual allows to ask, the one that the configuration names: the
/// shared state is not touched.
pub(crate) fn cuda_version() -> u32 {
    if let Ok(driver) = driver() {
        return driver.session.config().cuda_version;
    }
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    if let known @ 1.. = KNOWN.load(Ordering::Relaxed) {
        return known;
    }
    let version = std::env::var_os("SIMGPU_CONFIG")
        .and_then(|path| std::fs::read_to_string(path).ok())
        .and_then(|text| simgpu::Config::parse(&text).ok())
        .unwrap_or_default()
        .cuda_version;
    KNOWN.store(version, Ordering::Relaxed);
    version
}
