//! What a configuration would change.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::Reloader;
use crate::allocations::room::kept_by_other;
use tessera_config::keys;
use tessera_config::keys::{Difference, Takes};
use tessera_config::{Config, Judged, Problem};
use tessera_model::gpu::Gpu;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::record::{Grant, Record};
use tessera_model::replica::Replica;
use tessera_model::sharing::Compute;
use tessera_rules::allocate::Catalogue;
use tessera_rules::capacity;
use tessera_system::locks::lock;
use tessera_view::change::{
    AllocationChange, ConfigurationChange, ConfigurationProblem, PlanResponse,
};

impl Reloader {
    /// What `text` would change in this plugin. Blocking: it may ask the driver.
    pub fn plan(&self, text: String, file: &Path) -> PlanResponse {
        let judged = Judged::of(text, file);
        if !judged.problems.is_empty() {
            return refused(&judged.problems);
        }
        let mut config = judged.config;
        let Some(node) = self.agent.get() else {
            let waits = "the plugin waits for GPUs: what they would be cut into is not known";
            let differences = keys::differences(&self.current.get(), &config);
            let changes = planned(&differences, &config);
            return PlanResponse { changes, notes: vec![waits.to_owned()], ..Default::default() };
        };
        // Reading the file waits: a plan is about one configuration.
        let _still = lock(&self.seen);
        let before = self.current.get();
        let mut notes = Vec::new();
        let sold = node.inventory.catalogue();
        let mut gpus = sold.devices();
        match self.select_gpus(&config) {
            Ok(Some(selection)) => gpus = selection.gpus,
            Ok(None) => {}
            Err(why) => notes.push(format!(
                "which GPUs gpus.include and gpus.exclude leave is not known, and without that the \
                 configuration would be refused: {why}"
            )),
        }
        let problems = capacity::check(&gpus, &config);
        if !problems.is_empty() {
            return refused(&problems);
        }
        let differences = keys::differences(&before, &config);
        notes.extend(remarks(&gpus, &config));
        let records = node.allocations.records();
        notes.extend(moves(&sold, &Catalogue::new(&gpus, &config), &records));
        notes.extend(driver_stays(&config, &records));
        keys::keep(&mut config, &before);
        let after = Catalogue::new(&gpus, &config);
        let live = records.iter().filter(|record| record.is_live());
        PlanResponse {
            changes: planned(&differences, &config),
            shares: node.advertised.forecast(&after),
            allocations: live.map(|record| allocation(record, &after, &differences)).collect(),
            notes,
            ..PlanResponse::default()
        }
    }
}

pub fn problems(problems: &[Problem]) -> Vec<ConfigurationProblem> {
    let problem = |problem: &Problem| ConfigurationProblem {
        key: problem.key.clone(),
        line: problem.line.and_then(|line| u32::try_from(line).ok()).unwrap_or(0),
        message: problem.message.clone(),
    };
    problems.iter().map(problem).collect()
}

pub(super) fn changes(differences: &[Difference]) -> Vec<ConfigurationChange> {
    let change = |difference: &Difference| ConfigurationChange {
        key: difference.key.clone(),
        before: difference.before.clone(),
        after: difference.after.clone(),
        takes_effect: difference.takes.text().to_owned(),
        absent: false,
    };
    differences.iter().map(change).collect()
}

/// Those of a plan. What is different only because the file does not say it is marked: a file is taken whole, and what
/// somebody gives may be a part of one.
fn planned(differences: &[Difference], after: &Config) -> Vec<ConfigurationChange> {
    let mut changes = changes(differences);
    for change in &mut changes {
        change.absent = after.source.line_set(&change.key).is_none();
    }
    changes
}

fn refused(found: &[Problem]) -> PlanResponse {
    PlanResponse { problems: problems(found), ..PlanResponse::default() }
}

/// What is odd about a configuration, and no error; a sentence each.
pub(super) fn remarks(gpus: &[Gpu], config: &Config) -> Vec<String> {
    match gpus {
        [] => vec!["nothing is sold: gpus.include and gpus.exclude leave no GPU".to_owned()],
        gpus => capacity::remarks(gpus, config),
    }
}

/// GPUs that another front end would sell, or nobody although claims have something of it; a sentence each.
fn moves(before: &Catalogue, after: &Catalogue, records: &[Arc<Record>]) -> Vec<String> {
    let is_free = |uuid: &String| {
        let mut live = records.iter().filter(|record| record.is_live());
        !live.any(|record| record.grants.iter().any(|grant| grant.uuid == *uuid))
    };
    let at_once = before.gpus.iter().filter_map(|(uuid, sold)| {
        let to = after.gpus.get(uuid)?.seller;
        (to != sold.seller && is_free(uuid)).then(|| {
            let (from, to) = (sold.seller.into_str(), to.into_str());
            format!("{} moves from {from} to {to} at once: nothing of it is allocated", sold.gpu)
        })
    });
    at_once.chain(kept_by_other(after, records)).collect()
}

