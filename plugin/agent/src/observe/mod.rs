//! Memory that no hook sees: contexts beyond their constant, modules loaded late, local memory,
//! half-empty pages, and whatever goes past the shim. The driver's own figures per process show it,
//! and what they show beyond a tenant's charges is published in its quota page.
//!
//! One thread looks, GPU by GPU, when there is news and else ever less often ([`schedule`]). A look
//! reads a tenant's ledger, asks the driver, and reads the ledger again ([`sample`]); [`overhead`] says
//! what to believe and publish, [`audit`] what to report. Those four are pure. Whose a pid is
//! comes from the sessions and from `/proc` ([`procs`]).

pub mod audit;
pub mod departed;
pub mod overhead;
pub mod procs;
pub mod sample;
pub mod schedule;
mod used;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::debug;

pub use procs::{PidView, pid_view};
use tessera_region::usage::{Fate, SlotView};
use tessera_tenant::regions::Bell;

use self::audit::{Audit, Kubelet};
use self::departed::{ListedProcess, ProcessOwner};
use self::overhead::{OverheadEstimator, Verdict};
use self::procs::Procs;
use self::sample::{Member, compose, divide, join, slot_of};
use self::schedule::{Figure, Look, LookSchedule, SLOW};
use self::used::UseMeter;
use crate::Agent;
use crate::trust::strangers::{Confirmed, Stranger};
use tessera_gpu::{Discovery, GpuProcess};
use tessera_model::allocation_id::AllocationId;
use tessera_model::counted::plural;
use tessera_model::record::Record;
use tessera_peers::{TenantSessions, TokenBucket};
use tessera_tenant::regions::Region;

/// News of one allocation that bring looks forward: a burst, and how many a second after it. So a
/// flood of messages costs a few looks a second.
const NEWS_BURST: u32 = 16;
const NEWS_RATE: u32 = 1;

/// The first look is left until kubelet has been served.
const START: Duration = Duration::from_secs(1);
/// A new allocation has no process yet, and the first that comes is news.
const FRESH: Duration = Duration::from_millis(100);
/// What has been looked at rests for so many times as long as that took, so that looking costs at
/// most a ninth of a core however many pods come and go.
const REST: u32 = 8;
const LONGEST_REST: Duration = Duration::from_millis(100);
/// Shortest time between two reported findings about a tenant; all are counted.
const TELL: Duration = Duration::from_secs(10);

/// The thread that looks; ends when dropped.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    bell: Arc<Bell>,
}

impl Watch {
    pub fn start(agent: Arc<Agent>, discovery: Arc<dyn Discovery>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let bell = Arc::clone(agent.allocations.pages.bell());
        let watch = Watch { stop: Arc::clone(&stop), bell: Arc::clone(&bell) };
        let mut observer = Observer::new(agent, discovery);
        std::thread::Builder::new().name("observe".into()).stack_size(256 << 10).spawn(
            move || {
                let mut due = Instant::now() + START;
                while !stop.load(Ordering::Relaxed) {
                    bell.wait(due);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let began = Instant::now();
                    observer.round();
                    due = observer.due();
                    std::thread::sleep((began.elapsed() * REST).min(LONGEST_REST));
                }
            },
        )?;
        Ok(watch)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.bell.ring();
    }
}

/// A tenant, for as long as its generation lasts.
struct ObservedTenant {
    generation: u64,
    gpus: Vec<Figures>,
    /// Which pids on the host its processes had, by slot and time of claim, as looks found them.
    pids: BTreeMap<(usize, u64), u32>,
    news: TokenBucket,
    reported: Option<Instant>,
    launches: u64,
    /// Times that its usage page was found tampered with, as far as reported.
    tamperings: u64,
}

struct Figures {
    estimator: OverheadEstimator,
    audit: Audit,
}

/// An allocation as one round finds it; in the order of ids.
type Found = (Arc<Record>, Arc<Region>);

struct Observer {
    agent: Arc<Agent>,
    discovery: Arc<dyn Discovery>,
    procs: Procs,
    gpus: BTreeMap<String, LookSchedule>,
    tenants: BTreeMap<AllocationId, ObservedTenant>,
    silent: BTreeMap<String, String>,
    /// Pids that the driver listed at the last look, by GPU.
    listed: BTreeMap<String, Vec<u32>>,
    ending: BTreeSet<String>,
    strangers: BTreeMap<String, Confirmed>,
    reported_stranger: Option<Instant>,
    uses: UseMeter,
}

