//! What `top` shows: the last answer, its rates, order, filter, and what the keys did. Pure.

use std::cmp::Ordering;
use std::collections::BTreeSet;
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
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    pub node: String,
    pub id: String,
    /// The first of its allocation, which has what belongs to the whole of it.
    pub first: bool,
    /// `namespace/pod`, or the id where kubelet has not named it.
    pub name: String,
    pub container: String,
    /// NVML's index; `?` where the GPU is gone. In a wide view its UUID.
    pub gpu: String,
    pub gpu_uuid: String,
    pub used: u64,
    pub limit: u64,
    pub asked_millis: u32,
    pub policy: String,
    /// The second `None`: unknown.
    pub used_10s_millis: Option<Option<u32>>,
    pub got_10s_millis: Option<u32>,
    pub gate: String,
    pub state: String,
    pub refusals: u64,
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
    rows: Vec<Row>,
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
        let rates = match self.interval {
            Some(interval) => between(&self.fleet, &fleet, interval.as_secs_f64()),
            None => Default::default(),
        };
        let is_in = |(_, _, tenant): &(&str, &Node, &Tenant)| {
            self.namespace.is_empty() || tenant.namespace == self.namespace
        };
        let row = |(node, view, tenant): (&str, &Node, &Tenant)| {
            let rates = rates.get(&(node.to_owned(), tenant.id.clone())).copied();
            rows(node, view, tenant, rates.unwrap_or_default(), self.wide)
        };
        self.rows = tenants(&fleet).filter(is_in).flat_map(row).collect();
        self.fleet = fleet;
        self.at = Some(at);
    }

    /// Takes that there was no answer. What is known stays.
    pub fn miss(&mut self, reason: String, now_unix_ms: i64) {
        let since_unix_ms = self.silence.as_ref().map_or(now_unix_ms, |s| s.since_unix_ms);
        self.silence = Some(Silence { since_unix_ms, reason });
    }

    /// The rows to show, in order. The GPUs of an allocation stay together.
    pub fn shown(&self) -> Vec<&Row> {
        let wanted = self.filter.to_lowercase();
        let mut groups: Vec<&[Row]> = self
            .rows
            .chunk_by(|a, b| (&a.node, &a.id) == (&b.node, &b.id))
            .filter(|group| wanted.is_empty() || group.iter().any(|row| row.matches(&wanted)))
            .collect();
        groups.sort_by(|a, b| {
            let order = self.order(a, b);
            let order = if self.reverse { order.reverse() } else { order };
            // Whatever is equal keeps its place from one refresh to the next.
            order.then_with(|| by_name(a, b))
        });
        groups.into_iter().flatten().collect()
    }

    /// How many tenants there are, whatever the filter.
    pub fn tenants(&self) -> usize {
        self.rows.iter().filter(|row| row.first).count()
    }

    fn order(&self, a: &[Row], b: &[Row]) -> Ordering {
        let most = |group: &[Row], of: fn(&Row) -> f64| group.iter().map(of).fold(0.0, f64::max);
        let by = |of: fn(&Row) -> f64| most(b, of).total_cmp(&most(a, of));
        #[allow(clippy::cast_precision_loss, reason = "only compared")]
        match self.sort {
            Sort::Memory => by(|row| row.used as f64),
            Sort::Share => by(|row| row.used_10s_millis.flatten().unwrap_or(0).into()),
            Sort::Waiting => by(|row| row.rates.waited.unwrap_or(0.0)),
            Sort::Refusals => by(|row| row.refusals as f64),
            Sort::Name => by_name(a, b),
        }
    }
}

fn by_name(a: &[Row], b: &[Row]) -> Ordering {
    let key = |group: &[Row]| -> Option<(String, String, String)> {
        group.first().map(|row| (row.name.clone(), row.container.clone(), row.id.clone()))
    };
    key(a).cmp(&key(b))
}

impl Row {
    fn matches(&self, wanted: &str) -> bool {
        [&self.name, &self.container, &self.node, &self.gpu_uuid, &self.id]
            .into_iter()
            .any(|text| text.to_lowercase().contains(wanted))
    }

    /// It waits for much of the time and gets less than it asked for.
    pub fn is_short(&self) -> bool {
        let below = |got: u32| u64::from(got) * 10 < u64::from(self.asked_millis) * 9;
        self.rates.waited.is_some_and(|waited| waited > 0.5)
            && self.got_10s_millis.is_some_and(below)
    }
}

fn rows(node: &str, view: &Node, tenant: &Tenant, rates: Rates, wide: bool) -> Vec<Row> {
    let compute = tenant.compute.as_ref();
    // Pods that share a claim are of one namespace.
    let pods = tenant.other_holders.iter().filter_map(|holder| holder.split('/').nth(1));
    let pods: BTreeSet<&str> = pods.filter(|pod| *pod != tenant.pod).collect();
    let others: String = pods.iter().map(|pod| format!(", {pod}")).collect();
    let gpu = |uuid: &str| match view.gpus.iter().find(|gpu| gpu.uuid == uuid) {
        _ if wide => uuid.to_owned(),
        Some(gpu) => gpu.index.to_string(),
        None => "?".to_owned(),
    };
    let row = |(i, used): (usize, &Use)| Row {
        node: node.to_owned(),
        id: tenant.id.clone(),
        first: i == 0,
        name: match tenant.pod.as_str() {
            "" => tenant.id.clone(),
            pod => format!("{}/{pod}{others}", tenant.namespace),
        },
        container: tenant.container.clone(),
        gpu: gpu(&used.gpu_uuid),
        gpu_uuid: used.gpu_uuid.clone(),
        used: used.memory_used_bytes,
        limit: used.memory_limit_bytes,
        asked_millis: used.cores_millis,
        policy: used.policy.name().to_owned(),
        used_10s_millis: compute.map(|one| one.used_10s_millis),
        got_10s_millis: compute.map(|one| one.got_10s_millis),
        gate: compute.map_or("", |one| one.gate_text()).to_owned(),
        state: tenant.state.clone(),
        refusals: tenant.refusals,
        rates,
    };
    tenant.gpus.iter().enumerate().map(row).collect()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
