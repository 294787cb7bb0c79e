//! Memory outside the account: a state machine per tenant and GPU, pure; and reports of what it finds, with cause, owner
//! and recipients. It stops nobody.

use std::cell::OnceCell;
use std::time::Instant;

use tessera_kubelet::checkpoint::{self, Entry};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::quantity::format_bytes;
use tessera_model::record::Record;
use tessera_system::files;
use tessera_tenant::regions::Region;

use super::sample::Sample;
use super::{Observer, TELL};
use crate::Agent;
use crate::trust::container::{Mounts, PodContainer, Source};
use crate::trust::strangers::{self, Confirmed, Stranger};
use crate::trust::{FindingKind, Outside};

/// A bypass: a process of the container holds memory and is in no slot of the usage page, because it does not load the
/// shim, or the page was emptied under it. Or memory that is not accounted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    pub kind: FindingKind,
    /// The process, or the one that holds most beyond its own slot, by its pid on the host; 0 if none is known.
    pub pid: u32,
    pub bytes: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// Processes without a slot.
    strays: Confirmed,
    beyond: u32,
}

impl Audit {
    /// Takes a look; what it confirms of the look before. `slack`: bytes beyond the charges that are nothing unusual.
    pub fn see(&mut self, sample: &Sample, slack: u64) -> Vec<Finding> {
        let mut findings = Vec::new();
        let members = sample.members.iter().map(|(member, _)| member);
        let strays = members.filter(|member| member.slot.is_none());
        let strays: Vec<_> = strays.filter(|member| member.used_bytes > Some(0)).collect();
        for at in self.strays.see(strays.iter().map(|member| (member.pid, member.start))) {
            let (pid, bytes) = (strays[at].pid, strays[at].used_bytes.unwrap_or(0));
            findings.push(Finding { kind: FindingKind::Bypass, pid, bytes });
        }
        if let Some(bytes) = sample.overhead() {
            if bytes > slack {
                self.beyond = self.beyond.saturating_add(1);
                if self.beyond == 2 {
                    let (kind, pid) = (FindingKind::Unaccounted, sample.most_beyond());
                    findings.push(Finding { kind, pid, bytes });
                }
            } else if bytes <= slack / 2 || self.beyond < 2 {
                // Reported again only after it was clearly over.
                self.beyond = 0;
            }
        }
        findings
    }

    pub fn is_open(&self) -> bool {
        self.beyond == 1 || self.strays.waits()
    }

    pub fn stands(&self) -> bool {
        self.beyond >= 2 || self.strays.any()
    }
}