impl Observer {
    fn new(agent: Arc<Agent>, discovery: Arc<dyn Discovery>) -> Self {
        Observer {
            agent,
            discovery,
            procs: Procs::default(),
            gpus: BTreeMap::new(),
            tenants: BTreeMap::new(),
            silent: BTreeMap::new(),
            listed: BTreeMap::new(),
            ending: BTreeSet::new(),
            strangers: BTreeMap::new(),
            reported_stranger: None,
            uses: UseMeter::new(Instant::now()),
        }
    }

    fn due(&self) -> Instant {
        let idle = Instant::now() + SLOW;
        let looks =
            self.gpus.values().map(LookSchedule::due).min().map_or(idle, |due| due.min(idle));
        // Without a tenant there is nobody to look for.
        if self.tenants.is_empty() { looks } else { looks.min(self.uses.due()) }
    }

    fn round(&mut self) {
        let allocations: Vec<Found> = self
            .agent
            .allocations
            .with_regions()
            .into_iter()
            .filter_map(|(record, region)| Some((record, region?)))
            .collect();
        self.tenants.retain(|id, _| place(&allocations, |(record, _)| &record.id, id).is_some());
        let grants = allocations.iter().flat_map(|(record, _)| &record.grants);
        let sold: BTreeSet<&str> = grants.map(|grant| grant.uuid.as_str()).collect();
        let sold = |uuid: &String| sold.contains(uuid.as_str());
        self.gpus.retain(|uuid, _| sold(uuid));
        self.listed.retain(|uuid, _| sold(uuid));
        self.ending.retain(sold);
        self.strangers.retain(|uuid, _| sold(uuid));
        self.agent.trust.keep_outside(|uuid| sold(&uuid.to_owned()));
        let silent = self.silent.len();
        self.silent.retain(|uuid, _| sold(uuid));
        let now = Instant::now();
        for (record, region) in &allocations {
            self.meet(record, region, now);
            self.hear_of_tampering(record, region, now);
        }
        self.measure_use(&allocations, now);
        let due: Vec<String> = self
            .gpus
            .iter()
            .filter(|(_, schedule)| schedule.due() <= now)
            .map(|(uuid, _)| uuid.clone())
            .collect();
        for uuid in &due {
            let (figure, hurries) = self.figure(uuid, &allocations);
            let hurries = hurries || self.ending.contains(uuid);
            for (record, region) in &allocations {
                if let Some(gpu) = record.grants.iter().position(|grant| grant.uuid == *uuid) {
                    region.publish_departing(gpu, hurries);
                }
            }
            if let Some(schedule) = self.gpus.get_mut(uuid)
                && !schedule.wants_lists(now, figure, hurries)
            {
                schedule.polled(now, figure);
                if hurries {
                    schedule.hurry(now);
                }
                continue;
            }
            let look = self.look(uuid, &allocations);
            match look.ending {
                true => self.ending.insert(uuid.clone()),
                false => self.ending.remove(uuid),
            };
            if let Some(schedule) = self.gpus.get_mut(uuid) {
                schedule.looked(Instant::now(), figure, &look);
            }
        }
        if !due.is_empty() || silent != self.silent.len() {
            self.say_what_is_silent();
            let listed: HashSet<u32> = self.listed.values().flatten().copied().collect();
            self.procs.keep(|pid| listed.contains(&pid));
        }
    }

