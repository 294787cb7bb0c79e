//! One generation of an allocation, from beginning to end.

use std::cmp::Reverse;

use tessera_config::Config;
use tessera_model::audit::{Event, Limits, What};
use tessera_model::gpu::Gpu as Device;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::record::{Grant, Record};
use tessera_model::subject::Key;
use tessera_rules::shares;
use tessera_view::explain::{Behind, Enforcement, Limit, Neighbour, Placement, Story};
use tessera_view::gpu::Gpu;
use tessera_view::status::{Allocation, AllocationState};
use tessera_view::tenant::Use;

use super::subject::holder;
use super::{Facts, LINES, incidents, line};

/// All that is known of it.
pub(super) fn tell(facts: &Facts, key: &Key) -> Story {
    let same = |id: &str, generation: u64| id == key.id && generation == key.generation;
    let trail: Vec<&Event> = facts
        .trail
        .events
        .iter()
        .filter(|event| event.id.as_ref().is_some_and(|id| same(id.as_str(), event.generation)))
        .collect();
    let record = facts.records.iter().find(|r| same(r.id.as_str(), r.generation));
    let now = facts.status.allocations.iter().find(|a| same(&a.id, a.generation));
    let at = |what: &What| trail.iter().rev().find(|e| e.what == *what).map_or(0, |e| e.at_unix_ms);
    let lines: Vec<_> = trail.iter().map(|event| line(event)).collect();
    let story = Story {
        id: key.id.clone(),
        generation: key.generation,
        holder: holder(facts, key),
        now: now.cloned(),
        allocated_unix_ms: at(&What::Allocated),
        started_unix_ms: at(&What::Started),
        released_unix_ms: at(&What::Released),
        placement: Some(placement_of_trail(&trail)),
        incidents: incidents(&trail),
        trail: lines[lines.len().saturating_sub(LINES)..].to_vec(),
        ..Story::default()
    };
    match record {
        Some(record) => living(story, facts, record, now, &trail),
        None => story,
    }
}

/// Of one that is gone there is what its Allocate said.
fn placement_of_trail(trail: &[&Event]) -> Placement {
    let allocated = trail.iter().find(|event| event.what == What::Allocated);
    let reason = allocated.and_then(|event| event.reason.clone());
    Placement { reason: reason.unwrap_or_default(), ..Placement::default() }
}

fn living(
    story: Story,
    facts: &Facts,
    record: &Record,
    now: Option<&Allocation>,
    trail: &[&Event],
) -> Story {
    let limits = record.grants.iter().map(|grant| {
        let used = now.and_then(|now| now.gpus.iter().find(|gpu| gpu.gpu_uuid == grant.uuid));
        Limit {
            gpu_uuid: grant.uuid.clone(),
            memory_limit_bytes: grant.memory_limit_bytes,
            cores_millis: grant.cores_millis,
            policy: grant.compute,
            context_overhead_bytes: grant.context_overhead_bytes,
            memory_overhead_bytes: used.map_or(0, |used| used.memory_overhead_bytes),
            ..origin_of(facts, record, grant, trail)
        }
    });
    let stands = record.grants.iter().map(|grant| {
        let gpu = facts.status.gpus.iter().find(|gpu| gpu.uuid == grant.uuid);
        gpu.map_or_else(|| Gpu { uuid: grant.uuid.clone(), ..Gpu::default() }, crate::view::gpu)
    });
    let placed = match &record.placed {
        Some(placed) => Placement {
            preferred_replica_ids: placed.preferred.clone(),
            as_preferred: placed.is_followed(&record.replicas),
            reason: placed.sentence(&record.replicas),
            ..Placement::default()
        },
        None => story.placement.clone().unwrap_or_default(),
    };
    let placement = Placement { stands: stands.collect(), ..placed };
    Story {
        resource_name: record.resource.clone(),
        replica_ids: record.replicas.clone(),
        allocated_unix_ms: record.allocated_unix_ms,
        started_unix_ms: record.started_unix_ms,
        released_unix_ms: 0,
        limits: limits.collect(),
        neighbours: now.map(|now| neighbours(facts, now)).unwrap_or_default(),
        placement: Some(placement),
        enforcement: Some(enforcement(facts, record, now)),
        ..story
    }
}

/// Others that had its GPUs in the last ten seconds.
fn neighbours(facts: &Facts, now: &Allocation) -> Vec<Neighbour> {
    let mut all = Vec::new();
    for other in facts.status.allocations.iter().filter(|other| other.id != now.id) {
        let got_10s_millis = other.compute.as_ref().map_or(0, |compute| compute.got_10s_millis);
        let shares = |used: &&Use| now.gpus.iter().any(|mine| mine.gpu_uuid == used.gpu_uuid);
        for used in other.gpus.iter().filter(shares).filter(|_| got_10s_millis > 0) {
            let holder = other.holder.clone().unwrap_or_default();
            let who = Behind {
                allocation_id: other.id.clone(),
                namespace: holder.namespace,
                pod: holder.pod,
            };
            all.push(Neighbour { gpu_uuid: used.gpu_uuid.clone(), who, got_10s_millis });
        }
    }
    all.sort_by_key(|one| Reverse(one.got_10s_millis));
    all
}

