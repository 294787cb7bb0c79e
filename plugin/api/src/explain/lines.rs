//! Words for lines of the audit trail, and incidents grouped by kind.

use std::collections::BTreeMap;

use tessera_model::audit::{Behind, Event, Limits, What};
use tessera_model::counted::times;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_view::explain::{self as view, Incident, TrailLine};

/// A line as it is shown.
pub(crate) fn line(event: &Event) -> TrailLine {
    TrailLine {
        at_unix_ms: event.at_unix_ms,
        what: event.what.name().to_owned(),
        text: text(event),
        reason: event.reason.clone().unwrap_or_default(),
        reason_is_own: event.reason_is_own(),
        behind: behind(event),
        by: event.by.as_ref().map(ToString::to_string).unwrap_or_default(),
        gpu_uuid: event.gpu.clone().unwrap_or_default(),
        allocation_id: event.id.as_ref().map(ToString::to_string).unwrap_or_default(),
        generation: event.generation,
        times: event.times,
        holder: event.holder.as_ref().map(Into::into),
    }
}

/// The allocation that had the GPU meanwhile.
fn behind(event: &Event) -> Option<view::Behind> {
    let What::Delayed { behind: Behind::Allocation { id, holder }, .. } = &event.what else {
        return None;
    };
    let holder = holder.as_ref();
    Some(view::Behind {
        allocation_id: id.clone(),
        namespace: holder.map(|holder| holder.namespace.clone()).unwrap_or_default(),
        pod: holder.map(|holder| holder.pod.clone()).unwrap_or_default(),
    })
}

fn text(event: &Event) -> String {
    let often = match event.times {
        1 => String::new(),
        count => format!(" ({})", times(count)),
    };
    let limits = |limits: &[Limits]| {
        let one = |l: &Limits| {
            let memory = format_bytes(l.memory_limit_bytes);
            let cores = format_cores(l.cores_millis);
            format!("{memory}, {cores} {} on {}", l.compute.name(), l.uuid)
        };
        limits.iter().map(one).collect::<Vec<_>>().join("; ")
    };
    let text = match &event.what {
        What::Allocated => "kubelet allocated it".to_owned(),
        What::PagesKept => {
            "allocated again while a process of the generation before still used its pages"
                .to_owned()
        }
        What::Started => "a container started with it".to_owned(),
        What::Parked => "its replicas went to another allocation".to_owned(),
        What::Released => "released".to_owned(),
        What::Adopted => "found on disk without a record, and adopted".to_owned(),
        What::Unaccounted => "it holds device memory outside its account".to_owned(),
        What::SoldByOthers => "another device plugin sells this GPU, too".to_owned(),
        What::SoldAlone => "nobody else sells this GPU any more".to_owned(),
        What::Health { from, to } => {
            format!("health went from {} to {}", state(*from), state(*to))
        }
        What::QuotaSet { before, after, forced } => {
            let forced = if *forced { ", below what was in use" } else { "" };
            format!("limits set from {} to {}{forced}", limits(before), limits(after))
        }
        What::QuotaReset { before, after } => {
            format!("limits reset from {} to {}", limits(before), limits(after))
        }
        What::Cordoned => "cordoned: nothing more of it is given out".to_owned(),
        What::Uncordoned => "uncordoned".to_owned(),
        What::ConfigurationReloaded { changes } => {
            format!("another configuration is in force: {}", changes.join("; "))
        }
        What::ConfigurationRefused { problems } => {
            format!("a configuration was refused: {}", problems.join("; "))
        }
        What::RefusedMemory { .. } => "refused memory over its quota".to_owned(),
        What::DriverRefused => "the driver refused memory".to_owned(),
        What::Delayed { .. } => "waited long for GPU time".to_owned(),
        What::Overlapped => "drained its GPU too late".to_owned(),
        What::Rationed => "rationed itself".to_owned(),
        What::Unlisted => "a process was turned away".to_owned(),
        What::Tampered { what } => format!("tampered with: {what}"),
        What::Restored { what } => {
            format!("{what}: missing or damaged, so that no container could start; restored")
        }
        What::Bypassed { pid, bytes } => {
            format!("process {pid} uses the GPU past the shim and holds {}", format_bytes(*bytes))
        }
    };
    text + &often
}

fn state(state: tessera_model::health::State) -> String {
    // As the ledger writes it.
    format!("{state:?}").to_lowercase()
}

/// Lines about trouble, by kind, the latest kind first: by their places in the trail, for the clock
/// may have been set back.
pub(super) fn incidents(trail: &[&Event]) -> Vec<Incident> {
    let mut kinds: BTreeMap<&'static str, (usize, Incident)> = BTreeMap::new();
    for (at, event) in trail.iter().enumerate().filter(|(_, event)| is_trouble(&event.what)) {
        let (last, kind) = kinds.entry(event.what.name()).or_insert_with(|| {
            let what = event.what.name().to_owned();
            let first_unix_ms = event.at_unix_ms;
            (at, Incident { what, first_unix_ms, ..Incident::default() })
        });
        *last = at;
        kind.times = kind.times.saturating_add(event.times);
        kind.last_unix_ms = event.at_unix_ms;
        kind.reason = event.reason.clone().unwrap_or_else(|| text(event));
        kind.reason_is_own = event.reason.is_none() || event.reason_is_own();
        kind.behind = behind(event);
    }
    let mut incidents: Vec<(usize, Incident)> = kinds.into_values().collect();
    incidents.sort_by_key(|(last, _)| std::cmp::Reverse(*last));
    incidents.into_iter().map(|(_, incident)| incident).collect()
}

/// Whether a line is about something refused, late or wrong.
fn is_trouble(what: &What) -> bool {
    what.is_tenants() && *what != What::Started || matches!(what, What::Restored { .. })
}
