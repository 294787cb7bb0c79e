//! The helper: one thread per process, which closes the gate, drains, reports to the arbiter, and keeps the
//! connection.
//!
//! It is a guest's thread: all signals blocked, a small stack, a name, no context of its own for longer than
//! a call, relaxed towards captures, and out of the driver before the driver is torn down ([`super::bind`]).
//! It never synchronises: it polls, and sleeps in between.

use super::ahead;
use super::bind;
use super::closing::{self, Drain};
use super::cycle;
use super::futex;
use super::link::{self, Connection};
use super::want;
use crate::libdl;
use crate::log::now_ns;
use crate::pools::ask::Uncaptured;
use crate::state::Process;
use crate::thread::Depth;
use core::cell::Cell;
use core::ffi::c_void;
use core::mem::{MaybeUninit, forget};
use core::ptr;
use core::sync::atomic::Ordering;
use tessera_region::layout::{
    ARBITER_STALE_NS, GATE_CLOSED, GATE_OPEN, GATE_YIELD, gate_epoch, gate_state,
};
use tessera_region::session::Message;

/// Longest sleep at the gate, nanoseconds: the arbiter may have fallen silent.
const NAP_NS: u64 = 100_000_000;
/// Time between two looks whether the connection stands, nanoseconds.
const CHECK_NS: u64 = 50_000_000;
/// Time between two looks at a holder that is to say when it is idle, nanoseconds.
const WATCH_NS: u64 = 250_000;

/// Closings one after another up to which each lets twice as many launches pass as the last.
const MOST_CLOSINGS: u32 = 5;

/// Epochs wrap at the width that the gate word has for them.
const EPOCHS: u32 = gate_epoch(u32::MAX);

/// Starts the helper. False where the process can have no threads.
pub(super) fn start(process: &'static Process) -> bool {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: valid places. libc leaves out the signals that it needs itself. The calling thread's
    // mask is what it was when this returns; the new thread inherits the full one.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let started = libdl::start_thread(run, ptr::from_ref(process).cast_mut().cast());
        libc::sigprocmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        started
    }
}

extern "C" fn run(process: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passed it; the state of a process is never freed.
    let process: &'static Process = unsafe { &*process.cast_const().cast() };
    // SAFETY: this thread's own name and timer slack.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"tessera-gate".as_ptr());
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
    // What the driver calls of its own exports passes through, and no capture minds.
    forget(Depth::enter());
    forget(Uncaptured::enter());
    closing::prepare(process);
    bind::await_arbiter(process);
    let mut helper = Helper::new(now_ns());
    loop {
        helper.turn(process);
    }
}

/// Time between two words that the GPU works for a process that is late, nanoseconds.
const LATE_EVERY_NS: u64 = 10_000_000;

/// The last notice of a drain that takes long.
#[derive(Clone, Copy)]
struct LateNotice {
    at_ns: u64,
    works: bool,
}

impl LateNotice {
    fn new(now_ns: u64) -> Self {
        Self { at_ns: now_ns, works: true }
    }

    /// Says now and then whether the GPU works for the process, and at once when that changes.
    fn tell(mut self, process: &Process, word: u32, waits: bool) -> Self {
        let now_ns = now_ns();
        let is_due = now_ns.saturating_sub(self.at_ns) >= LATE_EVERY_NS;
        if is_due || self.works == waits {
            (self.at_ns, self.works) = (now_ns, !waits);
            let late = Message::Late { gpu: 0, epoch: gate_epoch(word), works: !waits };
            // One that is lost is said again.
            let _ = process.gate.link.say(&late);
        }
        self
    }
}

/// What the helper remembers.
pub(super) struct Helper {
    /// The closed gate word for which `drained` was said.
    drained: Option<u32>,
    /// The closed gate word at which what is in flight stood still to the last.
    stuck: Option<u32>,
    /// Closings without a lease in between, up to the one that is drained.
    closings: u32,
    /// The open gate word for which `idle` was said.
    idle: Option<u32>,
    /// Since when the gate has been open.
    opened_ns: Option<u64>,
    contact: Contact,
}