fn enforcement(facts: &Facts, record: &Record, now: Option<&Allocation>) -> Enforcement {
    let mut remarks = Vec::new();
    match now {
        None => remarks.push("its pages cannot be read: what is in use is unknown".to_owned()),
        Some(now) => {
            if now.state == AllocationState::Parked {
                let text = "parked: its replicas went to a newer allocation, and it counts no more";
                remarks.push(text.to_owned());
            }
            if now.processes.is_empty() {
                remarks.push("no process of it uses CUDA now".to_owned());
            }
            if now.compute.is_none() {
                remarks.push("its GPU time is not divided: no process has launched anything yet, or its policy is none".to_owned());
            }
        }
    }
    // What status warns of begins with the name, or has the id in it.
    let name = record.name();
    let mine =
        |text: &&String| text.contains(record.id.as_str()) || text.starts_with(name.as_str());
    let warnings = facts.status.warnings.iter().filter(mine).cloned();
    Enforcement {
        shim: record.shim.clone().unwrap_or_default(),
        page_version: facts.page_versions.get(record.id.as_str()).copied().unwrap_or(0),
        pages_dir: now.map(|now| now.pages_dir.clone()).unwrap_or_default(),
        remarks,
        warnings: warnings.collect(),
    }
}

/// Memory and share come from the same.
fn of_both(text: String) -> Limit {
    Limit { memory_origin: text.clone(), cores_origin: text, ..Limit::default() }
}

/// The part of the configuration that cuts a GPU: `share`, or `layout[n]`.
pub(super) fn table(gpu: &Device, config: &Config) -> String {
    match shares::layout_of(gpu, config) {
        Some(n) => format!("layout[{n}]"),
        None => "share".to_owned(),
    }
}

/// A limit with nothing but the origins of `grant`, as it is in force. `trail` is that of its generation.
fn origin_of(facts: &Facts, record: &Record, grant: &Grant, trail: &[&Event]) -> Limit {
    let before = record.overridden.as_ref().map(|set| &set.allocated);
    let is_set = |all: &Vec<Grant>| !all.contains(grant);
    if let Some((set_unix_ms, set_by)) = set(grant, trail) {
        let text = Limit::set(set_unix_ms, &set_by);
        return Limit { set_unix_ms, set_by, ..of_both(text) };
    }
    if before.is_some_and(is_set) {
        return of_both("set; the trail has lost by whom".to_owned());
    }
    if let Some(claim) = record.origin.claim() {
        let asked = |capacity: &str| match claim.asked.get(capacity) {
            Some(text) => format!("by {claim}, which asks for {text}"),
            None => format!("by {claim}, which states none: one replica's share"),
        };
        let (memory_origin, cores_origin) = (asked("memory"), asked("cores"));
        return Limit { memory_origin, cores_origin, ..Limit::default() };
    }
    let Some(gpu) = facts.gpus.iter().find(|gpu| gpu.uuid == grant.uuid) else {
        return of_both("as of its Allocate; the GPU is gone".to_owned());
    };
    let table = table(gpu, &facts.config);
    let cut = shares::cut(gpu, &facts.config);
    let Some((n, share)) = cut.iter().enumerate().find(|(_, s)| s.resource == record.resource)
    else {
        let text =
            format!("as of its Allocate; the configuration sells {} no more", record.resource);
        return of_both(text);
    };
    let on_it = |id: &&String| id.rsplit_once("::").is_some_and(|(uuid, _)| uuid == grant.uuid);
    let replicas = record.replicas.iter().filter(on_it).count();
    let key = |name: &str| match table.as_str() {
        "share" => format!("share.{name}"),
        layout => format!("{layout}.shares[{n}].{name}"),
    };
    let place = |name: &str| {
        let key = key(name);
        let source = &facts.config.source;
        match (&source.file, source.line_set(&key)) {
            (Some(file), Some(line)) => format!("{key} ({}:{line})", file.display()),
            (None, Some(line)) => format!("{key} (line {line})"),
            (_, None) => format!("{key} (default)"),
        }
    };
    let count = u64::try_from(replicas).unwrap_or(u64::MAX);
    let memory = share.memory_bytes.saturating_mul(count);
    let cores = u64::from(share.cores_millis).saturating_mul(count);
    let from = |name: &str, same: bool, today: String| match same {
        true => format!("{replicas} × {}", place(name)),
        false => format!("as of its Allocate; {} would give {today} now", place(name)),
    };
    let same_cores = cores == u64::from(grant.cores_millis) && share.compute == grant.compute;
    Limit {
        memory_origin: from("memory", memory == grant.memory_limit_bytes, format_bytes(memory)),
        cores_origin: from(
            "cores",
            same_cores,
            format!("{} {}", format_cores(cores), share.compute.into_str()),
        ),
        ..Limit::default()
    }
}

/// When the last change of limits was, and its originator, if it is in force.
fn set(grant: &Grant, trail: &[&Event]) -> Option<(i64, String)> {
    let (event, after) = trail.iter().rev().find_map(|event| match &event.what {
        What::QuotaSet { after, .. } => Some((event, Some(after))),
        What::QuotaReset { .. } => Some((event, None)),
        _ => None,
    })?;
    let mine = |limits: &&Limits| limits.uuid == grant.uuid;
    after?.iter().find(mine)?;
    let by = event.by.as_ref().map_or_else(|| "somebody".to_owned(), ToString::to_string);
    Some((event.at_unix_ms, by))
}
