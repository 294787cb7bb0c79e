//! What `top` shows: the last answer, its rates, order, filter, and what the keys did. Pure.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_view::tenant::{Tenant, Use};

use super::rates::{Rates, between, tenants};

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// Memory charged, the most first.
    #[default]
    Memory,
    /// GPU time used in the last ten seconds, the most first.
    Share,
    /// Part of the time that was waited, the most first.
    Waiting,
    /// Requests refused, the most first.
    Refusals,
    /// Namespace, pod and container.
    Name,
}

/// An allocation on one of its GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    pub node: &'a str,
    view: &'a Node,
    pub tenant: &'a Tenant,
    pub used: &'a Use,
    /// The first of its allocation, which has what belongs to the whole of it.
    pub is_first: bool,
    pub rates: Rates,
}

/// Nobody answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Silence {
    /// Since when, Unix milliseconds.
    pub since_unix_ms: i64,
    /// Why, as the system says.
    pub reason: String,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub fleet: Fleet,
    /// When it came, by a clock that does not jump; `None` before the first.
    at: Option<Duration>,
    /// From the answer before to this one.
    pub interval: Option<Duration>,
    /// By node and allocation id.
    rates: HashMap<(String, String), Rates>,
    pub sort: Sort,
    pub reverse: bool,
    pub filter: String,
    /// Only pods of this namespace; empty for all.
    pub namespace: String,
    /// UUIDs in full.
    pub wide: bool,
    /// The filter is being typed.
    pub editing: bool,
    pub paused: bool,
    pub help: bool,
    pub quit: bool,
    /// Rows that are scrolled past.
    pub scroll: usize,
    pub silence: Option<Silence>,
}

impl Model {
    pub fn new(sort: Sort, reverse: bool) -> Self {
        Model { sort, reverse, ..Model::default() }
    }

    /// Whether there was an answer yet.
    pub fn has_answer(&self) -> bool {
        self.at.is_some()
    }

    /// Whether it is of this node alone, and not of a cluster's.
    pub fn is_own(&self) -> bool {
        self.fleet.name.is_empty()
    }

    /// Takes an answer that came at `at`.
    pub fn take(&mut self, fleet: Fleet, at: Duration) {
        self.silence = None;
        if self.paused {
            return;
        }
        self.interval = self.at.and_then(|before| at.checked_sub(before)).filter(|d| !d.is_zero());
        self.rates = match self.interval {
            Some(interval) => between(&self.fleet, &fleet, interval.as_secs_f64()),
            None => HashMap::new(),
        };
        self.fleet = fleet;
        self.at = Some(at);
    }

    /// Takes that there was no answer. What is known stays.
    pub fn miss(&mut self, reason: String, now_unix_ms: i64) {
        let since_unix_ms = self.silence.as_ref().map_or(now_unix_ms, |s| s.since_unix_ms);
        self.silence = Some(Silence { since_unix_ms, reason });
    }

    /// The rows to show, in order. The GPUs of an allocation stay together.
    pub fn shown(&self) -> Vec<Row<'_>> {
        let wanted = self.filter.to_lowercase();
        let groups = self.all().map(|(node, view, tenant)| -> Vec<Row<'_>> {
            let key = (node.to_owned(), tenant.id.clone());
            let rates = self.rates.get(&key).copied().unwrap_or_default();
            let row = |(i, used)| Row { node, view, tenant, used, is_first: i == 0, rates };
            tenant.gpus.iter().enumerate().map(row).collect()
        });
        let is_wanted = |group: &Vec<Row<'_>>| {
            !group.is_empty() && (wanted.is_empty() || group.iter().any(|row| row.matches(&wanted)))
        };
        let mut groups: Vec<Vec<Row<'_>>> = groups.filter(is_wanted).collect();
        groups.sort_by(|a, b| {
            let order = self.order(a, b);
            let order = if self.reverse { order.reverse() } else { order };
            // Whatever is equal keeps its place from one refresh to the next.
            order.then_with(|| by_name(a, b))
        });
        groups.into_iter().flatten().collect()
    }

    /// Tenants of the namespace, whatever the filter.
    fn all(&self) -> impl Iterator<Item = (&str, &Node, &Tenant)> {
        tenants(&self.fleet).filter(|(_, _, tenant)| {
            self.namespace.is_empty() || tenant.namespace == self.namespace
        })
    }

    /// How many tenants there are, whatever the filter.
    pub fn tenants(&self) -> usize {
        self.all().filter(|(_, _, tenant)| !tenant.gpus.is_empty()).count()
    }

    fn order(&self, a: &[Row<'_>], b: &[Row<'_>]) -> Ordering {
        let most =
            |group: &[Row<'_>], of: fn(&Row<'_>) -> f64| group.iter().map(of).fold(0.0, f64::max);
        let by = |of: fn(&Row<'_>) -> f64| most(b, of).total_cmp(&most(a, of));
        #[allow(clippy::cast_precision_loss, reason = "only compared")]
        match self.sort {
            Sort::Memory => by(|row| row.used.memory_used_bytes as f64),
            Sort::Share => by(|row| row.used_10s_millis().flatten().unwrap_or(0).into()),
            Sort::Waiting => by(|row| row.rates.waited.unwrap_or(0.0)),
            Sort::Refusals => by(|row| row.tenant.refusals as f64),
            Sort::Name => by_name(a, b),
        }
    }
}

fn by_name(a: &[Row<'_>], b: &[Row<'_>]) -> Ordering {
    let key = |group: &[Row<'_>]| {
        group.first().map(|row| (row.name(), row.tenant.container.clone(), row.tenant.id.clone()))
    };
    key(a).cmp(&key(b))
}

impl Row<'_> {
    fn matches(&self, wanted: &str) -> bool {
        let Tenant { container, id, .. } = self.tenant;
        [&self.name(), container, self.node, &self.used.gpu_uuid, id]
            .into_iter()
            .any(|text| text.to_lowercase().contains(wanted))
    }

    /// `namespace/pod` with other pods that hold it, or the id where kubelet has not named it.
    pub fn name(&self) -> String {
        let Tenant { id, namespace, pod, other_holders, .. } = self.tenant;
        // Pods that share a claim are of one namespace.
        let pods = other_holders.iter().filter_map(|holder| holder.split('/').nth(1));
        let pods: BTreeSet<&str> = pods.filter(|other| other != pod).collect();
        let others: String = pods.iter().map(|pod| format!(", {pod}")).collect();
        if pod.is_empty() { id.clone() } else { format!("{namespace}/{pod}{others}") }
    }

    /// NVML's index; `?` where the GPU is gone.
    pub fn gpu_index(&self) -> String {
        let gpu = self.view.gpus.iter().find(|gpu| gpu.uuid == self.used.gpu_uuid);
        gpu.map_or_else(|| "?".to_owned(), |gpu| gpu.index.to_string())
    }

    /// The second `None`: unknown.
    pub fn used_10s_millis(&self) -> Option<Option<u32>> {
        self.tenant.compute.as_ref().map(|one| one.used_10s_millis)
    }

    pub fn got_10s_millis(&self) -> Option<u32> {
        self.tenant.compute.as_ref().map(|one| one.got_10s_millis)
    }

    /// It waits for much of the time and gets less than it asked for.
    pub fn is_short(&self) -> bool {
        let below = |got: u32| u64::from(got) * 10 < u64::from(self.used.cores_millis) * 9;
        self.rates.waited.is_some_and(|waited| waited > 0.5)
            && self.got_10s_millis().is_some_and(below)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
