//! Which processes use the GPUs, and whether they are held to their quotas. It reports and stops nobody:
//! nothing here touches a pod. `docs/trust.md` says how certain each finding is, and what is not seen.
//!
//! [`crate::observe`] compares the driver's figures with the ledger and finds processes that are in no
//! session. This module finds their owners ([`container`]), and processes that use a shared GPU without a share
//! ([`strangers`]). All of it is read from `/proc` of the host, with no capability, and nothing below `/proc/<pid>/root`
//! is touched.

pub mod container;
pub mod strangers;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use strum::{IntoStaticStr, VariantArray};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_system::locks::lock;
use tracing::warn;

use crate::Agent;
use crate::kubernetes::Counts;

const PODS: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[repr(usize)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum FindingKind {
    /// A process of a container that holds device memory and is in no slot.
    Bypass,
    /// A container's processes together hold far more than is charged.
    Unaccounted,
    /// A process that uses a shared GPU and holds no share of it.
    Stranger,
    /// A usage page that cannot be true, was resized, or is held up.
    UsagePage,
}

/// Processes on one GPU that hold no share of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// How many, as far as two looks agree; `None` where the host's pids are hidden and no process can be matched.
    pub strangers: Option<u64>,
    pub bytes: u64,
    /// Descriptions of a few of them, as far as two looks agree.
    pub who: Vec<String>,
}

/// What was found on this node, for `status`, metrics and Kubernetes' events.
#[derive(Debug, Default)]
pub struct Trust {
    counts: [AtomicU64; FindingKind::VARIANTS.len()],
    outside: Mutex<BTreeMap<String, Outside>>,
    uids: Mutex<BTreeMap<(String, String), String>>,
    pub events: Arc<Counts>,
}

impl Trust {
    pub fn count(&self, kind: FindingKind, times: u64) {
        self.counts[kind as usize].fetch_add(times, Ordering::Relaxed);
    }

    pub fn counts(&self) -> impl Iterator<Item = (FindingKind, u64)> {
        let counted = |kind: &FindingKind| self.counts[*kind as usize].load(Ordering::Relaxed);
        FindingKind::VARIANTS.iter().map(move |kind| (*kind, counted(kind)))
    }

    /// Processes that hold no share of a GPU that is shared, as of the last look at it; `None` where nobody looks.
    pub fn outside(&self, uuid: &str) -> Option<Outside> {
        lock(&self.outside).get(uuid).cloned()
    }

    pub fn set_outside(&self, uuid: &str, outside: Outside) {
        lock(&self.outside).insert(uuid.to_owned(), outside);
    }

    pub fn keep_outside(&self, looked_at: impl Fn(&str) -> bool) {
        lock(&self.outside).retain(|uuid, _| looked_at(uuid));
    }

    pub fn learn(&self, namespace: &str, pod: &str, uid: &str) {
        let mut uids = lock(&self.uids);
        let key = (namespace.to_owned(), pod.to_owned());
        if uids.len() >= PODS && !uids.contains_key(&key) {
            // Any: it is learnt again while it matters.
            uids.pop_first();
        }
        uids.insert(key, uid.to_owned());
    }

    pub fn uid(&self, namespace: &str, pod: &str) -> Option<String> {
        lock(&self.uids).get(&(namespace.to_owned(), pod.to_owned())).cloned()
    }
}

impl Agent {
    /// What was found, to the log and to the audit trail. Blocking.
    pub fn found(&self, kind: FindingKind, event: Event) {
        let [namespace, pod, container] = match &event.holder {
            Some(holder) => [&*holder.namespace, &*holder.pod, &*holder.container],
            None => [""; 3],
        };
        let why = event.detail();
        warn!(
            id = event.id.as_ref().map(AllocationId::as_str),
            namespace,
            pod,
            container,
            gpu = event.gpu,
            finding = kind.into_str(),
            "{}: {why}. {}",
            event.sentence("the GPU"),
            event.advice()
        );
        self.journal.audit([event]);
    }

    pub fn trust_warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for uuid in self.inventory.catalogue().gpus.keys() {
            let Some(outside) = self.trust.outside(uuid) else { continue };
            let [first, rest @ ..] = outside.who.as_slice() else { continue };
            let more = match rest.len() {
                0 => String::new(),
                n => format!(", and {n} more"),
            };
            let what = What::Bypassed { pid: 0, bytes: 0 };
            let advice = Event::of_node(what, 0).advice();
            warnings.push(format!(
                "GPU {uuid}: {first} of it{more}, and has no share of it. {advice} (docs/trust.md)"
            ));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_without_end_are_not_remembered_without_end() {
        let trust = Trust::default();
        for n in 0..2 * PODS {
            trust.learn("team", &format!("{n:04}"), "u");
        }
        assert_eq!(lock(&trust.uids).len(), PODS);
        assert_eq!(trust.uid("team", &format!("{:04}", 2 * PODS - 1)).as_deref(), Some("u"));
        assert_eq!(trust.uid("team", "other"), None);
    }
}
