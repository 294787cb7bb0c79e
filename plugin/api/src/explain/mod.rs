//! `tessera explain`: why a pod, an allocation or a GPU is as it is. [`answer`] is pure: it takes what the
//! plugin knows, and puts together what concerns the subject.

mod story;
mod subject;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_agent::Agent;
use tessera_config::Config;
use tessera_model::audit::{Behind, Event, What};
use tessera_model::counted::times;
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_rules::shares;
use tessera_store::Lines;
use tessera_view::API_VERSION;
use tessera_view::explain::{self as view, Explanation, GpuStory, Incident, TrailLine};
use tessera_view::status::{Allocation, Status};
use tessera_web::SourceError;

use crate::admin::StatusView;

/// Most allocations that are explained in full; of a Deployment's pods, or of a name that comes again and again.
const STORIES: usize = 8;
/// Lines of the trail for each of them, the newest.
const LINES: usize = 200;
/// Longest subject, bytes. A namespace, a pod and a container fit into it.
const LONGEST: usize = 512;

/// Answers. Blocking: it reads the pages and the ledger, and asks the driver.
pub(crate) fn explanation(view: &StatusView, subject: &str) -> Result<Explanation, SourceError> {
    if subject.trim().is_empty() || subject.len() > LONGEST {
        return Err(SourceError::Invalid("name a pod, an allocation or a GPU".to_owned()));
    }
    let facts = match view.agent.get() {
        Some(agent) => Facts::gathered(view, agent),
        None => Facts {
            status: view.status(),
            records: Vec::new(),
            trail: Lines::default(),
            config: view.config(),
            gpus: Vec::new(),
            page_versions: Default::default(),
            remarks: vec!["the plugin is still starting".to_owned()],
        },
    };
    answer(&facts, subject)
}

#[derive(Clone, Debug)]
struct Facts {
    /// As `tessera status` has it.
    status: Status,
    /// What the ledger records.
    records: Vec<Arc<Record>>,
    /// The audit trail.
    trail: Lines,
    config: Arc<Config>,
    gpus: Vec<Gpu>,
    /// Version of the pages, by allocation id.
    page_versions: BTreeMap<String, u32>,
    /// What could not be looked at.
    remarks: Vec<String>,
}

impl Facts {
    fn gathered(view: &StatusView, agent: &Arc<Agent>) -> Self {
        // Counters are read below: the trail must not be behind them.
        agent.note_incidents();
        // One look, so that what is said of limits and of their sums is of one moment.
        // Where nobody is in a page, nothing is that a story is of: that is most of it.
        let survey = view.survey(&|region| Some(region.recover_and_snapshot()));
        let books = survey.books.as_ref();
        let records: Vec<_> = books.map_or_else(Vec::new, |books| {
            books.allocations.iter().map(|(record, _)| Arc::clone(record)).collect()
        });
        let page_versions = records.iter().filter_map(|record| {
            let pages = agent.allocations.pages_of(&record.id);
            Some((record.id.to_string(), tessera_region::quota::abi_in(&pages)?))
        });
        let gpus = books.map_or_else(Vec::new, |books| {
            books.catalogue.gpus.values().map(|sold| sold.gpu.clone()).collect()
        });
        let journal = &agent.journal;
        let mut remarks = Vec::new();
        let trail = journal.read_trail(|trail| {
            // Asked after the trail was begun: no line is in both.
            let waiting = journal.waiting_events();
            trail.read().map(|mut lines| {
                lines.events.extend(waiting);
                lines
            })
        });
        let trail = trail.unwrap_or_else(|error| {
            remarks.push(format!("the audit trail cannot be read: {error}"));
            Lines::default()
        });
        Facts {
            page_versions: page_versions.collect(),
            status: survey.status,
            records,
            trail,
            config: view.config(),
            gpus,
            remarks,
        }
    }
}

