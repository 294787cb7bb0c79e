//! Shares of time, judged on a machine that has other things to do.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::PATIENCE;

/// Looks per judgement.
const LOOKS: usize = 8;
/// Asserts that one of several looks lies within `expected`. A second in which this machine's CPUs were
/// elsewhere says nothing of what is tested, and does not count as one of them; what is wrong stays wrong.
/// How exact shares are, the benches measure.
#[track_caller]
pub fn settles(what: &str, expected: &RangeInclusive<u64>, mut look: impl FnMut() -> u64) -> u64 {
    let mut seen = Vec::with_capacity(LOOKS);
    let (begin, mut judged) = (Instant::now(), 0);
    while judged < LOOKS && begin.elapsed() < PATIENCE {
        let (began, waited) = (Instant::now(), waited_for_cpus());
        let found = look();
        if expected.contains(&found) {
            return found;
        }
        seen.push(found);
        let waited = waited_for_cpus().saturating_sub(waited);
        judged += usize::from(waited < began.elapsed() / 10);
    }
    panic!("{what}: {seen:?}, none of them in {expected:?}");
}

/// How long processes of this machine have waited for a CPU in all; 0 where the kernel does not tell
/// (Documentation/accounting/psi.rst).
fn waited_for_cpus() -> Duration {
    let text = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("some "));
    let total = line.and_then(|line| line.split("total=").nth(1)?.trim().parse().ok());
    Duration::from_micros(total.unwrap_or(0))
}
