//! The gate: where a launch asks whether its tenant may use the GPU now.
//!
//! The plugin writes a gate word per GPU into the quota page. Only this module reads it, between raising the
//! thread's busy flag and the driver's launch, so the ordering of a lease's protocol (close the gate, wait
//! until no flag is up, drain) is here and nowhere else:
//!
//! - The launching thread raises the flag, then loads the gate.
//! - The closer, a thread of the same process that has read CLOSED, calls `membarrier(2)` PRIVATE_EXPEDITED,
//!   then reads the flags.
//!
//! One of the two sees the other, because the system call puts a full barrier into every running thread of
//! the process. Between raising and loading there is then only a compiler fence: a locked instruction there
//! costs 6 ns in every launch, more than everything else together, and closing is rare. The closer also
//! registers for the call, which is slow in a process with many threads. Where the kernel has no such call,
//! a `swap(1, SeqCst)` raises the flag, and the closer needs a `fence(SeqCst)` only.
//!
//! A container with several GPUs is granted all of them or none (a gang, for NCCL), so its gates move
//! together, and a launch reads the first.
//!
//! [`closing`] is the closer's side, which the [`helper`] thread takes; [`streams`] knows what is to be
//! drained; [`flight`] and [`window`] bound what is in flight while the gate is open; [`ahead`] has work
//! queued behind a closed one; [`cycle`] opens and closes a gate of the process's own while the arbiter is silent;
//! [`bind`] starts all of it when there is an arbiter. docs/internals/compute.md is the contract.

mod ahead;
mod bind;
pub mod capture;
mod closing;
mod cycle;
mod elsewhere;
mod events;
mod flight;
mod futex;
mod helper;
mod lanes;
mod link;
pub(crate) mod local;
#[cfg(test)]
mod model_tests;
mod nap;
mod progress;
mod relief;
mod solo;
pub mod streams;
mod tickets;
mod window;

pub(crate) use closing::has_membarrier;
pub use events::Stream;
pub(crate) use events::is_capturing;

use crate::log::{errno, now_ns, set_errno};
use crate::own::record;
use crate::quota;
use crate::records::{Flown, Record};
use crate::state::{self, Process, Standing};
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering, compiler_fence};
use local::Local;
use tessera_cuda::types::{
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_SYSTEM_NOT_READY, CUresult,
};
use tessera_region::layout::{GATE_CLOSED, GATE_OPEN, GATE_SOLO, GATE_YIELD, gate_state};
use tessera_region::session::Message;

/// The right to hand one operation to the driver; given back on drop.
#[derive(Debug)]
pub enum Pass {
    /// This thread's busy flag is up.
    Flag(Busy),
    /// The same at an open gate: what is in flight is counted.
    Counted(Counted),
    /// Into the thread's own default stream, beside a live capture.
    Own(Own),
    /// Nothing to give back: pass-through, or inside another launch of this thread.
    Free,
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
pub fn admit_at_once(stream: Stream, is_launch: bool) -> Option<Busy> {
    // SAFETY: records are never unmapped; in a forked child they read as zero.
    let record = unsafe { record().as_ref() }?;
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
    if is_launch {
        // A record with a gate is the word's only writer.
        let count = launches.load(Ordering::Relaxed).wrapping_add(1);
        if solo::is_due(record, count) {
            return None;
        }
        launches.store(count, Ordering::Relaxed);
    }
    Some(busy)
}

/// See [`Pass::Counted`].
#[derive(Debug)]
pub struct Counted {
    process: &'static Process,
    flown: &'static Flown,
    kind: Kind,
    /// Dropped last.
    _busy: Busy,
}

impl Drop for Counted {
    #[inline(never)]
    fn drop(&mut self) {
        flight::launched(self.process, self.flown, self.kind);
    }
}

/// See [`Pass::Own`].
#[derive(Debug)]
pub struct Own {
    process: &'static Process,
    is_counted: bool,
    /// Dropped last.
    _busy: Busy,
}

impl Drop for Own {
    #[inline(never)]
    fn drop(&mut self) {
        let errno = errno();
        streams::launched_beside_a_capture(self.process, self.is_counted);
        set_errno(errno);
    }
}

/// What is to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A fill, or a copy on the device. Counted nowhere.
    Work,
    /// A launch, which the usage page counts.
    Launch,
    /// The same, of a kernel that may begin before the one before it has ended.
    Chained,
    /// The same, of a graph: a unit of its own.
    Graph,
}

