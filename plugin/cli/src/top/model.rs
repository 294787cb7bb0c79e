//! What `top` shows: the last answer, its rates, order, filter, and what keys do. Pure.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use strum::IntoStaticStr;
use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_view::tenant::{Tenant, Use};

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
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

/// A page of rows, for scrolling; what a small terminal has.
const PAGE: usize = 10;

impl Model {
    /// Takes a key.
    pub fn press(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            self.quit |= matches!(key.code, KeyCode::Char('c' | 'd'));
            return;
        }
        if self.editing {
            return self.edit(key.code);
        }
        match key.code {
            KeyCode::Char('q') => self.quit = true,
            KeyCode::Char('m') => self.sort_by(Sort::Memory),
            KeyCode::Char('c') => self.sort_by(Sort::Share),
            KeyCode::Char('w') => self.sort_by(Sort::Waiting),
            KeyCode::Char('r') => self.sort_by(Sort::Refusals),
            KeyCode::Char('n') => self.sort_by(Sort::Name),
            KeyCode::Char('R') => self.reverse = !self.reverse,
            KeyCode::Char('/') => self.editing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('j') | KeyCode::Down => self.scroll += 1,
            KeyCode::Char('k') | KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll += PAGE,
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(PAGE),
            KeyCode::Home => self.scroll = 0,
            _ => {}
        }
        self.scroll = self.scroll.min(self.shown().len().saturating_sub(1));
    }

    fn sort_by(&mut self, sort: Sort) {
        self.reverse = self.sort == sort && !self.reverse;
        self.sort = sort;
        self.scroll = 0;
    }

    fn edit(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.editing = false,
            KeyCode::Esc => {
                self.editing = false;
                self.filter.clear();
            }
            KeyCode::Backspace if self.filter.pop().is_none() => self.editing = false,
            KeyCode::Char(c) if self.filter.chars().count() < 64 => self.filter.push(c),
            _ => {}
        }
        self.scroll = 0;
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