/// The connection, as it was found last.
struct Contact {
    is_there: Cell<bool>,
    /// When there was one last.
    there_ns: Cell<u64>,
    checked_ns: Cell<u64>,
}

impl Contact {
    /// Looks at it now and then, and connects again. Whether there is a new one: what was said before was said to nobody.
    fn keep(&self, process: &Process, now_ns: u64) -> bool {
        if now_ns.saturating_sub(self.checked_ns.get()) < CHECK_NS {
            return false;
        }
        self.checked_ns.set(now_ns);
        let found = link::connect(process);
        self.is_there.set(found != Connection::None);
        if found != Connection::None {
            self.there_ns.set(now_ns);
        }
        if found == Connection::New {
            process.gate.wanted.store(0, Ordering::Relaxed);
        }
        found == Connection::New
    }
}

impl Helper {
    fn new(now_ns: u64) -> Self {
        Self {
            drained: None,
            stuck: None,
            closings: 0,
            idle: None,
            opened_ns: None,
            contact: Contact {
                is_there: Cell::new(false),
                there_ns: Cell::new(now_ns),
                checked_ns: Cell::new(0),
            },
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.contact.is_there.get()
    }

    /// Looks at the connection now and then, and connects again.
    pub(super) fn keep_connected(&mut self, process: &Process, now_ns: u64) {
        if self.contact.keep(process, now_ns) {
            self.drained = None;
            self.idle = None;
        }
    }

    fn turn(&mut self, process: &Process) {
        let gate = &process.gate;
        let now_ns = now_ns();
        self.keep_connected(process, now_ns);
        let unheard = now_ns.saturating_sub(self.contact.there_ns.get()) > ARBITER_STALE_NS
            && gate.flight().waiting.load(Ordering::Relaxed) != 0;
        if cycle::is_silent(process, now_ns) || unheard {
            cycle::run(process, self);
            self.drained = None;
            self.opened_ns = None;
            return;
        }
        let page = gate.page();
        let word = page.load(Ordering::Acquire);
        match gate_state(word) {
            GATE_CLOSED => {
                if self.drained != Some(word) {
                    self.close(process, word);
                }
                let waits = gate.flight().waiting.load(Ordering::Relaxed) != 0;
                if waits || ahead::is_waiting(gate, word) {
                    want(process, word);
                }
            }
            GATE_YIELD if self.idle != Some(word) => {
                self.opened_ns.get_or_insert(now_ns);
                self.watch(process, word);
            }
            GATE_OPEN | GATE_YIELD => _ = self.opened_ns.get_or_insert(now_ns),
            _ => self.opened_ns = None,
        }
        futex::wait(page, word, NAP_NS);
    }

    /// Drains, and says so.
    fn close(&mut self, process: &Process, word: u32) {
        let page = process.gate.page();
        // Who is invited has drained: the arbiter has seen it.
        let is_invited = || process.gate.flight().invited.load(Ordering::Acquire) == word;
        let contact = &self.contact;
        let still = || {
            let now_ns = now_ns();
            // What waits for the turn of an arbiter that died goes when the next one has the page that comes with the hello.
            contact.keep(process, now_ns);
            page.load(Ordering::Acquire) == word
                && !is_invited()
                && !cycle::is_silent(process, now_ns)
        };
        // Closed again with nothing in between: what another process has in flight may wait for launches
        // that wait here; how many of them, nobody knows.
        let is_next = |before: u32| gate_epoch(before).wrapping_add(1) & EPOCHS == gate_epoch(word);
        let again = self.drained.is_some_and(is_next);
        self.closings = if again { (self.closings + 1).min(MOST_CLOSINGS) } else { 0 };
        // Closings that follow each other leave who stands still no time to find out that it is a launch of
        // its own that is waited for.
        let due = match again {
            true => {
                let behind = process.gate.flight().behind.load(Ordering::Relaxed);
                behind.max(1 << (self.closings - 1))
            }
            false => u32::from(self.stuck.is_some_and(is_next)),
        };
        let idle = Message::Idle { gpu: 0, epoch: gate_epoch(word) };
        let is_stuck = Cell::new(false);
        let stuck = || {
            is_stuck.set(true);
            let _ = process.gate.link.say(&idle);
        };
        let notice = Cell::new(LateNotice::new(now_ns()));
        let late = |waits| notice.set(notice.get().tell(process, word, waits));
        let drained = cycle::drain(process, due, still, stuck, late);
        self.stuck = is_stuck.get().then_some(word);
        let Some(passes) = drained.or_else(|| is_invited().then_some(0)) else { return };
        let opened_ns = self.opened_ns.take();
        let open_ns = opened_ns.map_or(0, |opened_ns| now_ns().saturating_sub(opened_ns));
        process.account.add_gpu_time(open_ns);
        // Of a connection that broke meanwhile it was taken; then the arbiter does without.
        let used_ns = process.gate.take_use_ns();
        let drained = Message::Drained { gpu: 0, epoch: gate_epoch(word), used_ns };
        if process.gate.link.say(&drained) {
            self.drained = Some(word);
            if passes > 0 && !again {
                // It would have stood still.
                stuck();
            }
        } else {
            self.contact.checked_ns.set(0);
        }
    }

    /// Watches a holder for whom others wait, until it is idle or the gate moves.
    fn watch(&mut self, process: &Process, word: u32) {
        let gate = &process.gate;
        let page = gate.page();
        let issued = || gate.flight().admitted.load(Ordering::Relaxed);
        let synchronised = || gate.synchronised.load(Ordering::Relaxed);
        // So long nothing may be in flight and nothing be launched before that is called idle.
        let patience_ns = process.gate_quota().idle_ns(0);
        let (mut seen, mut waits) = (issued(), synchronised());
        let mut round: Option<Drain> = None;
        let mut complete_ns = None;
        loop {
            let now_ns = now_ns();
            if page.load(Ordering::Acquire) != word || cycle::is_silent(process, now_ns) {
                return;
            }
            // A thread that waits for room wants to launch, whatever the GPU does meanwhile.
            let is_busy = process.records.busy_from(0).is_some()
                || gate.flight().roomless.load(Ordering::Relaxed) != 0;
            if issued() != seen || is_busy {
                (seen, round, complete_ns) = (issued(), None, None);
                if is_busy || synchronised() == waits {
                    futex::wait(page, word, WATCH_NS);
                    continue;
                }
            }
            waits = synchronised();
            let nap_ns = match (&mut round, complete_ns) {
                (None, _) => {
                    let still = || issued() == seen && page.load(Ordering::Acquire) == word;
                    round = Drain::begin(process, still);
                    0
                }
                (Some(round), Some(since_ns)) => {
                    let quiet_ns = now_ns.saturating_sub(since_ns);
                    if quiet_ns >= patience_ns
                        && !(round.look(process) || round.waits_elsewhere(process))
                    {
                        // The host was ready, and the GPU went on.
                        complete_ns = None;
                        0
                    } else if quiet_ns >= patience_ns {
                        let epoch = gate_epoch(word);
                        if process.gate.link.say(&Message::Idle { gpu: 0, epoch }) {
                            self.idle = Some(word);
                        }
                        return;
                    } else {
                        patience_ns - quiet_ns
                    }
                }
                (Some(round), None) if round.look(process) || round.waits_elsewhere(process) => {
                    complete_ns = Some(now_ns);
                    patience_ns
                }
                (Some(round), None) => round.next_nap_ns(),
            };
            if nap_ns > 0 {
                futex::wait(page, word, nap_ns);
            }
        }
    }
}
