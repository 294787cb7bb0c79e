//! Binding a process to its gate: at the first launch after an arbiter has shown itself, a helper
//! thread is started and the arbiter is told of the process. Without an arbiter, or where compute is
//! not limited, there is neither.

use super::helper;
use super::local::{ALONE, BOUND, UNBOUND};
use crate::cancel::Deferred;
use crate::log::{errno, set_errno};
use crate::spin::pause;
use crate::state::{self, Process};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use tessera_region::quota::Policy;

/// Binds the process if there is an arbiter and it is not bound yet.
#[inline]
pub(super) fn if_due(process: &'static Process) {
    let quota = process.account.quota();
    if process.gate.bound.load(Ordering::Acquire) == UNBOUND
        && quota.arbiter_ns() != 0
        && quota.policy(0) != Policy::None
    {
        bind(process);
    }
}

#[cold]
#[inline(never)]
fn bind(process: &'static Process) {
    let errno = errno();
    let _deferred = Deferred::new();
    let gate = &process.gate;
    let _one_at_a_time = gate.binding.lock();
    if gate.bound.load(Ordering::Acquire) == UNBOUND {
        // Before anything is launched: who is not known of is not waited for.
        gate.link.connect(&process.gate_path, &process.hello());
        park_at_exit();
        let bound = if helper::start(process) { BOUND } else { ALONE };
        gate.bound.store(bound, Ordering::Release);
    }
    set_errno(errno);
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
    // Whoever has the lock now is in the driver; who takes it later sees the word.
    for turn in 0..PATIENCE {
        if process.gate.streams.try_lock().is_some() {
            return;
        }
        pause(turn);
    }
}
