//! Contexts: CUDA Driver API, "Context Management" and "Primary Context Management".

use crate::abi::{Header, Result, enliven, exports, get, handle, kill, object, put_if, resolve};
use crate::driver::{CallLock, Device, driver, lock};
use crate::pool;
use crate::stream::{HIGHEST_PRIORITY, Stream};
use crate::work::{Tails, each};
use simgpu::memory::Use;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY, CUcontext, CUctxCreateParams, CUdevice, CUexecAffinityParam,
    CUresult,
};

const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = 709;
const CUDA_ERROR_STREAM_DETACHED: CUresult = 917;

const CUDA_ERROR_UNSUPPORTED_LIMIT: CUresult = 215;
/// Scheduling (3 bits), map host, resize local memory, core dumps, sync memops.
const ALL_FLAGS: u32 = 0xff;

#[repr(C)]
pub(crate) struct Context {
    header: Header,
    pub device: &'static Device,
    pub tails: Tails,
    alive: AtomicBool,
    primary: bool,
    /// Of a green context: the primary context that it is a view of.
    base: Option<&'static Context>,
    /// Multiprocessors that its kernels run on.
    sms: u32,
    green: AtomicUsize,
    legacy: OnceLock<&'static Stream>,
    limits: [AtomicU64; 8],
    /// The largest frame that a kernel had which was launched, in bytes of each thread.
    frame: AtomicU64,
    /// What its limits have taken of device memory beyond the defaults.
    local: Mutex<Local>,
    /// Buffers of raised limits are taken when a kernel is launched.
    is_owed: AtomicBool,
    /// What its calls take, and those of its green contexts.
    pub calls: CallLock,
}

/// Device memory that a context's limits have taken beyond the defaults.
#[derive(Clone, Copy, Default)]
struct Local {
    /// The stacks of all threads that can be resident, and the device runtime's.
    stacks: u64,
    /// The printf buffer and the heap.
    buffers: u64,
}

object!(Context, 0x4354_5854, CUDA_ERROR_INVALID_CONTEXT);

const STACK: usize = 0;
const PRINTF: usize = 1;
const HEAP: usize = 2;
const SYNC_DEPTH: usize = 3;
const PENDING: usize = 4;
/// "each parent generation at which cudaDeviceSynchronize() is callable may require up to 860MB of
/// device memory, depending on the device configuration" (CUDA Programming Guide, dynamic
/// parallelism), of 80 multiprocessors with 2048 threads.
const DEPTH_BYTES_PER_THREAD: u64 = 5632;
/// 4 KiB of parameters, and as much again.
const PENDING_BYTES: u64 = 8192;
/// From here on "this limit" (the depth) is unsupported.
const NO_SYNC_DEPTH: u32 = 9;

/// What each limit is by default; the context's overhead covers it.
const DEFAULT_LIMITS: [u64; 8] = [1024, 6_291_456, 8_388_608, 2, 2048, 128, 0, 0];

#[derive(Default)]
pub(crate) struct Primary {
    retained: u32,
    context: Option<&'static Context>,
}

impl Primary {
    /// The primary context, while it is active.
    pub(crate) fn context(&self) -> Option<&'static Context> {
        self.context
    }
}

