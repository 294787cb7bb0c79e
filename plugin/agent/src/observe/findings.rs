//! Turns findings into reports: cause, owner, and recipients.

use std::cell::OnceCell;
use std::time::Instant;

use super::audit::Finding;
use super::{Observer, TELL};
use crate::Agent;
use crate::trust::cgroup::PodContainer;
use crate::trust::mounts::{Mounts, Source};
use crate::trust::strangers::{self, Stranger};
use crate::trust::{FindingKind, Outside, maps};
use tessera_kubelet::foreign_plugins::checkpoint;
use tessera_kubelet::foreign_plugins::checkpoint::Entry;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::quantity::format_bytes;
use tessera_model::record::Record;
use tessera_tenant::regions::Region;

/// Strangers of one GPU that `status` names.
const NAMED: usize = 8;

/// What kubelet has written down, read when it is first needed and no more than once a round.
pub(super) struct Kubelet<'a> {
    agent: &'a Agent,
    entries: OnceCell<Vec<Entry>>,
}

impl<'a> Kubelet<'a> {
    pub(super) fn new(agent: &'a Agent) -> Self {
        Kubelet { agent, entries: OnceCell::new() }
    }

    fn entries(&self) -> &[Entry] {
        self.entries.get_or_init(|| {
            checkpoint::entries(&self.agent.allocations().paths().kubelet).unwrap_or_default()
        })
    }

    pub(super) fn given(&self, place: &PodContainer, container: &str) -> Option<AllocationId> {
        let is_its = |e: &&Entry| e.pod_uid == place.pod_uid && e.container == container;
        let mut ids = self.entries().iter().filter(is_its).map(Entry::allocation);
        ids.find(|id| self.agent.allocations().record(id).is_some())
    }
}

impl Observer {
    /// Takes those on a GPU that hold no share of it; whether one of them is to be looked at again soon.
    pub(super) fn judge_strangers(
        &mut self,
        uuid: &str,
        mut list: Vec<Stranger>,
        hidden: bool,
        now: Instant,
    ) -> bool {
        let bytes = list.iter().filter_map(|s| s.bytes).fold(0, u64::saturating_add);
        // One that the driver lists with nothing is about to end, or to begin.
        list.retain(|stranger| stranger.bytes != Some(0));
        let mut outside = Outside { strangers: None, bytes, who: Vec::new() };
        if hidden {
            self.agent.trust().set_outside(uuid, outside);
            return false;
        }
        let seen = self.strangers.entry(uuid.to_owned()).or_default();
        let found = seen.see(&list, now);
        let known = list.iter().filter(|stranger| seen.knows(stranger)).count();
        outside.strangers = Some(u64::try_from(known).unwrap_or(u64::MAX));
        let agent = &self.agent;
        let logs = &agent.allocations().paths().container_logs;
        list.truncate(NAMED.max(found.iter().map(|(at, _)| at + 1).max().unwrap_or(0)));
        for stranger in list.iter_mut().filter(|stranger| seen.knows(stranger)) {
            if let (None, Some(place)) = (&stranger.holder, &stranger.place) {
                stranger.holder = strangers::by_log(logs, &place.container_id);
                if let Some(holder) = &stranger.holder {
                    agent.trust().learn(&holder.namespace, &holder.pod, &place.pod_uid);
                }
            }
            if outside.who.len() < NAMED {
                outside.who.push(stranger.to_string());
            }
        }
        agent.trust().set_outside(uuid, outside);
        let reported =
            self.reported_stranger.is_none_or(|reported| now.duration_since(reported) >= TELL);
        let mut tells = reported;
        for (at, tell) in &found {
            agent.trust().count(FindingKind::Stranger, 1);
            if *tell && tells {
                let stranger = &list[*at];
                let what = What::Bypassed { pid: stranger.pid, bytes: stranger.bytes.unwrap_or(0) };
                let event = Event::of_gpu(uuid, what, stranger.to_string(), unix_ms());
                let event = Event { holder: stranger.holder.clone(), ..event.by(Actor::Plugin) };
                agent.found(FindingKind::Stranger, event);
                self.reported_stranger = Some(now);
                tells = false;
            }
        }
        seen.waits()
    }

    /// Says what the audit found: to the log, and to the audit trail.
    pub(super) fn report(&self, record: &Record, uuid: &str, finding: Finding) {
        let (what, why) = match finding {
            Finding::NoSlot { pid, bytes } => (
                What::Bypassed { pid, bytes },
                format!("it is in no slot of its usage page: {}", self.cause(pid)),
            ),
            Finding::Beyond { bytes, pid } => (
                What::Unaccounted,
                format!(
                    "{} beyond what is charged, contexts included, process {pid} most of it",
                    format_bytes(bytes)
                ),
            ),
        };
        let event = Event::of(record, what, unix_ms()).because(why);
        self.agent.found(finding.kind(), event.on_gpu(uuid));
    }

    /// Why a process is in no slot, as far as known.
    fn cause(&self, pid: u32) -> String {
        match maps::mapped(self.procs.root(), pid) {
            Some(mapped) => mapped.why().to_owned(),
            None => {
                "a static program, another linker namespace, a preload removed, or the page was \
                     emptied (what it has mapped may not be read: docs/trust.md)"
                    .to_owned()
            }
        }
    }

    /// A usage page that was ruined since the round before.
    pub(super) fn hear_of_tampering(&mut self, record: &Record, region: &Region, now: Instant) {
        let Some(tenant) = self.tenants.get_mut(&record.id) else { return };
        let seen = region.tamperings();
        let new = seen.saturating_sub(tenant.tamperings);
        if new == 0 || tenant.reported.is_some_and(|reported| now.duration_since(reported) < TELL) {
            // A new generation counts from nothing.
            tenant.tamperings = tenant.tamperings.min(seen);
            return;
        }
        tenant.tamperings = seen;
        tenant.reported = Some(now);
        self.agent.trust().count(FindingKind::UsagePage, new);
        let why = "it was resized, cannot be true, or is kept from being changed; it was put right where that was \
                   possible, and the driver's figures count against the quota meanwhile";
        let what = What::Tampered { what: "usage page".to_owned() };
        self.agent.found(FindingKind::UsagePage, Event::of(record, what, unix_ms()).because(why));
    }

    /// Where the pages lie, by the plugin's own mounts: they may be mounted again at any time.
    pub(super) fn pages_source(&self) -> Option<Source> {
        let text = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        // As the kernel names it, whatever links lead there.
        let pages = self.agent.allocations().paths().pages.canonicalize().ok()?;
        Source::of(&Mounts::parse(&text), pages.to_str()?)
    }
}
