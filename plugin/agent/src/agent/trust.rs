//! Sends findings about GPU users to the log, the audit trail, `status` and the counters; see
//! [`crate::trust`].

use tracing::warn;

use super::Agent;
use crate::trust::strangers::Stranger;
use crate::trust::{FindingKind, Trust};
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::record::{Holder, Record};

impl Agent {
    /// What was found so far.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// A finding about a tenant, which happened `times` times. Only the first of several is reported. Blocking.
    pub fn found(
        &self,
        record: &Record,
        gpu: Option<&str>,
        kind: FindingKind,
        what: What,
        why: &str,
    ) {
        let event = Event::of(record, what, unix_ms()).because(why);
        let (namespace, pod, container) = names(record.holder.as_ref());
        warn!(
            id = %record.id, namespace, pod, container, gpu, finding = kind.name(),
            "{}: {why}. {}", event.sentence("the GPU"), event.advice()
        );
        self.journal.audit(match gpu {
            Some(uuid) => event.on_gpu(uuid),
            None => event,
        });
    }

    /// A process that uses a shared GPU and holds no share of it. Blocking.
    pub fn found_stranger(&self, uuid: &str, stranger: &Stranger) {
        let (namespace, pod, container) = names(stranger.holder.as_ref());
        let uid = stranger.place.as_ref().map(|place| place.pod_uid.as_str());
        let what = What::Bypassed { pid: stranger.pid, bytes: stranger.bytes.unwrap_or(0) };
        let event = Event::of_gpu(uuid, what, stranger.to_string(), unix_ms()).by(Actor::Plugin);
        warn!(
            gpu = uuid,
            namespace,
            pod,
            container,
            pod_uid = uid,
            pid = stranger.pid,
            bytes = stranger.bytes,
            finding = FindingKind::Stranger.name(),
            "{}: {stranger}. {}",
            event.sentence("the GPU"),
            event.advice()
        );
        self.journal.audit(Event { holder: stranger.holder.clone(), ..event });
    }

    /// What `status` warns of.
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

fn names(holder: Option<&Holder>) -> (&str, &str, &str) {
    match holder {
        Some(h) => (h.namespace.as_str(), h.pod.as_str(), h.container.as_str()),
        None => ("", "", ""),
    }
}
