//! Searches `/proc` for containers with shares, and checks that they still have the plugin's mounts.
//!
//! Of every process its cgroup is read, one short line or a few; of one process of each container that
//! holds a share its mounts. Containers of pods that hold none are remembered and left alone. A sweep is made after a
//! container has started, to confirm what another saw, and periodically; never more often than costs a
//! thousandth of a core.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use super::cgroup::PodContainer;
use super::integrity::{CONFIRM, Integrity, MountOwner};
use super::mounts::{Damage, Mounts, Sources};
use crate::observe::procs::Procs;
use tessera_model::allocation_id::AllocationId;

/// The longest time between two sweeps.
pub const USUAL: Duration = Duration::from_secs(60);
/// When a container's mounts are made after PreStartContainer, and when they surely are.
const AFTER_START: [Duration; 2] = [Duration::from_secs(4), Duration::from_secs(15)];
/// Rest after a sweep, in times of the processor time that it took.
const REST: u32 = 1000;
/// A container that no allocation is found for is looked at for so long; then only if its pod holds one.
const YOUNG: Duration = Duration::from_secs(20);

/// What a sweep needs to know.
pub struct SweepContext<'a> {
    /// Where pages and shims lie; without it nothing is judged.
    pub sources: Option<&'a Sources>,
    /// Whether containers are given the preload file.
    pub preload: bool,
    /// Whether there is such an allocation.
    pub is_live: &'a dyn Fn(&AllocationId) -> bool,
    /// Whether kubelet gave a container of this pod an allocation that lives.
    pub holds: &'a dyn Fn(&PodContainer) -> bool,
    /// The allocation that kubelet gave a container of a pod, by the pod's UID and the container's name.
    pub given: &'a dyn Fn(&PodContainer, &str) -> Option<AllocationId>,
}

/// Confirmed damage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The container's allocation.
    pub allocation: AllocationId,
    /// A process of it, by its pid on the host.
    pub pid: u32,
    /// What.
    pub damages: Vec<Damage>,
}

/// Remembers what was seen.
#[derive(Debug)]
pub struct Sweep {
    integrity: Integrity,
    /// Allocations of containers, by the containers' ids.
    homes: HashMap<String, (Vec<AllocationId>, PodContainer)>,
    /// Containers whose mounts name no allocation, and since when that is known.
    foreign: HashMap<String, Instant>,
    due: Vec<Instant>,
    rested: Instant,
}

impl Sweep {
    /// The first sweep is due after `wait`.
    #[must_use]
    pub fn new(now: Instant, wait: Duration) -> Self {
        Sweep {
            integrity: Integrity::default(),
            homes: HashMap::new(),
            foreign: HashMap::new(),
            due: vec![now + wait],
            rested: now,
        }
    }

    /// When to sweep next.
    #[must_use]
    pub fn due(&self) -> Instant {
        let due = self.due.iter().min().copied();
        due.map_or(self.rested + USUAL, |due| due.max(self.rested))
    }

    /// A container starts.
    pub fn started(&mut self, now: Instant) {
        if self.due.len() < 8 {
            self.due.extend(AFTER_START.map(|after| now + after));
        }
    }

