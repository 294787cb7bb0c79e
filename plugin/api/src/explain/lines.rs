//! Words for lines of the audit trail, and incidents grouped by kind.

use std::collections::BTreeMap;

use tessera_model::audit::{Behind, Event, What};
use tessera_model::counted::times;
use tessera_view::explain::{self as view, Incident, TrailLine};

/// A line as it is shown.
pub(crate) fn line(event: &Event) -> TrailLine {
    TrailLine {
        at_unix_ms: event.at_unix_ms,
        what: event.what.name().to_owned(),
        text: text(event),
        reason: event.detail().to_owned(),
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

/// The sentence, and how often.
fn text(event: &Event) -> String {
    let is_nodes = event.gpu.is_none() && event.id.is_none();
    let sentence = event.sentence(if is_nodes { "the node" } else { "the GPU" });
    match event.times {
        1 => sentence,
        count => format!("{sentence} ({})", times(count)),
    }
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
        let sentence = event.sentence("the GPU");
        (kind.reason, kind.reason_is_own) = match event.detail() {
            "" => (sentence, true),
            detail => (format!("{sentence}: {detail}"), event.reason_is_own()),
        };
        event.advice().clone_into(&mut kind.advice);
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
