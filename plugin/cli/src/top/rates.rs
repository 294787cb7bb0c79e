//! What happened from one answer of the plugin to the next. Pure.

use std::collections::HashMap;

use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_view::tenant::Tenant;

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

/// Rates by node and allocation id, from `before` to `after`, which came `seconds` later by a clock that does not jump.
pub(super) fn between(
    before: &Fleet,
    after: &Fleet,
    seconds: f64,
) -> HashMap<(String, String), Rates> {
    let old: HashMap<(&str, &str), (&Node, &Tenant)> =
        tenants(before).map(|(name, node, one)| ((name, one.id.as_str()), (node, one))).collect();
    let rates = |name: &str, node: &Node, new: &Tenant| {
        let old = old.get(&(name, new.id.as_str())).filter(|_| seconds > 0.0);
        let Some((old_node, old)) = old.filter(|(_, old)| old.generation == new.generation) else {
            return Rates::default();
        };
        let same_plugin = old_node.plugin.started_unix_ms == node.plugin.started_unix_ms;
        let count = |of: fn(&Tenant) -> u64| rate(of(old), of(new), seconds);
        let waited = match (&old.compute, &new.compute) {
            // The arbiter counts from the plugin's start.
            (Some(old), Some(new)) if same_plugin => rate(old.waited_us, new.waited_us, seconds),
            _ => None,
        };
        Rates {
            waited: waited.map(|us| (us / 1e6).min(1.0)),
            refusals: count(|one| one.refusals),
            driver_refusals: count(|one| one.driver_refusals),
            launches: count(|one| one.launches),
        }
    };
    let key = |name: &str, one: &Tenant| (name.to_owned(), one.id.clone());
    tenants(after).map(|(name, node, one)| (key(name, one), rates(name, node, one))).collect()
}

/// All tenants with their nodes.
pub(super) fn tenants(fleet: &Fleet) -> impl Iterator<Item = (&str, &Node, &Tenant)> {
    let views =
        fleet.nodes.iter().filter_map(|entry| Some((entry.node.as_str(), entry.view.as_ref()?)));
    views.flat_map(|(name, node)| node.tenants.iter().map(move |tenant| (name, node, tenant)))
}

/// A counter that a container may write: one that went back says nothing.
#[allow(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(before: u64, after: u64, seconds: f64) -> Option<f64> {
    Some(after.checked_sub(before)? as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use tessera_view::fleet::Entry;
    use tessera_view::node::Plugin;
    use tessera_view::tenant::Compute;

    use super::*;

    fn fleet(started_unix_ms: i64, generation: u64, launches: u64, waited_us: u64) -> Fleet {
        let tenant = Tenant {
            id: "a".into(),
            generation,
            launches,
            refusals: launches / 10,
            compute: Some(Compute { waited_us, ..Compute::default() }),
            ..Tenant::default()
        };
        let plugin = Plugin { started_unix_ms, ..Plugin::default() };
        let view = Some(Node { plugin, tenants: vec![tenant], ..Node::default() });
        Fleet { nodes: vec![Entry { view, ..Entry::default() }], ..Fleet::default() }
    }

    fn of_a(before: &Fleet, after: &Fleet, seconds: f64) -> Rates {
        between(before, after, seconds)[&(String::new(), "a".to_owned())]
    }

    #[test]
    fn counters_become_rates() {
        let rates = of_a(&fleet(1, 1, 100, 0), &fleet(1, 1, 300, 500_000), 2.0);
        assert_eq!(rates.launches, Some(100.0));
        assert_eq!(rates.refusals, Some(10.0));
        assert_eq!(rates.waited, Some(0.25));
    }

    #[test]
    fn what_cannot_be_compared_has_no_rate() {
        let none = Rates::default();
        assert_eq!(of_a(&fleet(1, 1, 9, 9), &fleet(1, 2, 9, 9), 1.0), none, "generation");
        assert_eq!(of_a(&Fleet::default(), &fleet(1, 1, 9, 9), 1.0), none, "new");
        assert_eq!(of_a(&fleet(1, 1, 9, 9), &fleet(1, 1, 9, 9), 0.0), none, "no time");
        let restarted = of_a(&fleet(1, 1, 10, 90), &fleet(2, 1, 20, 95), 1.0);
        assert_eq!((restarted.waited, restarted.launches), (None, Some(10.0)));
        let back = of_a(&fleet(1, 1, 100, 90), &fleet(1, 1, 20, 95), 1.0);
        assert_eq!(back.launches, None, "a counter that went back");
    }
}
