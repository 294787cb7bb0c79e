//! Series and live tenants, by workload and container, over all nodes: which of a container's allocations they are, and
//! how much what was seen is worth.

use std::collections::{BTreeMap, BTreeSet};

use strum::IntoStaticStr;
use tessera_view::advice::Scope;
use tessera_view::gpu::Gpu;
use tessera_view::tenant::Tenant;
use tessera_view::workload;

use crate::Observed;
use crate::sample::Sample;

/// Namespace, workload, container, and which of the container's allocations.
pub(crate) type Key<'a> = (&'a str, &'a str, &'a str, Part<'a>);

#[derive(Debug, Default)]
pub(crate) struct Workload<'a> {
    pub pods: BTreeSet<&'a str>,
    /// Every bucket, of every pod, generation and GPU.
    pub samples: Vec<Sample>,
    pub live: Vec<&'a Tenant>,
    /// GPUs that it had or has, as far as they are known.
    pub gpus: BTreeMap<&'a str, &'a Gpu>,
    pub seen: Seen,
    /// Of others of its allocations that are gone, the history does not say what they were asked for.
    pub has_unattributed: bool,
}

/// By workload and container, in order of names. Tenants that nobody named are in no workload.
pub(crate) fn workloads<'a>(
    observed: &[Observed<'a>],
    scope: &Scope,
) -> BTreeMap<Key<'a>, Workload<'a>> {
    let mut found: BTreeMap<Key<'a>, Workload<'a>> = BTreeMap::new();
    let parts = Parts::of(observed);
    let mut unattributed: BTreeSet<(&str, &str, &str)> = BTreeSet::new();
    for (at, Observed { node, history }) in observed.iter().enumerate() {
        let gpus: BTreeMap<&str, &'a Gpu> =
            node.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu)).collect();
        for tenant in node.tenants.iter().filter(|one| one.state != "parked") {
            let Some(of) = container(tenant).filter(|of| scope.wants_namespace(of.0)) else {
                continue;
            };
            let part = parts.get(of, (at, &tenant.id, &tenant.pod)).unwrap_or(Part::Whole);
            let workload = found.entry((of.0, of.1, of.2, part)).or_default();
            workload.pods.insert(&tenant.pod);
            workload.live.push(tenant);
            for used in &tenant.gpus {
                workload.gpus.extend(gpus.get_key_value(used.gpu_uuid.as_str()));
            }
        }
        // GPUs of one allocation are observed together: its time counts once.
        let mut observed_ms: BTreeMap<(&str, u64, i64), (Key<'a>, u64)> = BTreeMap::new();
        for series in &history.tenants {
            let named = name(&series.namespace, &series.workload, &series.pod, &series.container);
            let Some(of) = named.filter(|of| scope.wants_namespace(of.0)) else { continue };
            let samples: Vec<Sample> = series
                .points
                .iter()
                .filter_map(Sample::of)
                .filter_map(|sample| sample.since(scope.since_unix_ms, history.step_seconds))
                .collect();
            if samples.is_empty() {
                continue;
            }
            let Some(part) = parts.get(of, (at, &series.id, &series.pod)) else {
                unattributed.insert(of);
                continue;
            };
            let key = (of.0, of.1, of.2, part);
            let workload = found.entry(key).or_default();
            workload.pods.insert(&series.pod);
            workload.gpus.extend(gpus.get_key_value(series.gpu_uuid.as_str()));
            for sample in &samples {
                workload.seen.note(sample.at_unix_ms, sample.end_unix_ms());
                let bucket = (series.id.as_str(), series.generation, sample.at_unix_ms);
                let (_, most) = observed_ms.entry(bucket).or_insert((key, 0));
                *most = (*most).max(sample.observed_ms);
            }
            workload.samples.extend(samples);
        }
        for (key, ms) in observed_ms.into_values() {
            let seen = &mut found.entry(key).or_default().seen;
            seen.observed_ms = seen.observed_ms.saturating_add(ms);
        }
    }
    for (key, workload) in &mut found {
        workload.seen.pods = workload.pods.len();
        workload.has_unattributed = unattributed.contains(&(key.0, key.1, key.2));
    }
    found.retain(|key, workload| workload.pods.iter().any(|pod| scope.wants_pod(key.0, pod)));
    found
}

/// Namespace, workload and container of a tenant; `None` while nobody named it.
pub(crate) fn container(tenant: &Tenant) -> Option<(&str, &str, &str)> {
    name(&tenant.namespace, &tenant.workload, &tenant.pod, &tenant.container)
}

fn name<'a>(
    namespace: &'a str,
    workload: &'a str,
    pod: &'a str,
    container: &'a str,
) -> Option<(&'a str, &'a str, &'a str)> {
    let workload = if workload.is_empty() { workload::of(pod) } else { workload };
    (!pod.is_empty()).then_some((namespace, workload, container))
}

