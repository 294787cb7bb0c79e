//! An explanation for people.

use std::fmt::Write;

use tessera_model::audit::{Event, What};
use tessera_model::counted::{plural, times};
use tessera_model::health::State as GpuState;
use tessera_model::percent::{format_cores, format_used};
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;

use tessera_model::replica;

use crate::gpu::{Gpu, Replicas, StatusGpu};
use crate::status::{Allocation, ComputePolicy, Holder, Refusal};

use super::because;
use super::{
    Explanation, Explanations, GpuStory, Incident, Limit, Neighbour, OnNode, Story, TrailLine,
};

/// [`Gpu::front_end`] of one that is sold by claims.
const DRA: &str = "DRA";
/// Lines of the trail that people are shown, the newest; JSON has all.
const SHOWN: usize = 20;

/// For people.
pub(super) fn text(explained: &Explanation) -> String {
    let now = explained.at_unix_ms;
    let allocations = explained.allocations.iter().map(|story| allocation(story, now));
    let gpus = explained.gpus.iter().map(|story| gpu(story, now));
    let refusals = explained.refusals.iter().map(|refusal| refused(refusal, now));
    let mut out = allocations.chain(gpus).chain(refusals).collect::<Vec<_>>().join("\n");
    if explained.left_out > 0 {
        let _ = writeln!(out, "\nand {} older allocations", explained.left_out);
    }
    for remark in &explained.remarks {
        let _ = writeln!(out, "\nnote: {}", printable::line(remark));
    }
    let since = time_format::utc(explained.trail_since_unix_ms);
    let _ = writeln!(out, "\nTimes are in UTC. The audit trail goes back to {since}.");
    out
}

fn refused(refusal: &Refusal, now_unix_ms: i64) -> String {
    let out = &mut heading(&format!("{} cannot start", refusal.who()));
    if !refusal.claim.is_empty() {
        line(out, "claim", &format!("{}/{}", refusal.namespace, refusal.claim));
    }
    line(out, "refused", &refusal.reason);
    let last = time_format::ago(refusal.last_unix_ms, now_unix_ms);
    line(out, "", &format!("{}, last {last}", times(refusal.times)));
    std::mem::take(out)
}

/// What a node says is one line wherever it stands: two would be another node's words.
fn heading(text: &str) -> String {
    format!("{}\n", printable::line(text))
}

fn line(out: &mut String, title: &str, text: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "  {title:<10} {}", printable::line(text));
}

/// The first with the title, the others below it.
fn lines(out: &mut String, title: &str, texts: impl IntoIterator<Item = String>) {
    for (i, text) in texts.into_iter().enumerate() {
        line(out, if i == 0 { title } else { "" }, &text);
    }
}