    /// Whether something is to be confirmed.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.integrity.waits()
    }

    /// The allocations of a container.
    #[must_use]
    pub fn home(&self, place: &PodContainer) -> &[AllocationId] {
        self.homes.get(&place.container_id).map_or(&[], |(ids, _)| ids)
    }

    /// Shares that containers hold, with the pods that these are in.
    pub fn homes(&self) -> impl Iterator<Item = (&AllocationId, &PodContainer)> {
        self.homes.values().flat_map(|(ids, place)| ids.iter().map(move |id| (id, place)))
    }

    /// What stands, confirmed, by allocation.
    #[must_use]
    pub fn confirmed(&self) -> BTreeMap<AllocationId, Vec<Damage>> {
        self.integrity.confirmed()
    }

    /// Looks through all processes. Gives what it confirms.
    pub fn sweep(
        &mut self,
        procs: &mut Procs,
        context: &SweepContext<'_>,
        now: Instant,
    ) -> Vec<Report> {
        let began = own_time();
        let mut reports = Vec::new();
        let mut seen: HashSet<String> = HashSet::new();
        let mut pids: Vec<u32> = procs.pids().collect();
        // The first process of a container is its oldest, and mostly has its lowest pid.
        pids.sort_unstable();
        for pid in pids {
            let Some(place) = procs.place(pid).filter(|place| !place.container_id.is_empty())
            else {
                continue;
            };
            if !seen.insert(place.container_id.clone()) {
                continue;
            }
            let is_old = |since: &Instant| now.saturating_duration_since(*since) > YOUNG;
            // Of a pod that holds a share it is never certain: its mounts may have been read too early.
            let is_foreign = self.foreign.get(&place.container_id).is_some_and(is_old);
            if is_foreign && !(context.holds)(&place) {
                continue;
            }
            let Some(text) = procs.mountinfo(pid) else { continue };
            let mounts = Mounts::parse(&text);
            let ids = self.allocations(&place, &mounts, context);
            if ids.is_empty() {
                self.foreign.entry(place.container_id).or_insert(now);
                continue;
            }
            self.foreign.remove(&place.container_id);
            let owner = MountOwner::Container(place.container_id.clone());
            self.homes.insert(place.container_id.clone(), (ids.clone(), place));
            for id in ids {
                reports.extend(self.judge(owner.clone(), pid, id, &mounts, context, now));
            }
        }
        self.homes.retain(|id, _| seen.contains(id));
        self.foreign.retain(|id, _| seen.contains(id));
        // Those in no pod are looked at with the GPU that they use.
        self.integrity.forget(now.checked_sub(2 * USUAL).unwrap_or(now));
        self.integrity.forget_containers(|id| seen.contains(id));
        self.due.retain(|due| *due > now);
        self.due.push(now + if self.integrity.waits() { CONFIRM } else { USUAL });
        self.rested = now + (own_time().saturating_sub(began) * REST).min(USUAL);
        reports
    }

    /// Looks at one process that uses a GPU, in a pod or not.
    pub fn look(
        &mut self,
        procs: &Procs,
        (pid, start): (u32, u64),
        allocation: &AllocationId,
        place: Option<&PodContainer>,
        context: &SweepContext<'_>,
        now: Instant,
    ) -> Option<Report> {
        let text = procs.mountinfo(pid)?;
        let owner = match place.filter(|place| !place.container_id.is_empty()) {
            Some(place) => MountOwner::Container(place.container_id.clone()),
            None => MountOwner::Process(pid, start),
        };
        let report =
            self.judge(owner, pid, allocation.clone(), &Mounts::parse(&text), context, now);
        if self.integrity.waits() {
            self.due.push(now + CONFIRM);
        }
        report
    }

    fn judge(
        &mut self,
        owner: MountOwner,
        pid: u32,
        allocation: AllocationId,
        mounts: &Mounts<'_>,
        context: &SweepContext<'_>,
        now: Instant,
    ) -> Option<Report> {
        let damages = mounts.damages(&allocation, context.preload, context.sources?);
        let damages = self.integrity.see(owner, &allocation, damages, now)?;
        Some(Report { allocation, pid, damages })
    }

    /// By what is mounted or was once, or else by what kubelet gave the container.
    fn allocations(
        &self,
        place: &PodContainer,
        mounts: &Mounts<'_>,
        ground: &SweepContext<'_>,
    ) -> Vec<AllocationId> {
        let pages = ground.sources.map(|sources| &sources.pages);
        let mut ids = mounts.allocations(pages);
        ids.extend_from_slice(self.home(place));
        ids.retain(|id| (ground.is_live)(id));
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            let own = mounts.container().filter(|(uid, _)| *uid == place.pod_uid);
            let given = own.and_then(|(_, name)| (ground.given)(place, name));
            ids.extend(given.filter(|id| (ground.is_live)(id)));
        }
        ids
    }
}

/// Processor time of this thread: how long a sweep takes by the clock is the neighbours' doing as well. Where
/// it is unknown, there is no rest but the time between two sweeps.
fn own_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
