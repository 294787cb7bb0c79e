//! `tessera explain`: why a pod, an allocation or a GPU is as it is. [`answer`] is pure: it takes what the
//! plugin knows, and puts together what concerns the subject.

mod lines;
mod origin;
mod story;
mod subject;
pub(crate) mod trail;

use std::collections::BTreeMap;
use std::sync::Arc;

pub(crate) use lines::line;
pub use subject::Unknown;

use tessera_config::Config;
use tessera_model::audit::Event;
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_rules::shares;
use tessera_store::Lines;
use tessera_view::API_VERSION;
use tessera_view::explain::{Explanation, GpuStory};
use tessera_view::status::{Allocation, Status};

/// Most allocations that are explained in full; of a Deployment's pods, or of a name that comes again and again.
const STORIES: usize = 8;
/// Lines of the trail for each of them, the newest.
const LINES: usize = 200;

#[derive(Clone, Debug)]
pub struct Facts {
    /// As `tessera status` has it.
    pub status: Status,
    /// What the ledger records.
    pub records: Vec<Arc<Record>>,
    /// Lines of the audit trail: at least those that concern the subject.
    pub trail: Lines,
    pub config: Arc<Config>,
    pub gpus: Vec<Gpu>,
    /// Version of the pages, by allocation id.
    pub page_versions: BTreeMap<String, u32>,
    /// What could not be looked at.
    pub remarks: Vec<String>,
}

/// Everything about what `subject` names.
///
/// # Errors
/// It names nothing, or not one thing.
pub fn answer(facts: &Facts, subject: &str) -> Result<Explanation, Unknown> {
    let refusals = subject::refused(facts, subject);
    let named = match subject::find(facts, subject) {
        // It holds nothing, because it was refused.
        Err(Unknown::Nothing { .. }) if !refusals.is_empty() => subject::Named::default(),
        found => found?,
    };
    let stories = named.allocations.iter().take(STORIES);
    let gpus = named.gpus.iter().filter_map(|uuid| gpu_story(facts, uuid));
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
        apart: true,
    })
}

fn gpu_story(facts: &Facts, uuid: &str) -> Option<GpuStory> {
    let gpu = facts.status.gpus.iter().find(|gpu| gpu.uuid == uuid)?;
    let device = facts.gpus.iter().find(|gpu| gpu.uuid == uuid);
    let cut = device.map(|device| {
        let place = origin::table(device, &facts.config);
        let share = |share: shares::Share| {
            format!(
                "{} × {}: {} and {} {} each ({place})",
                share.count,
                share.resource,
                tessera_model::quantity::format_bytes(share.limit.memory_bytes),
                tessera_model::percent::format_cores(share.limit.cores_millis),
                share.compute.name()
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
        let mut line = lines::line(event);
        // Its holder is known by now.
        line.holder = line.holder.or_else(|| Some(subject::of(&holders, event)?.into()));
        line
    };
    let trail = concerned[concerned.len().saturating_sub(LINES)..].iter().map(line).collect();
    let holds = |one: &&Allocation| one.gpus.iter().any(|used| used.gpu_uuid == uuid);
    let allocations = facts.status.allocations.iter().filter(holds).cloned().collect();
    Some(GpuStory { gpu: Some(gpu.clone()), cut: cut.unwrap_or_default(), allocations, trail })
}

#[cfg(test)]
mod tests;