/// As [`admit`], for a fill or a copy on the device.
pub fn admit_work(stream: Stream) -> Result<Pass, CUresult> {
    match admit_at_once(stream, false) {
        Some(busy) => Ok(Pass::Flag(busy)),
        None => admit(Kind::Work, stream),
    }
}

/// As [`admit`], for one launch into several streams.
pub fn admit_several(mut streams: impl Iterator<Item = Stream>) -> Result<Pass, CUresult> {
    // Not ahead of its turn: the other streams would not wait.
    let pass = admit_when(Kind::Launch, streams.next().unwrap_or(Stream::LEGACY), false)?;
    if let (Pass::Flag(_) | Pass::Counted(_), Some(process)) = (&pass, state::armed()) {
        // With the flag up: what closes sees either the flag or the streams.
        streams.for_each(|stream| streams::note(&process.gate.noted, stream, || {}));
    }
    Ok(pass)
}

/// Waits until this thread may hand work for `stream` to the driver. For synchronous forms: the NULL stream of the
/// function's flavour. To be dropped right after the driver's call.
///
/// # Errors
/// `CUDA_ERROR_SYSTEM_NOT_READY` where the quota cannot be read (absence closes);
/// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES` for a thread of which nothing can be noted.
pub fn admit(kind: Kind, stream: Stream) -> Result<Pass, CUresult> {
    admit_when(kind, stream, true)
}

