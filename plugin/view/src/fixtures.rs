//! Made-up fleets of any size: for tests, benches and the sandbox. The same layout and instant always give the same
//! figures, and figures change from second to second: everything is a function of the seed, a name and the time.

mod advice;
mod chance;
mod fleet;
mod history;
mod names;

use std::collections::BTreeSet;

/// How large a fleet is, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub nodes: usize,
    pub gpus: usize,
    /// Tenants of each GPU, at most; a GPU in five has fewer.
    pub tenants: usize,
    /// Other seeds give other fleets.
    pub seed: u64,
    /// Sick and cordoned GPUs, nodes that do not answer, refusals.
    pub trouble: bool,
    /// Pods and namespaces with names that the API server would refuse: markup, controls, marks of direction, length.
    pub hostile: bool,
    /// The earliest instant of histories.
    pub since_unix_ms: i64,
}

impl Default for Layout {
    fn default() -> Self {
        Layout {
            nodes: 3,
            gpus: 2,
            tenants: 4,
            seed: 1,
            trouble: true,
            hostile: false,
            // 2026-11-16 00:00:00.
            since_unix_ms: 1_794_787_200_000,
        }
    }
}

/// A made-up fleet at an instant.
#[derive(Clone, Debug)]
pub struct MadeUp {
    layout: Layout,
    now_unix_ms: i64,
    away: BTreeSet<String>,
}

impl MadeUp {
    /// A fleet as it is at an instant; none is earlier than a day after its layout's `since_unix_ms`.
    pub fn new(layout: Layout, now_unix_ms: i64) -> Self {
        let earliest = layout.since_unix_ms.saturating_add(24 * HOUR_MS);
        MadeUp { layout, now_unix_ms: now_unix_ms.max(earliest), away: BTreeSet::new() }
    }

    /// Time passes.
    pub fn tick(&mut self, ms: u32) {
        self.now_unix_ms = self.now_unix_ms.saturating_add(i64::from(ms));
    }

    /// A node stops answering, or answers again.
    pub fn set_away(&mut self, node: &str, away: bool) {
        if away {
            self.away.insert(node.to_owned());
        } else {
            self.away.remove(node);
        }
    }

    /// Names of all nodes, in order.
    pub fn nodes(&self) -> impl Iterator<Item = String> + '_ {
        (0..self.layout.nodes).map(names::node)
    }
}

const HOUR_MS: i64 = 3_600_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Query;

    fn made(layout: Layout) -> MadeUp {
        let now = layout.since_unix_ms + 48 * HOUR_MS;
        MadeUp::new(layout, now)
    }

    #[test]
    fn a_fleet_is_the_same_each_time_and_changes_with_time() {
        let mut one = made(Layout::default());
        let first = one.fleet();
        assert_eq!(first, made(Layout::default()).fleet());
        assert_ne!(first, made(Layout { seed: 2, ..Layout::default() }).fleet());
        one.tick(2000);
        assert_ne!(first.nodes[0].view, one.fleet().nodes[0].view);
    }

    #[test]
    fn sums_agree() {
        let fleet = made(Layout { nodes: 20, gpus: 8, tenants: 10, ..Layout::default() }).fleet();
        for view in fleet.nodes.iter().filter_map(|entry| entry.view.as_ref()) {
            for gpu in &view.gpus {
                let uses =
                    || view.tenants.iter().flat_map(|t| &t.gpus).filter(|u| u.gpu_uuid == gpu.uuid);
                assert_eq!(
                    uses().map(|u| u.memory_limit_bytes).sum::<u64>(),
                    gpu.memory_limits_bytes
                );
                assert_eq!(
                    uses().map(|u| u.memory_charged_bytes).sum::<u64>(),
                    gpu.memory_charged_bytes
                );
                assert_eq!(uses().map(|u| u.cores_millis).sum::<u32>(), gpu.cores_millis);
                assert!(gpu.memory_used_bytes <= gpu.memory_total_bytes, "{gpu:?}");
                assert!(gpu.cores_millis <= 1000);
                for one in uses() {
                    assert!(one.memory_charged_bytes <= one.memory_limit_bytes, "{one:?}");
                    assert!(one.memory_peak_bytes <= one.memory_limit_bytes, "{one:?}");
                }
            }
        }
        assert_eq!(fleet.nodes.len(), 20);
        assert!(fleet.nodes.iter().any(|entry| !entry.answers), "trouble");
    }

    #[test]
    fn a_history_has_the_tenants_of_now_and_those_that_are_gone() {
        let made = made(Layout::default());
        let query = Query { since_unix_ms: made.now_unix_ms - HOUR_MS, ..Query::default() };
        let answer = made.history("", &query).unwrap();
        assert_eq!(answer.step_seconds, 10);
        let fleet = made.fleet();
        let live = fleet.nodes[0].view.as_ref().unwrap().tenants.len();
        assert_eq!(answer.tenants.iter().filter(|tenant| tenant.live).count(), live);
        assert!(answer.tenants.iter().any(|tenant| !tenant.live));
        assert_eq!(answer.tenants[0].points.len(), 360);
        // A GPU gives no more time than there is.
        for gpu in &answer.gpus {
            for (i, point) in gpu.points.iter().enumerate() {
                let got: f64 = answer
                    .tenants
                    .iter()
                    .filter(|t| t.live && t.gpu_uuid == gpu.gpu_uuid)
                    .filter_map(|t| t.points.get(i))
                    .map(|p| p.got_seconds)
                    .sum();
                assert!(got <= point.seconds + 1e-6, "{got} of {}", point.seconds);
            }
        }
        assert!(answer.events.is_sorted_by_key(|event| event.at_unix_ms));
        assert!(made.history("no-such-node", &query).is_none());
    }
}
