//! What the suite asks of a measuring process: JSON lines, `{"do": …}`.

use std::io::BufRead;
use std::time::Duration;

use serde_json::Value;

/// Work goes on for so long after what is measured, so that neighbours end under the same load.
const TAIL_NS: u64 = 150_000_000;

/// Between two moments by `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub begin_ns: u64,
    pub end_ns: u64,
}

impl Window {
    /// Of a request `{"begin": ns, "end": ns}`.
    pub fn of(request: &Value) -> Self {
        let at = |name: &str| request[name].as_u64().unwrap_or(0);
        Self { begin_ns: at("begin"), end_ns: at("end") }
    }

    pub fn contains(&self, ns: u64) -> bool {
        (self.begin_ns..self.end_ns).contains(&ns)
    }

    /// Whether work may stop.
    pub fn is_over(&self) -> bool {
        now_ns() >= self.end_ns + TAIL_NS
    }

    #[allow(clippy::cast_precision_loss, reason = "a few seconds")]
    pub fn seconds(&self) -> f64 {
        self.end_ns.saturating_sub(self.begin_ns) as f64 / 1e9
    }
}

/// `CLOCK_MONOTONIC`, as Python's `time.monotonic_ns`.
pub(super) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live out-parameter.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let now = Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or(0));
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// The next request; `None` at the end of the input.
pub(super) fn next() -> Option<Value> {
    for line in std::io::stdin().lock().lines() {
        if let Ok(request) = serde_json::from_str(&line.ok()?) {
            return Some(request);
        }
    }
    None
}

/// The value that `permille` thousandths of sorted values do not exceed, microseconds of nanoseconds.
#[allow(clippy::cast_precision_loss, reason = "microseconds for people")]
pub(super) fn percentile_us(sorted_ns: &[u64], permille: usize) -> f64 {
    let Some(last) = sorted_ns.len().checked_sub(1) else { return 0.0 };
    sorted_ns[(sorted_ns.len() * permille / 1000).min(last)] as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_values() {
        let ns: Vec<u64> = (1..=1000).map(|n| n * 1000).collect();
        assert!((percentile_us(&ns, 500) - 501.0).abs() < 1.5);
        assert!((percentile_us(&ns, 1000) - 1000.0).abs() < f64::EPSILON);
        assert!(percentile_us(&[], 500).abs() < f64::EPSILON);
    }

    #[test]
    fn a_window_has_its_beginning_and_not_its_end() {
        let window = Window::of(&serde_json::json!({ "begin": 10, "end": 20 }));
        assert!(window.contains(10) && !window.contains(20) && !window.contains(9));
        assert!(window.is_over());
    }
}