thread_local! {
    /// The top of this thread's context stack.
    static TOP: Cell<Option<&'static Context>> = const { Cell::new(None) };
    /// What lies below it.
    static BELOW: RefCell<Vec<Option<&'static Context>>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    fn create(device: &'static Device, primary: bool) -> Result<&'static Context> {
        let driver = driver()?;
        device.check()?;
        device.lane.open(driver, device.gpu)?;
        let overhead = driver.session.config().context_bytes(&device.config);
        if !pool::charge(driver, device.gpu, overhead) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let context = Context::stand_in(device, primary);
        let _ = context.legacy.set(Stream::create_legacy(context));
        Ok(enliven(context))
    }

    /// A context without a handle: what belongs to a device, but to no context, is booked on one.
    pub(crate) fn stand_in(device: &'static Device, primary: bool) -> &'static Context {
        // Stack size, printf FIFO, malloc heap, sync depth, pending launches, L2 granularity,
        // persisting L2: the defaults of a real H100.
        Context::make(device, primary, None)
    }

    pub(crate) fn view(base: &'static Context, sms: u32) -> &'static Context {
        enliven(Context::make(base.device, false, Some((base, sms))))
    }

    fn make(
        device: &'static Device,
        primary: bool,
        green: Option<(&'static Context, u32)>,
    ) -> &'static Context {
        let limits = DEFAULT_LIMITS.map(AtomicU64::new);
        Box::leak(Box::new(Context {
            header: Header::new(),
            device,
            tails: Tails::default(),
            alive: AtomicBool::new(true),
            primary,
            base: green.map(|(base, _)| base),
            sms: green.map_or(device.config.sm_count, |(_, sms)| sms),
            green: AtomicUsize::new(0),
            legacy: OnceLock::new(),
            limits,
            frame: AtomicU64::new(0),
            local: Mutex::default(),
            is_owed: AtomicBool::new(false),
            calls: CallLock::default(),
        }))
    }

    pub(crate) fn owner(&'static self) -> &'static Context {
        self.base.unwrap_or(self)
    }

    pub(crate) fn is_within(&self, context: &Context) -> bool {
        std::ptr::eq(self, context) || self.base.is_some_and(|base| std::ptr::eq(base, context))
    }

    pub(crate) fn sm_count(&self) -> u32 {
        self.sms
    }

    /// The handle of the green context that it is of; null: of none.
    pub(crate) fn green(&self) -> *mut std::ffi::c_void {
        self.green.load(Ordering::Relaxed) as *mut std::ffi::c_void
    }

    pub(crate) fn set_green(&self, green: *mut std::ffi::c_void) {
        self.green.store(green as usize, Ordering::Relaxed);
    }

    /// Its green context is destroyed: its streams are detached.
    pub(crate) fn end_view(&'static self) {
        self.alive.store(false, Ordering::Release);
        if top().is_some_and(|t| std::ptr::eq(t, self)) {
            pop();
        }
        kill(self);
    }

    /// Notes that it has operation `seq` in a queue, in a blocking stream or another.
    pub(crate) fn note(&self, queue: usize, seq: u64, blocking: bool) {
        for context in [Some(self), self.base].into_iter().flatten() {
            context.tails.all[queue].fetch_max(seq + 1, Ordering::Relaxed);
            if blocking {
                context.tails.blocking[queue].fetch_max(seq + 1, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn note_legacy(&self, seq: u64) {
        for context in [Some(self), self.base].into_iter().flatten() {
            context.tails.legacy.fetch_max(seq + 1, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn legacy(&'static self) -> &'static Stream {
        self.legacy.get_or_init(|| Stream::create_legacy(self))
    }

    #[inline]
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.alive.load(Ordering::Relaxed) {
            Ok(())
        } else if self.base.is_some() {
            Err(CUDA_ERROR_STREAM_DETACHED)
        } else {
            Err(CUDA_ERROR_CONTEXT_IS_DESTROYED)
        }
    }

    /// Takes what a kernel with `frame` bytes of local memory for each thread needs before it runs:
    /// "The driver automatically increases the per-thread stack size for each kernel launch as needed.
    /// This size isn't reset back to the original value after each launch" (`cuCtxSetLimit`).
    #[inline]
    pub(crate) fn take_local(&self, frame: u64) -> Result<()> {
        if let Some(base) = self.base {
            return base.take_local(frame);
        }
        if frame > self.frame.load(Ordering::Relaxed) || self.is_owed.load(Ordering::Relaxed) {
            self.grow_local(frame)
        } else {
            Ok(())
        }
    }

    #[cold]
    fn grow_local(&self, frame: u64) -> Result<()> {
        let mut local = lock(&self.local);
        let frame = frame.max(self.frame.load(Ordering::Relaxed));
        self.move_to(&mut local.stacks, self.stacks(&self.now(), frame))?;
        self.frame.store(frame, Ordering::Relaxed);
        let buffers = self.buffers().max(local.buffers);
        self.move_to(&mut local.buffers, buffers)?;
        self.is_owed.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Takes or gives back device memory until `taken` is what is `needed`.
    fn move_to(&self, taken: &mut u64, needed: u64) -> Result<()> {
        let driver = driver()?;
        let grain = driver.session.config().memory.granularity_bytes;
        let needed = needed.checked_next_multiple_of(grain).unwrap_or(u64::MAX);
        if needed > *taken {
            if !pool::charge(driver, self.device.gpu, needed - *taken) {
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
        } else {
            driver.session.uncharge(self.device.gpu, Use::Own, *taken - needed);
        }
        *taken = needed;
        Ok(())
    }

    fn now(&self) -> [u64; 8] {
        std::array::from_fn(|at| self.limits[at].load(Ordering::Relaxed))
    }

    /// What is taken at once, beyond the defaults.
    fn stacks(&self, limits: &[u64; 8], frame: u64) -> u64 {
        let config = &self.device.config;
        let threads = u64::from(config.threads_per_sm()) * u64::from(config.sm_count);
        let beyond = |value: u64, at: usize| value.saturating_sub(DEFAULT_LIMITS[at]);
        let each = beyond(limits[STACK].max(frame), STACK)
            .saturating_add(beyond(limits[SYNC_DEPTH], SYNC_DEPTH) * DEPTH_BYTES_PER_THREAD);
        let pending = beyond(limits[PENDING], PENDING).saturating_mul(PENDING_BYTES);
        each.saturating_mul(threads).saturating_add(pending)
    }

    fn buffers(&self) -> u64 {
        let limits = self.now();
        let beyond = |at: usize| limits[at].saturating_sub(DEFAULT_LIMITS[at]);
        beyond(PRINTF).saturating_add(beyond(HEAP))
    }

    /// "Setting this value will take effect immediately, and if necessary, the device will block until
    /// all preceding requested tasks are complete" (the stack); "If these reservations of device memory
    /// fail, cuCtxSetLimit() will return CUDA_ERROR_OUT_OF_MEMORY, and the limit can be reset to a lower
    /// value" (the device runtime's). When the printf buffer and the heap are taken is not said; here it
    /// is the next launch.
    fn set_limit(&'static self, which: c_int, value: u64) -> Result<()> {
        let at = limit(self, which)?;
        let which = usize::try_from(which).map_err(|_| CUDA_ERROR_UNSUPPORTED_LIMIT)?;
        match which {
            PRINTF | HEAP => {
                at.store(value, Ordering::Relaxed);
                self.is_owed.store(true, Ordering::Relaxed);
            }
            SYNC_DEPTH if self.device.config.compute_capability.0 >= NO_SYNC_DEPTH => {
                return Err(CUDA_ERROR_UNSUPPORTED_LIMIT);
            }
            STACK | SYNC_DEPTH | PENDING => {
                if which == STACK {
                    self.synchronize()?;
                }
                let value =
                    if which == STACK { value.checked_next_multiple_of(16) } else { Some(value) };
                let mut limits = self.now();
                limits[which] = value.ok_or(CUDA_ERROR_INVALID_VALUE)?;
                let mut local = lock(&self.local);
                let needed = self.stacks(&limits, self.frame.load(Ordering::Relaxed));
                self.move_to(&mut local.stacks, needed)?;
                at.store(limits[which], Ordering::Relaxed);
            }
            _ => at.store(value, Ordering::Relaxed),
        }
        Ok(())
    }

    pub(crate) fn synchronize(&'static self) -> Result<()> {
        self.check_alive()?;
        crate::capture::permit_context(self)?;
        drop(self.owner().calls.shared());
        self.wait()
    }

    /// The same, beside captures too: the driver's own wait.
    pub(crate) fn wait(&self) -> Result<()> {
        each(&self.tails.all).try_for_each(|seq| self.device.wait(seq))?;
        self.device.check()
    }

    fn destroy(&'static self) -> Result<()> {
        let driver = driver()?;
        if !self.alive.swap(false, Ordering::AcqRel) {
            return Err(CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        // Work in flight completes first: memory is not pulled from under a running kernel.
        // A lost GPU's work is over too.
        let _ = self.wait();
        crate::ipc::close_all_of(driver, self);
        crate::memory::free_all_of(driver, self);
        crate::array::free_all_of(driver, self);
        if self.primary {
            crate::graph::memory::release_all(driver, self.device);
        }
        crate::module::unload_all_of(driver, self);
        let overhead = driver.session.config().context_bytes(&self.device.config);
        driver.session.uncharge(self.device.gpu, Use::Own, overhead);
        let local = std::mem::take(&mut *lock(&self.local));
        driver.session.uncharge(self.device.gpu, Use::Own, local.stacks + local.buffers);
        self.legacy().destroy();
        kill(self);
        Ok(())
    }
}

#[inline]
pub(crate) fn current() -> Result<&'static Context> {
    driver()?;
    match TOP.try_with(Cell::get) {
        Ok(Some(context)) => context.check_alive().map(|()| context),
        _ => Err(CUDA_ERROR_INVALID_CONTEXT),
    }
}

fn top() -> Option<&'static Context> {
    TOP.try_with(Cell::get).ok().flatten()
}

fn push(context: &'static Context) {
    let _ = BELOW.try_with(|below| below.borrow_mut().push(top()));
    let _ = TOP.try_with(|t| t.set(Some(context)));
}

fn pop() -> Option<&'static Context> {
    let popped = top()?;
    let below = BELOW.try_with(|b| b.borrow_mut().pop()).ok().flatten().flatten();
    let _ = TOP.try_with(|t| t.set(below));
    Some(popped)
}

fn create(flags: c_uint, dev: CUdevice) -> Result<CUcontext> {
    let device = driver()?.device(dev)?;
    if flags & !ALL_FLAGS != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let context = Context::create(device, false)?;
    push(context);
    Ok(handle(context))
}

pub(crate) fn retain_primary(device: &'static Device) -> Result<&'static Context> {
    let mut primary = lock(&device.primary);
    let context = match primary.context {
        Some(context) => context,
        None => {
            let context = Context::create(device, true)?;
            primary.context = Some(context);
            context
        }
    };
    primary.retained += 1;
    Ok(context)
}

/// Releases it once; it may have been reset meanwhile.
pub(crate) fn release_primary(device: &'static Device) -> Result<()> {
    if lock(&device.primary).retained == 0 {
        return Ok(());
    }
    release(device.ordinal, false)
}

fn release(dev: CUdevice, all: bool) -> Result<()> {
    let device = driver()?.device(dev)?;
    let mut primary = lock(&device.primary);
    if all {
        primary.retained = 0;
    } else {
        // "CUDA_ERROR_INVALID_CONTEXT" for a release without a retain.
        primary.retained = primary.retained.checked_sub(1).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    }
    if primary.retained == 0
        && let Some(context) = primary.context.take()
    {
        context.destroy()?;
    }
    Ok(())
}

fn synchronize(context: &'static Context) -> Result<()> {
    context.synchronize()?;
    pool::synchronized();
    Ok(())
}

/// Where `CU_LIMIT_*` is kept.
fn limit(context: &Context, which: c_int) -> Result<&AtomicU64> {
    usize::try_from(which)
        .ok()
        .filter(|&i| i < 7)
        .and_then(|i| context.limits.get(i))
        .ok_or(CUDA_ERROR_UNSUPPORTED_LIMIT)
}

exports! {
    fn cuDevicePrimaryCtxRetain(dev: CUdevice) -> CUcontext {
        let device = driver()?.device(dev)?;
        Ok(handle(retain_primary(device)?))
    }

    fn cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2(dev: CUdevice) { release(dev, false) }
    fn cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2(dev: CUdevice) { release(dev, true) }

    fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int) {
        let device = driver()?.device(dev)?;
        let primary = lock(&device.primary);
        put_if(flags, 0);
        put_if(active, c_int::from(primary.context.is_some()));
        Ok(())
    }

    fn cuCtxCreate, cuCtxCreate_v2(flags: c_uint, dev: CUdevice) -> CUcontext { create(flags, dev) }

    // Execution affinity needs MPS, which is not simulated.
    fn cuCtxCreate_v3(_params: *mut CUexecAffinityParam, count: c_int, flags: c_uint, dev: CUdevice) -> CUcontext {
        if count != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        create(flags, dev)
    }

    fn cuCtxCreate_v4(params: *mut CUctxCreateParams, flags: c_uint, dev: CUdevice) -> CUcontext {
        /// `CUctxCreateParams`: affinity parameters, their number, CIG parameters.
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Params { affinity: usize, count: c_int, cig: usize }
        if !params.is_null() {
            let p: Params = get(params.cast())?;
            if p.affinity != 0 || p.count != 0 || p.cig != 0 {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
        }
        create(flags, dev)
    }

    fn cuCtxDestroy, cuCtxDestroy_v2(ctx: CUcontext) {
        let context: &'static Context = resolve(ctx)?;
        if context.primary || context.base.is_some() {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        // "If ctx is current to the calling thread then ctx will also be popped."
        if top().is_some_and(|t| std::ptr::eq(t, context)) {
            pop();
        }
        context.destroy()
    }

    fn cuCtxPushCurrent, cuCtxPushCurrent_v2(ctx: CUcontext) {
        push(resolve(ctx)?);
        Ok(())
    }
    fn cuCtxPopCurrent, cuCtxPopCurrent_v2(out: *mut CUcontext) {
        put_if(out, handle(pop().ok_or(CUDA_ERROR_INVALID_CONTEXT)?));
        Ok(())
    }

    fn cuCtxSetCurrent(ctx: CUcontext) {
        if ctx.is_null() {
            pop();
            return Ok(());
        }
        let context: &'static Context = resolve(ctx)?;
        let _ = TOP.try_with(|t| t.set(Some(context)));
        Ok(())
    }

    fn cuCtxGetCurrent() -> CUcontext {
        Ok(top().map_or(std::ptr::null_mut(), handle))
    }

    fn cuCtxGetDevice() -> CUdevice { Ok(current()?.device.ordinal) }

    fn cuCtxSynchronize() { synchronize(current()?) }
    fn cuCtxSynchronize_v2(ctx: CUcontext) {
        synchronize(if ctx.is_null() { current()? } else { resolve(ctx)? })
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        current()?;
        put_if(least, 0);
        put_if(greatest, HIGHEST_PRIORITY);
        Ok(())
    }

    fn cuCtxGetLimit(which: c_int) -> usize {
        let context = current()?.owner();
        let mut now = limit(context, which)?.load(Ordering::Relaxed);
        if usize::try_from(which) == Ok(STACK) {
            now = now.max(context.frame.load(Ordering::Relaxed));
        }
        Ok(usize::try_from(now).unwrap_or(usize::MAX))
    }
    fn cuCtxSetLimit(which: c_int, value: usize) {
        current()?.owner().set_limit(which, value as u64)
    }
}