/// As [`admit`]. `may_queue`: it may be queued ahead of its turn.
#[inline(never)]
fn admit_when(kind: Kind, stream: Stream, may_queue: bool) -> Result<Pass, CUresult> {
    // SAFETY: records are never unmapped; in a forked child they read as zero.
    let mut record = unsafe { record().as_ref() };
    if record.is_none_or(|record| record.process.load(Ordering::Relaxed).is_null()) {
        let process = match state::standing() {
            Standing::Pass => return Ok(Pass::Free),
            Standing::Closed => return Err(CUDA_ERROR_SYSTEM_NOT_READY),
            Standing::Armed(process) => process,
        };
        bind::if_due(process);
        let Some(claimed) = process.records.claim(process.owner()) else {
            // Who closes the gate could not see it.
            quota::refuse_unnoted("a launch");
            return Err(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        };
        crate::own::set_record(claimed);
        record = Some(claimed);
    }
    let Some(record) = record else { return Ok(Pass::Free) };
    // SAFETY: not null, as just seen to; the state of a process is never freed.
    let process: &'static Process = unsafe { &*record.process.load(Ordering::Relaxed) };
    if record.busy.load(Ordering::Relaxed) != 0 {
        // The driver called its own export: the outer launch holds the flag.
        return Ok(Pass::Free);
    }
    bind::if_due(process);
    if kind != Kind::Work
        && record.is_hot()
        && is_solo_due(process, record)
        && !(kind == Kind::Chained && solo::put_off(record))
    {
        let errno = errno();
        solo::bound(process, record);
        set_errno(errno);
    }
    let (mut may_wait, mut ticket, mut has_room, mut tried) = (true, 0, false, 0);
    loop {
        bind::if_due(process);
        let is_hot = record.is_hot();
        if is_hot {
            // As in `admit_at_once`.
            record.busy.store(1, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
        } else {
            record.busy.swap(1, Ordering::SeqCst);
        }
        let busy = Busy(&record.busy);
        // Acquire: pairs with the arbiter's Release.
        let word = process.gate.gate().load(Ordering::Acquire);
        let state = gate_state(word);
        let is_free = !may_wait
            || !matches!(state, GATE_OPEN | GATE_YIELD | GATE_CLOSED)
            || process.gate.captures.is_of(stream);
        let is_open = matches!(state, GATE_OPEN | GATE_YIELD);
        let is_graph = kind == Kind::Graph;
        let mut is_ahead = false;
        let is_counted = !is_free
            && match is_open {
                true => flight::take_room(&process.gate, is_graph, has_room),
                false if may_queue && tried != word && ahead::is_invited(&process.gate, word) => {
                    tried = word;
                    is_ahead = ahead::take_room(process, is_graph);
                    is_ahead
                }
                false => {
                    let has_ticket = process.gate.tickets.take(ticket);
                    if has_ticket && is_graph {
                        // As an operation it was counted by who offered the ticket.
                        process.gate.graphs_issued.fetch_add(1, Ordering::Relaxed);
                    }
                    has_ticket
                }
            };
        if is_counted
            && is_open
            // SeqCst: after room was taken; see `tessera_region::flight`.
            && gate_state(process.gate.gate().load(Ordering::SeqCst)) == GATE_CLOSED
        {
            flight::returned(&process.gate, is_graph);
            continue;
        }
        if is_free || is_counted {
            // Beside a capture only the thread itself can mark its own default stream.
            let is_own = stream == Stream::PER_THREAD && process.gate.captures.any();
            let flown = match is_counted && !is_own {
                true => flight::flown(process, record, stream, kind),
                false => None,
            };
            if is_ahead && !flown.is_some_and(|flown| ahead::hold(process, flown, word)) {
                flight::returned(&process.gate, is_graph);
                continue;
            }
            if flown.is_none() && !is_own {
                note(process, record, stream);
            }
            if kind != Kind::Work {
                // SAFETY: set together with `process`: a word of this process's slot, which stays
                // mapped.
                let launches = unsafe { &*record.launches.load(Ordering::Relaxed) };
                if is_hot {
                    let count = launches.load(Ordering::Relaxed).wrapping_add(1);
                    launches.store(count, Ordering::Relaxed);
                } else {
                    launches.fetch_add(1, Ordering::Relaxed);
                }
            }
            if is_own {
                return Ok(Pass::Own(Own { process, is_counted, _busy: busy }));
            }
            return Ok(match flown {
                Some(flown) => Pass::Counted(Counted { process, flown, kind, _busy: busy }),
                None => Pass::Flag(busy),
            });
        }
        drop(busy);
        let errno = errno();
        if is_open {
            has_room = flight::wait_for_room(process, word, stream);
        } else {
            (may_wait, ticket) = wait_at(process, stream, may_queue.then_some(tried));
        }
        set_errno(errno);
    }
}

/// Whether this launch of a thread whose tenant is alone is one that bounds what is in flight.
fn is_solo_due(process: &Process, record: &Record) -> bool {
    // SAFETY: set together with `process`: a word of this process's slot, which stays mapped.
    let launches = unsafe { &*record.launches.load(Ordering::Relaxed) };
    gate_state(process.gate.gate().load(Ordering::Relaxed)) == GATE_SOLO
        && solo::is_due(record, launches.load(Ordering::Relaxed).wrapping_add(1))
}

/// `stream` is launched into and that is not counted: closing will drain it. The flag is up.
#[inline]
fn note(process: &Process, record: &Record, stream: Stream) {
    if record.stream.load(Ordering::Relaxed) != stream.0 {
        note_again(process, record, stream);
    }
}

#[cold]
#[inline(never)]
fn note_again(process: &Process, record: &Record, stream: Stream) {
    // Under the lock: who closes takes both away under it.
    streams::note(&process.gate.noted, stream, || {
        record.stream.store(stream.0, Ordering::Relaxed);
    });
}

/// What the application has waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// All that was in a stream of the current context.
    Stream(Stream),
    /// All that was in a context.
    Context(usize),
    /// Something.
    Event,
}

/// The application has waited for the GPU: what it knows to be complete needs no marker. A holder for whom others
/// wait may well be idle now, and the helper looks at once instead of at its leisure.
#[inline]
pub fn synchronised(waited: Waited) {
    if let Some(process) = state::armed()
        && process.gate.is_bound()
    {
        if waited != Waited::Event {
            flight::waited(process, waited);
        }
        if gate_state(process.gate.page().load(Ordering::Relaxed)) == GATE_YIELD {
            nudge(process);
        }
    }
}

/// Whether somebody moves this process's gate.
pub(crate) fn is_bound() -> bool {
    state::armed().is_some_and(|process| process.gate.is_bound())
}

/// Something is about to be handed to the driver for `stream` that no lease is needed for: what the GPU is to do before
/// it is not to be awaited together with it.
#[inline]
pub(crate) fn passing(stream: Stream) {
    if let Some(process) = state::armed()
        && process.gate.is_bound()
    {
        flight::passing(process, stream);
    }
}

#[cold]
#[inline(never)]
fn nudge(process: &Process) {
    let errno = errno();
    process.gate.synchronised.fetch_add(1, Ordering::Relaxed);
    futex::wake(process.gate.page());
    set_errno(errno);
}

/// How long who comes to wait, or is woken for it, stays awake.
const NEW_US: u32 = 300;
const ROUSED_US: u32 = 600;
/// How long a sleep at the gate lasts at most.
const NAP_NS: u64 = 100_000_000;

/// Waits while the gate is closed, or until a ticket is offered, which is returned. False where the
/// launch may pass whatever the gate says: nobody can be asked, and there is no helper that would know
/// when. `tried`: the closed gate word at which the launch could not be queued ahead; `None` where it never can.
#[cold]
#[inline(never)]
fn wait_at(process: &Process, stream: Stream, tried: Option<u32>) -> (bool, u32) {
    let gate = &process.gate;
    let begun_ns = now_ns();
    let mut may_wait = true;
    let ticket = gate.tickets.enter(stream);
    // The same one to the end of this: binding changes it.
    let flight = gate.flight();
    flight.waiting.fetch_add(1, Ordering::Relaxed);
    let (mut awake_us, mut marked) = (NEW_US, 0);
    loop {
        let word = gate.gate();
        let seen = word.load(Ordering::Acquire);
        let goes = || {
            gate.tickets.is_offered(ticket)
                || tried.is_some_and(|tried| tried != seen) && ahead::is_invited(gate, seen)
        };
        if gate_state(seen) != GATE_CLOSED || goes() {
            break;
        }
        if !gate.is_own() {
            if want(process, seen) || marked != seen && ahead::is_waiting(gate, seen) {
                // The first that comes does what the helper may get no processor for, and each for what is queued ahead.
                closing::mark(process, seen);
            }
            marked = seen;
            let may_sleep = awake_us == 0 || ahead::is_able(gate, seen);
            if !may_sleep && stay_awake(gate, seen, goes, awake_us) {
                continue;
            }
        }
        // Somebody woke this thread, and the gate is as it was: it may be about to open.
        awake_us = if futex::wait(word, seen, NAP_NS) { ROUSED_US } else { 0 };
        if !gate.is_bound() {
            // An arbiter that takes the tenant on closes first, and is there a moment later.
            let now_ns = now_ns();
            let is_silent = cycle::is_silent(process, now_ns);
            if !is_silent || now_ns.saturating_sub(begun_ns) >= NAP_NS {
                may_wait = !is_silent;
                break;
            }
        }
    }
    flight.waiting.fetch_sub(1, Ordering::Relaxed);
    gate.tickets.leave(ticket);
    process.account.add_gate_wait(now_ns().saturating_sub(begun_ns));
    (may_wait, ticket)
}

/// Waits without a sleep for the gate to open, so that the launch follows at once, and shows that. One thread of a
/// process does. False when nothing happened for so long.
fn stay_awake(gate: &Local, seen: u32, goes: impl Fn() -> bool, awake_us: u32) -> bool {
    let flight = gate.flight();
    let Some(_only) = gate.awake.try_lock() else { return false };
    let begun_us = flight::now_us();
    let mut now_us = begun_us;
    let mut is_over = false;
    while !is_over && now_us.wrapping_sub(begun_us) < awake_us {
        flight.awake_us.store(now_us, Ordering::Relaxed);
        flight.awake.store(seen, Ordering::Release);
        spin_loop();
        is_over = gate.gate().load(Ordering::Relaxed) != seen || goes();
        now_us = flight::now_us();
    }
    flight.awake.store(0, Ordering::Relaxed);
    is_over
}

/// Says once per closing that somebody waits. Whether this was the time.
fn want(process: &Process, closed: u32) -> bool {
    let wanted = &process.gate.wanted;
    let is_first = wanted.swap(closed, Ordering::Relaxed) != closed;
    if is_first && !process.gate.link.say(&Message::Want { gpu: 0 }) {
        // The helper says it when there is a connection again.
        wanted.store(0, Ordering::Relaxed);
    }
    is_first
}