    fn meet(&mut self, record: &Record, region: &Region, now: Instant) {
        let fresh = self.tenants.get(&record.id).is_none_or(|t| t.generation != record.generation);
        if fresh {
            let gpu = |gpu: usize| Figures {
                estimator: OverheadEstimator::new(region.overhead(gpu)),
                audit: Audit::default(),
            };
            let tenant = ObservedTenant {
                generation: record.generation,
                gpus: (0..record.grants.len()).map(gpu).collect(),
                pids: BTreeMap::new(),
                news: TokenBucket::new(NEWS_BURST, NEWS_RATE, now),
                reported: None,
                launches: 0,
                tamperings: 0,
            };
            self.tenants.insert(record.id.clone(), tenant);
        }
        if region.observed().departing() && !region.tenant().has_hidden_pids() {
            for grant in &record.grants {
                let schedule =
                    self.gpus.entry(grant.uuid.clone()).or_insert_with(|| LookSchedule::new(now));
                schedule.hurry(now);
            }
        }
        let wait = match self.tenants.get_mut(&record.id) {
            Some(tenant) if region.observed().take_news() => tenant.news.take(now).err(),
            _ if fresh => Some(FRESH),
            _ => return,
        };
        for grant in &record.grants {
            let schedule =
                self.gpus.entry(grant.uuid.clone()).or_insert_with(|| LookSchedule::new(now));
            schedule.news(now, wait);
        }
    }

    /// What a GPU has in use beyond its tenants' ledgers, and whether somebody waits for dead processes' memory.
    fn figure(&self, uuid: &str, allocations: &[Found]) -> (Figure, bool) {
        let (mut charged, mut hurries) = (0u64, false);
        for (record, region) in allocations {
            let Some(gpu) = record.grants.iter().position(|grant| grant.uuid == uuid) else {
                continue;
            };
            let slots = region.slots();
            charged = slots.iter().fold(charged, |sum, slot| sum.saturating_add(slot.granted[gpu]));
            hurries |= region.observed().departing() && !region.tenant().has_hidden_pids();
        }
        let used = self.discovery.memory_used(uuid).ok();
        (used.map(|used| i128::from(used) - i128::from(charged)), hurries)
    }

