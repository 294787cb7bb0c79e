//! What a context's limits and its kernels' frames take of device memory (CUDA Driver API,
//! `cuCtxSetLimit`).
//!
//! A context keeps a stack for every thread that its GPU can have resident: multiprocessors × threads
//! of each × bytes. Its constant pays for the default. More is taken
//!
//! - by `cuCtxSetLimit`, at once: "Setting this value will take effect immediately, and if necessary,
//!   the device will block until all preceding requested tasks are complete". The device runtime's
//!   reservations likewise. When the driver takes the heap and the printf buffer is not documented;
//!   they are charged at the call, so never too late.
//! - by the launch of a kernel with a larger frame, without any call, and for good: "The driver
//!   automatically increases the per-thread stack size for each kernel launch as needed. This size
//!   isn't reset back to the original value after each launch". A frame is an attribute of its
//!   function, so it is looked at where a function's handle comes from. The few handles with a frame beyond
//!   the default are remembered ([`Frames`]), and charged at their first launch, which is
//!   `CUDA_ERROR_OUT_OF_MEMORY` where it does not fit. Other launches cost a load. A captured launch is
//!   one; kernel nodes made by hand are charged at the instantiation or the change of an executable graph.
//!
//! The charge of a context is what its limits need now, as the driver reports them, less what they
//! needed when the first hook looked; it ends with the context. A lowered stack is given back, but not
//! below the frames; a lowered heap or buffer is not, as no document says that the driver does. Not looked at
//! are handles out of an enumeration (`cuModuleEnumerateFunctions`, `cuLibraryEnumerateKernels`), launches by
//! the device, and nodes made by hand in the body of a conditional node; observation sees what their kernels
//! take.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::contexts::Place;
use crate::gate::Stream;
use crate::launch;
use crate::memory::CHUNK;
use crate::place::{self, Pushed, context_of, current_device};
use crate::quota::{self, Asked};
use crate::real;
use crate::spin::Spin;
use crate::state::{self, Process};
use crate::thread::{Answer, Call, Depth};
use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use tessera_cuda::types::*;
use tessera_region::account::Reservation;
use tessera_region::layout::Kind;

/// Limits that take memory, which are the first: `CU_LIMIT_STACK_SIZE`, `CU_LIMIT_PRINTF_FIFO_SIZE`,
/// `CU_LIMIT_MALLOC_HEAP_SIZE`, `CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH`, `CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT`.
const LIMITS: usize = 5;

/// For each level of synchronisation and each thread that can be resident: "may require up to 860MB of
/// device memory, depending on the device configuration" (CUDA Programming Guide, dynamic
/// parallelism), on 80 multiprocessors with 2048 threads.
const DEPTH_BYTES: u64 = 5632;
/// For each launch of the device runtime: 4 KiB of parameters, and as much again. Not documented.
const PENDING_BYTES: u64 = 8192;

/// What a context's limits take, and what of it is charged. All zero: not looked at yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// Whether a hook has looked.
    known: bool,
    /// The limits then, which the context's constant pays for.
    base: [u64; LIMITS],
    /// The largest frame that is charged.
    pub(crate) frame: u32,
    /// The largest buffers: printf's and the heap.
    buffers: [u64; 2],
    /// Bytes charged beyond `base`.
    pub(crate) charged: u64,
}

impl Local {
    /// What the context is due to be charged with these limits, and functions of such frames, where
    /// `threads` are resident. What is lowered below the base pays for nothing else, and each has pages of its own.
    fn due(&self, limits: &[u64; LIMITS], frame: u32, threads: u64) -> u64 {
        let mut limits = *limits;
        let stack = u64::from(frame.max(self.frame));
        let floors = [stack, self.buffers[0], self.buffers[1], 0, 0];
        for ((limit, base), floor) in limits.iter_mut().zip(self.base).zip(floors) {
            *limit = (*limit).max(base).max(floor);
        }
        let beyond = needed(&limits, threads).into_iter().zip(needed(&self.base, threads));
        let pages = beyond.map(|(needed, base)| (needed - base).checked_next_multiple_of(CHUNK));
        pages.fold(0, |sum, bytes| sum.saturating_add(bytes.unwrap_or(u64::MAX)))
    }
}

