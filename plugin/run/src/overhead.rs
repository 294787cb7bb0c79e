//! Overhead of a command tree, as [`tessera_agent::observe`] does it for pods: what the driver shows of the
//! command's processes beyond their charges, published in their quota page. There are no sessions
//! and no containers here; a process is the command's if it has the usage page mapped.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use tessera_agent::observe::departed::{self, ListedProcess, ProcessOwner};
use tessera_agent::observe::overhead::{OverheadEstimator, Verdict};
use tessera_agent::observe::procs::Procs;
use tessera_agent::observe::sample::{Member, compose, join, slot_of};
use tessera_agent::observe::schedule::{Figure, Look, LookSchedule};
use tessera_gpu::{Discovery, GpuProcess};
use tessera_model::quantity::format_bytes;
use tessera_region::layout::{Kind, MAX_GPUS, USAGE_FILE};
use tessera_region::quota::QuotaWriter;
use tessera_region::usage::{SlotView, Snapshot, Tally, UsageFile};

/// How soon the usage page is read again while nobody uses a GPU.
pub(super) const IDLE: Duration = Duration::from_millis(20);
/// The same while somebody does, who may end at any time.
const WATCHFUL: Duration = Duration::from_millis(4);

/// Looks now and then, and publishes.
pub(super) struct Overhead {
    discovery: Box<dyn Discovery>,
    /// UUIDs and what is known of each, in the page's order.
    gpus: Vec<(String, OverheadEstimator)>,
    schedule: LookSchedule,
    procs: Procs,
    /// Device and inode of the usage page.
    page: (u64, u64),
    /// The holders of contexts at the last tick: slot, time of claim, bytes.
    seen: Vec<(usize, u64, u64)>,
    /// At the last look.
    launches: u64,
    /// What dead processes had counted in slots that a look zeroed.
    ended: Tally,
    /// Which pids the command's processes had, by slot and time of claim, as looks found them.
    pids: BTreeMap<(usize, u64), u32>,
    /// The command's processes have other pids in their own eyes.
    nested: bool,
    /// The driver may have memory of dead processes.
    departing: bool,
}

impl Overhead {
    /// For the pages in `dir`, which name the GPUs `uuids` in this order.
    pub fn new(
        discovery: Box<dyn Discovery>,
        dir: &Path,
        uuids: impl Iterator<Item = String>,
    ) -> std::io::Result<Self> {
        let page = std::fs::metadata(dir.join(USAGE_FILE))?;
        Ok(Self {
            discovery,
            gpus: uuids.map(|uuid| (uuid, OverheadEstimator::new(0))).collect(),
            schedule: LookSchedule::new(Instant::now()),
            procs: Procs::default(),
            page: (page.dev(), page.ino()),
            seen: Vec::new(),
            launches: 0,
            ended: Tally::default(),
            pids: BTreeMap::new(),
            nested: false,
            departing: false,
        })
    }

    /// Which pid the owner of a slot had.
    fn pid_of(&self, slot: &SlotView) -> Option<u32> {
        let learnt = self.pids.get(&(slot.index, slot.claimed_ns)).copied();
        // One that no look has found alive had the pid that it says, unless it saw others than we do.
        learnt.or_else(|| (!self.nested).then_some(slot.pid_hint))
    }

    /// What dead processes had counted in slots that a look zeroed.
    pub fn ended(&self) -> &Tally {
        &self.ended
    }

    /// Looks if it is time, or if contexts or processes have come or gone since the last tick. Returns
    /// when to come again.
    pub fn tick(
        &mut self,
        snapshot: &Snapshot,
        quota: &QuotaWriter,
        usage: &UsageFile,
    ) -> Duration {
        let contexts = |slot: &tessera_region::usage::SlotView| {
            (slot.index, slot.claimed_ns, slot.kinds[Kind::Overhead as usize])
        };
        let seen: Vec<_> = snapshot.slots.iter().map(contexts).collect();
        let pace = if snapshot.slots.is_empty() { IDLE } else { WATCHFUL };
        let now = Instant::now();
        if seen != self.seen {
            self.seen = seen;
            self.schedule.news(now, None);
        }
        let is_dead = |slot: &SlotView| slot.is_departing() || !usage.slot_locked(slot.index);
        self.departing = snapshot.slots.iter().any(is_dead);
        if self.departing {
            self.schedule.hurry(now);
        }
        if self.schedule.due() > now {
            return pace;
        }
        if self.departing {
            // What cannot be written now is tried again.
            if let Ok(recovered) = usage.bury(quota.departure()) {
                self.ended.merge(&recovered.tally);
            }
        }
        let figure = self.figure(snapshot);
        if !self.schedule.wants_lists(now, figure, self.departing) {
            self.schedule.polled(now, figure);
            return pace;
        }
        let verdicts: Vec<Verdict> =
            (0..self.gpus.len()).filter_map(|gpu| self.look(gpu, quota, usage)).collect();
        let launches =
            snapshot.slots.iter().fold(0u64, |sum, s| sum.saturating_add(s.did.launches));
        let busy = std::mem::replace(&mut self.launches, launches) != launches;
        let estimators = || self.gpus.iter().map(|(_, estimator)| estimator);
        let open = estimators().any(OverheadEstimator::is_falling);
        let watch = estimators().filter_map(OverheadEstimator::watch).min();
        let look = Look { verdicts, busy, open, watch, ..Look::default() };
        self.schedule.looked(Instant::now(), figure, &look);
        pace
    }

