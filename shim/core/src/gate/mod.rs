//! The gate: where a launch asks whether its tenant may use the GPU now.
//!
//! The plugin writes a gate word per GPU into the quota page. This is the one place that reads it,
//! between raising the thread's busy flag and the driver's launch, so that the protocol of a lease
//! (close the gate, wait until no flag is up, drain) has its ordering here and nowhere else:
//!
//! - the launching thread: raise the flag, then load the gate;
//! - who closes, a thread of the same process that has read CLOSED: `membarrier(2)`
//!   PRIVATE_EXPEDITED, then read the flags. One of the two sees the other, because the system call
//!   puts a full barrier into every running thread of the process. Between raising and loading there
//!   is then only a compiler fence: a locked instruction there costs 6 ns in every launch, more than
//!   everything else together, and closing is rare. Registration, which is slow in a process with
//!   many threads, is the closer's affair. Where the kernel has no such call, the flag is raised by a
//!   `swap(1, SeqCst)`, and who closes needs a `fence(SeqCst)` only.
//!
//! A container with several GPUs is granted all of them or none (design: a gang, for NCCL), so its
//! gates move together, and a launch looks at the first.
//!
//! **State of enforcement.** Compute is not limited yet: the plugin writes SOLO only, and a word
//! other than SOLO is admitted at once, with a line that says so (`other_than_solo`). What is final
//! is the hot path and its cost.

pub mod capture;
pub(crate) mod local;
mod stream;
pub mod streams;

pub use stream::Stream;
pub use streams::Order;

use crate::log::Reason;
use crate::own;
use crate::state::{self, Process, Standing};
use core::sync::atomic::{AtomicU32, Ordering, compiler_fence};
use tessera_cuda::types::{CUDA_ERROR_SYSTEM_NOT_READY, CUresult};
use tessera_region::layout::{GATE_SOLO, gate_state};

/// The right to hand one operation to the driver; given back on drop.
#[derive(Debug)]
pub enum Pass {
    /// This thread's busy flag is up.
    Flag(Busy),
    /// More threads than there are records: they share a counter.
    Crowd(&'static AtomicU32),
    /// Nothing to give back: pass-through, or inside another launch of this thread.
    Free,
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Self::Crowd(count) = self {
            count.fetch_sub(1, Ordering::Release);
        }
    }
}

/// A busy flag that is up; dropping it lowers it.
#[derive(Debug)]
pub struct Busy(&'static AtomicU32);

impl Drop for Busy {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: the launch is the driver's before the flag is seen down.
        self.0.store(0, Ordering::Release);
    }
}

