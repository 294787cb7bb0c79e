//! `[compute]`, `[health]`, `[history]` and `[advice]`: how GPU time is divided, when a GPU is no longer sold, what is
//! remembered and what is advised by that.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::MIB;
use crate::form::{boolean, bytes, money, parsed, time, whole, word};
use crate::table::{mapping, table};
use crate::words::{XIDS, XidAction};

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(minutes * 60)
}

const fn hours(hours: u64) -> Duration {
    minutes(hours * 60)
}

/// Of leases.
const SHORTEST: Duration = millis(1);
const LONGEST: Duration = millis(1000);

table! {
    pub struct Leases {
        /// How long a lease of the GPU lasts while other tenants wait.
        quantum: Duration = millis(5), time(SHORTEST, LONGEST);
        /// Shortest lease, used where many tenants wait; at most `compute.quantum`.
        quantum_min: Duration = millis(2), time(SHORTEST, LONGEST);
        /// Longest lease, used where draining takes long; at least `compute.quantum`.
        quantum_max: Duration = millis(20), time(SHORTEST, LONGEST);
        /// Most operations (kernels, graphs) that a tenant may have in flight while its lease can end.
        window: u32 = 64, whole(2..=1 << 16);
        /// Most predicted work in flight then; two operations are always allowed. Less ends leases more
        /// precisely, more keeps the GPU busier.
        window_time: Duration = millis(1), time(SHORTEST, LONGEST);
        /// Most GPU time that is owed to a tenant that returns from a pause.
        credit: Duration = millis(20), time(SHORTEST, LONGEST);
        /// Shortest time to drain before the next tenant may use the GPU beside it; at most
        /// `compute.drain_max`.
        drain_min: Duration = millis(20), time(SHORTEST, LONGEST);
        /// Longest such time. Between the two it is three times the longest recent drain.
        drain_max: Duration = millis(200), time(SHORTEST, LONGEST);
    }
}

/// Of health.
const BRIEF: Duration = millis(100);
const DAY: Duration = hours(24);

table! {
    pub struct Health {
        /// How often each GPU is asked whether it answers.
        probe_interval: Duration = Duration::from_secs(10), time(BRIEF, DAY);
        /// Unanswered probes in a row after which a GPU counts as lost.
        probes_failed: u32 = 3, whole(1..=100);
        /// Answered probes in a row after which its recovery begins.
        probes_passed: u32 = 3, whole(1..=100);
        /// How long a recovering GPU must be without trouble before it is sold again. Each relapse doubles it.
        recovery: Duration = minutes(5), time(BRIEF, DAY);
        /// Longest recovery time; at least `health.recovery`.
        recovery_max: Duration = hours(1), time(BRIEF, DAY);
        /// Suspicions within `health.suspect_window` that make a GPU unhealthy.
        suspect_count: u32 = 3, whole(1..=100);
        /// How long a suspicion counts. A suspect GPU is sold, but preferred last.
        suspect_window: Duration = minutes(10), time(BRIEF, DAY);
        /// What an XID means that `health.xid` does not name: nothing, a suspicion, unhealthy until the GPU has
        /// been quiet, or until the driver shows a reset.
        xid_default: XidAction = XidAction::Suspect, word();
        /// What single XIDs mean: changes rows of the [built-in table](health.md#xids).
        xid: BTreeMap<u32, XidAction> = XIDS.iter().map(|(xid, action, _)| (*xid, *action)).collect(),
            mapping((xid, r"^\+?[0-9]+$"), word(), "table: XID = as `health.xid_default`", true);
    }
}

fn xid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("\"{text}\" is no XID; write 79 = …"))
}

impl Health {
    /// What an XID means.
    pub fn action(&self, xid: u64) -> XidAction {
        let named = u32::try_from(xid).ok().and_then(|xid| self.xid.get(&xid));
        named.copied().unwrap_or(self.xid_default)
    }
}

