//! Warnings and their ages: since when something stands, or when it was first and last seen and how often. Pure.
//!
//! What stands ends when it is over. What happened ends a time after it last did ([`PAST`], [`GRAVE`]): a warning that
//! never goes is one that nobody reads. The audit trail keeps it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tessera_model::time_format::ago;

/// How long something is shown after it last happened, milliseconds.
pub const PAST: i64 = 3_600_000;
/// The same for what somebody must look into: damage at the start, tampering.
pub const GRAVE: i64 = 24 * PAST;
/// Ages below that are not said, milliseconds.
const NOW: i64 = 60_000;

/// Something that needs attention.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Warning {
    /// A sentence: what, and what to do.
    pub text: String,
    /// Since when; 0 where that is not known.
    pub since_unix_ms: i64,
    /// The last time it was seen; 0 where it stands.
    pub last_unix_ms: i64,
    /// How often; 0 where it stands.
    pub times: u64,
}

impl Warning {
    /// The sentence with its age.
    pub fn aged(&self, now_unix_ms: i64) -> String {
        let is_old = |at: i64| now_unix_ms.saturating_sub(at) >= NOW;
        let times = match self.times {
            0 if !is_old(self.since_unix_ms) => return self.text.clone(),
            0 => return format!("{} (for {})", self.text, ago(self.since_unix_ms, now_unix_ms)),
            1 => "once".to_owned(),
            n => format!("{n} times"),
        };
        match is_old(self.last_unix_ms) {
            false => format!("{} ({times})", self.text),
            true => {
                format!("{} ({times}, last {} ago)", self.text, ago(self.last_unix_ms, now_unix_ms))
            }
        }
    }
}

/// Something to warn of, as a look finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is about, which stays the same while its figures change.
    pub key: String,
    pub text: String,
    /// How often it happened since its subject began; 0 for what stands.
    pub times: u64,
    /// How long it is shown after it last happened, milliseconds.
    pub shown: i64,
}

/// When each was first and last seen. It remembers what the last look found, and no more.
#[derive(Debug, Default)]
pub struct Ages {
    seen: BTreeMap<String, (u64, i64, i64)>,
}

impl Ages {
    /// Takes what a look found; the warnings that are to be shown, in the same order.
    pub fn update(&mut self, found: Vec<Found>, now_unix_ms: i64) -> Vec<Warning> {
        let mut before = std::mem::take(&mut self.seen);
        let mut shown = Vec::with_capacity(found.len());
        for Found { key, text, times, shown: kept } in found {
            let (count, since, mut last) =
                before.remove(&key).unwrap_or((0, now_unix_ms, now_unix_ms));
            // A counter that goes back was reset, and has counted since.
            if times != count {
                last = now_unix_ms;
            }
            // A clock that was set back makes nothing older than it is.
            let (since, last) = (since.min(now_unix_ms), last.min(now_unix_ms));
            self.seen.insert(key, (times, since, last));
            if times == 0 {
                shown.push(Warning { text, since_unix_ms: since, last_unix_ms: 0, times });
            } else if now_unix_ms - last < kept {
                shown.push(Warning { text, since_unix_ms: since, last_unix_ms: last, times });
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(key: &str, times: u64) -> Found {
        Found { key: key.into(), text: format!("{key} happens"), times, shown: PAST }
    }

    #[test]
    fn what_stands_has_an_age_until_it_is_over() {
        let mut ages = Ages::default();
        assert_eq!(ages.update(vec![found("a", 0)], 1000)[0].since_unix_ms, 1000);
        let warning = ages.update(vec![found("a", 0)], 1000 + 2 * PAST).remove(0);
        assert_eq!(warning.since_unix_ms, 1000, "what stands does not end by itself");
        assert_eq!(warning.aged(1000 + 2 * PAST), "a happens (for 2h 0m)");
        assert!(ages.update(Vec::new(), 1000 + 2 * PAST).is_empty());
        assert_eq!(ages.update(vec![found("a", 0)], 3 * PAST)[0].since_unix_ms, 3 * PAST);
    }

    #[test]
    fn what_happened_ends_and_comes_back_when_it_happens_again() {
        let mut ages = Ages::default();
        let warning = ages.update(vec![found("a", 3)], 0).remove(0);
        assert_eq!(warning.aged(0), "a happens (3 times)");
        let warning = ages.update(vec![found("a", 3)], PAST - 1).remove(0);
        assert_eq!(warning.aged(12 * 60_000), "a happens (3 times, last 12m 0s ago)");
        assert!(ages.update(vec![found("a", 3)], PAST).is_empty());
        let warning = ages.update(vec![found("a", 4)], 2 * PAST).remove(0);
        assert_eq!((warning.since_unix_ms, warning.last_unix_ms), (0, 2 * PAST));
        assert_eq!(warning.aged(2 * PAST), "a happens (4 times)");
    }

    proptest! {
        #[test]
        fn ages_are_within_the_looks_and_memory_within_the_last(
            // Clocks before 1970 among them: a node without one starts there, and goes back.
            start in -2 * PAST..2 * PAST,
            looks in prop::collection::vec(
                (prop::collection::vec((0u8..6, 0u64..4), 0..6), -PAST..2 * PAST), 1..40),
        ) {
            let (mut ages, mut now) = (Ages::default(), start);
            for (found_now, step) in looks {
                now += step;
                let mut unique = BTreeMap::new();
                unique.extend(found_now);
                let list: Vec<Found> =
                    unique.iter().map(|(key, times)| found(&key.to_string(), *times)).collect();
                let (count, standing) =
                    (list.len(), list.iter().filter(|one| one.times == 0).count());
                let shown = ages.update(list, now);
                prop_assert!(ages.seen.len() == count && shown.len() <= count);
                prop_assert_eq!(shown.iter().filter(|one| one.times == 0).count(), standing);
                for warning in shown {
                    let Warning { since_unix_ms: since, last_unix_ms: last, times, .. } = warning;
                    prop_assert!(since <= now);
                    match times {
                        0 => prop_assert_eq!(last, 0, "what stands has no last time"),
                        _ => prop_assert!(since <= last && last <= now && now - last < PAST),
                    }
                }
            }
        }
    }
}