/// The hot path of [`admit`]: a thread that has launched before, at an open gate. `None` says
/// nothing but "ask [`admit`]". Makes no call, so that the launch's arguments stay where they are.
#[inline(always)]
pub fn admit_at_once(stream: Stream) -> Option<Busy> {
    // SAFETY: records are never unmapped; in a forked child they read as zero.
    let record = unsafe { own::record().as_ref() }?;
    if record.busy.load(Ordering::Relaxed) != 0 {
        return None; // inside another launch of this thread
    }
    record.busy.store(1, Ordering::Relaxed);
    // Pairs with the closer's membarrier; see the module's text. What the closer changes is read
    // below it: the gate's place, the stream and the gate.
    compiler_fence(Ordering::SeqCst);
    let busy = Busy(&record.busy);
    let gate = record.gate.load(Ordering::Relaxed);
    let launches = record.launches.load(Ordering::Relaxed);
    if gate.is_null() || record.stream.load(Ordering::Relaxed) != stream.0 {
        return None;
    }
    // SAFETY: words of the quota page and of this process's slot, which stay mapped; set together.
    let (gate, launches) = unsafe { (&*gate, &*launches) };
    // Acquire: pairs with the plugin's Release.
    if gate_state(gate.load(Ordering::Acquire)) != GATE_SOLO {
        return None;
    }
    // A record with a gate is the word's only writer.
    launches.store(launches.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    Some(busy)
}

/// Whether the kernel has what the hot path leaves to who closes. Only asks; a closer registers.
pub(crate) fn has_membarrier() -> bool {
    /// `MEMBARRIER_CMD_QUERY`
    const QUERY: libc::c_int = 0;
    /// `MEMBARRIER_CMD_PRIVATE_EXPEDITED`
    const PRIVATE_EXPEDITED: libc::c_long = 1 << 3;
    // SAFETY: a query has no effect.
    let commands = unsafe { libc::syscall(libc::SYS_membarrier, QUERY, 0, 0) };
    commands > 0 && commands & PRIVATE_EXPEDITED != 0
}

/// Waits until this thread may hand work for `stream` to the driver (a kernel, a memset, a copy on
/// the device), and counts it. For synchronous forms: the NULL stream of the function's flavour. To
/// be dropped right after the driver's call.
///
/// # Errors
/// `CUDA_ERROR_SYSTEM_NOT_READY` where the quota cannot be read (absence closes).
#[inline(never)]
pub fn admit_work(stream: Stream) -> Result<Pass, CUresult> {
    admit(stream)
}

/// As [`admit_work`], for a launch, which the usage page counts.
///
/// # Errors
/// As [`admit_work`].
#[inline(never)]
pub fn admit(stream: Stream) -> Result<Pass, CUresult> {
    // SAFETY: records are never unmapped; in a forked child they read as zero.
    let mut record = unsafe { own::record().as_ref() };
    if record.is_none_or(|record| record.process.load(Ordering::Relaxed).is_null()) {
        let process = match state::standing() {
            Standing::Pass => return Ok(Pass::Free),
            Standing::Closed => return Err(CUDA_ERROR_SYSTEM_NOT_READY),
            Standing::Armed(process) => process,
        };
        record = process.records.claim(process.owner());
        let Some(record) = record else { return Ok(admit_to_crowd(process)) };
        own::set_record(record);
    }
    let Some(record) = record else { return Ok(Pass::Free) };
    if record.busy.swap(1, Ordering::SeqCst) != 0 {
        // The driver called its own export: the outer launch holds the flag.
        return Ok(Pass::Free);
    }
    let busy = Busy(&record.busy);
    record.stream.store(stream.0, Ordering::Relaxed);
    // SAFETY: not null, as just seen to; the state of a process is never freed.
    check(unsafe { &*record.process.load(Ordering::Relaxed) }.gate_word());
    // SAFETY: set together with `process`: a word of this process's slot, which stays mapped.
    unsafe { &*record.launches.load(Ordering::Relaxed) }.fetch_add(1, Ordering::Relaxed);
    Ok(Pass::Flag(busy))
}

/// As [`admit`], for one launch into several streams.
///
/// # Errors
/// As [`admit_work`].
pub fn admit_several(mut streams: impl Iterator<Item = Stream>) -> Result<Pass, CUresult> {
    admit(streams.next().unwrap_or(Stream::LEGACY))
}

/// A launch of a thread that has no record.
fn admit_to_crowd(process: &'static Process) -> Pass {
    process.crowd.fetch_add(1, Ordering::SeqCst);
    check(process.gate_word());
    if let Some(shared) = process.account.launches().last() {
        shared.fetch_add(1, Ordering::Relaxed);
    }
    Pass::Crowd(&process.crowd)
}

fn check(gate: &AtomicU32) {
    // Acquire: pairs with the plugin's Release.
    let word = gate.load(Ordering::Acquire);
    if gate_state(word) != GATE_SOLO {
        other_than_solo(word);
    }
}

static NO_LEASES: Reason = Reason::new();

/// OPEN, CLOSED or a word from a later plugin: it shares out GPU time, which this shim cannot. The
/// launch passes, and the mismatch is said.
#[cold]
#[inline(never)]
fn other_than_solo(word: u32) {
    NO_LEASES.say(format_args!(
        "the plugin shares out GPU time (gate {word}), and this libtessera.so only limits memory: \
         restart the container so that it gets the plugin's own"
    ));
}
