//! The origin of limits: a key of the configuration, or a change by hand.

use super::Facts;
use tessera_config::Config;
use tessera_model::audit::{Event, Limits, What};
use tessera_model::gpu::Gpu;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::record::{Grant, Record};
use tessera_rules::shares;
use tessera_view::explain::Limit;

/// Memory and share come from the same.
fn of_both(text: String) -> Limit {
    Limit { memory_origin: text.clone(), cores_origin: text, ..Limit::default() }
}

/// The part of the configuration that cuts a GPU: `share`, or `layout[n]`.
pub(super) fn table(gpu: &Gpu, config: &Config) -> String {
    match shares::layout_of(gpu, config) {
        Some(n) => format!("layout[{n}]"),
        None => "share".to_owned(),
    }
}

/// A limit with nothing but the origins of `grant`, as it is in force. `trail` is that of its generation.
pub(super) fn of(facts: &Facts, record: &Record, grant: &Grant, trail: &[&Event]) -> Limit {
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
    let memory = share.limit.memory_bytes.saturating_mul(count);
    let cores = u64::from(share.limit.cores_millis).saturating_mul(count);
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
            format!("{} {}", format_cores(cores), share.compute.name()),
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