const REMEMBERED: usize = 64;
/// In [`Remembered::frame`]: a `CUkernel`, which every context may launch. A `CUfunction` is one context's.
const OF_EVERY: u32 = 1 << 31;

/// Remembered handles that some context is not charged for, for launches to look at before anything else. A
/// forked child inherits it, and then finds nothing in its own table.
static UNPAID: AtomicUsize = AtomicUsize::new(0);

/// Whether any remembered handle is to be charged when it is launched.
#[inline(always)]
pub(crate) fn any_unpaid() -> bool {
    UNPAID.load(Ordering::Relaxed) != 0
}

/// The handles of kernels with large frames. Launches read it without a lock; the lock of the contexts, by
/// whose charges it is judged, serialises changes.
#[derive(Debug)]
pub(crate) struct Frames {
    cells: [Remembered; REMEMBERED],
    /// Held while one is charged: of two threads only the first needs the bytes.
    charging: Spin<()>,
}

/// `handle` 0 is an unused cell.
#[derive(Debug)]
struct Remembered {
    handle: AtomicUsize,
    /// Bytes, and [`OF_EVERY`].
    frame: AtomicU32,
}

impl Remembered {
    const fn none() -> Self {
        Self { handle: AtomicUsize::new(0), frame: AtomicU32::new(0) }
    }

    fn frame(&self) -> u32 {
        self.frame.load(Ordering::Relaxed) & !OF_EVERY
    }

    fn is_of_every(&self) -> bool {
        self.frame.load(Ordering::Relaxed) & OF_EVERY != 0
    }
}

impl Frames {
    pub(crate) const fn new() -> Self {
        Self { cells: [const { Remembered::none() }; REMEMBERED], charging: Spin::new(()) }
    }

    fn find(&self, handle: usize) -> Option<&Remembered> {
        // Acquire: pairs with the Release in `remember`, so that the frame is this handle's.
        self.cells.iter().find(|cell| cell.handle.load(Ordering::Acquire) == handle && handle != 0)
    }

    /// See [`Contexts::remember_frame`](crate::contexts::Contexts::remember_frame); every context is charged
    /// `lowest`.
    pub(crate) fn remember(
        &self,
        handle: usize,
        frame: u32,
        is_of_every: bool,
        lowest: u32,
    ) -> bool {
        let known = self.find(handle);
        let is_of_every = is_of_every || known.is_some_and(Remembered::is_of_every);
        if !is_of_every && frame <= lowest {
            return true;
        }
        let unused = || self.cells.iter().find(|cell| cell.handle.load(Ordering::Relaxed) == 0);
        let Some(cell) = known.or_else(unused) else { return false };
        let mark = if is_of_every { OF_EVERY } else { 0 };
        cell.frame.store(frame | mark, Ordering::Relaxed);
        cell.handle.store(handle, Ordering::Release);
        self.recount(lowest);
        true
    }

    /// See [`Contexts::forget_frame`](crate::contexts::Contexts::forget_frame).
    pub(crate) fn forget(&self, handle: usize, if_of_every: bool, lowest: u32) {
        if let Some(cell) = self.find(handle).filter(|cell| if_of_every || !cell.is_of_every()) {
            cell.handle.store(0, Ordering::Relaxed);
        }
        self.recount(lowest);
    }

    /// What contexts are charged has changed.
    pub(crate) fn recount(&self, lowest: u32) {
        let used = self.cells.iter().filter(|cell| cell.handle.load(Ordering::Relaxed) != 0);
        UNPAID.store(used.filter(|cell| cell.frame() > lowest).count(), Ordering::Relaxed);
    }
}

/// What limits need on a GPU with so many `threads` resident.
fn needed(limits: &[u64; LIMITS], threads: u64) -> [u64; LIMITS] {
    let [stack, printf, heap, depth, pending] = *limits;
    let depth = depth.saturating_mul(DEPTH_BYTES);
    let [stack, depth] = [stack, depth].map(|bytes| bytes.saturating_mul(threads));
    [stack, printf, heap, depth, pending.saturating_mul(PENDING_BYTES)]
}