fn driver_stays(after: &Config, records: &[Arc<Record>]) -> Option<String> {
    let claims = records.iter().filter_map(|record| record.origin.claim());
    let count = claims.map(|claim| &claim.uid).collect::<BTreeSet<_>>().len();
    let claims = if count == 1 { "1 claim has".to_owned() } else { format!("{count} claims have") };
    (!after.dra.enabled && count > 0).then(|| {
        format!(
            "the DRA driver stays registered with kubelet until {claims} ended: it ends them and prepares no other"
        )
    })
}

fn allocation(record: &Record, after: &Catalogue, differences: &[Difference]) -> AllocationChange {
    let mut effects = Vec::new();
    for grant in &record.grants {
        effects.push(format!(
            "keeps {} of {} until its pod ends",
            limits(grant.memory_limit_bytes, grant.cores_millis, grant.compute),
            grant.uuid
        ));
        effects.extend(successor(record, grant, after));
    }
    let compute = record.grants.iter().any(|grant| grant.compute != Compute::None);
    let at_once: Vec<&str> = differences
        .iter()
        .filter(|difference| matches!(difference.takes, Takes::AtOnce))
        .map(|difference| difference.key.as_str())
        .filter(|key| key.starts_with("compute.") && compute || *key == "gpus.audit_slack")
        .collect();
    if !at_once.is_empty() {
        effects.push(format!("at once: {}", at_once.join(", ")));
    }
    AllocationChange {
        id: record.id.to_string(),
        holder: record.holder.clone(),
        resource_name: match record.origin.claim() {
            Some(claim) => claim.to_string(),
            None => record.resource.clone(),
        },
        effects,
    }
}

/// What the next allocation of the same replicas would be, where it is another.
fn successor(record: &Record, grant: &Grant, after: &Catalogue) -> Option<String> {
    let held = record.replicas.iter().filter_map(|id| Replica::split(id));
    let held: Vec<u32> =
        held.filter(|(gpu, _)| *gpu == grant.uuid).map(|(_, index)| index).collect();
    if held.is_empty() {
        return None;
    }
    let sold = after.gpus.get(&grant.uuid);
    let share = sold.and_then(|sold| sold.share(&record.resource));
    let kept = share.filter(|share| held.iter().all(|index| *index < share.count));
    let Some(share) = kept else {
        let which = if held.len() == 1 { "its replica is" } else { "replicas of it are" };
        return Some(format!("{which} retired: nobody gets them after it"));
    };
    let count = u32::try_from(held.len()).unwrap_or(u32::MAX);
    let (memory, cores) = (
        share.memory_bytes.saturating_mul(u64::from(count)),
        share.cores_millis.saturating_mul(count),
    );
    let same = (memory, cores, share.compute)
        == (grant.memory_limit_bytes, grant.cores_millis, grant.compute);
    let text = limits(memory, cores, share.compute);
    (!same).then(|| format!("the next holder of its replicas gets {text}"))
}

pub fn limits(memory_bytes: u64, cores_millis: u32, compute: Compute) -> String {
    let word = match compute {
        Compute::None => "compute not limited",
        policy => policy.into_str(),
    };
    let cores = format_cores(cores_millis);
    format!("{}, {cores} {word}", format_bytes(memory_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::allocation_id::AllocationId;

    #[test]
    fn a_gpu_that_would_move_is_named_with_what_it_waits_for() {
        let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
        let catalogue = |text: &str| Catalogue::new(&gpus, &Config::parse(text).unwrap());
        let before = catalogue("");
        let after = catalogue("[dra]\nenabled = true\ngpus = [\"GPU-b\"]");
        assert_eq!(moves(&before, &before, &[]), [""; 0]);
        let now = moves(&before, &after, &[]).concat();
        assert!(
            now.contains("GPU 1 (") && now.contains("to DRA") && now.contains("at once"),
            "{now}"
        );
        let grant = |uuid: &str| Grant {
            uuid: uuid.into(),
            memory_limit_bytes: 1,
            context_overhead_bytes: 0,
            cores_millis: 1,
            compute: Compute::Burst,
        };
        let record = |name: &str, uuid: &str| {
            Arc::new(Record::new(AllocationId::of("r", [name]), 1, vec![grant(uuid)]))
        };
        let records = [record("a", "GPU-a"), record("b", "GPU-b"), record("c", "GPU-b")];
        let later = moves(&before, &after, &records).concat();
        assert!(
            later.contains("2 allocations keep it with device plugin until they end"),
            "{later}"
        );
    }
}
