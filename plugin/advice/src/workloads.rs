//! Series and live tenants, by workload and container, over all nodes.

use std::collections::{BTreeMap, BTreeSet};

use tessera_view::gpu::Gpu;
use tessera_view::tenant::Tenant;
use tessera_view::workload;

use crate::confidence::Seen;
use crate::sample::Sample;
use crate::{Observed, Question};

/// Namespace, workload, container.
pub(crate) type Key<'a> = (&'a str, &'a str, &'a str);

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
    /// Length of the longest buckets, seconds.
    pub step_seconds: u32,
    /// How much was seen.
    pub seen: Seen,
}

/// By workload and container, in order of names. Tenants that nobody named are in no workload.
pub(crate) fn workloads<'a>(
    observed: &[Observed<'a>],
    question: &Question<'_>,
) -> BTreeMap<Key<'a>, Workload<'a>> {
    let mut found: BTreeMap<Key<'a>, Workload<'a>> = BTreeMap::new();
    for Observed { node, history } in observed {
        let gpus: BTreeMap<&str, &'a Gpu> =
            node.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu)).collect();
        for tenant in node.tenants.iter().filter(|one| one.state != "parked") {
            let named = name(&tenant.namespace, &tenant.workload, &tenant.pod, &tenant.container);
            let Some(key) = named.filter(|key| question.wants_namespace(key.0)) else { continue };
            let workload = found.entry(key).or_default();
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
            let Some(key) = named.filter(|key| question.wants_namespace(key.0)) else { continue };
            let samples: Vec<Sample> = series
                .points
                .iter()
                .filter_map(Sample::of)
                .filter_map(|sample| sample.since(question.since_unix_ms))
                .collect();
            if samples.is_empty() {
                continue;
            }
            let workload = found.entry(key).or_default();
            workload.step_seconds = workload.step_seconds.max(history.step_seconds);
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
    for workload in found.values_mut() {
        workload.seen.pods = workload.pods.len();
    }
    found.retain(|key, workload| workload.pods.iter().any(|pod| question.wants_pod(key.0, pod)));
    found
}

fn name<'a>(
    namespace: &'a str,
    workload: &'a str,
    pod: &'a str,
    container: &'a str,
) -> Option<Key<'a>> {
    let workload = if workload.is_empty() { workload::of(pod) } else { workload };
    (!pod.is_empty()).then_some((namespace, workload, container))
}
