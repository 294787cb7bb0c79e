//! What is asked and not used, by namespace and pod, with its price.

use std::collections::BTreeMap;

use tessera_config::Advice;
use tessera_view::advice::{NamespaceWaste, Scope, TenantWaste, Waste};
use tessera_view::workload;

use crate::Observed;
use crate::recommend::{asked_at, millis, remarks};
use crate::sample::{Sample, WHOLE, ceil};
use crate::workloads::{Confidence, Seen};

const HOUR_MS: f64 = 3_600_000.0;
const HOUR: i64 = 3_600_000;

/// A container of a pod; what nobody named is apart by its allocation.
type Key<'a> = (&'a str, &'a str, &'a str, &'a str);

/// One container, over all its GPUs and generations.
#[derive(Default)]
struct Holder<'a> {
    workload: &'a str,
    live: bool,
    /// By node and GPU.
    gpus: BTreeMap<(&'a str, &'a str), OnGpu>,
    /// Buckets over all GPUs: whether it worked, and how much of it was observed.
    buckets: BTreeMap<i64, Bucket>,
    /// When it is at its node.
    now_unix_ms: i64,
}

#[derive(Default)]
struct OnGpu {
    /// Memory of the device; 0 where the GPU is gone.
    total_bytes: u64,
    live: bool,
    samples: Vec<Sample>,
}

#[derive(Clone, Copy, Default)]
struct Bucket {
    worked: bool,
    observed_ms: u64,
    /// As if it was observed from its beginning on.
    end_unix_ms: i64,
    /// Its end, whether it was observed until then or not.
    closes_unix_ms: i64,
    /// It is part of a stretch without work that is longer than the setting.
    idle: bool,
}