table! {
    pub struct History {
        /// Whether the history is recorded, which `tessera history`, `recommend` and `waste` need. What was
        /// recorded stays.
        enabled: bool = true, boolean();
        /// Most bytes in use in the file, which may be twice as long; the oldest of the finest buckets go first.
        size_bytes as "size": u64 = 8 * MIB,
            bytes(4 * MIB, "must be at least 4Mi; 8Mi keep 64 busy tenants");
        /// How long buckets of 10 seconds are kept.
        keep_10s: Duration = hours(6), time(hours(1), hours(7 * 24));
        /// How long buckets of 5 minutes are kept; no less than `history.keep_10s`.
        keep_5m: Duration = hours(7 * 24), time(hours(24), hours(90 * 24));
        /// How long buckets of one hour are kept; no less than `history.keep_5m`.
        keep_1h: Duration = hours(35 * 24), time(hours(7 * 24), hours(800 * 24));
    }
}

impl History {
    /// Seconds that buckets of 10 s, 5 min and 1 h are kept.
    pub fn keep_seconds(&self) -> [u32; 3] {
        [self.keep_10s, self.keep_5m, self.keep_1h]
            .map(|keep| u32::try_from(keep.as_secs()).unwrap_or(u32::MAX))
    }
}

table! {
    pub struct Advice {
        /// Part of the observed time that the advised memory covers, percent. No less than the highest use is
        /// advised.
        memory_percentile: u32 = 99, whole(50..=100);
        /// What is added to that, percent.
        memory_margin: u32 = 15, whole(0..=400);
        /// Part of the observed time that the advised share covers, percent, of GPU time used and waited for.
        cores_percentile: u32 = 95, whole(50..=100);
        /// What is added to that, percent.
        cores_margin: u32 = 15, whole(0..=400);
        /// How long a tenant must have had no work on a GPU to count as idle.
        idle_after: Duration = hours(4), time(minutes(1), hours(31 * 24));
        /// How far back advice looks where the question does not say.
        window: Duration = hours(7 * 24), time(hours(1), hours(366 * 24));
        /// What a whole GPU costs for an hour. 0: no costs are shown.
        price_millis_per_gpu_hour as "price_per_gpu_hour": u64 = 0, money();
        /// The price's currency, as it is printed.
        currency: String = "USD".into(), parsed(
            currency, String::clone, "1 to 8 letters",
            || json!({ "pattern": r"^[A-Za-z]{1,8}$" }),
        );
    }
}

fn currency(text: &str) -> Result<String, String> {
    let fits = (1..=8).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphabetic());
    fits.then(|| text.to_owned())
        .ok_or_else(|| format!("\"{text}\" is no currency; write 1 to 8 letters, such as \"EUR\""))
}

impl Advice {
    /// The price of a whole GPU for an hour, in [`Advice::currency`].
    pub fn price_per_gpu_hour(&self) -> f64 {
        // A price beyond 2^53 thousandths is nobody's.
        self.price_millis_per_gpu_hour as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn the_file_changes_single_xids_and_the_table_stays() {
        let text = "[health]\nxid = { 94 = \"unhealthy\", 999 = \"ignore\" }\nrecovery = \"2m\"";
        let health = Config::parse(text).unwrap().health;
        assert_eq!(health.action(94), XidAction::Unhealthy);
        assert_eq!(health.action(999), XidAction::Ignore);
        assert_eq!(health.action(79), XidAction::UntilReset);
        assert_eq!(health.action(31), XidAction::Ignore);
        assert_eq!(health.action(1 << 40), XidAction::Suspect);
        assert_eq!(health.recovery, Duration::from_secs(120));
    }

    #[test]
    fn a_price_is_a_number() {
        for (text, millis) in [("2", 2000), ("2.5", 2500), ("\"0.125\"", 125), ("0", 0)] {
            let config = Config::parse(&format!("[advice]\nprice_per_gpu_hour = {text}")).unwrap();
            assert_eq!(config.advice.price_millis_per_gpu_hour, millis, "{text}");
        }
        assert!((Advice::default().price_per_gpu_hour()).abs() < f64::EPSILON);
    }
}
