//! Time: CLOCK_MONOTONIC nanoseconds, and sleeping until one.

/// Now, in CLOCK_MONOTONIC nanoseconds.
pub fn now_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid timespec to write to; CLOCK_MONOTONIC always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut ts) };
    u64::try_from(ts.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(ts.tv_nsec).unwrap_or(0)
}

/// Spends so much CPU time, as a call of the driver's does.
pub fn burn(ns: u64) {
    burn_until(now_ns() + ns);
}

pub fn burn_until(deadline_ns: u64) {
    while now_ns() < deadline_ns {
        std::hint::spin_loop();
    }
}

/// Sleeps until `deadline_ns`, whatever signals come.
pub fn sleep_out(deadline_ns: u64) {
    while now_ns() < deadline_ns {
        sleep_until(deadline_ns);
    }
}

/// A sleep overshoots (timer slack is 50 µs), so the last stretch is spent yielding.
pub(crate) const YIELD_BELOW_NS: u64 = 60_000;

/// Waits until `deadline_ns`. May return early on a signal: callers re-evaluate.
pub fn sleep_until(deadline_ns: u64) {
    let left = deadline_ns.saturating_sub(now_ns());
    if let Some(nap) = left.checked_sub(YIELD_BELOW_NS) {
        let ts = libc::timespec {
            tv_sec: libc::time_t::try_from(nap / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::try_from(nap % 1_000_000_000).unwrap_or(0),
        };
        // SAFETY: `ts` is a valid timespec; a null remainder is allowed.
        if unsafe { libc::nanosleep(&raw const ts, std::ptr::null_mut()) } != 0 {
            return;
        }
    }
    while now_ns() < deadline_ns {
        // SAFETY: sched_yield has no preconditions.
        unsafe { libc::sched_yield() };
    }
}
