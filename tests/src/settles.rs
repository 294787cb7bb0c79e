//! Shares of time, judged on a machine that has other things to do.

use std::ops::RangeInclusive;

/// Looks per judgement.
const LOOKS: usize = 8;

/// Asserts that one of several looks lies within `expected`. A second in which this machine's CPUs were
/// elsewhere says nothing of what is tested, and what is wrong stays wrong. How exact shares are, the
/// benches measure.
///
/// # Panics
///
/// If none does: with all that was seen.
#[track_caller]
pub fn settles(what: &str, expected: &RangeInclusive<u64>, mut look: impl FnMut() -> u64) -> u64 {
    let mut seen = Vec::with_capacity(LOOKS);
    for _ in 0..LOOKS {
        let found = look();
        if expected.contains(&found) {
            return found;
        }
        seen.push(found);
    }
    panic!("{what}: {seen:?}, none of them in {expected:?}");
}