/// What is asked and not used in the window, the largest waste first.
///
/// Asked is the larger part of memory and share, for as long as it was held. Used is the larger part of the
/// highest memory in the window and of the GPU time wanted within the hour, and nothing while the container was
/// idle: without work on a GPU for longer than `idle_after`. What it did on the CPU does not matter. Buckets of any
/// length give the same, because an hour is compared with an hour.
pub fn waste(observed: &[Observed<'_>], settings: &Advice, scope: &Scope) -> Waste {
    let mut holders = holders(observed, scope);
    let price = settings.price_per_gpu_hour();
    let mut namespaces: BTreeMap<&str, NamespaceWaste> = BTreeMap::new();
    for ((namespace, pod, container, _), holder) in &mut holders {
        let idle_stretch = mark_idle(&mut holder.buckets, millis(settings.idle_after));
        let tenant = judge(holder, idle_stretch, (*pod, *container), settings, price);
        let of = namespaces.entry(namespace).or_insert_with(|| NamespaceWaste {
            namespace: (*namespace).to_owned(),
            ..NamespaceWaste::default()
        });
        of.asked_gpu_hours += tenant.asked_gpu_hours;
        of.used_gpu_hours += tenant.asked_gpu_hours - tenant.wasted_gpu_hours;
        of.cost += tenant.cost;
        of.tenants.push(tenant);
    }
    let mut waste = Waste {
        api_version: tessera_view::API_VERSION.to_owned(),
        at_unix_ms: asked_at(observed),
        since_unix_ms: scope.since_unix_ms,
        price_per_gpu_hour: price,
        currency: settings.currency.clone(),
        namespaces: namespaces.into_values().collect(),
        remarks: remarks(observed),
    };
    largest_first(&mut waste);
    waste
}

/// Sorts namespaces, and each one's containers: the largest waste first.
pub fn largest_first(waste: &mut Waste) {
    for namespace in &mut waste.namespaces {
        namespace.tenants.sort_by(|a, b| {
            b.wasted_gpu_hours
                .total_cmp(&a.wasted_gpu_hours)
                .then_with(|| (&a.pod, &a.container).cmp(&(&b.pod, &b.container)))
        });
    }
    let wasted = |one: &NamespaceWaste| one.asked_gpu_hours - one.used_gpu_hours;
    waste.namespaces.sort_by(|a, b| {
        wasted(b).total_cmp(&wasted(a)).then_with(|| a.namespace.cmp(&b.namespace))
    });
}

fn holders<'a>(observed: &[Observed<'a>], scope: &Scope) -> BTreeMap<Key<'a>, Holder<'a>> {
    let mut holders: BTreeMap<Key<'a>, Holder<'a>> = BTreeMap::new();
    for Observed { node, history } in observed {
        for series in &history.tenants {
            if !scope.wants_namespace(&series.namespace)
                || !scope.wants_pod(&series.namespace, &series.pod)
            {
                continue;
            }
            let samples = series.points.iter().filter_map(Sample::of);
            let samples: Vec<Sample> = samples
                .filter_map(|one| one.since(scope.since_unix_ms, history.step_seconds))
                .collect();
            if samples.is_empty() {
                continue;
            }
            let id = if series.pod.is_empty() { series.id.as_str() } else { "" };
            let key = (&*series.namespace, &*series.pod, &*series.container, id);
            let holder = holders.entry(key).or_default();
            holder.workload = match &*series.workload {
                "" => workload::of(&series.pod),
                workload => workload,
            };
            holder.live |= series.live;
            // The node's own clock: buckets are of it.
            holder.now_unix_ms = match (history.at_unix_ms, node.at_unix_ms) {
                (0, at) | (at, _) => at,
            };
            for sample in &samples {
                let bucket = holder.buckets.entry(sample.at_unix_ms).or_default();
                bucket.worked |= sample.worked;
                bucket.observed_ms = bucket.observed_ms.max(sample.observed_ms);
                bucket.end_unix_ms = bucket.end_unix_ms.max(sample.end_unix_ms());
                let closes = sample.closes_unix_ms(history.step_seconds);
                bucket.closes_unix_ms = bucket.closes_unix_ms.max(closes);
            }
            let gpu = node.gpus.iter().find(|gpu| gpu.uuid == series.gpu_uuid);
            let on = holder.gpus.entry((&*node.node, &*series.gpu_uuid)).or_default();
            on.total_bytes = gpu.map_or(0, |gpu| gpu.memory_total_bytes);
            on.live |= series.live;
            on.samples.extend(samples);
        }
    }
    holders
}

/// Marks stretches without work; answers the length of the last one, observed milliseconds, and whether it is
/// long enough.
fn mark_idle(buckets: &mut BTreeMap<i64, Bucket>, idle_after_ms: u64) -> bool {
    let mut stretch: Vec<i64> = Vec::new();
    let mut long = Vec::new();
    let mut length: u64 = 0;
    let mut is_long = false;
    for (at, bucket) in buckets.iter() {
        if bucket.worked {
            stretch.clear();
            (length, is_long) = (0, false);
            continue;
        }
        stretch.push(*at);
        length = length.saturating_add(bucket.observed_ms);
        if length > idle_after_ms {
            is_long = true;
            long.append(&mut stretch);
        }
    }
    for at in long {
        if let Some(bucket) = buckets.get_mut(&at) {
            bucket.idle = true;
        }
    }
    is_long
}