    fn look(&mut self, uuid: &str, allocations: &[Found]) -> Look {
        // Without the host's pids no process can be attributed; `status` says so.
        let tenants: Vec<(&Found, usize)> = allocations
            .iter()
            .filter(|(_, region)| !region.tenant().has_hidden_pids())
            .filter_map(|found| {
                let gpu = found.0.grants.iter().position(|grant| grant.uuid == uuid)?;
                Some((found, gpu))
            })
            .collect();
        let before: Vec<_> = tenants
            .iter()
            .map(|((_, region), _)| region.recover_and_snapshot().snapshot.slots)
            .collect();
        let processes = match self.discovery.processes(uuid) {
            Ok(processes) => processes,
            Err(error) => {
                // Of a GPU that has left the node the driver knows nothing.
                match self.agent.inventory.catalogue().gpus.contains_key(uuid) {
                    true => self.silent.insert(uuid.to_owned(), error),
                    false => self.silent.remove(uuid),
                };
                tenants.iter().for_each(|((_, r), gpu)| r.observed().set_used(*gpu, None));
                self.agent.trust.keep_outside(|looked_at| looked_at != uuid);
                return Look::default();
            }
        };
        let now = Instant::now();
        if processes.iter().any(|process| process.used_bytes.is_none()) {
            let reason = "it tells the processes and not their memory (NVML_VALUE_NOT_AVAILABLE)";
            self.silent.insert(uuid.to_owned(), reason.to_owned());
        } else {
            self.silent.remove(uuid);
        }
        let pids: Vec<u32> = processes.iter().map(|p| p.pid).collect();
        let others = self.listed.get(uuid) != Some(&pids);
        self.listed.insert(uuid.to_owned(), pids);
        self.procs.set_pages(self.pages_source());

        let mut members: Vec<Vec<Member>> = vec![Vec::new(); tenants.len()];
        let mut strangers = Vec::new();
        let mut ending = false;
        let sessions = sessions(&tenants);
        let dead = self.departing(&tenants, &before);
        let mut listed = Vec::new();
        let agent = Arc::clone(&self.agent);
        let kubelet = Kubelet::new(&agent);
        for process in processes {
            let departing = |at: usize| {
                let its = |(_, pid): &&(usize, Option<u32>)| *pid == Some(process.pid);
                dead[at].iter().filter(its).map(|(slot, _)| *slot).collect::<Vec<_>>()
            };
            // What it has of each share, which NVML does not distinguish.
            let share = |at: usize, slots: &[usize]| {
                let ((record, _), gpu) = tenants[at];
                let its = before[at].iter().filter(|slot| slots.contains(&slot.index));
                let granted = its.fold(0, |sum: u64, slot| sum.saturating_add(slot.shown(gpu)));
                (granted, record.grants[gpu].memory_limit_bytes)
            };
            let owner = match self.owner(&process, &tenants, &sessions, &before, &kubelet) {
                Owner::ObservedTenants(owners) => {
                    let slots = |(at, member): &(usize, Member)| {
                        let slots = departing(*at).into_iter().chain(member.slot);
                        share(*at, &slots.collect::<Vec<_>>())
                    };
                    let parts =
                        divide(process.used_bytes, &owners.iter().map(slots).collect::<Vec<_>>());
                    let all = owners.iter().map(|(at, _)| *at).collect();
                    for ((at, member), used_bytes) in owners.into_iter().zip(parts) {
                        join(&mut members[at], Member { used_bytes, ..member }, departing(at));
                    }
                    Some(all)
                }
                Owner::Nobody(stranger) => {
                    strangers.push(stranger);
                    Some(Vec::new())
                }
                Owner::Gone => {
                    let GpuProcess { pid, used_bytes } = process;
                    ending |= used_bytes != Some(0);
                    let was = (0..dead.len()).map(|at| (at, departing(at)));
                    let was: Vec<_> = was.filter(|(_, was)| !was.is_empty()).collect();
                    let shares: Vec<_> = was.iter().map(|(at, was)| share(*at, was)).collect();
                    for ((at, was), used_bytes) in was.into_iter().zip(divide(used_bytes, &shares))
                    {
                        let member = Member { pid, start: 0, used_bytes, slot: None };
                        join(&mut members[at], member, was);
                    }
                    None
                }
            };
            listed.push((process, owner));
        }
        // Without the host's pids everybody is a stranger.
        let hidden = self.are_pids_hidden(allocations);
        let unsettled = self.judge_strangers(uuid, strangers, hidden, now);

        let slack = self.agent.config().gpus.audit_slack_bytes;
        let open = unsettled || others;
        let mut look = Look { busy: unsettled, open, ending, ..Look::default() };
        for (at, ((record, region), gpu)) in tenants.iter().enumerate() {
            let after = region.slots();
            self.learn(&record.id, &before[at], &members[at]);
            if !dead[at].is_empty() {
                let fates = self.fates(at, &tenants, &dead, &listed, (&before, &after));
                if !fates.is_empty() {
                    region.settle(fates);
                }
                look.departing |= region.observed().departing();
            }
            let sample = compose(&before[at], &after, *gpu, std::mem::take(&mut members[at]));
            region.observed().set_used(*gpu, sample.used);
            let Some(tenant) = self.tenants.get_mut(&record.id) else { continue };
            let launches =
                after.iter().fold(0u64, |sum, slot| sum.saturating_add(slot.did.launches));
            look.busy |= std::mem::replace(&mut tenant.launches, launches) != launches;
            let Some(figures) = tenant.gpus.get_mut(*gpu) else { continue };
            let Figures { estimator, audit } = figures;
            let verdict = estimator.see(now, &sample);
            look.watch = look.watch.into_iter().chain(estimator.watch()).min();
            look.open |= estimator.is_falling();
            if let Verdict::Publish(bytes) = verdict {
                region.publish_overhead(*gpu, bytes);
                debug!(id = %record.id, gpu = uuid, overhead = bytes, "overhead observed");
            }
            let findings = audit.see(&sample, slack);
            look.open |= audit.is_open();
            let stands = tenant.gpus.iter().any(|figures| figures.audit.stands());
            region.observed().found(u64::try_from(findings.len()).unwrap_or(0), stands);
            for finding in &findings {
                self.agent.trust.count(finding.kind, 1);
            }
            let tells = tenant.reported.is_none_or(|reported| now.duration_since(reported) >= TELL);
            if let Some(finding) = findings.first().filter(|_| tells) {
                tenant.reported = Some(now);
                self.report(record, uuid, *finding);
            }
            look.verdicts.push(verdict);
        }
        look
    }

