//! What happened from one answer of the plugin to the next. Pure.

use std::collections::HashMap;

use tessera_view::status::{Allocation, Status};

/// An allocation's counters over an interval. `None` where they cannot be compared: the first answer, a
/// new generation, a plugin that started in between.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Part of the time that it waited for a lease, 0 to 1.
    pub waited: Option<f64>,
    /// Requests refused because of the quota, a second.
    pub refusals: Option<f64>,
    /// Requests refused by the driver, a second.
    pub driver_refusals: Option<f64>,
    /// Kernel and graph launches, a second.
    pub launches: Option<f64>,
}

/// Rates by allocation id, from `before` to `after`, which came `seconds` later by a clock that does not
/// jump.
pub(super) fn between(before: &Status, after: &Status, seconds: f64) -> HashMap<String, Rates> {
    let old: HashMap<&str, &Allocation> =
        before.allocations.iter().map(|a| (a.id.as_str(), a)).collect();
    let same_plugin = started(before) == started(after);
    let rates = |new: &Allocation| {
        let old = old.get(new.id.as_str()).filter(|old| old.generation == new.generation);
        let Some(old) = old.filter(|_| seconds > 0.0) else { return Rates::default() };
        let count = |of: fn(&Allocation) -> u64| rate(of(old), of(new), seconds);
        let waited = match (&old.compute, &new.compute) {
            // The arbiter counts from the plugin's start.
            (Some(old), Some(new)) if same_plugin => rate(old.waited_us, new.waited_us, seconds),
            _ => None,
        };
        Rates {
            waited: waited.map(|us| (us / 1e6).min(1.0)),
            refusals: count(|a| a.refusals),
            driver_refusals: count(|a| a.driver_refusals),
            launches: count(|a| a.launches),
        }
    };
    after.allocations.iter().map(|new| (new.id.clone(), rates(new))).collect()
}

fn started(status: &Status) -> (u32, i64) {
    (status.plugin.pid, status.plugin.started_unix_ms)
}

/// A counter that a container may write: one that went back says nothing.
#[allow(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(before: u64, after: u64, seconds: f64) -> Option<f64> {
    Some(after.checked_sub(before)? as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use tessera_view::status::Plugin;
    use tessera_view::tenant::Compute;

    use super::*;

    fn status(pid: u32, generation: u64, launches: u64, waited_us: u64) -> Status {
        Status {
            plugin: Plugin { pid, ..Plugin::default() },
            allocations: vec![Allocation {
                id: "a".into(),
                generation,
                launches,
                refusals: launches / 10,
                compute: Some(Compute { waited_us, ..Compute::default() }),
                ..Allocation::default()
            }],
            ..Status::default()
        }
    }

    #[test]
    fn counters_become_rates() {
        let rates = between(&status(1, 1, 100, 0), &status(1, 1, 300, 500_000), 2.0)["a"];
        assert_eq!(rates.launches, Some(100.0));
        assert_eq!(rates.refusals, Some(10.0));
        assert_eq!(rates.waited, Some(0.25));
    }

    #[test]
    fn what_cannot_be_compared_has_no_rate() {
        let none = Rates::default();
        assert_eq!(between(&status(1, 1, 9, 9), &status(1, 2, 9, 9), 1.0)["a"], none, "generation");
        assert_eq!(between(&Status::default(), &status(1, 1, 9, 9), 1.0)["a"], none, "new");
        assert_eq!(between(&status(1, 1, 9, 9), &status(1, 1, 9, 9), 0.0)["a"], none, "no time");
        let restarted = between(&status(1, 1, 10, 90), &status(2, 1, 20, 95), 1.0)["a"];
        assert_eq!((restarted.waited, restarted.launches), (None, Some(10.0)));
        let back = between(&status(1, 1, 100, 90), &status(1, 1, 20, 95), 1.0)["a"];
        assert_eq!(back.launches, None, "a counter that went back");
    }
}
