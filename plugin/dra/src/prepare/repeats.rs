//! What the log says of calls that fail again and again: kubelet repeats each some seconds later, for as long as
//! the pod waits. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the same failure of the same claim is counted instead of logged.
const QUIET: Duration = Duration::from_secs(300);
/// Claims remembered; beyond, the one that was logged longest ago is forgotten.
const REMEMBERED: usize = 256;

/// The failures that were logged lately, by call and the claim's UID.
#[derive(Debug, Default)]
pub(super) struct Repeats(BTreeMap<(&'static str, String), Logged>);

#[derive(Debug)]
struct Logged {
    error: String,
    at: Instant,
    /// Repetitions since.
    more: u64,
}

impl Repeats {
    /// Whether to log this failure now: the number of repetitions since it was last logged.
    pub(super) fn failed(
        &mut self,
        call: &'static str,
        uid: &str,
        error: &str,
        now: Instant,
    ) -> Option<u64> {
        let key = (call, uid.to_owned());
        let mut more = 0;
        if let Some(logged) = self.0.get_mut(&key).filter(|logged| logged.error == error) {
            if now.saturating_duration_since(logged.at) < QUIET {
                logged.more += 1;
                return None;
            }
            more = logged.more + 1;
        } else if self.0.len() >= REMEMBERED && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by_key(|(_, logged)| logged.at);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.0.remove(&oldest);
            }
        }
        self.0.insert(key, Logged { error: error.to_owned(), at: now, more: 0 });
        Some(more)
    }

    /// The call succeeded: its next failure is news.
    pub(super) fn succeeded(&mut self, call: &'static str, uid: &str) {
        // Most calls succeed, and there is nothing to forget.
        if !self.0.is_empty() {
            self.0.remove(&(call, uid.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_logged_at_once_and_its_repetitions_every_five_minutes_with_their_number() {
        let (mut repeats, begin) = (Repeats::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(repeats.failed("prepared", "u", "full", begin), Some(0));
        for seconds in (6..300).step_by(6) {
            assert_eq!(repeats.failed("prepared", "u", "full", at(seconds)), None);
        }
        assert_eq!(repeats.failed("prepared", "u", "full", at(300)), Some(50));
        assert_eq!(repeats.failed("prepared", "u", "full", at(306)), None);
    }

    #[test]
    fn another_reason_another_claim_and_a_failure_after_a_success_are_news() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        assert_eq!(repeats.failed("prepared", "u", "2 GiB held", now), Some(0));
        assert_eq!(repeats.failed("prepared", "u", "3 GiB held", now), Some(0));
        assert_eq!(repeats.failed("prepared", "v", "3 GiB held", now), Some(0));
        assert_eq!(repeats.failed("unprepared", "u", "3 GiB held", now), Some(0));
        repeats.succeeded("prepared", "u");
        assert_eq!(repeats.failed("prepared", "u", "3 GiB held", now), Some(0));
        assert_eq!(repeats.failed("prepared", "v", "3 GiB held", now), None);
    }

    #[test]
    fn claims_without_end_are_not_remembered_without_end() {
        let (mut repeats, begin) = (Repeats::default(), Instant::now());
        for n in 0..10 * REMEMBERED as u64 {
            let now = begin + Duration::from_millis(n);
            assert_eq!(repeats.failed("prepared", &n.to_string(), "full", now), Some(0));
        }
        assert_eq!(repeats.0.len(), REMEMBERED);
    }
}
