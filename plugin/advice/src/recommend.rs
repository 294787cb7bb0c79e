//! What a workload should ask for, as the vertical pod autoscaler judges: by what all its pods used, over time.

use std::collections::BTreeSet;
use std::time::Duration;

use tessera_config::Advice;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_view::advice::{Change, Recommendation, Recommendations, Scope, Settings};
use tessera_view::tenant::ComputePolicy;

use crate::Observed;
use crate::changes::{Target, changes};
use crate::sample::{Sample, WHOLE, percentile};
use crate::workloads::{Confidence, Key, Part, Workload, workloads};

/// Advised memory is whole multiples of this.
pub(crate) const MEMORY_STEP: u64 = 64 << 20;
/// Advised shares are whole multiples of this, thousandths: what a claim can say.
pub(crate) const CORES_STEP: u32 = 10;
/// No share is advised where more than such a part of the time it is unknown what was used.
const UNMEASURED: u64 = 10;
/// A difference of less than such a part is not worth a change.
const WORTH: u64 = 10;
/// How much more than it has is advised at least where requests were refused, percent.
const REFUSED_MARGIN: u64 = 10;

/// Advice for every workload and container in question, in order of names. An empty list means that nothing of
/// what was asked for was seen or lives.
pub fn recommend(observed: &[Observed<'_>], settings: &Advice, scope: &Scope) -> Recommendations {
    let advised = workloads(observed, scope);
    Recommendations {
        api_version: tessera_view::API_VERSION.to_owned(),
        at_unix_ms: asked_at(observed),
        settings: Some(Settings {
            memory_percentile: settings.memory_percentile,
            memory_margin: settings.memory_margin,
            cores_percentile: settings.cores_percentile,
            cores_margin: settings.cores_margin,
        }),
        workloads: advised
            .iter()
            .map(|(key, workload)| one(*key, workload, observed, settings, scope))
            .collect(),
        remarks: remarks(observed),
    }
}

/// What histories could not read, with the node where there are several.
pub(crate) fn remarks(observed: &[Observed<'_>]) -> Vec<String> {
    let several = observed.len() > 1;
    let of = |one: &Observed<'_>| {
        let node = one.node.node.clone();
        one.history.remarks.clone().into_iter().map(move |remark| match several {
            true => format!("{node}: {remark}"),
            false => remark,
        })
    };
    observed.iter().flat_map(of).collect()
}

pub(crate) fn asked_at(observed: &[Observed<'_>]) -> i64 {
    observed.iter().map(|one| one.node.at_unix_ms).max().unwrap_or(0)
}

fn one(
    (namespace, name, container, part): Key<'_>,
    workload: &Workload<'_>,
    observed: &[Observed<'_>],
    settings: &Advice,
    scope: &Scope,
) -> Recommendation {
    let now = Now::of(workload);
    let mut advice = Recommendation {
        namespace: namespace.to_owned(),
        workload: name.to_owned(),
        container: container.to_owned(),
        part: part.words(),
        pods: workload.pods.iter().map(ToString::to_string).collect(),
        memory_limit_bytes: now.memory_bytes,
        memory_bytes: now.memory_bytes,
        cores_millis: now.cores_millis,
        recommended_cores_millis: now.cores_millis,
        confidence: Confidence::Low.into_str().to_owned(),
        observed_seconds: workload.seen.observed_ms as f64 / 1000.0,
        since_unix_ms: scope.since_unix_ms,
        ..Recommendation::default()
    };
    if workload.samples.is_empty() {
        advice.evidence.push("nothing was observed yet: ask again in an hour".to_owned());
        return advice;
    }
    let evidence = &mut advice.evidence;
    evidence.push(seen(workload));
    evidence.extend(apart(workload, part));
    let memory = memory(workload, &now, settings, evidence);
    let cores = cores(workload, &now, settings, evidence);
    advice.memory_bytes = memory;
    advice.recommended_cores_millis = cores.millis;

    let mut confidence = Confidence::of(workload.seen);
    if cores.capped {
        confidence = confidence.lowered();
    }
    if !workload.seen.full_day() {
        evidence.push("less than a whole day was seen: a daily peak may be missing".to_owned());
    }
    advice.confidence = confidence.into_str().to_owned();

    for used in workload.live.iter().flat_map(|tenant| &tenant.gpus) {
        let bytes = i128::from(used.memory_limit_bytes) - i128::from(memory);
        let saved = i128::from(advice.saves_memory_bytes) + bytes;
        advice.saves_memory_bytes =
            i64::try_from(saved).unwrap_or(if saved < 0 { i64::MIN } else { i64::MAX });
        advice.saves_cores_millis = advice
            .saves_cores_millis
            .saturating_add(i64::from(used.cores_millis) - i64::from(cores.millis));
    }
    if Confidence::of(workload.seen) == Confidence::Low {
        advice.evidence.push("less than an hour was seen: no change is written yet".to_owned());
        return advice;
    }
    let all = || workload.live.iter().flat_map(|tenant| &tenant.gpus);
    let target = Target {
        memory_bytes: memory,
        cores_millis: if cores.is_of_idle { now.cores_millis } else { cores.millis },
        memory_changes: all().any(|used| used.memory_limit_bytes != memory)
            || memory != now.memory_bytes,
        cores_change: cores.divided
            && !cores.is_of_idle
            && (all().any(|used| used.cores_millis != cores.millis)
                || cores.millis != now.cores_millis),
        divided: cores.divided,
    };
    let label = advice.container_and_part();
    let changes = changes(target, workload, (&label, part), observed);
    advice.evidence.extend(changes.evidence);
    let written = |what| Change::written(what, "tessera");
    advice.changes = changes.lines.into_iter().map(written).collect();
    if !target.memory_changes && !target.cores_change && !cores.is_of_idle {
        advice.evidence.push("what it has fits: nothing to change".to_owned());
    }
    advice
}

/// What the workload has now, on each GPU: the most that any of its pods has, or had.
struct Now {
    memory_bytes: u64,
    cores_millis: u32,
    /// Most that a GPU of its could give; 0 where that is not known.
    ceiling_bytes: u64,
    /// The least that is advised: contexts take as much.
    floor_bytes: u64,
    differ: bool,
}

impl Now {
    fn of(workload: &Workload<'_>) -> Self {
        let live = || workload.live.iter().flat_map(|tenant| &tenant.gpus);
        let limits: BTreeSet<_> =
            live().map(|used| (used.memory_limit_bytes, used.cores_millis)).collect();
        let last =
            workload.samples.iter().max_by_key(|sample| (sample.at_unix_ms, sample.limit_bytes));
        let before = last.map_or((0, 0), |sample| (sample.limit_bytes, sample.cores_millis));
        let most = |gpus: &dyn Fn(&tessera_view::gpu::Gpu) -> u64| {
            workload.gpus.values().map(|gpu| gpus(gpu)).max().unwrap_or(0)
        };
        Now {
            memory_bytes: limits.iter().map(|limit| limit.0).max().unwrap_or(before.0),
            cores_millis: limits.iter().map(|limit| limit.1).max().unwrap_or(before.1).min(WHOLE),
            ceiling_bytes: most(&|gpu| {
                gpu.memory_total_bytes.saturating_sub(gpu.memory_reserve_bytes)
            }),
            floor_bytes: most(&|gpu| gpu.context_overhead_bytes).saturating_add(MEMORY_STEP),
            differ: limits.len() > 1,
        }
    }
}

fn seen(workload: &Workload<'_>) -> String {
    let pods = workload.pods.len();
    let first = workload.samples.iter().map(|sample| sample.at_unix_ms).min().unwrap_or(0);
    format!(
        "seen for {} in all, {pods} pod{}, since {}",
        length(workload.seen.observed_ms),
        if pods == 1 { "" } else { "s" },
        time_format::utc(first)
    )
}

fn apart(workload: &Workload<'_>, part: Part<'_>) -> Vec<String> {
    let mut all = Vec::new();
    if part != Part::Whole {
        all.push(
            "the container holds several allocations, and this is one of them: commands name it by its id"
                .to_owned(),
        );
    }
    if workload.has_unattributed {
        all.push(
            "pods that have ended are left out: the history does not say which of the allocations theirs were"
                .to_owned(),
        );
    }
    all
}

/// A length of time in its two largest units.
pub(crate) fn length(ms: u64) -> String {
    time_format::ago(0, i64::try_from(ms).unwrap_or(i64::MAX))
}

fn up(bytes: u64, percent: u64) -> u64 {
    let more = u128::from(bytes) * u128::from(100 + percent);
    u64::try_from(more.div_ceil(100)).unwrap_or(u64::MAX)
}

fn steps(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(MEMORY_STEP).unwrap_or(bytes)
}

fn memory(
    workload: &Workload<'_>,
    now: &Now,
    settings: &Advice,
    evidence: &mut Vec<String>,
) -> u64 {
    let samples = &workload.samples;
    let highest = samples.iter().map(|sample| sample.peak_bytes).max().unwrap_or(0);
    let weighed = samples.iter().map(|sample| (sample.peak_bytes, sample.observed_ms));
    let usual = percentile(weighed, settings.memory_percentile).unwrap_or(highest);
    let with_margin = up(usual, settings.memory_margin.into());
    let wanted = with_margin.max(highest).max(now.floor_bytes);
    evidence.push(format!(
        "memory: at most {} of {}; {}% of the time no more than {}, with {}% on top {}",
        format_bytes(highest),
        format_bytes(now.memory_bytes),
        settings.memory_percentile,
        format_bytes(usual),
        settings.memory_margin,
        format_bytes(with_margin),
    ));
    if now.differ {
        evidence
            .push("its pods have different limits; the largest counts as what it has".to_owned());
    }
    // Nobody can have more than there is, but what was used is never cut.
    let bounded = |bytes: u64| match now.ceiling_bytes {
        0 => steps(bytes),
        ceiling => steps(bytes).min(ceiling.max(highest)),
    };
    let refusals: u64 =
        samples.iter().fold(0, |sum: u64, sample| sum.saturating_add(sample.refusals));
    if refusals > 0 {
        let refused = samples.iter().filter(|sample| sample.refusals > 0);
        let refused_at = refused.map(|sample| sample.limit_bytes).max().unwrap_or(0);
        let margin = REFUSED_MARGIN.max(settings.memory_margin.into());
        let advised = bounded(wanted.max(up(refused_at, margin))).max(now.memory_bytes);
        let requests = if refusals == 1 { "request" } else { "requests" };
        let mut text = format!(
            "{refusals} {requests} for memory refused at a limit of {}: it needs more than that",
            format_bytes(refused_at)
        );
        if advised <= refused_at {
            text += ", and it has all that a GPU here can give";
        }
        evidence.push(text);
        return advised;
    }
    worth(now.memory_bytes, bounded(wanted), highest, MEMORY_STEP)
}

/// The advised amount, or the present one where that is nearly the same and large enough for `least`.
fn worth(now: u64, advised: u64, least: u64, step: u64) -> u64 {
    let near = now.abs_diff(advised) <= (now / WORTH).max(step);
    if now > 0 && now >= least && near { now } else { advised }
}

struct Cores {
    millis: u32,
    divided: bool,
    capped: bool,
    /// More than it has, of time alone that others left idle.
    is_of_idle: bool,
}

impl Cores {
    fn undivided(millis: u32) -> Self {
        Cores { millis, divided: false, capped: false, is_of_idle: false }
    }
}

fn cores(
    workload: &Workload<'_>,
    now: &Now,
    settings: &Advice,
    evidence: &mut Vec<String>,
) -> Cores {
    let samples = &workload.samples;
    let policies: BTreeSet<ComputePolicy> =
        workload.live.iter().flat_map(|tenant| &tenant.gpus).map(|used| used.policy).collect();
    let wanted_any = samples.iter().any(|sample| sample.wanted_millis > 0);
    let launched = samples.iter().any(|sample| sample.launched);
    let undivided =
        policies.iter().all(|policy| *policy == ComputePolicy::None) && !policies.is_empty();
    if !wanted_any && (undivided || launched) {
        evidence.push("GPU time: nobody divides it here, so no share is advised".to_owned());
        return Cores::undivided(now.cores_millis);
    }
    if !wanted_any {
        evidence.push(
            "GPU time: no work at all; if that is so always, scale it to zero or remove it"
                .to_owned(),
        );
    }
    let ms = |samples: &mut dyn Iterator<Item = &Sample>| {
        samples.map(|sample| sample.observed_ms).fold(0, u64::saturating_add)
    };
    let unmeasured_ms = ms(&mut samples.iter().filter(|sample| !sample.is_measured));
    if unmeasured_ms > ms(&mut samples.iter()) / UNMEASURED {
        evidence.push(format!(
            "GPU time: for {} nobody measured how much of what it had leased it used, so no share is advised; if that \
             was long ago, ask for a shorter time (--since)",
            length(unmeasured_ms)
        ));
        return Cores::undivided(now.cores_millis);
    }
    let of = |figure: fn(&Sample) -> u32| samples.iter().filter(|one| one.is_measured).map(figure);
    let highest = of(|sample| sample.highest_millis).max().unwrap_or(0);
    let weighed = samples.iter().filter(|sample| sample.is_measured);
    let weighed = weighed.map(|sample| (sample.wanted_millis, sample.observed_ms));
    let usual = percentile(weighed, settings.cores_percentile).unwrap_or(0);
    let with_margin = up(usual.into(), settings.cores_margin.into());
    let with_margin = u32::try_from(with_margin).unwrap_or(WHOLE).min(WHOLE);
    if wanted_any {
        evidence.push(format!(
            "GPU time: used {} on average, {} at most in ten seconds; used and waited for, {}% of the time no more than {}, with \
             {}% on top {}",
            format_cores(mean(samples, |sample| sample.used_millis)),
            format_cores(highest),
            settings.cores_percentile,
            format_cores(usual),
            settings.cores_margin,
            format_cores(with_margin),
        ));
    }
    let capped_ms = samples.iter().filter(|sample| sample.capped).map(|sample| sample.observed_ms);
    let capped_ms = capped_ms.fold(0, u64::saturating_add);
    let strict = policies.contains(&ComputePolicy::Strict);
    let at_cap =
        samples.iter().any(|one| one.leased_millis > 0 && one.leased_millis >= one.cores_millis);
    // The history does not know the policy, so without a live tenant what waited speaks for a cap.
    let capped = strict && at_cap || capped_ms > 0 && (strict || policies.is_empty());
    if capped {
        evidence.push(format!(
            "its share of {} is also a cap: more than that could not be seen, and what it waited for says only \
             that it wants more",
            format_cores(now.cores_millis)
        ));
    }
    let wanted = with_margin.max(highest).max(CORES_STEP);
    let advised = wanted.next_multiple_of(CORES_STEP).min(WHOLE);
    let millis = worth(now.cores_millis.into(), advised.into(), highest.into(), CORES_STEP.into());
    let millis = u32::try_from(millis).unwrap_or(WHOLE);
    // What it used beyond its share while it did not wait, nobody else wanted.
    let contended = samples.iter().filter(|sample| sample.is_measured).map(|sample| {
        let waited = sample.wanted_millis > sample.used_millis;
        let most = if waited { WHOLE } else { sample.cores_millis };
        (sample.wanted_millis.min(most), sample.observed_ms)
    });
    let contended = percentile(contended, settings.cores_percentile).unwrap_or(0);
    let is_of_idle = !capped && millis > now.cores_millis && contended <= now.cores_millis;
    if !capped && highest > now.cores_millis && now.cores_millis > 0 {
        let no_change =
            if is_of_idle { ": no change of the share is written for that" } else { "" };
        evidence.push(format!(
            "it used more than its share of {}, in time that others left idle{no_change}",
            format_cores(now.cores_millis)
        ));
    }
    Cores { millis, divided: true, capped, is_of_idle }
}

fn mean(samples: &[Sample], figure: fn(&Sample) -> u32) -> u64 {
    let whole: u128 = samples.iter().map(|sample| u128::from(sample.observed_ms)).sum();
    let sum: u128 = samples
        .iter()
        .map(|sample| u128::from(figure(sample)) * u128::from(sample.observed_ms))
        .sum();
    u64::try_from(sum.checked_div(whole).unwrap_or(0)).unwrap_or(u64::MAX)
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
