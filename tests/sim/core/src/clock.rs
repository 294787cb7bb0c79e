//! Time: CLOCK_MONOTONIC nanoseconds, and sleeping until one.

/// Now, in CLOCK_MONOTONIC nanoseconds.
#[must_use]
pub fn now_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid timespec to write to; CLOCK_MONOTONIC always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut ts) };
    u64::try_from(ts.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(ts.tv_nsec).unwrap_or(0)
}

/// Below this much remaining time a sleep would overshoot (timer slack is 50 µs): yield instead.
const YIELD_BELOW_NS: u64 = 60_000;

/// Waits until `deadline_ns`, sleeping through all but the last stretch. May return early on a
/// signal: callers re-evaluate.
pub fn sleep_until(deadline_ns: u64) {
    let now = now_ns();
    if deadline_ns <= now {
        return;
    }
    let left = deadline_ns - now;
    if left <= YIELD_BELOW_NS {
        // SAFETY: sched_yield has no preconditions.
        unsafe { libc::sched_yield() };
        return;
    }
    let nap = left - YIELD_BELOW_NS;
    let ts = libc::timespec {
        tv_sec: libc::time_t::try_from(nap / 1_000_000_000).unwrap_or(libc::time_t::MAX),
        tv_nsec: i64::try_from(nap % 1_000_000_000).unwrap_or(0),
    };
    // SAFETY: `ts` is a valid timespec; a null remainder is allowed.
    unsafe { libc::nanosleep(&raw const ts, std::ptr::null_mut()) };
}