struct Current {
    process: &'static Process,
    handle: usize,
    gpu: u8,
    threads: u64,
}

impl Current {
    /// `None`: not a tenant, no context, or a driver that does not tell.
    fn find() -> Result<Option<Self>, CUresult> {
        let Some(process) = state::standing().tenant()? else { return Ok(None) };
        let place = place::current(process).or_refuse(process, "a new context")?;
        let Some(Place { gpu: Some(gpu), .. }) = place else { return Ok(None) };
        let threads = resident_threads(process, gpu);
        let context = place::current_context().filter(|_| threads != 0);
        Ok(context.map(|context| Self { process, handle: context.addr(), gpu, threads }))
    }

    /// Moves the charge to what the limits need now, with at least `frame` for the stack. What is
    /// lacking is paid from `reserved`, and is owed beyond that.
    fn settle(&self, frame: u32, reserved: Option<Reservation<'static>>) {
        let limits = limits();
        let (more, less) = self.process.contexts.local(self.handle, |local| {
            let due = local.due(&limits, frame, self.threads);
            local.frame = local.frame.max(frame);
            let [_, printf, heap, ..] = limits;
            local.buffers = [local.buffers[0].max(printf), local.buffers[1].max(heap)];
            let before = core::mem::replace(&mut local.charged, due);
            (due.saturating_sub(before), before.saturating_sub(due))
        });
        let paid = reserved.as_ref().map_or(0, |reserved| more.min(reserved.bytes()));
        if let Some(reserved) = reserved.filter(|_| paid > 0) {
            // At most what was reserved, which never fails.
            let _fits = reserved.commit(paid, Kind::Overhead);
        }
        if more > paid {
            self.process.account.owe(usize::from(self.gpu), more - paid, Kind::Overhead);
        }
        if less > 0 {
            quota::release(self.process, self.gpu, less, Kind::Overhead);
        }
    }

    fn charge(&self, name: &str, frame: u32) -> Answer {
        if self.process.contexts.local(self.handle, |local| frame > local.frame) {
            let reserved = self.reserve(name, frame, |_| {})?;
            // Also where a raised limit pays for it: that may be lowered.
            self.settle(frame, reserved);
        }
        Ok(())
    }

    /// Sets aside what the context needs beyond its charge, with `change` made to its limits.
    fn reserve(
        &self,
        name: &str,
        frame: u32,
        change: impl FnOnce(&mut [u64; LIMITS]),
    ) -> Result<Option<Reservation<'static>>, CUresult> {
        let before = limits();
        let mut wanted = before;
        change(&mut wanted);
        let more = self.process.contexts.local(self.handle, |local| {
            if !local.known {
                (local.known, local.base) = (true, before);
            }
            local.due(&wanted, frame, self.threads).saturating_sub(local.charged)
        });
        match more {
            0 => Ok(None),
            _ => {
                quota::reserve_for(self.process, self.gpu, more, name, Asked::Bytes(more)).map(Some)
            }
        }
    }
}

