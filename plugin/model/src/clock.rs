//! The clocks: Unix time for people, `CLOCK_MONOTONIC` for the pages.

use std::time::{SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of the pages.
pub fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC);
    let nanos = |t: nix::sys::time::TimeSpec| {
        let (seconds, nanos) = (u64::try_from(t.tv_sec()).ok()?, u64::try_from(t.tv_nsec()).ok()?);
        Some(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    };
    time.ok().and_then(nanos).unwrap_or(0)
}