    /// Each tenant's departing slots, and which pids on the host they had, as far as that is known.
    fn departing(
        &self,
        tenants: &[(&Found, usize)],
        slots: &[Vec<SlotView>],
    ) -> Vec<Vec<(usize, Option<u32>)>> {
        let pid = |(record, region): &Found, slot: &SlotView| {
            let tenant = self.tenants.get(&record.id);
            let learnt = tenant.and_then(|t| t.pids.get(&(slot.index, slot.claimed_ns)).copied());
            let said = || region.tenant().host_pid(slot.pid_hint, u32::try_from(slot.index).ok()?);
            learnt.or_else(said)
        };
        let of = |(found, slots): (&Found, &Vec<SlotView>)| {
            let departing = slots.iter().filter(|slot| slot.is_departing());
            departing.map(|slot| (slot.index, pid(found, slot))).collect()
        };
        tenants.iter().map(|(found, _)| *found).zip(slots).map(of).collect()
    }

    /// Which process has which slot, for when it is dead.
    fn learn(&mut self, id: &AllocationId, slots: &[SlotView], members: &[Member]) {
        let Some(tenant) = self.tenants.get_mut(id) else { return };
        let is_there =
            |key: &(usize, u64)| slots.iter().any(|slot| (slot.index, slot.claimed_ns) == *key);
        tenant.pids.retain(|key, _| is_there(key));
        for member in members {
            let its = |slot: &&SlotView| Some(slot.index) == member.slot && !slot.is_departing();
            if let Some(slot) = slots.iter().find(its) {
                tenant.pids.insert((slot.index, slot.claimed_ns), member.pid);
            }
        }
    }

    /// What has become of the departing slots of the tenant at `at`, whose slots were `around` the
    /// driver's answer.
    fn fates(
        &self,
        at: usize,
        tenants: &[(&Found, usize)],
        dead: &[Vec<(usize, Option<u32>)>],
        listed: &[(GpuProcess, Option<Vec<usize>>)],
        (all_before, after): (&[Vec<SlotView>], &[SlotView]),
    ) -> Vec<Fate> {
        let (gpu, before) = (tenants[at].1, &all_before[at]);
        let sum = |of: usize, pid: u32, slots: &[SlotView]| {
            let ((record, _), gpu) = tenants[of];
            let tenant = self.tenants.get(&record.id);
            let its = |slot: &&SlotView| {
                !slot.is_departing()
                    && tenant.and_then(|t| t.pids.get(&(slot.index, slot.claimed_ns))) == Some(&pid)
            };
            slots.iter().filter(its).fold(0, |sum: u64, s| sum.saturating_add(s.shown(gpu)))
        };
        // In all the shares that it has.
        let granted = |pid: u32, owners: &[usize]| {
            let others = owners.iter().filter(|of| **of != at);
            let others = others.map(|of| sum(*of, pid, &all_before[*of]));
            others.fold(sum(at, pid, before).min(sum(at, pid, after)), u64::saturating_add)
        };
        let listed: Vec<ListedProcess> = listed
            .iter()
            .map(|(process, whose)| ListedProcess {
                pid: process.pid,
                used_bytes: process.used_bytes,
                owner: match whose {
                    None => ProcessOwner::Ending,
                    Some(all) if all.contains(&at) => ProcessOwner::Own(granted(process.pid, all)),
                    Some(_) => ProcessOwner::Others,
                },
            })
            .collect();
        let known = |(index, pid): &(usize, Option<u32>)| {
            before.iter().find(|slot| slot.index == *index).map(|slot| (slot, *pid))
        };
        let departing: Vec<_> = dead[at].iter().filter_map(known).collect();
        let is_others = |pid: u32| {
            let has = |(other, ((record, region), _)): (usize, &(&Found, usize))| {
                let learnt = self.tenants.get(&record.id).map(|tenant| &tenant.pids);
                let learnt = learnt.is_some_and(|pids| pids.values().any(|known| *known == pid));
                other != at && (learnt || region.tenant().knows(pid))
            };
            tenants.iter().enumerate().any(has)
        };
        departed::fates(&departing, gpu, &listed, is_others)
    }

