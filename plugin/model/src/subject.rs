//! What a person means by a subject.

use std::collections::BTreeSet;

use crate::written_name::{Several, by_beginning, proposals, there_is};

/// An allocation in one of its generations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub id: String,
    pub generation: u64,
}

/// What an allocation is called: by a container that has it, or by its claim. Names are empty where there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Called<'a> {
    pub id: &'a str,
    pub generation: u64,
    pub namespace: &'a str,
    pub pod: &'a str,
    pub container: &'a str,
    pub claim: &'a str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meant {
    Allocations(BTreeSet<Key>),
    /// By its UUID.
    Gpu(String),
}

/// Why nothing is meant, in words that say what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmeant {
    #[error(transparent)]
    Several(#[from] Several),
    #[error("{0}")]
    Nothing(String),
}

/// Pods first, then claims, containers, ids, GPUs, by index or UUID. A name may have its namespace before it: readers of
/// one namespace write all of them so. `past`: where those are from that are gone.
pub fn find(
    subject: &str,
    all: &[Called<'_>],
    gpus: &[(Option<u32>, &str)],
    past: &str,
) -> Result<Meant, Unmeant> {
    let subject = subject.trim();
    let parts: Vec<&str> = subject.split('/').collect();
    let (namespace, name, container) = match parts.as_slice() {
        [namespace, name] => (Some(*namespace), *name, None),
        [namespace, name, container] => (Some(*namespace), *name, Some(*container)),
        _ => (None, subject, None),
    };
    let is_there = |one: &&Called<'_>| namespace.is_none_or(|namespace| namespace == one.namespace);
    let there: Vec<&Called<'_>> = all.iter().filter(is_there).collect();
    let called = |is_so: &dyn Fn(&Called<'_>) -> bool| -> BTreeSet<Key> {
        let found = there.iter().filter(|one| !name.is_empty() && is_so(one));
        found.map(|one| Key { id: one.id.to_owned(), generation: one.generation }).collect()
    };
    let is_containers = |one: &Called<'_>| container.is_none_or(|name| name == one.container);
    let mut found = called(&|one| one.pod == name && is_containers(one));
    if container.is_none() {
        if found.is_empty() {
            found = called(&|one| one.claim == name);
        }
        if found.is_empty() {
            found = called(&|one| one.container == name);
        }
        if found.is_empty() {
            let id = by_beginning(&there.iter().map(|one| one.id).collect(), name)?;
            found = id.map_or(found, |id| called(&|one| one.id == id));
        }
    }
    if !found.is_empty() {
        return Ok(Meant::Allocations(found));
    }
    let has_index = |index: Option<u32>| index.is_some_and(|index| index.to_string() == subject);
    let uuids = gpus.iter().map(|(_, uuid)| *uuid).collect();
    let uuid = match gpus.iter().find(|(index, _)| has_index(*index)) {
        Some((_, uuid)) => Some(*uuid),
        None => by_beginning(&uuids, subject)?,
    };
    uuid.map(|uuid| Meant::Gpu(uuid.to_owned())).ok_or_else(|| {
        let pods = all.iter().filter(|one| !one.pod.is_empty());
        let pods = pods.map(|one| format!("{}/{}", one.namespace, one.pod));
        let names = pods.chain(uuids.into_iter().map(str::to_owned)).collect();
        Unmeant::Nothing(format!(
            "nothing is called \"{subject}\": no pod, container, allocation or GPU of this node, now or in {past}{}",
            there_is(&proposals(names, subject))
        ))
    })
}