fn allocation(story: &Story, now_unix_ms: i64) -> String {
    let ago = |at: i64| ago(at, now_unix_ms);
    let state = match (&story.now, story.released_unix_ms) {
        (Some(now), _) => now.state.into_str().to_owned(),
        (None, 0) if story.enforcement.is_some() => "recorded".to_owned(),
        (None, 0) => "gone".to_owned(),
        (None, at) => format!("released {}", ago(at)),
    };
    let out = &mut heading(&format!("{}: {state}", story.name()));
    let placement = story.placement.clone().unwrap_or_default();
    lines(out, "trouble", placement.stands.iter().filter_map(trouble));
    lines(out, "meanwhile", meanwhile(story));
    line(out, "id", &format!("{}, generation {}", story.id, story.generation));
    for (what, at) in [("allocated", story.allocated_unix_ms), ("started", story.started_unix_ms)] {
        lines(out, what, (at > 0).then(|| ago(at)));
    }
    if let Some(claim) = story.now.as_ref().and_then(|now| now.claim.as_ref()) {
        let devices = claim.devices.join(", ");
        let text = format!(
            "{}/{}, request {}; {devices} of pool {}",
            claim.namespace, claim.name, claim.request, claim.pool
        );
        line(out, "claim", &text);
    }
    let others = story.now.iter().flat_map(|now| &now.other_holders);
    lines(out, "also", others.map(Holder::to_string));
    if !story.replica_ids.is_empty() {
        let replicas = replica::grouped(&story.replica_ids);
        line(out, "replicas", &format!("{replicas}, of {}", story.resource_name));
    }
    let why = match placement.reason.as_str() {
        "" => "not recorded: allocated by an earlier version, or the line is gone".to_owned(),
        reason => reason.to_owned(),
    };
    line(out, "why there", &why);
    lines(out, "GPUs", placement.stands.iter().map(stand));
    lines(out, "limits", story.limits.iter().flat_map(|limit| limit_lines(story, limit)));
    if let Some(how) = &story.enforcement {
        let shim = match how.shim.as_str() {
            "" => "shim unknown".to_owned(),
            shim => format!("shim {shim}"),
        };
        line(out, "enforced", &format!("{shim}, page version {}", how.page_version));
        let remarks = how.remarks.iter().chain(&how.warnings);
        lines(out, "", remarks.map(|remark| format!("- {remark}")));
    }
    if story.incidents.is_empty() {
        let is_warned = story.enforcement.as_ref().is_some_and(|how| !how.warnings.is_empty());
        let none = match is_warned {
            // What is warned of enters the trail with the next look.
            true => "none in the audit trail yet; see the warnings above",
            false => "none: nothing was refused or delayed, and no finding",
        };
        line(out, "incidents", none);
    } else {
        let incident = |i: &Incident| {
            let span = match (i.first_unix_ms, i.last_unix_ms) {
                (first, last) if first == last => time_format::utc(last),
                (first, last) => {
                    format!("{} to {}", time_format::utc(first), time_format::utc(last))
                }
            };
            let last = format!(
                "{} {}, {span}; last: {}",
                i.what,
                times(i.times),
                because(&i.reason, i.behind.as_ref())
            );
            if i.advice.is_empty() { last } else { format!("{last}. {}", i.advice) }
        };
        lines(out, "incidents", story.incidents.iter().map(incident));
    }
    trail(out, &story.trail, false);
    std::mem::take(out)
}

/// Names the tenants that had its GPUs in the last ten seconds, where it shares GPU time.
fn meanwhile(story: &Story) -> Option<String> {
    let compute = story.now.as_ref()?.compute.as_ref()?;
    let other =
        |one: &Neighbour| format!("{} {}", one.who.name(), format_cores(one.got_10s_millis));
    let others: Vec<String> = story.neighbours.iter().map(other).collect();
    let share = story.limits.iter().map(|limit| limit.cores_millis).max().unwrap_or(0);
    let waits = |us| format!("; it has now waited {:.1} s", us as f64 / 1e6);
    let waits = compute.waiting_us.map(waits).unwrap_or_default();
    (!others.is_empty()).then(|| {
        format!(
            "in the last 10 s it had leased {} (its share: {}), {}{waits}",
            format_cores(compute.got_10s_millis),
            format_cores(share),
            others.join(", ")
        )
    })
}

/// What is wrong with one of its GPUs, and what to do.
fn trouble(gpu: &Gpu) -> Option<String> {
    let to = match gpu.state.as_str() {
        "unhealthy" => GpuState::Unhealthy,
        _ => GpuState::Suspect,
    };
    let advice = Event::of_node(What::Health { from: GpuState::Healthy, to }, 0).advice();
    let text = format!("{}. {advice}", gpu.trouble()?);
    Some(text.trim_end_matches([' ', '.']).to_owned())
}

/// How one of its GPUs stands.
fn stand(gpu: &Gpu) -> String {
    if gpu.state.is_empty() {
        return format!("{}: gone", gpu.uuid);
    }
    let numa = gpu.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
    let because = |why: &str| if why.is_empty() { String::new() } else { format!(" ({why})") };
    let health = match (gpu.cordon.as_str(), gpu.state.as_str()) {
        ("", "healthy") if !gpu.withheld.is_empty() => {
            format!("not given out{}", because(&gpu.withheld))
        }
        ("", state) => format!("{state}{}", because(&gpu.state_reason)),
        (cordon, _) => cordon.to_owned(),
    };
    let [memory, cores] =
        [format_bytes(gpu.left_memory_bytes), format_cores(gpu.left_cores_millis)];
    let sum = |of: fn(&Replicas) -> u32| gpu.replicas.iter().map(of).fold(0, u32::saturating_add);
    let free = match (gpu.front_end == DRA, gpu.no_room.as_str()) {
        (true, "") => format!("for claims {memory} and {cores} free now"),
        (true, lack) => format!("for claims nothing free now: too little {lack}"),
        (false, _) => format!("{} of {} free now", sum(|of| of.free), replicas(sum(|of| of.count))),
    };
    format!(
        "GPU {} ({}): {}, NUMA node {numa}, PCI {}, {health}; {free}",
        gpu.index, gpu.uuid, gpu.name, gpu.pci_bus_id
    )
}