/// Threads that the page's GPU `gpu` can have resident; 0 where the driver does not tell.
fn resident_threads(process: &Process, gpu: u8) -> u64 {
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`
    const MULTIPROCESSORS: c_int = 16;
    /// `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`
    const THREADS_OF_EACH: c_int = 39;
    let Some(device) = process.gpus.device_of(gpu) else { return 0 };
    let attribute = |which: c_int| {
        // SAFETY: a valid place for the value; any device may be asked about.
        let value =
            real::cuDeviceGetAttribute.ask(0, |ask, value| unsafe { ask(value, which, device) });
        value.map_or(0, |value| u64::try_from(value).unwrap_or(0))
    };
    attribute(MULTIPROCESSORS) * attribute(THREADS_OF_EACH)
}

/// The current context's limits; 0 where there is no such limit.
fn limits() -> [u64; LIMITS] {
    let mut limits = [0; LIMITS];
    for (which, limit) in (0..).zip(&mut limits) {
        // SAFETY: a valid place for the value.
        let value = real::cuCtxGetLimit.ask(0, |ask, value| unsafe { ask(value, which) });
        *limit = value.unwrap_or(0) as u64;
    }
    limits
}

pub unsafe fn cuCtxSetLimit(call: Call<'_>, limit: CUlimit, value: usize) -> Answer {
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(at) = usize::try_from(limit).ok().filter(|at| *at < LIMITS) else { return call() };
    let Some(current) = Current::find()? else { return call() };
    let reserved = current.reserve("cuCtxSetLimit", 0, |limits| limits[at] = value as u64)?;
    let bytes = reserved.as_ref().map_or(0, |reserved| reserved.bytes());
    let answer = quota::insist(current.process, current.gpu, bytes, call);
    current.settle(0, reserved);
    answer
}

/// `handle`, whose frame is `local_bytes`, was handed out; `name` is the call that did.
fn handed_out(name: &str, handle: usize, local_bytes: c_int, is_of_every: bool) -> Answer {
    /// What every context's constant pays for.
    const DEFAULT: u32 = 1024;
    launch::handed_out(handle, !is_of_every);
    let frame = u32::try_from(local_bytes).unwrap_or(0);
    if frame <= DEFAULT {
        if let Some(process) = state::armed()
            && process.contexts.frames.find(handle).is_some()
        {
            process.contexts.forget_frame(handle, true); // a handle made again
        }
        return Ok(());
    }
    // The context is noted, so that what it is charged tells what is to be remembered.
    let Some(current) = Current::find()? else { return Ok(()) };
    match current.process.contexts.remember_frame(handle, frame, is_of_every) {
        true => Ok(()),
        false => current.charge(name, frame),
    }
}

/// `function`, which may be a `CUkernel`, is about to be launched into `stream`: its frame is charged.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`: it does not fit, and the launch must not be.
#[cold]
pub(crate) fn launching(function: CUfunction, stream: Stream) -> Answer {
    let Some(process) = state::armed() else { return Ok(()) };
    if process.contexts.frames.find(function.addr()).is_none() {
        return Ok(());
    }
    let Some(_depth) = Depth::enter() else { return Ok(()) };
    let context = context_of(stream).unwrap_or(ptr::null_mut());
    launching_in(process, function.addr(), context)
}

/// As [`launching`], in a context; null is the current one.
fn launching_in(process: &'static Process, handle: usize, context: CUcontext) -> Answer {
    let frames = &process.contexts.frames;
    let _one_at_a_time = frames.charging.lock();
    let Some(frame) = frames.find(handle).map(Remembered::frame) else { return Ok(()) };
    let _current = Pushed::new(context);
    let Some(current) = Current::find()? else { return Ok(()) };
    current.charge("a kernel with much local memory", frame)?;
    process.contexts.forget_frame(handle, false);
    Ok(())
}

/// As [`launching`], for a node of a graph with these parameters; inside a hook.
pub(crate) fn node(params: &CUDA_KERNEL_NODE_PARAMS) -> Answer {
    let Some(process) = state::armed() else { return Ok(()) };
    // "This field is ignored if func is set" (`CUDA_KERNEL_NODE_PARAMS`, kern and ctx).
    match params.func.is_null() {
        true => launching_in(process, params.kern.addr(), params.ctx),
        false => launching_in(process, params.func.addr(), ptr::null_mut()),
    }
}

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`: "The size in bytes of local memory used by each thread of this
/// function", which can be asked of functions that are not loaded yet.
const LOCAL_SIZE: c_int = 3;

/// What `call` has written to `handle`, in a process that may be a tenant.
unsafe fn handed_by(
    call: Call<'_>,
    handle: *mut *mut c_void,
) -> Result<Option<*mut c_void>, CUresult> {
    call()?;
    // SAFETY: null, or the driver wrote it.
    Ok(unsafe { handle.as_ref() }.copied().filter(|_| !state::passes()))
}

/// The driver's function with `call`, which hands out a function of one context.
unsafe fn get_function(name: &str, call: Call<'_>, function: *mut CUfunction) -> Answer {
    let Some(_depth) = Depth::enter() else { return call() };
    // SAFETY: the caller's own arguments.
    let Some(function) = (unsafe { handed_by(call, function) })? else { return Ok(()) };
    // SAFETY: a function that the driver has just named, and a place for the value.
    let frame =
        real::cuFuncGetAttribute.ask(0, |ask, bytes| unsafe { ask(bytes, LOCAL_SIZE, function) });
    handed_out(name, function.addr(), frame.unwrap_or(0), false)
}

pub unsafe fn cuModuleGetFunction(call: Call<'_>, function: *mut CUfunction) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { get_function("cuModuleGetFunction", call, function) }
}

pub unsafe fn cuKernelGetFunction(call: Call<'_>, function: *mut CUfunction) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { get_function("cuKernelGetFunction", call, function) }
}

/// CUDA Driver API, "Library Management": a kernel of every context.
pub unsafe fn cuLibraryGetKernel(call: Call<'_>, kernel: *mut CUkernel) -> Answer {
    let Some(_depth) = Depth::enter() else { return call() };
    // SAFETY: the caller's own arguments.
    let Some(kernel) = (unsafe { handed_by(call, kernel) })? else { return Ok(()) };
    let Some(device) = current_device() else { return Ok(()) };
    // SAFETY: the driver has just named the kernel; a valid place for the value.
    let frame = real::cuKernelGetAttribute
        .ask(0, |ask, bytes| unsafe { ask(bytes, LOCAL_SIZE, kernel, device) });
    frame.map_or(Ok(()), |bytes| handed_out("cuLibraryGetKernel", kernel.addr(), bytes, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// Of an H100.
    const THREADS: u64 = 132 * 2048;
    const DEFAULTS: [u64; LIMITS] = [1024, 6 * MIB, 8 * MIB, 2, 2048];

    fn local() -> Local {
        Local { known: true, base: DEFAULTS, ..Local::default() }
    }

    #[test]
    fn a_stack_is_every_resident_threads() {
        let stack = |bytes| [bytes, 6 * MIB, 8 * MIB, 2, 2048];
        assert_eq!(local().due(&stack(2048), 0, THREADS), 264 * MIB);
        assert_eq!(local().due(&DEFAULTS, 2048, THREADS), 264 * MIB, "a frame is a stack");
        assert_eq!(local().due(&stack(2048), 1500, THREADS), 264 * MIB);
        assert!(local().due(&stack(u64::MAX), 0, THREADS) > 1 << 60, "more than any quota");
        let framed = Local { frame: 2048, ..local() };
        assert_eq!(framed.due(&stack(0), 0, THREADS), 264 * MIB, "a frame stays");
    }

    #[test]
    fn a_function_is_forgotten_once_it_is_charged_and_a_kernel_once_it_is_another() {
        let frames = Frames::new();
        assert!(frames.remember(0x10, 2048, false, 0) && frames.remember(0x20, 2048, true, 0));
        assert!(frames.remember(0x30, 2048, false, 4096) && frames.find(0x30).is_none());
        frames.forget(0x10, false, 2048);
        frames.forget(0x20, false, 2048);
        assert!(frames.find(0x10).is_none() && frames.find(0x20).is_some());
        frames.forget(0x20, true, 2048);
        assert!(frames.find(0x20).is_none() && frames.find(0).is_none());
        assert!((1..=REMEMBERED).all(|handle| frames.remember(handle, 2048, false, 0)));
        assert!(!frames.remember(0x1000, 2048, false, 0) && frames.remember(1, 4096, false, 0));
    }

    #[test]
    fn what_is_lowered_pays_for_nothing_else() {
        let limits = [0, 6 * MIB, 108 * MIB, 0, 0];
        assert_eq!(local().due(&limits, 0, THREADS), 100 * MIB);
        let kept = Local { buffers: [0, 208 * MIB], ..local() };
        assert_eq!(kept.due(&limits, 0, THREADS), 200 * MIB);
        assert_eq!(local().due(&DEFAULTS, 1024, THREADS), 0);
    }

    #[test]
    fn the_device_runtimes_levels_and_launches_take_memory() {
        let limits = [1024, 6 * MIB, 8 * MIB, 3, 4096];
        assert_eq!(local().due(&limits, 0, THREADS), 1452 * MIB + 16 * MIB);
    }
}
