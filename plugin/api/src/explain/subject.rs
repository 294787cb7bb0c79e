//! What a subject names: pods and containers by their holders, allocations and GPUs by ids or beginnings
//! of them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Facts;
use tessera_model::audit::Event;
use tessera_model::record::Holder;

/// Fewest characters of a beginning.
const BEGINNING: usize = 4;
/// Names that are proposed.
const PROPOSED: usize = 8;

/// An allocation in one of its generations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub id: String,
    pub generation: u64,
}

/// What a subject names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Named {
    /// Living ones first, then the newest.
    pub allocations: Vec<Key>,
    /// By UUID.
    pub gpus: Vec<String>,
}

/// Why there is nothing to explain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// Nothing is called so.
    #[error(
        "nothing is called \"{subject}\": no pod, container, allocation or GPU of this node, now or in the audit trail{}",
        propose(known)
    )]
    Nothing {
        /// What was asked.
        subject: String,
        /// What is called like it, or else what there is.
        known: Vec<String>,
    },
    /// Several things begin so.
    #[error("\"{subject}\" begins several ids; write more of it: {}", ids.join(", "))]
    Several {
        /// What was asked.
        subject: String,
        /// Those.
        ids: Vec<String>,
    },
}

fn propose(known: &[String]) -> String {
    if known.is_empty() { String::new() } else { format!("; there is {}", known.join(", ")) }
}

/// See the module's documentation.
pub(super) fn find(facts: &Facts, subject: &str) -> Result<Named, Unknown> {
    let subject = subject.trim();
    let holders = holders(facts);
    let held = |test: &dyn Fn(&Holder) -> bool| -> Vec<Key> {
        let held = holders.iter().filter(|(_, holder)| holder.as_ref().is_some_and(test));
        held.map(|(key, _)| key.clone()).collect()
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
        found = held(&|holder| holder.container == subject);
    }
    if found.is_empty() {
        let mut ids: Vec<&str> = holders.keys().map(|key| key.id.as_str()).collect();
        ids.dedup();
        if let Some(id) = beginning(&ids, subject)? {
            found = holders.keys().filter(|key| key.id == id).cloned().collect();
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
    let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let uuid = match by_index {
        Some(gpu) => Some(gpu.uuid.as_str()),
        None => beginning(&uuids, subject)?,
    };
    match uuid {
        Some(uuid) => Ok(Named { allocations: Vec::new(), gpus: vec![uuid.to_owned()] }),
        None => Err(nothing(subject, &holders, &uuids)),
    }
}

/// Every generation that is known, with who holds or held it. Not every line of the trail says: at
/// Allocate nobody knows.
pub(super) fn holders(facts: &Facts) -> BTreeMap<Key, Option<Holder>> {
    let mut holders: BTreeMap<Key, Option<Holder>> = BTreeMap::new();
    let trail = facts.trail.iter().filter_map(|event| {
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

/// Who held a generation, as far as anything says.
pub(super) fn holder(facts: &Facts, key: &Key) -> Option<Holder> {
    holders(facts).remove(key).flatten()
}

/// Who held the generation that an event is of.
pub(super) fn of<'a>(
    holders: &'a BTreeMap<Key, Option<Holder>>,
    event: &Event,
) -> Option<&'a Holder> {
    let key = Key { id: event.id.as_ref()?.to_string(), generation: event.generation };
    holders.get(&key)?.as_ref()
}

fn beginning<'a>(ids: &[&'a str], subject: &str) -> Result<Option<&'a str>, Unknown> {
    if let Some(id) = ids.iter().find(|id| **id == subject) {
        return Ok(Some(id));
    }
    if subject.len() < BEGINNING {
        return Ok(None);
    }
    let begun: Vec<&str> = ids.iter().filter(|id| id.starts_with(subject)).copied().collect();
    match begun.as_slice() {
        [] => Ok(None),
        [id] => Ok(Some(id)),
        several => {
            let ids = several.iter().take(PROPOSED).map(ToString::to_string).collect();
            Err(Unknown::Several { subject: subject.to_owned(), ids })
        }
    }
}

fn nothing(subject: &str, holders: &BTreeMap<Key, Option<Holder>>, uuids: &[&str]) -> Unknown {
    let pods = holders.values().flatten().map(|h| format!("{}/{}", h.namespace, h.pod));
    let mut all: Vec<String> = pods.chain(uuids.iter().map(ToString::to_string)).collect();
    all.sort_unstable();
    all.dedup();
    let last = subject.rsplit('/').next().unwrap_or(subject).to_lowercase();
    let alike: Vec<String> =
        all.iter().filter(|name| name.to_lowercase().contains(&last)).cloned().collect();
    let mut known = if alike.is_empty() { all } else { alike };
    let more = known.len().saturating_sub(PROPOSED);
    known.truncate(PROPOSED);
    if more > 0 {
        known.push(format!("and {more} more"));
    }
    Unknown::Nothing { subject: subject.to_owned(), known }
}