    /// Whether this process cannot know the host's pids: a tenant's own word goes before what is guessed.
    fn are_pids_hidden(&self, allocations: &[Found]) -> bool {
        let any =
            |has: fn(&TenantSessions) -> bool| allocations.iter().any(|(_, r)| has(&r.tenant()));
        any(TenantSessions::has_hidden_pids)
            || pid_view() == PidView::Own
                && !any(|tenant| tenant.peers().iter().any(|peer| peer.host_pid.is_some()))
    }

    /// Whose a process is: by its session, by its mounts, by its container.
    fn owner(
        &mut self,
        process: &GpuProcess,
        tenants: &[(&Found, usize)],
        sessions: &Sessions,
        slots: &[Vec<SlotView>],
        kubelet: &Kubelet<'_>,
    ) -> Owner {
        let Some(identity) = self.procs.living(process.pid) else { return Owner::Gone };
        let at = |id: &AllocationId| place(tenants, |((record, _), _)| &record.id, id);
        let given = || {
            let (place, name) = (identity.place.as_ref()?, identity.container.as_deref()?);
            kubelet.given(place, name)
        };
        let by_proc = || {
            let mounted = &identity.allocations;
            if mounted.is_empty() { given().into_iter().collect() } else { mounted.clone() }
        };
        let mut elsewhere = None;
        let slot = |at: usize, named| slot_of(&slots[at], named, identity.namespace_pid);
        // The shares of its sessions, and those of its container in which it has a slot.
        let mut owners: Vec<_> = sessions.get(&process.pid).cloned().unwrap_or_default();
        if owners.is_empty() || identity.allocations.len() > 1 {
            for id in by_proc() {
                match at(&id) {
                    Some(at) if owners.iter().any(|(known, _)| *known == at) => {}
                    Some(at) if owners.is_empty() || slot(at, None).is_some() => {
                        owners.push((at, None));
                    }
                    Some(_) => {}
                    None => elsewhere = Some(id),
                }
            }
        }
        if !owners.is_empty() {
            let member = |(at, named): (usize, Option<u32>)| {
                let (pid, start) = (process.pid, identity.start);
                (at, Member { pid, start, used_bytes: process.used_bytes, slot: slot(at, named) })
            };
            return Owner::ObservedTenants(owners.into_iter().map(member).collect());
        }
        let record = elsewhere.as_ref().and_then(|id| self.agent.allocations.record(id));
        Owner::Nobody(Stranger {
            pid: process.pid,
            start: identity.start,
            bytes: process.used_bytes,
            name: identity.name.clone(),
            holder: record.as_ref().and_then(|record| record.holder.clone()),
            tenant: record.is_some(),
            place: identity.place.clone(),
        })
    }

    fn say_what_is_silent(&self) {
        let text = self.silent.iter().next().map(|(uuid, reason)| {
            format!(
                "the driver does not tell what processes hold on {}, {uuid} among them: {reason}. \
                 Memory that no call shows is charged by gpus.context_overhead alone, and nothing is \
                 audited there",
                plural(self.silent.len(), "GPU")
            )
        });
        self.agent.board.set_condition("observation", text);
    }
}

/// Processes with a session, by their pids on the host: the tenants, by their places in the round, each with
/// the slot that the process named there.
type Sessions = HashMap<u32, Vec<(usize, Option<u32>)>>;

fn sessions(tenants: &[(&Found, usize)]) -> Sessions {
    let mut sessions = Sessions::new();
    for (at, ((_, region), _)) in tenants.iter().enumerate() {
        for peer in region.tenant().peers() {
            if let Some(pid) = peer.host_pid {
                let of = sessions.entry(pid).or_default();
                // Of several in one share the first counts.
                if of.iter().all(|(known, _)| *known != at) {
                    of.push((at, peer.hello.map(|(_, slot)| slot)));
                }
            }
        }
    }
    sessions
}

fn place<T>(list: &[T], id_of: impl Fn(&T) -> &AllocationId, id: &AllocationId) -> Option<usize> {
    list.binary_search_by(|found| id_of(found).cmp(id)).ok()
}

enum Owner {
    /// Of these, by their places in the round: the shares of this GPU that it has.
    ObservedTenants(Vec<(usize, Member)>),
    Nobody(Stranger),
    /// It has ended, or lets go of its memory.
    Gone,
}
