//! Signals without handlers: they stay blocked and are fetched where the work can end.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// SIGTERM, SIGINT or SIGHUP: finish and report.
    Stop,
    /// SIGUSR1: close this phase.
    Phase,
}

fn set() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data that sigemptyset initialises before it is read.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

/// Blocks the signals that [`poll`] fetches; called before any thread starts.
pub fn block_signals() {
    let set = set();
    // SAFETY: `set` is initialised and the old mask is not wanted.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}

/// Undoes [`block_signals`], for a command that replaces this process.
pub fn unblock_signals() {
    let set = set();
    // SAFETY: as in `block_signals`.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
}

/// A pending request, if any, without waiting.
pub fn poll() -> Option<Asked> {
    wait(Duration::ZERO)
}

/// Waits for a request, at most `timeout`.
pub fn wait(timeout: Duration) -> Option<Asked> {
    let set = set();
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos().cast_signed()),
    };
    // SAFETY: both pointers are to live locals; no siginfo is wanted.
    let signal =
        unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const timeout) };
    match signal {
        libc::SIGUSR1 => Some(Asked::Phase),
        s if s > 0 => Some(Asked::Stop),
        _ => None,
    }
}

/// Waits until asked to stop, or until `limit` passed.
pub fn until_stopped(limit: Duration) {
    let start = Instant::now();
    loop {
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() || wait(left.min(Duration::from_secs(3600))) == Some(Asked::Stop) {
            return;
        }
    }
}