    /// What the GPUs have in use beyond what the command's processes are charged.
    fn figure(&self, snapshot: &Snapshot) -> Figure {
        let mut figure = 0;
        for (gpu, (uuid, _)) in self.gpus.iter().enumerate() {
            let charged =
                snapshot.slots.iter().map(|slot| i128::from(slot.granted[gpu])).sum::<i128>();
            figure += i128::from(self.discovery.memory_used(uuid).ok()?) - charged;
        }
        Some(figure)
    }

    /// `None` where page or driver do not tell.
    fn look(&mut self, gpu: usize, quota: &QuotaWriter, usage: &UsageFile) -> Option<Verdict> {
        let before = usage.snapshot().ok()?.slots;
        self.pids.retain(|key, _| before.iter().any(|slot| (slot.index, slot.claimed_ns) == *key));
        let dead: Vec<(&SlotView, Option<u32>)> = before
            .iter()
            .filter(|slot| slot.is_departing())
            .map(|slot| (slot, self.pid_of(slot)))
            .collect();
        let processes = self.discovery.processes(&self.gpus[gpu].0).ok()?;
        let now = Instant::now();
        let departing = |pid: u32| -> Vec<usize> {
            let its = |(_, known): &&(&SlotView, Option<u32>)| *known == Some(pid);
            dead.iter().filter(its).map(|(slot, _)| slot.index).collect()
        };
        let mut members = Vec::new();
        let mut listed = Vec::new();
        for GpuProcess { pid, used_bytes } in processes {
            let Some(identity) = self.procs.living(pid) else {
                let was = departing(pid);
                if !was.is_empty() {
                    join(&mut members, Member { pid, start: 0, used_bytes, slot: None }, was);
                }
                listed.push((pid, used_bytes, Some(ProcessOwner::Ending)));
                continue;
            };
            let (start, namespace_pid) = (identity.start, identity.namespace_pid);
            if !self.procs.maps(pid, self.page) {
                listed.push((pid, used_bytes, Some(ProcessOwner::Others)));
                continue;
            }
            self.nested |= namespace_pid != pid;
            let slot = slot_of(&before, None, namespace_pid);
            if let Some(slot) = before.iter().find(|s| Some(s.index) == slot) {
                self.pids.insert((slot.index, slot.claimed_ns), pid);
            }
            join(&mut members, Member { pid, start, used_bytes, slot }, departing(pid));
            listed.push((pid, used_bytes, None));
        }
        let after = usage.snapshot().ok()?.slots;
        if !dead.is_empty() {
            let granted = |pid: u32, slots: &[SlotView]| {
                let its = |slot: &&SlotView| {
                    !slot.is_departing()
                        && self.pids.get(&(slot.index, slot.claimed_ns)) == Some(&pid)
                };
                slots.iter().filter(its).fold(0, |sum: u64, s| sum.saturating_add(s.shown(gpu)))
            };
            let own = |pid| ProcessOwner::Own(granted(pid, &before).min(granted(pid, &after)));
            let listed: Vec<ListedProcess> = listed
                .into_iter()
                .map(|(pid, used_bytes, owner)| {
                    let owner = owner.unwrap_or_else(|| own(pid));
                    ListedProcess { pid, used_bytes, owner }
                })
                .collect();
            let fates = departed::fates(&dead, gpu, &listed, |_| false);
            self.ended.merge(&usage.settle(&fates).ok()?.tally);
        }
        let sample = compose(&before, &after, gpu, members);
        let verdict = self.gpus[gpu].1.see(now, &sample);
        if let Verdict::Publish(bytes) = verdict {
            quota.set_observed_overhead(gpu, bytes);
        }
        Some(verdict)
    }
}

/// Peak use and refusals of a command tree, as repeated looks at its usage page saw them so far.
#[derive(Debug, Default)]
pub(super) struct Observer {
    peaks: [u64; MAX_GPUS],
    refusals: u64,
}

impl Observer {
    /// Takes one look into account. `ended`: what processes did whose slots the look zeroed.
    pub fn see(&mut self, snapshot: &Snapshot, ended: &Tally) {
        let mut tally = snapshot.tally();
        tally.merge(ended);
        let mut now = [0u64; MAX_GPUS];
        for slot in &snapshot.slots {
            for (now, granted) in now.iter_mut().zip(slot.granted) {
                *now = now.saturating_add(granted);
            }
        }
        // One process's own peak is a lower bound that no look can miss.
        for (peak, seen) in self.peaks.iter_mut().zip(now.into_iter().zip(tally.peak)) {
            *peak = (*peak).max(seen.0).max(seen.1);
        }
        self.refusals = self.refusals.max(tally.refusals);
    }

    /// One line per GPU, in the page's order.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.peaks.iter().map(|&peak| format!("peak use {}", format_bytes(peak)))
    }

    /// Requests refused because of the quota.
    pub fn refusals(&self) -> u64 {
        self.refusals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: usize, claimed_ns: u64, granted: u64, peak: u64, refusals: u64) -> SlotView {
        let mut slot = SlotView { index, claimed_ns, ..SlotView::default() };
        slot.granted[0] = granted;
        slot.did.refusals = refusals;
        slot.did.peak[0] = peak;
        slot
    }

    #[test]
    fn a_peak_is_the_most_held_at_once() {
        let mut observer = Observer::default();
        for slots in [
            vec![slot(0, 1, 10 << 20, 10 << 20, 0), slot(1, 1, 20 << 20, 20 << 20, 0)],
            vec![slot(0, 1, 0, 10 << 20, 0), slot(1, 1, 5 << 20, 20 << 20, 0)],
        ] {
            observer.see(&Snapshot { slots, ..Snapshot::default() }, &Tally::default());
        }
        assert_eq!(observer.lines().next().unwrap(), "peak use 30 MiB");
    }
}