fn replicas(count: u32) -> String {
    plural(usize::try_from(count).unwrap_or(usize::MAX), "replica")
}

/// An instant and how long ago it was, as far as the clock can tell.
fn ago(at_unix_ms: i64, now_unix_ms: i64) -> String {
    let at = time_format::utc(at_unix_ms);
    match at_unix_ms.saturating_sub(now_unix_ms) {
        // Two readings of one clock, which may be disciplined meanwhile.
        ..=1000 => format!("{at} ({} ago)", time_format::ago(at_unix_ms, now_unix_ms)),
        _ => format!("{at} (the node's clock was set back since)"),
    }
}

fn limit_lines(story: &Story, limit: &Limit) -> Vec<String> {
    let memory = format_bytes(limit.memory_limit_bytes);
    let cores = format_cores(limit.cores_millis);
    let policy = limit.policy.into_str();
    let what = match limit.policy {
        ComputePolicy::Strict => "a hard cap",
        ComputePolicy::Burst => "its part while others want the GPU, more while they do not",
        ComputePolicy::None => "GPU time is not divided",
    };
    let stands = story.placement.iter().flat_map(|placement| &placement.stands);
    let stand = stands.into_iter().find(|stand| stand.uuid == limit.gpu_uuid);
    let gpu = match stand.filter(|stand| !stand.state.is_empty()) {
        Some(stand) => format!("GPU {}", stand.index),
        None => limit.gpu_uuid.clone(),
    };
    let mut lines = vec![
        format!("{gpu}: memory {memory}, {}", limit.memory_origin),
        format!("  GPU time {cores} {policy} ({what}), {}", limit.cores_origin),
    ];
    let now = story.now.as_ref();
    let used = now.and_then(|now| now.gpus.iter().find(|used| used.gpu_uuid == limit.gpu_uuid));
    if let Some(used) = used {
        let nvml = |bytes| format!(", the driver says {}", format_bytes(bytes));
        let nvml = used.memory_nvml_bytes.map(nvml).unwrap_or_default();
        lines.push(format!(
            "  charged {}, at most {} by one process; overhead observed {} beyond {} for each \
             context{nvml}",
            format_bytes(used.memory_charged_bytes),
            format_bytes(used.memory_peak_bytes),
            format_bytes(limit.memory_overhead_bytes),
            format_bytes(limit.context_overhead_bytes),
        ));
    }
    if let Some(compute) = now.and_then(|now| now.compute.as_ref()) {
        lines.push(format!(
            "  used {} in 10 s, had leased {}; waited {} s for it in all; gate {}",
            format_used(compute.used_10s_millis),
            format_cores(compute.got_10s_millis),
            compute.waited_us / 1_000_000,
            compute.gate_text()
        ));
    }
    lines
}

