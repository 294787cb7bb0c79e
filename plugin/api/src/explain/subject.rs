//! What a subject names: pods and containers by their holders, allocations and GPUs by ids or beginnings
//! of them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tessera_model::audit::Event;
use tessera_model::record::{Holder, Record};
use tessera_model::{printable, written_name};
use tessera_view::status::Refusal;
use tessera_web::SourceError;

use super::Facts;

/// An allocation in one of its generations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub id: String,
    pub generation: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Named {
    /// Living ones first, then the newest.
    pub allocations: Vec<Key>,
    pub gpus: Vec<String>,
}

pub(super) fn find(facts: &Facts, subject: &str) -> Result<Named, SourceError> {
    let subject = subject.trim();
    let holders = holders(facts);
    let held = |test: &dyn Fn(&Holder) -> bool| -> Vec<Key> {
        let held = holders.iter().filter(|(_, holder)| holder.as_ref().is_some_and(test));
        let shared = facts.records.iter().filter(|record| record.others.iter().any(test));
        let held = held.map(|(key, _)| key.clone()).chain(shared.map(|record| key_of(record)));
        held.collect::<BTreeSet<_>>().into_iter().collect()
    };
    let parts: Vec<&str> = subject.split('/').collect();
    let mut found = match parts.as_slice() {
        [pod] => held(&|holder| holder.is_of(None, pod)),
        [namespace, pod] => held(&|holder| holder.is_of(Some(namespace), pod)),
        [namespace, pod, container] => {
            held(&|holder| holder.is_of(Some(namespace), pod) && holder.container == *container)
        }
        _ => Vec::new(),
    };
    if found.is_empty() {
        found = claimed(facts, &parts);
    }
    if found.is_empty() {
        found = match parts.as_slice() {
            [container] => held(&|holder| holder.container == *container),
            // As readers of one namespace mean it.
            [namespace, container] => {
                held(&|holder| holder.namespace == *namespace && holder.container == *container)
            }
            _ => Vec::new(),
        };
    }
    if found.is_empty() {
        // As readers of one namespace mean it: an allocation there.
        let (namespace, written) = match parts.as_slice() {
            [namespace, written] => (Some(*namespace), *written),
            _ => (None, subject),
        };
        let is_there = |holder: &Option<Holder>| {
            let of = |namespace| holder.as_ref().is_some_and(|held| held.namespace == namespace);
            namespace.is_none_or(of)
        };
        let there = holders.iter().filter(|(_, holder)| is_there(holder)).map(|(key, _)| key);
        let ids = there.clone().map(|key| key.id.as_str()).collect();
        if let Some(id) = by_beginning(&ids, written)? {
            found = there.filter(|key| key.id == id).cloned().collect();
        }
    }
    if !found.is_empty() {
        let lives = |key: &Key| {
            facts.records.iter().any(|r| r.id.as_str() == key.id && r.generation == key.generation)
        };
        found.sort_by_key(|key| (Reverse(lives(key)), Reverse(key.generation)));
        return Ok(Named { allocations: found, gpus: Vec::new() });
    }
    let gpus = &facts.status.gpus;
    let by_index = gpus.iter().find(|gpu| gpu.index.to_string() == subject);
    let uuids: BTreeSet<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let uuid = match by_index {
        Some(gpu) => Some(gpu.uuid.as_str()),
        None => by_beginning(&uuids, subject)?,
    };
    match uuid {
        Some(uuid) => Ok(Named { allocations: Vec::new(), gpus: vec![uuid.to_owned()] }),
        None => Err(nothing(subject, &holders, &uuids)),
    }
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

/// Shares of the claim that `name` or `namespace/name` means.
fn claimed(facts: &Facts, parts: &[&str]) -> Vec<Key> {
    let (namespace, name) = match parts {
        [name] => (None, *name),
        [namespace, name] => (Some(*namespace), *name),
        _ => return Vec::new(),
    };
    let is_it = |record: &&Record| {
        record.origin.claim().is_some_and(|claim| {
            claim.name == name && namespace.is_none_or(|namespace| namespace == claim.namespace)
        })
    };
    facts.records.iter().map(AsRef::as_ref).filter(is_it).map(key_of).collect()
}

fn key_of(record: &Record) -> Key {
    Key { id: record.id.to_string(), generation: record.generation }
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

fn by_beginning<'a>(
    ids: &BTreeSet<&'a str>,
    written: &str,
) -> Result<Option<&'a str>, SourceError> {
    written_name::by_beginning(ids, written)
        .map_err(|several| SourceError::Invalid(printable::reason(&several)))
}

fn nothing(
    subject: &str,
    holders: &BTreeMap<Key, Option<Holder>>,
    uuids: &BTreeSet<&str>,
) -> SourceError {
    let pods = holders.values().flatten().map(|h| format!("{}/{}", h.namespace, h.pod));
    let all = pods.chain(uuids.iter().map(ToString::to_string)).collect();
    let known = written_name::there_is(&written_name::proposals(all, subject));
    let text = format!(
        "nothing is called \"{subject}\": no pod, container, allocation or GPU of this node, now or in the audit trail{known}"
    );
    SourceError::NotFound(printable::reason(&text))
}