fn judge(
    holder: &Holder<'_>,
    idle: bool,
    (pod, container): (&str, &str),
    settings: &Advice,
    price: f64,
) -> TenantWaste {
    let mut tenant = TenantWaste {
        pod: pod.to_owned(),
        container: container.to_owned(),
        workload: holder.workload.to_owned(),
        live: holder.live,
        idle: idle && holder.live,
        ..TenantWaste::default()
    };
    let (mut wanted, mut observed) = (0.0, 0.0);
    let last_of = |on: &OnGpu| on.samples.iter().map(|sample| sample.at_unix_ms).max();
    let last = holder.gpus.values().filter_map(last_of).max();
    // A pod that was placed elsewhere has no quota where it was.
    let is_current = |on: &OnGpu| if holder.live { on.live } else { last_of(on) == last };
    for on in holder.gpus.values() {
        let peak = on.samples.iter().map(|sample| sample.peak_bytes).max().unwrap_or(0);
        let last = on.samples.iter().max_by_key(|sample| sample.at_unix_ms);
        let (limit, cores) = last.map_or((0, 0), |last| (last.limit_bytes, last.cores_millis));
        if is_current(on) {
            tenant.memory_peak_bytes = tenant.memory_peak_bytes.saturating_add(peak);
            tenant.memory_limit_bytes = tenant.memory_limit_bytes.saturating_add(limit);
            tenant.cores_millis = tenant.cores_millis.saturating_add(cores);
        }
        let of_memory = |bytes: u64| match on.total_bytes {
            0 => 0.0,
            total => (bytes as f64 / total as f64).min(1.0),
        };
        let of_time = |millis: u32| f64::from(millis.min(WHOLE)) / f64::from(WHOLE);
        // By the hour: asked and, unless it was idle, held and wanted; GPU hours.
        let mut hourly: BTreeMap<i64, (f64, f64, f64)> = BTreeMap::new();
        for sample in &on.samples {
            let hours = sample.observed_ms as f64 / HOUR_MS;
            let asked = of_memory(sample.limit_bytes).max(of_time(sample.cores_millis)) * hours;
            let hour = hourly.entry(sample.at_unix_ms.div_euclid(HOUR)).or_default();
            hour.0 += asked;
            if !holder.buckets.get(&sample.at_unix_ms).is_some_and(|bucket| bucket.idle) {
                hour.1 += (of_memory(peak) * hours).min(asked);
                hour.2 += of_time(sample.wanted_millis) * hours;
            }
            wanted += f64::from(sample.wanted_millis) * hours;
            observed += hours;
        }
        for (asked, held, wanted) in hourly.into_values() {
            tenant.asked_gpu_hours += asked;
            tenant.wasted_gpu_hours += asked - held.max(wanted).min(asked);
        }
    }
    // Sums of many small numbers.
    tenant.wasted_gpu_hours = tenant.wasted_gpu_hours.clamp(0.0, tenant.asked_gpu_hours);
    tenant.cost = tenant.wasted_gpu_hours * price;
    if observed > 0.0 {
        // A mean of thousandths, to the nearest.
        tenant.wanted_millis = ceil(wanted / observed - 0.5);
    }
    tenant.idle_seconds = idle_seconds(holder);
    let mut seen = Seen { pods: 1, ..Seen::default() };
    for (at, bucket) in &holder.buckets {
        seen.observed_ms = seen.observed_ms.saturating_add(bucket.observed_ms);
        seen.note(*at, bucket.end_unix_ms);
    }
    let confidence = Confidence::of(seen);
    // An idle tenant was seen idle for as long as it takes to say so.
    let short = idle && seen.observed_ms < millis(settings.idle_after).saturating_mul(2);
    tenant.confidence = if short { confidence.lowered() } else { confidence }.into_str().to_owned();
    tenant
}

/// Since it last had work, or since it was first seen where it had none; absent where its last bucket has some,
/// and for one that is gone. A bucket does not say when in it that was: it may have been until its end, so no time of
/// work is ever counted.
fn idle_seconds(holder: &Holder<'_>) -> Option<f64> {
    let (_, last) = holder.buckets.last_key_value()?;
    if last.worked || !holder.live {
        return None;
    }
    let now = holder.now_unix_ms.max(last.end_unix_ms);
    let worked = holder.buckets.values().rfind(|bucket| bucket.worked);
    let since = match worked {
        Some(bucket) => bucket.closes_unix_ms.min(now),
        None => {
            let (_, first) = holder.buckets.first_key_value()?;
            let observed_ms = i64::try_from(first.observed_ms).unwrap_or(i64::MAX);
            first.closes_unix_ms.min(now).saturating_sub(observed_ms)
        }
    };
    Some(now.saturating_sub(since).max(0) as f64 / 1000.0)
}