fn gpu(story: &GpuStory, now_unix_ms: i64) -> String {
    let gpu = story.gpu.clone().unwrap_or_default();
    let title = format!("GPU {}, {}, {}: {}", gpu.index, gpu.uuid, gpu.name, gpu.state.into_str());
    let out = &mut heading(&title);
    if !gpu.state_reason.is_empty() {
        let ago = time_format::ago(gpu.state_since_unix_ms, now_unix_ms);
        line(out, "health", &format!("{} since {ago}", gpu.state_reason));
    }
    if !gpu.state_waits_for.is_empty() {
        line(out, "waits for", &gpu.state_waits_for);
    }
    if !gpu.cordon.is_empty() {
        let node = if gpu.cordoned_with_node { " with the whole node" } else { "" };
        line(out, "cordon", &format!("{}{node}", gpu.cordon));
    }
    if !gpu.health_reason.is_empty() {
        line(out, "withheld", &gpu.health_reason);
    }
    let numa = gpu.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
    line(out, "where", &format!("PCI {}, NUMA node {numa}", gpu.pci_bus_id));
    let memory = format!(
        "{} in use of {}; sold {}, reserve {}, held by processes of no tenant {}",
        format_bytes(gpu.memory_used_bytes),
        format_bytes(gpu.memory_total_bytes),
        format_bytes(gpu.memory_limits_bytes),
        format_bytes(gpu.memory_reserve_bytes),
        format_bytes(gpu.memory_outside_bytes)
    );
    line(out, "memory", &memory);
    if gpu.context_overhead_bytes > 0 {
        let (bytes, source) = (gpu.context_overhead_bytes, &gpu.context_overhead_source);
        let text = match source.as_str() {
            "configured" => "by gpus.context_overhead",
            "formula" => "by its multiprocessors",
            _ => "because nobody tells its multiprocessors",
        };
        line(out, "context", &format!("{} each for new pods, {text}", format_bytes(bytes)));
    }
    lines(out, "cut into", story.cut.clone());
    lines(out, "pods", story.allocations.iter().map(|one| on_gpu(one, &gpu.uuid)));
    lines(out, "shares", shares(&gpu));
    trail(out, &story.trail, true);
    std::mem::take(out)
}

/// A pod on a GPU in a line: what it has of it, and what it uses.
fn on_gpu(one: &Allocation, uuid: &str) -> String {
    let who = match (&one.holder, &one.claim) {
        (Some(holder), _) => holder.to_string(),
        (None, Some(claim)) => format!("claim {}/{}", claim.namespace, claim.name),
        (None, None) => {
            format!(
                "allocation {}, which kubelet has not named",
                one.id.get(..8).unwrap_or(&one.id)
            )
        }
    };
    let used = one.gpus.iter().find(|used| used.gpu_uuid == uuid).cloned().unwrap_or_default();
    let time = one.compute.as_ref().map_or_else(String::new, |compute| {
        let (used, leased) = (compute.used_10s_millis, compute.got_10s_millis);
        format!("; used {} in 10 s, had leased {}", format_used(used), format_cores(leased))
    });
    format!(
        "{who}: {} of {}, {} {}{time}",
        format_bytes(used.memory_used_bytes),
        format_bytes(used.memory_limit_bytes),
        format_cores(used.cores_millis),
        used.policy.into_str()
    )
}

/// How many of each resource are held and free, and why others are not given out.
fn shares(gpu: &StatusGpu) -> Vec<String> {
    let of = |all: Replicas| {
        let Replicas { resource_name: name, count, held, free, .. } = all;
        let kept = gpu.replicas.iter().filter(|one| {
            one.resource_name == name && one.allocation_id.is_empty() && !one.is_free()
        });
        let mut why: Vec<&str> = kept.map(|one| one.health_reason.as_str()).collect();
        why.dedup();
        let kept = match count - held - free {
            0 => String::new(),
            kept => format!(", {kept} not given out: {}", why.join("; ")),
        };
        format!("{name}: {held} of {count} held, {free} free{kept}")
    };
    gpu.by_resource().into_iter().map(of).collect()
}

fn trail(out: &mut String, trail: &[TrailLine], named: bool) {
    if trail.is_empty() {
        return line(out, "history", "no line of the audit trail is left");
    }
    let first = trail.len().saturating_sub(SHOWN);
    let earlier = (first > 0).then(|| format!("({first} earlier lines: -o json)"));
    let latest = trail[first..].iter().map(|line| {
        let by = if line.by.is_empty() { String::new() } else { format!(" [{}]", line.by) };
        let because = because(&line.reason, line.behind.as_ref());
        let reason = match because.as_str() {
            // Shown above, or by `explain` of that allocation.
            _ if line.what == "allocated" => String::new(),
            "" => String::new(),
            reason => format!(": {reason}"),
        };
        let whom = match (&line.holder, line.allocation_id.as_str()) {
            (Some(holder), _) if named => format!("{}/{}: ", holder.namespace, holder.pod),
            (None, id) if named && !id.is_empty() => format!("{}: ", id.get(..8).unwrap_or(id)),
            _ => String::new(),
        };
        format!("{}  {whom}{}{reason}{by}", time_format::utc(line.at_unix_ms), line.text)
    });
    lines(out, "history", earlier.into_iter().chain(latest));
}

