//! Binding a process to its gate. The first launch starts a helper thread. That launch, or the helper as
//! soon as an arbiter appears, reports the process to the arbiter. Where compute is not limited there is
//! neither.

use super::futex;
use super::helper;
use super::link;
use super::local::{ALONE, BOUND, UNBOUND, WATCHED};
use crate::log::{errno, set_errno};
use crate::session::Kept;
use crate::spin::pause;
use crate::state::{self, Process};
use crate::thread::Deferred;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use tessera_region::flight::FlightPage;
use tessera_region::layout::{GATE_SOLO, gate_state};
use tessera_region::quota::{Policy, QuotaReader};

/// Whether an arbiter moves, or will move, the gate.
fn is_arbitrated(quota: &QuotaReader) -> bool {
    quota.arbiter_ns() != 0 && quota.policy(0) != Policy::None
}

/// Binds the process if there is an arbiter and it is not bound yet; without one, has the helper wait
/// for one.
#[inline]
pub(super) fn if_due(process: &'static Process) {
    let quota = process.gate_quota();
    let due = match process.gate.bound.load(Ordering::Acquire) {
        UNBOUND => quota.policy(0) != Policy::None,
        WATCHED => is_arbitrated(quota),
        _ => false,
    };
    if due {
        bind(process);
    }
}

#[cold]
#[inline(never)]
fn bind(process: &'static Process) {
    let errno = errno();
    let _deferred = Deferred::new();
    let gate = &process.gate;
    let mut its_helper = gate.binding.lock();
    if matches!(gate.bound.load(Ordering::Acquire), UNBOUND | WATCHED) {
        let arbitrated = is_arbitrated(process.gate_quota());
        if arbitrated {
            show_flight(process);
            // Before anything is launched: who is not known of is not waited for.
            link::connect(process);
        }
        let runs = *its_helper.get_or_insert_with(|| {
            park_at_exit();
            helper::start(process)
        });
        let bound = match (arbitrated, runs) {
            (false, _) => WATCHED,
            (true, true) => BOUND,
            (true, false) => ALONE,
        };
        gate.bound.store(bound, Ordering::Release);
    }
    drop(its_helper);
    set_errno(errno);
}

/// Counts what is in flight, and has markers written, where the arbiter can see it; where the kernel has memory for that.
fn show_flight(process: &Process) {
    if let Ok((fd, page)) = FlightPage::create() {
        let gate = &process.gate;
        *gate.flight_file.lock() = Kept::keep(fd);
        gate.show_flight(page);
        gate.streams.lock().lanes.begin(page);
    }
}

/// Longest sleep of a helper for whom there is no arbiter, nanoseconds. The gate's first move ends it.
const NO_ARBITER_NS: u64 = 999_999_999;

/// The helper's: returns when the process is bound. An arbiter closes the gate first, and gives its
/// first sign a moment later.
pub(super) fn await_arbiter(process: &'static Process) {
    let (gate, quota) = (&process.gate, process.gate_quota());
    let mut nap_ns = 1_000_000;
    while !is_arbitrated(quota) {
        let word = gate.page().load(Ordering::Acquire);
        if gate_state(word) == GATE_SOLO {
            nap_ns = 1_000_000;
            futex::wait(gate.page(), word, NO_ARBITER_NS);
        } else {
            futex::wait(gate.page(), word, nap_ns);
            nap_ns = (nap_ns * 2).min(NO_ARBITER_NS);
        }
    }
    bind(process);
}

unsafe extern "C" {
    /// LSB Core, "__cxa_atexit". `atexit` is not libc.so.6's own.
    fn __cxa_atexit(
        handler: extern "C" fn(*mut c_void),
        argument: *mut c_void,
        library: *mut c_void,
    ) -> c_int;
}

/// Has the helper keep away from the driver before the driver is torn down: handlers run in reverse
/// order, and the driver's are older than the first launch. A forked child has its parent's.
fn park_at_exit() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the shim is never unloaded; without a library the handler runs at exit only.
        unsafe { __cxa_atexit(park, core::ptr::null_mut(), core::ptr::null_mut()) };
    }
}

/// Looks, some 100 µs apart, until the helper is taken to be stuck in the driver.
const PATIENCE: u32 = 2_000;

extern "C" fn park(_: *mut c_void) {
    let Some(process) = state::armed() else { return };
    process.gate.parked.store(true, Ordering::Release);
    // The lock's holder now is in the driver; later holders see the word.
    for turn in 0..PATIENCE {
        if process.gate.streams.try_lock().is_some() {
            return;
        }
        pause(turn);
    }
}
