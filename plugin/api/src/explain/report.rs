//! An explanation for people, and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};
use tessera_kubelet_api::admin::{
    AllocationStory, ComputePolicy, ExplainResponse, GpuStory, Limit, TrailLine,
};

use crate::admin;
use crate::admin::words;
use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;

/// Lines of the trail that people are shown, the newest; JSON has all.
const SHOWN: usize = 20;

/// For people.
pub(super) fn text(told: &ExplainResponse) -> String {
    let mut out = String::new();
    for (i, story) in told.allocations.iter().enumerate() {
        gap(&mut out, i);
        allocation(&mut out, story, told);
    }
    for (i, story) in told.gpus.iter().enumerate() {
        gap(&mut out, i);
        gpu(&mut out, story, told.at_unix_ms);
    }
    if told.left_out > 0 {
        let _ = writeln!(out, "\nand {} older allocations", told.left_out);
    }
    for remark in &told.remarks {
        let _ = writeln!(out, "\nnote: {}", printable::line(remark));
    }
    let since = time_format::utc(told.trail_since_unix_ms);
    let _ = writeln!(out, "\nTimes are in UTC. The audit trail goes back to {since}.");
    out
}

fn gap(out: &mut String, i: usize) {
    if i > 0 {
        out.push('\n');
    }
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

fn allocation(out: &mut String, story: &AllocationStory, told: &ExplainResponse) {
    let name = match &story.holder {
        Some(h) => format!("{}/{}, container {}", h.namespace, h.pod, h.container),
        None => "a container that kubelet has not named".to_owned(),
    };
    let ago = |at: i64| ago(at, told.at_unix_ms);
    let state = match (&story.now, story.released_unix_ms) {
        (Some(now), _) => words::allocation(now.state()).to_owned(),
        (None, 0) if story.enforcement.is_some() => "recorded".to_owned(),
        (None, 0) => "gone".to_owned(),
        (None, at) => format!("released {}", ago(at)),
    };
    let _ = writeln!(out, "{}: {state}", printable::line(&name));
    line(out, "id", &format!("{}, generation {}", story.id, story.generation));
    if story.allocated_unix_ms > 0 {
        line(out, "allocated", &ago(story.allocated_unix_ms));
    }
    if story.started_unix_ms > 0 {
        line(out, "started", &ago(story.started_unix_ms));
    }
    if !story.replica_ids.is_empty() {
        let replicas = format!("{} of {}", story.replica_ids.join(", "), story.resource_name);
        line(out, "replicas", &replicas);
    }
    let placement = story.placement.clone().unwrap_or_default();
    let why = match placement.reason.as_str() {
        "" => "not recorded: allocated by an earlier version, or the line is gone".to_owned(),
        reason => reason.to_owned(),
    };
    line(out, "why there", &why);
    lines(out, "GPUs", placement.gpus);
    lines(out, "limits", story.limits.iter().flat_map(|limit| limit_lines(story, limit)));
    if let Some(how) = &story.enforcement {
        let shim = match how.shim.as_str() {
            "" => "shim unknown".to_owned(),
            shim => format!("shim {shim}"),
        };
        let injected = match how.injected_by.as_slice() {
            [] => "nothing (container.inject is empty)".to_owned(),
            ways => ways.join(" and "),
        };
        let text = format!(
            "{shim} by {injected}, page version {}; GPU delivered by {}",
            how.page_version, how.device_list_strategy
        );
        line(out, "enforced", &text);
        lines(out, "", how.remarks.iter().map(|remark| format!("- {remark}")));
    }
    if story.incidents.is_empty() {
        line(out, "incidents", "none: nothing refused, delayed or found amiss");
    } else {
        let incident = |i: &tessera_kubelet_api::admin::Incident| {
            let span = match (i.first_unix_ms, i.last_unix_ms) {
                (first, last) if first == last => time_format::utc(last),
                (first, last) => {
                    format!("{} to {}", time_format::utc(first), time_format::utc(last))
                }
            };
            format!("{} {}, {span}; last: {}", i.what, times(i.times), i.reason)
        };
        lines(out, "incidents", story.incidents.iter().map(incident));
    }
    trail(out, &story.trail, false);
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

fn times(times: u64) -> String {
    if times == 1 { "once".to_owned() } else { format!("{times} times") }
}

fn limit_lines(story: &AllocationStory, limit: &Limit) -> Vec<String> {
    let memory = format_bytes(limit.memory_limit_bytes);
    let cores = format_cores(limit.cores_millis);
    let policy = words::policy(limit.policy());
    let what = match limit.policy() {
        ComputePolicy::Strict => "a hard cap",
        ComputePolicy::Burst => "its part while others want the GPU, more while they do not",
        ComputePolicy::None => "GPU time is not divided",
        ComputePolicy::Unspecified => "unknown",
    };
    let mut lines = vec![
        format!("{}: memory {memory}, {}", limit.gpu_uuid, limit.memory_origin),
        format!("  GPU time {cores} {policy} ({what}), {}", limit.cores_origin),
    ];
    let now = story.now.as_ref();
    let used = now.and_then(|now| now.gpus.iter().find(|used| used.gpu_uuid == limit.gpu_uuid));
    if let Some(used) = used {
        let nvml = match used.memory_nvml_bytes {
            Some(bytes) => format!(", the driver says {}", format_bytes(bytes)),
            None => String::new(),
        };
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
            "  got {} in 1 s, {} in 10 s; waited {} s for it in all; gate {}",
            format_cores(compute.got_1s_millis),
            format_cores(compute.got_10s_millis),
            compute.waited_us / 1_000_000,
            compute.gate
        ));
    }
    lines
}