/// Which of a container's allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part<'a> {
    Whole,
    Allocation(&'a str),
}

impl Part<'_> {
    /// What tells this allocation of a container from the others; empty where it has one.
    pub fn words(&self) -> String {
        match self {
            Part::Whole => String::new(),
            Part::Allocation(id) => format!("allocation {id}"),
        }
    }
}

/// Namespace, workload, container.
type Of<'a> = (&'a str, &'a str, &'a str);
/// An allocation: the number of its node, its id, its pod.
type Held<'a> = (usize, &'a str, &'a str);

/// Containers with several allocations, and which part each live one is.
pub(crate) struct Parts<'a>(BTreeMap<Of<'a>, BTreeMap<Held<'a>, Part<'a>>>);

impl<'a> Parts<'a> {
    /// By what lives now: the history does not say what an allocation was asked for.
    pub fn of(observed: &[Observed<'a>]) -> Self {
        let mut containers: BTreeMap<Of<'a>, BTreeMap<Held<'a>, Part<'a>>> = BTreeMap::new();
        for (at, Observed { node, .. }) in observed.iter().enumerate() {
            for tenant in node.tenants.iter().filter(|one| one.state != "parked") {
                let Some(of) = container(tenant) else { continue };
                let (id, pod) = (tenant.id.as_str(), tenant.pod.as_str());
                containers.entry(of).or_default().insert((at, id, pod), Part::Allocation(id));
            }
        }
        containers.retain(|_, held| {
            let pods: BTreeSet<_> = held.keys().map(|(at, _, pod)| (at, pod)).collect();
            pods.len() < held.len()
        });
        Parts(containers)
    }

    /// Which part of a container an allocation is. `None`: it has several, and nothing says which this one was.
    pub fn get(&self, of: Of<'_>, held: Held<'_>) -> Option<Part<'a>> {
        match self.0.get(&of) {
            None => Some(Part::Whole),
            Some(parts) => parts.get(&held).copied(),
        }
    }
}

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub(crate) enum Confidence {
    /// Hardly: little was seen.
    Low,
    /// Daily or weekly peaks may be missing.
    Medium,
    /// A whole day was seen, of several pods or for days.
    High,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub observed_ms: u64,
    pub pods: usize,
    /// The hours of the day that were seen, a bit each.
    pub hours: u32,
}

impl Confidence {
    pub(crate) fn of(seen: Seen) -> Self {
        if seen.observed_ms < HOUR_MS {
            Confidence::Low
        } else if seen.full_day() && (seen.pods > 1 || seen.observed_ms >= 3 * DAY_MS) {
            Confidence::High
        } else {
            Confidence::Medium
        }
    }

    pub(crate) fn lowered(self) -> Self {
        match self {
            Confidence::High => Confidence::Medium,
            Confidence::Medium | Confidence::Low => Confidence::Low,
        }
    }
}

impl Seen {
    pub fn note(&mut self, from_unix_ms: i64, to_unix_ms: i64) {
        let hour = |unix_ms: i64| unix_ms.div_euclid(HOUR_MS as i64);
        let (first, last) = (hour(from_unix_ms), hour(to_unix_ms.saturating_sub(1)));
        // A day has them all.
        for hour in first..=last.min(first.saturating_add(23)) {
            self.hours |= 1 << hour.rem_euclid(24);
        }
    }

    pub fn full_day(&self) -> bool {
        self.hours == (1 << 24) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_grows_with_time_pods_and_a_whole_day() {
        let seen = |hours: u64, pods, day: bool| Seen {
            observed_ms: hours * HOUR_MS,
            pods,
            hours: if day { (1 << 24) - 1 } else { 0b111 },
        };
        assert_eq!(Confidence::of(Seen::default()), Confidence::Low);
        assert_eq!(Confidence::of(seen(5, 3, false)), Confidence::Medium);
        assert_eq!(Confidence::of(seen(24, 1, true)), Confidence::Medium);
        assert_eq!(Confidence::of(seen(48, 2, true)), Confidence::High);
        assert_eq!(Confidence::of(seen(72, 1, true)), Confidence::High);
    }

    #[test]
    fn hours_of_the_day_are_noted() {
        let mut seen = Seen::default();
        let hour = HOUR_MS as i64;
        seen.note(0, hour);
        assert_eq!(seen.hours, 1);
        seen.note(47 * hour + 1, 48 * hour + 1);
        assert_eq!(seen.hours, 1 | 1 << 23);
        seen.note(i64::MIN, i64::MAX);
        assert!(seen.full_day());
        // A clock that runs backwards says nothing.
        let mut backwards = Seen::default();
        backwards.note(hour, 0);
        assert_eq!(backwards.hours, 0);
    }
}
