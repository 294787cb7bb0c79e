//! What the simulator's account says of a scenario: who got how much in any stretch of time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use simgpu::account::{Account, Handover};

use super::machine::Machine;
use super::tenant::Tenant;
use crate::stats::Sample;

/// Time between looks. Windows begin and end at looks, which say when they were.
const STEP: Duration = Duration::from_millis(50);

/// One look; by tenant, in the scenario's order.
#[derive(Clone, Debug)]
pub struct Look {
    pub at_ns: u64,
    /// GPU time of work so far, events and markers left out.
    pub work_ns: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// At least two.
    pub looks: Vec<Look>,
    /// From one tenant's work to another's.
    pub handovers: Vec<Handover>,
}

/// Maps processes to tenants by their process groups, and remembers: a pid is looked up once.
#[derive(Debug, Default)]
struct Groups(BTreeMap<i32, Option<usize>>);

impl Groups {
    fn tenant(&mut self, pid: i32, tenants: &[Tenant]) -> Option<usize> {
        *self.0.entry(pid).or_insert_with(|| {
            // SAFETY: getpgid has no preconditions; -1 is nobody's group.
            let group = unsafe { libc::getpgid(pid) };
            tenants.iter().position(|tenant| tenant.group == group)
        })
    }
}

pub fn observe(machine: &Machine, tenants: &[Tenant], length: Duration) -> Observation {
    let mut groups = Groups::default();
    let mut observation = Observation::default();
    let mut since = machine.account(u32::MAX).switches;
    let (start, mut next) = (Instant::now(), Instant::now());
    loop {
        let account = machine.account(since);
        since = account.switches;
        let slots = observation.take(&account, |pid| groups.tenant(pid, tenants), tenants.len());
        let of = |slot: u32| slots.get(&slot).copied();
        let between = account.handovers.iter().filter(|h| of(h.from) != of(h.to));
        observation.handovers.extend(between.copied());
        if start.elapsed() >= length {
            return observation;
        }
        next += STEP;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

impl Observation {
    /// Adds a look; whose slots are whose.
    fn take(
        &mut self,
        account: &Account,
        mut tenant_of: impl FnMut(i32) -> Option<usize>,
        tenants: usize,
    ) -> BTreeMap<u32, usize> {
        let mut slots = BTreeMap::new();
        let mut look = Look { at_ns: account.now_ns, work_ns: vec![0; tenants] };
        for context in &account.contexts {
            let Some(tenant) = tenant_of(context.pid) else { continue };
            slots.insert(context.slot, tenant);
            look.work_ns[tenant] += context.busy_ns - context.mark_ns;
        }
        self.looks.push(look);
        slots
    }

    fn ends(&self) -> (&Look, &Look) {
        (&self.looks[0], &self.looks[self.looks.len() - 1])
    }

    /// Part of all time in which each tenant's work ran.
    pub fn rates(&self) -> Vec<f64> {
        let (first, last) = self.ends();
        (0..first.work_ns.len()).map(|i| rate(first, last, i)).collect()
    }

    /// Each tenant's part of all work done.
    pub fn shares(&self) -> Vec<f64> {
        let (first, last) = self.ends();
        shares(first, last)
    }

    /// In every stretch of `window` that begins at a look: by how many percentage points the tenant
    /// that is farthest from its due was off it.
    pub fn share_errors(&self, due: &[f64], window: Duration) -> Vec<f64> {
        let error = |(first, last): (&Look, &Look)| {
            let off = shares(first, last).into_iter().zip(due).map(|(got, due)| (got - due).abs());
            off.fold(0.0, f64::max) * 100.0
        };
        self.windows(window).map(error).collect()
    }

    fn windows(&self, window: Duration) -> impl Iterator<Item = (&Look, &Look)> {
        let length = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX);
        self.looks.iter().filter_map(move |first| {
            let last = self.looks.iter().find(|l| l.at_ns >= first.at_ns.saturating_add(length))?;
            Some((first, last))
        })
    }

    /// How long the GPU was idle between two tenants' work, microseconds; no hand-over: `None`.
    pub fn handover_us(&self) -> Option<Sample> {
        let idle = |h: &Handover| seconds(h.idle_ns()) * 1e6;
        let values: Vec<f64> = self.handovers.iter().map(idle).collect();
        (!values.is_empty()).then(|| Sample::new(values))
    }
}

fn rate(first: &Look, last: &Look, tenant: usize) -> f64 {
    seconds(last.work_ns[tenant] - first.work_ns[tenant]) / seconds(last.at_ns - first.at_ns)
}

fn shares(first: &Look, last: &Look) -> Vec<f64> {
    let work: Vec<f64> =
        last.work_ns.iter().zip(&first.work_ns).map(|(b, a)| seconds(b - a)).collect();
    let all: f64 = work.iter().sum();
    work.iter().map(|own| if all > 0.0 { own / all } else { 0.0 }).collect()
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tenants; the first gets 3 of 4 ms each, but nothing in the last 4.
    fn seen() -> Observation {
        let look = |n: u64| Look {
            at_ns: n * 4_000_000,
            work_ns: vec![n.min(9) * 3_000_000, n * 1_000_000],
        };
        Observation { looks: (0..=10).map(look).collect(), handovers: Vec::new() }
    }

    #[test]
    fn an_error_is_that_of_the_worst_window() {
        let errors = seen().share_errors(&[0.75, 0.25], Duration::from_millis(4));
        assert_eq!(errors.len(), 10);
        assert!(errors[..9].iter().all(|e| e.abs() < 1e-9), "{errors:?}");
        assert!((errors[9] - 75.0).abs() < 1e-9, "{errors:?}");
    }

    #[test]
    fn rates_are_parts_of_all_time_and_shares_of_all_work() {
        let rates = seen().rates();
        assert!((rates[0] - 27.0 / 40.0).abs() < 1e-9 && (rates[1] - 0.25).abs() < 1e-9);
        let shares = seen().shares();
        assert!((shares[0] - 27.0 / 37.0).abs() < 1e-9, "{shares:?}");
    }
}