const NAMED: usize = 8;
/// Why a process that holds memory is in no slot.
const BYPASSES: &str = "it is in no slot of its usage page: a static program, OpenCL (a driver of its own), another linker \
                        namespace, a preload removed, or the page was emptied (docs/trust.md)";

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
            checkpoint::entries(&self.agent.allocations.paths.kubelet).unwrap_or_default()
        })
    }

    pub(super) fn given(&self, place: &PodContainer, container: &str) -> Option<AllocationId> {
        let is_its = |e: &&Entry| e.pod_uid == place.pod_uid && e.container == container;
        let mut ids = self.entries().iter().filter(is_its).map(Entry::allocation);
        ids.find(|id| self.agent.allocations.record(id).is_some())
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
            self.agent.trust.set_outside(uuid, outside);
            return false;
        }
        let seen = self.strangers.entry(uuid.to_owned()).or_default();
        let who = |stranger: &Stranger| (stranger.pid, stranger.start);
        let found = seen.see(list.iter().map(who));
        let known = list.iter().filter(|stranger| seen.knows(who(stranger))).count();
        outside.strangers = Some(u64::try_from(known).unwrap_or(u64::MAX));
        let agent = &self.agent;
        let logs = &agent.allocations.paths.container_logs;
        list.truncate(NAMED.max(found.iter().map(|at| at + 1).max().unwrap_or(0)));
        for stranger in list.iter_mut().filter(|stranger| seen.knows(who(stranger))) {
            if let (None, Some(place)) = (&stranger.holder, &stranger.place) {
                stranger.holder = strangers::by_log(logs, &place.container_id);
                if let Some(holder) = &stranger.holder {
                    agent.trust.learn(&holder.namespace, &holder.pod, &place.pod_uid);
                }
            }
            if outside.who.len() < NAMED {
                outside.who.push(stranger.to_string());
            }
        }
        agent.trust.set_outside(uuid, outside);
        let tells =
            self.reported_stranger.is_none_or(|reported| now.duration_since(reported) >= TELL);
        agent.trust.count(FindingKind::Stranger, u64::try_from(found.len()).unwrap_or(u64::MAX));
        if let Some(at) = found.first().filter(|_| tells) {
            let stranger = &list[*at];
            let what = What::Bypassed { pid: stranger.pid, bytes: stranger.bytes.unwrap_or(0) };
            let event = Event::of_gpu(uuid, what, stranger.to_string(), unix_ms());
            let event = Event { holder: stranger.holder.clone(), ..event.by(Actor::Plugin) };
            agent.found(FindingKind::Stranger, event);
            self.reported_stranger = Some(now);
        }
        seen.waits()
    }

    /// Says what the audit found: to the log, and to the audit trail.
    pub(super) fn report(&self, record: &Record, uuid: &str, finding: Finding) {
        let Finding { kind, pid, bytes } = finding;
        let (what, why) = match kind {
            FindingKind::Bypass => (What::Bypassed { pid, bytes }, BYPASSES.to_owned()),
            _ => (
                What::Unaccounted,
                format!(
                    "{} beyond what is charged, contexts included, process {pid} most of it",
                    format_bytes(bytes)
                ),
            ),
        };
        let event = Event::of(record, what, unix_ms()).because(why);
        self.agent.found(kind, event.on_gpu(uuid));
    }

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
        self.agent.trust.count(FindingKind::UsagePage, new);
        let why = "it was resized, cannot be true, or is kept from being changed; it was put right where that was \
                   possible, and the driver's figures count against the quota meanwhile";
        let what = What::Tampered { what: "usage page".to_owned() };
        self.agent.found(FindingKind::UsagePage, Event::of(record, what, unix_ms()).because(why));
    }

    /// Where the pages lie, by the plugin's own mounts: they may be mounted again at any time.
    pub(super) fn pages_source(&self) -> Option<Source> {
        let text = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let pages = files::open_directory(&self.agent.allocations.paths.pages).ok()?;
        Source::of(&Mounts::parse(&text), &pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::sample::Member;

    const SLACK: u64 = 1000;

    fn look(overhead: u64, strays: &[u32]) -> Sample {
        let stray = |&pid| (Member { pid, start: 1, used_bytes: Some(5), slot: None }, 0);
        let one = Member { pid: 1, start: 1, used_bytes: Some(overhead), slot: Some(0) };
        let members = std::iter::once((one, 0)).chain(strays.iter().map(stray)).collect();
        Sample { quiet: true, granted: 0, used: Some(overhead), members, ..Sample::default() }
    }

    #[test]
    fn far_more_than_is_charged_is_reported_once_until_it_is_over() {
        let mut audit = Audit::default();
        assert_eq!(audit.see(&look(SLACK, &[]), SLACK), []);
        assert_eq!(audit.see(&look(SLACK + 1, &[]), SLACK), [], "not confirmed");
        assert_eq!(audit.see(&look(SLACK, &[]), SLACK), []);
        assert_eq!(audit.see(&look(SLACK + 1, &[]), SLACK), []);
        assert_eq!(
            audit.see(&look(SLACK + 9, &[]), SLACK),
            [Finding { kind: FindingKind::Unaccounted, pid: 1, bytes: SLACK + 9 }]
        );
        for overhead in [SLACK + 5, SLACK, SLACK - 1, SLACK + 5, SLACK + 5] {
            assert_eq!(audit.see(&look(overhead, &[]), SLACK), [], "{overhead}");
            assert!(audit.stands());
        }
        assert_eq!(audit.see(&look(SLACK / 2, &[]), SLACK), []);
        assert!(!audit.stands());
        audit.see(&look(SLACK + 1, &[]), SLACK);
        assert_eq!(audit.see(&look(SLACK + 1, &[]), SLACK).len(), 1);
    }

    #[test]
    fn looks_that_cannot_tell_find_nothing_beyond() {
        let mut audit = Audit::default();
        for _ in 0..9 {
            assert_eq!(audit.see(&Sample { quiet: false, ..look(9 * SLACK, &[]) }, SLACK), []);
        }
    }

    #[test]
    fn a_process_without_a_slot_is_reported_once() {
        let mut audit = Audit::default();
        let bypass = |pid| Finding { kind: FindingKind::Bypass, pid, bytes: 5 };
        assert_eq!(audit.see(&look(0, &[7]), SLACK), [], "it may be taking one");
        assert_eq!(audit.see(&look(0, &[7]), SLACK), [bypass(7)]);
        assert_eq!(audit.see(&look(0, &[7, 8]), SLACK), []);
        assert_eq!(audit.see(&look(0, &[8]), SLACK), [bypass(8)]);
        assert!(audit.stands());
        audit.see(&look(0, &[]), SLACK);
        assert!(!audit.stands());
    }
}