impl Explanation {
    /// For people. Safe to print.
    pub fn text(&self) -> String {
        printable::lines(&text(self)).into_owned()
    }
}

impl Explanations {
    /// For people: one node's explanation after the other's. Safe to print.
    pub fn text(&self) -> String {
        match self.nodes.as_slice() {
            [one] => one.explanation.text(),
            several => {
                let on = |one: &OnNode| {
                    format!("On node {}:\n{}", printable::line(&one.node), one.explanation.text())
                };
                several.iter().map(on).collect::<Vec<_>>().join("\n")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Enforcement, Explanation, GpuStory, Incident, Limit, Placement, Story, TrailLine,
    };
    use crate::gpu::{Gpu, StatusGpu};
    use crate::status::{Allocation, Holder};
    use crate::tenant::Compute;
    use serde_json::Value;

    /// Fields of few words, which nothing else is read as.
    const WORDS: [&str; 3] = ["state", "health", "policy"];

    /// Every text in it, whatever it is of.
    fn with_every_text(value: &mut Value, text: &str) {
        match value {
            Value::String(old) => text.clone_into(old),
            Value::Array(all) => all.iter_mut().for_each(|one| with_every_text(one, text)),
            Value::Object(all) => {
                let free = all.iter_mut().filter(|(key, _)| !WORDS.contains(&key.as_str()));
                free.for_each(|(_, one)| with_every_text(one, text));
            }
            _ => {}
        }
    }

    #[test]
    fn nothing_that_a_node_says_is_another_line() {
        let one = || vec![String::new()];
        let stands = vec![Gpu { state: "healthy".to_owned(), ..Gpu::default() }];
        let story = Story {
            holder: Some(Holder::default()),
            now: Some(Allocation {
                other_holders: vec![Holder::default()],
                compute: Some(Compute::default()),
                ..Allocation::default()
            }),
            replica_ids: one(),
            placement: Some(Placement { stands, ..Placement::default() }),
            limits: vec![Limit::default()],
            enforcement: Some(Enforcement {
                remarks: one(),
                warnings: one(),
                ..Enforcement::default()
            }),
            incidents: vec![Incident { times: 1, ..Incident::default() }],
            trail: vec![TrailLine::default()],
            ..Story::default()
        };
        let gpu = GpuStory {
            gpu: Some(StatusGpu::default()),
            cut: one(),
            allocations: vec![Allocation::default()],
            trail: vec![TrailLine::default()],
        };
        let whole = Explanation {
            allocations: vec![story],
            gpus: vec![gpu],
            remarks: one(),
            ..Explanation::default()
        };
        let mut hostile = serde_json::to_value(whole).unwrap();
        with_every_text(&mut hostile, "a\n\nOn node n0:\nann/chat\r\u{85}\u{2028}forged");
        let hostile: Explanation = serde_json::from_value(hostile).unwrap();
        for line in hostile.text().lines() {
            let is_own =
                !["On node", "ann/chat", "forged"].iter().any(|text| line.starts_with(text));
            assert!(is_own && !line.contains(['\r', '\u{85}', '\u{2028}']), "{line:?}");
        }
    }

    #[test]
    fn no_story_says_that_nothing_was_found_beside_a_warning() {
        let of = |warnings: Vec<String>| {
            let enforcement = Some(Enforcement { warnings, ..Enforcement::default() });
            let story = Story { enforcement, ..Story::default() };
            Explanation { allocations: vec![story], ..Explanation::default() }.text()
        };
        assert!(of(Vec::new()).contains("and no finding"));
        let warned = of(vec!["drained the GPU too late".to_owned()]);
        assert!(!warned.contains("no finding") && warned.contains("warnings above"), "{warned}");
    }
}