/// Everything about what `subject` names.
fn answer(facts: &Facts, subject: &str) -> Result<Explanation, SourceError> {
    let refusals = subject::refused(facts, subject);
    let named = match subject::find(facts, subject) {
        // It holds nothing, because it was refused.
        Err(SourceError::NotFound(_)) if !refusals.is_empty() => subject::Named::default(),
        found => found?,
    };
    let stories = named.allocations.iter().take(STORIES);
    let gpus = named.gpu.iter().filter_map(|uuid| gpu_story(facts, uuid));
    Ok(Explanation {
        api_version: API_VERSION.to_owned(),
        allocations: stories.map(|key| story::tell(facts, key)).collect(),
        gpus: gpus.collect(),
        at_unix_ms: facts.status.at_unix_ms,
        trail_since_unix_ms: facts.trail.since_unix_ms.unwrap_or(0),
        left_out: u32::try_from(named.allocations.len().saturating_sub(STORIES))
            .unwrap_or(u32::MAX),
        remarks: facts.remarks.clone(),
        refusals,
    })
}

fn gpu_story(facts: &Facts, uuid: &str) -> Option<GpuStory> {
    let gpu = facts.status.gpus.iter().find(|gpu| gpu.uuid == uuid)?;
    let device = facts.gpus.iter().find(|gpu| gpu.uuid == uuid);
    let cut = device.map(|device| {
        let place = story::table(device, &facts.config);
        let share = |share: shares::Share| {
            format!(
                "{} × {}: {} and {} {} each ({place})",
                share.count,
                share.resource,
                tessera_model::quantity::format_bytes(share.memory_bytes),
                tessera_model::percent::format_cores(share.cores_millis),
                share.compute.into_str()
            )
        };
        shares::cut(device, &facts.config).into_iter().map(share).collect()
    });
    let on: Vec<(&str, u64)> = facts
        .records
        .iter()
        .filter(|record| record.grants.iter().any(|grant| grant.uuid == uuid))
        .map(|record| (record.id.as_str(), record.generation))
        .collect();
    let concerns = |event: &&Event| {
        event.gpu.as_deref() == Some(uuid)
            || event.id.as_ref().is_some_and(|id| on.contains(&(id.as_str(), event.generation)))
            || (event.id.is_none() && event.gpu.is_none())
    };
    let concerned: Vec<&Event> = facts.trail.events.iter().filter(concerns).collect();
    let holders = subject::holders(facts);
    let line = |event: &&Event| {
        let mut line = line(event);
        // Its holder is known by now.
        line.holder = line.holder.or_else(|| subject::of(&holders, event).cloned());
        line
    };
    let trail = concerned[concerned.len().saturating_sub(LINES)..].iter().map(line).collect();
    let holds = |one: &&Allocation| one.gpus.iter().any(|used| used.gpu_uuid == uuid);
    let allocations = facts.status.allocations.iter().filter(holds).cloned().collect();
    Some(GpuStory { gpu: Some(gpu.clone()), cut: cut.unwrap_or_default(), allocations, trail })
}

/// A line as it is shown.
pub(crate) fn line(event: &Event) -> TrailLine {
    TrailLine {
        at_unix_ms: event.at_unix_ms,
        what: event.what.into_str().to_owned(),
        text: text(event),
        reason: event.detail().to_owned(),
        reason_is_own: event.reason_is_own(),
        behind: behind(event),
        by: event.by.as_ref().map(ToString::to_string).unwrap_or_default(),
        gpu_uuid: event.gpu.clone().unwrap_or_default(),
        allocation_id: event.id.as_ref().map(ToString::to_string).unwrap_or_default(),
        generation: event.generation,
        times: event.times,
        holder: event.holder.clone(),
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
fn incidents(trail: &[&Event]) -> Vec<Incident> {
    let mut kinds: BTreeMap<&'static str, (usize, Incident)> = BTreeMap::new();
    for (at, event) in trail.iter().enumerate().filter(|(_, event)| is_trouble(&event.what)) {
        let (last, kind) = kinds.entry(event.what.into_str()).or_insert_with(|| {
            let what = event.what.into_str().to_owned();
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
