//! What `top` shows: the last answer, its rates, order, filter, and what the keys did. Pure.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::time::Duration;

use tessera_view::status::{Allocation, Gpu, Status};
use tessera_view::tenant::Use;

use super::rates::{Rates, between};

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sort {
    /// Memory charged, the most first.
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
    pub id: String,
    /// The first of its allocation, which has what belongs to the whole of it.
    pub first: bool,
    /// `namespace/pod`, or the id where kubelet has not named it.
    pub name: String,
    pub container: String,
    /// NVML's index, where the GPU is still there.
    pub gpu: Option<u32>,
    pub gpu_uuid: String,
    pub used: u64,
    pub limit: u64,
    pub asked_millis: u32,
    pub policy: &'static str,
    /// The second `None`: unknown.
    pub used_10s_millis: Option<Option<u32>>,
    pub got_10s_millis: Option<u32>,
    /// For how long it has been waiting now.
    pub waiting_us: Option<u64>,
    pub gate: String,
    pub state: &'static str,
    pub refusals: u64,
    pub rates: Rates,
}

/// The plugin does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Silence {
    /// Since when, Unix milliseconds.
    pub since_unix_ms: i64,
    /// Why, as the system says.
    pub reason: String,
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub status: Status,
    /// When it came, by a clock that does not jump; `None` before the first.
    at: Option<Duration>,
    /// From the answer before to this one.
    pub interval: Option<Duration>,
    rows: Vec<Row>,
    pub sort: Sort,
    pub reverse: bool,
    pub filter: String,
    /// Only pods of this namespace.
    pub namespace: Option<String>,
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
        Model {
            status: Status::default(),
            at: None,
            interval: None,
            rows: Vec::new(),
            sort,
            reverse,
            filter: String::new(),
            namespace: None,
            editing: false,
            paused: false,
            help: false,
            quit: false,
            scroll: 0,
            silence: None,
        }
    }

    /// Whether the plugin has answered yet.
    pub fn has_answer(&self) -> bool {
        self.at.is_some()
    }

    /// Takes an answer that came at `at`.
    pub fn take(&mut self, status: Status, at: Duration) {
        self.silence = None;
        if self.paused {
            return;
        }
        self.interval = self.at.and_then(|before| at.checked_sub(before)).filter(|d| !d.is_zero());
        let rates = match self.interval {
            Some(interval) => between(&self.status, &status, interval.as_secs_f64()),
            None => Default::default(),
        };
        let row = |allocation: &Allocation| {
            let rates = rates.get(&allocation.id).copied().unwrap_or_default();
            rows(allocation, &status.gpus, rates)
        };
        let is_in = |allocation: &&Allocation| {
            let holder = allocation.holder.as_ref();
            let is_of = |name: &String| holder.is_some_and(|holder| holder.namespace == *name);
            self.namespace.as_ref().is_none_or(is_of)
        };
        self.rows = status.allocations.iter().filter(is_in).flat_map(row).collect();
        self.status = status;
        self.at = Some(at);
    }

    /// Takes that there was no answer. What is known stays.
    pub fn miss(&mut self, reason: String, now_unix_ms: i64) {
        let since_unix_ms = self.silence.as_ref().map_or(now_unix_ms, |s| s.since_unix_ms);
        self.silence = Some(Silence { since_unix_ms, reason });
    }

    /// Rates of an allocation.
    pub fn rates(&self, id: &str) -> Rates {
        self.rows.iter().find(|row| row.id == id).map(|row| row.rates).unwrap_or_default()
    }

    /// The rows to show, in order. The GPUs of an allocation stay together.
    pub fn shown(&self) -> Vec<&Row> {
        let wanted = self.filter.to_lowercase();
        let mut groups: Vec<&[Row]> = self
            .rows
            .chunk_by(|a, b| a.id == b.id)
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
        [&self.name, &self.container, &self.gpu_uuid, &self.id]
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

fn rows(allocation: &Allocation, gpus: &[Gpu], rates: Rates) -> Vec<Row> {
    let holder = allocation.holder.as_ref();
    let compute = allocation.compute.as_ref();
    // Pods that share a claim are of one namespace.
    let pods: BTreeSet<&String> = allocation.other_holders.iter().map(|other| &other.pod).collect();
    let is_other = |pod: &&&String| holder.is_some_and(|holder| holder.pod != ***pod);
    let others: String = pods.iter().filter(is_other).map(|pod| format!(", {pod}")).collect();
    let row = |(i, used): (usize, &Use)| Row {
        id: allocation.id.clone(),
        first: i == 0,
        name: holder.map_or_else(
            || allocation.id.clone(),
            |h| format!("{}/{}{others}", h.namespace, h.pod),
        ),
        container: holder.map(|h| h.container.clone()).unwrap_or_default(),
        gpu: gpus.iter().find(|gpu| gpu.uuid == used.gpu_uuid).map(|gpu| gpu.index),
        gpu_uuid: used.gpu_uuid.clone(),
        used: used.memory_used_bytes,
        limit: used.memory_limit_bytes,
        asked_millis: used.cores_millis,
        policy: used.policy.name(),
        used_10s_millis: compute.map(|c| c.used_10s_millis),
        got_10s_millis: compute.map(|c| c.got_10s_millis),
        waiting_us: compute.and_then(|c| c.waiting_us),
        gate: compute.map(|c| c.gate_text().to_owned()).unwrap_or_default(),
        state: allocation.state.name(),
        refusals: allocation.refusals,
        rates,
    };
    allocation.gpus.iter().enumerate().map(row).collect()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
