//! What a subject names: pods and containers by their holders, allocations and GPUs by ids or beginnings
//! of them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use tessera_model::audit::Event;
use tessera_model::printable;
use tessera_model::record::Holder;
use tessera_model::subject::{self, Called, Key, Meant, Unmeant};
use tessera_view::status::Refusal;
use tessera_web::SourceError;

use super::Facts;

/// Allocations, living ones first, then the newest; or a GPU by its UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Named {
    pub allocations: Vec<Key>,
    pub gpu: Option<String>,
}

pub(super) fn find(facts: &Facts, subject: &str) -> Result<Named, SourceError> {
    let holders = holders(facts);
    let mut all = Vec::new();
    for (Key { id, generation }, holder) in &holders {
        let of = Called { id, generation: *generation, ..Called::default() };
        all.push(holder.as_ref().map_or(of, |holder| held(of, holder)));
    }
    for record in &facts.records {
        let of =
            Called { id: record.id.as_str(), generation: record.generation, ..Called::default() };
        all.extend(record.others.iter().map(|holder| held(of, holder)));
        let claim = record.origin.claim();
        all.extend(claim.map(|claim| Called {
            namespace: &claim.namespace,
            claim: &claim.name,
            ..of
        }));
    }
    let gpus = facts.status.gpus.iter().map(|gpu| (Some(gpu.index), gpu.uuid.as_str()));
    let gpus: Vec<_> = gpus.collect();
    match subject::find(subject, &all, &gpus, "the audit trail") {
        Ok(Meant::Gpu(uuid)) => Ok(Named { gpu: Some(uuid), ..Named::default() }),
        Ok(Meant::Allocations(found)) => {
            let lives = |key: &Key| {
                let mut records = facts.records.iter();
                records.any(|r| r.id.as_str() == key.id && r.generation == key.generation)
            };
            let mut allocations = Vec::from_iter(found);
            allocations.sort_by_key(|key| (Reverse(lives(key)), Reverse(key.generation)));
            Ok(Named { allocations, gpu: None })
        }
        Err(error @ Unmeant::Several(_)) => Err(SourceError::Invalid(printable::reason(&error))),
        Err(error @ Unmeant::Nothing(_)) => Err(SourceError::NotFound(printable::reason(&error))),
    }
}

/// By a container that has it.
fn held<'a>(of: Called<'a>, Holder { namespace, pod, container }: &'a Holder) -> Called<'a> {
    Called { namespace, pod, container, ..of }
}

/// What pods or claims that the subject may mean were refused.
pub(super) fn refused(facts: &Facts, subject: &str) -> Vec<Refusal> {
    let parts: Vec<&str> = subject.trim().split('/').collect();
    let (namespace, name) = match parts.as_slice() {
        [name] => (None, *name),
        [namespace, name] | [namespace, name, _] => (Some(*namespace), *name),
        _ => return Vec::new(),
    };
    let is_it = |one: &&Refusal| {
        namespace.is_none_or(|namespace| namespace == one.namespace)
            && (one.claim == name || one.pods.iter().any(|pod| pod == name))
    };
    facts.status.refusals.iter().filter(is_it).cloned().collect()
}

/// Every known generation, with its holder. Not every line of the trail says: at
/// Allocate nobody knows.
pub(super) fn holders(facts: &Facts) -> BTreeMap<Key, Option<Holder>> {
    let mut holders: BTreeMap<Key, Option<Holder>> = BTreeMap::new();
    let trail = facts.trail.events.iter().filter_map(|event| {
        let key = Key { id: event.id.as_ref()?.to_string(), generation: event.generation };
        Some((key, event.holder.as_ref()))
    });
    let records = facts.records.iter().map(|record| {
        let key = Key { id: record.id.to_string(), generation: record.generation };
        (key, record.holder.as_ref())
    });
    for (key, holder) in trail.chain(records) {
        let known = holders.entry(key).or_default();
        if let Some(holder) = holder {
            *known = Some(holder.clone());
        }
    }
    holders
}

/// The holder of a generation, as far as known.
pub(super) fn holder(facts: &Facts, key: &Key) -> Option<Holder> {
    holders(facts).remove(key).flatten()
}

/// The holder of the generation that an event is of.
pub(super) fn of<'a>(
    holders: &'a BTreeMap<Key, Option<Holder>>,
    event: &Event,
) -> Option<&'a Holder> {
    let key = Key { id: event.id.as_ref()?.to_string(), generation: event.generation };
    holders.get(&key)?.as_ref()
}
