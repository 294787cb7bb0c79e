//! Series and live tenants, by workload and container, over all nodes.

use std::collections::{BTreeMap, BTreeSet};

use tessera_view::gpu::Gpu;
use tessera_view::tenant::Tenant;
use tessera_view::workload;

use crate::confidence::Seen;
use crate::parts::{Part, Parts};
use crate::sample::Sample;
use crate::{Observed, Question};

/// Namespace, workload, container, and which of the container's allocations.
pub(crate) type Key<'a> = (&'a str, &'a str, &'a str, Part<'a>);

/// What is known of one container of a workload.
#[derive(Debug, Default)]
pub(crate) struct Workload<'a> {
    /// Every pod that was seen.
    pub pods: BTreeSet<&'a str>,
    /// Every bucket, of every pod, generation and GPU.
    pub samples: Vec<Sample>,
    /// What lives now.
    pub live: Vec<&'a Tenant>,
    /// GPUs that it had or has, as far as they are known.
    pub gpus: BTreeMap<&'a str, &'a Gpu>,
    /// How much was seen.
    pub seen: Seen,
    /// Of others of its allocations that are gone, the history does not say what they were asked for.
    pub has_unattributed: bool,
}

/// By workload and container, in order of names. Tenants that nobody named are in no workload.
pub(crate) fn workloads<'a>(
    observed: &[Observed<'a>],
    question: &Question<'_>,
) -> BTreeMap<Key<'a>, Workload<'a>> {
    let mut found: BTreeMap<Key<'a>, Workload<'a>> = BTreeMap::new();
    let parts = Parts::of(observed);
    let mut unattributed: BTreeSet<(&str, &str, &str)> = BTreeSet::new();
    for (at, Observed { node, history }) in observed.iter().enumerate() {
        let gpus: BTreeMap<&str, &'a Gpu> =
            node.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu)).collect();
        for tenant in node.tenants.iter().filter(|one| one.state != "parked") {
            let Some(of) = container(tenant).filter(|of| question.wants_namespace(of.0)) else {
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
            let Some(of) = named.filter(|of| question.wants_namespace(of.0)) else { continue };
            let samples: Vec<Sample> = series
                .points
                .iter()
                .filter_map(Sample::of)
                .filter_map(|sample| sample.since(question.since_unix_ms, history.step_seconds))
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
    found.retain(|key, workload| workload.pods.iter().any(|pod| question.wants_pod(key.0, pod)));
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