fn gpu(out: &mut String, story: &GpuStory, now_unix_ms: i64) {
    let gpu = story.gpu.clone().unwrap_or_default();
    let name = printable::line(&gpu.name);
    let _ = writeln!(out, "GPU {}, {}, {name}: {}", gpu.index, gpu.uuid, words::gpu(gpu.state()));
    if !gpu.state_reason.is_empty() {
        let ago = time_format::ago(gpu.state_since_unix_ms, now_unix_ms);
        line(out, "health", &format!("{} since {ago}", gpu.state_reason));
    }
    if !gpu.state_waits_for.is_empty() {
        line(out, "waits for", &gpu.state_waits_for);
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
            "measured" => "as a bare context was seen to take with this driver",
            "formula" => "by its multiprocessors; none was measured yet",
            _ => "because nobody tells its multiprocessors",
        };
        line(out, "context", &format!("{} each for new pods, {text}", format_bytes(bytes)));
    }
    lines(out, "cut into", story.cut.clone());
    lines(
        out,
        "replicas",
        gpu.replicas.iter().map(|replica| {
            let state = match (replica.allocation_id.as_str(), replica.health_reason.as_str()) {
                ("", "") => "free".to_owned(),
                ("", reason) => format!("not given out: {reason}"),
                (id, "") => format!("held by {id}"),
                (id, reason) => format!("held by {id}, not given out again: {reason}"),
            };
            format!("{} {}: {state}", replica.resource_name, replica.index)
        }),
    );
    trail(out, &story.trail, true);
}

fn trail(out: &mut String, trail: &[TrailLine], named: bool) {
    if trail.is_empty() {
        return line(out, "history", "no line of the audit trail is left");
    }
    let first = trail.len().saturating_sub(SHOWN);
    let earlier = (first > 0).then(|| format!("({first} earlier lines: -o json)"));
    let told = trail[first..].iter().map(|line| {
        let by = if line.by.is_empty() { String::new() } else { format!(" [{}]", line.by) };
        let reason = match line.reason.as_str() {
            // Told above, or by `explain` of that allocation.
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
    lines(out, "history", earlier.into_iter().chain(told));
}

/// With the field names of `admin_v1.proto`, and enumerations as words.
pub(super) fn json(told: &ExplainResponse) -> Value {
    json!({
        "allocations": told.allocations.iter().map(allocation_json).collect::<Vec<_>>(),
        "gpus": told.gpus.iter().map(|story| json!({
            "gpu": story.gpu.as_ref().map(admin::gpu_json),
            "cut": story.cut,
            "trail": trail_json(&story.trail),
        })).collect::<Vec<_>>(),
        "at_unix_ms": told.at_unix_ms,
        "trail_since_unix_ms": told.trail_since_unix_ms,
        "left_out": told.left_out,
        "remarks": told.remarks,
    })
}

fn allocation_json(story: &AllocationStory) -> Value {
    let limits = story.limits.iter().map(|limit| {
        json!({
            "gpu_uuid": limit.gpu_uuid,
            "memory_limit_bytes": limit.memory_limit_bytes,
            "memory_origin": limit.memory_origin,
            "cores_millis": limit.cores_millis,
            "policy": words::policy(limit.policy()),
            "cores_origin": limit.cores_origin,
            "context_overhead_bytes": limit.context_overhead_bytes,
            "memory_overhead_bytes": limit.memory_overhead_bytes,
        })
    });
    let incidents = story.incidents.iter().map(|incident| {
        json!({
            "what": incident.what,
            "times": incident.times,
            "first_unix_ms": incident.first_unix_ms,
            "last_unix_ms": incident.last_unix_ms,
            "reason": incident.reason,
        })
    });
    json!({
        "id": story.id,
        "generation": story.generation,
        "resource_name": story.resource_name,
        "replica_ids": story.replica_ids,
        "holder": story.holder.as_ref().map(holder_json),
        "now": story.now.as_ref().map(admin::allocation_json),
        "allocated_unix_ms": story.allocated_unix_ms,
        "started_unix_ms": story.started_unix_ms,
        "released_unix_ms": story.released_unix_ms,
        "placement": story.placement.as_ref().map(|placement| json!({
            "preferred_replica_ids": placement.preferred_replica_ids,
            "as_preferred": placement.as_preferred,
            "reason": placement.reason,
            "gpus": placement.gpus,
        })),
        "limits": limits.collect::<Vec<_>>(),
        "enforcement": story.enforcement.as_ref().map(|how| json!({
            "device_list_strategy": how.device_list_strategy,
            "injected_by": how.injected_by,
            "shim": how.shim,
            "page_version": how.page_version,
            "pages_dir": how.pages_dir,
            "remarks": how.remarks,
        })),
        "incidents": incidents.collect::<Vec<_>>(),
        "trail": trail_json(&story.trail),
    })
}

fn holder_json(holder: &tessera_kubelet_api::admin::Holder) -> Value {
    json!({
        "namespace": holder.namespace,
        "pod": holder.pod,
        "container": holder.container,
    })
}

fn trail_json(trail: &[TrailLine]) -> Vec<Value> {
    let line = |line: &TrailLine| {
        json!({
            "at_unix_ms": line.at_unix_ms,
            "what": line.what,
            "text": line.text,
            "reason": line.reason,
            "by": line.by,
            "gpu_uuid": line.gpu_uuid,
            "allocation_id": line.allocation_id,
            "generation": line.generation,
            "times": line.times,
            "holder": line.holder.as_ref().map(holder_json),
        })
    };
    trail.iter().map(line).collect()
}
