//! Overhead of a command tree, as [`crate::observe`] does it for pods: what the driver shows of the
//! command's processes beyond their charges, published in their quota page. There are no sessions
//! and no containers here; a process is the command's if it has the usage page mapped.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use tessera_region::layout::{Kind, USAGE_FILE};
use tessera_region::quota::QuotaWriter;
use tessera_region::usage::{Snapshot, Tally, UsageFile};

use crate::device::{Discovery, GpuProcess};
use crate::observe::gauge::{Gauge, Verdict};
use crate::observe::procs::Procs;
use crate::observe::rhythm::Rhythm;
use crate::observe::sample::{Member, compose, slot_of};

/// Looks now and then, and publishes.
pub(super) struct Overhead {
    discovery: Box<dyn Discovery>,
    /// UUIDs and what is known of each, in the page's order.
    gpus: Vec<(String, Gauge)>,
    rhythm: Rhythm,
    procs: Procs,
    /// Device and inode of the usage page.
    page: (u64, u64),
    /// Who held what contexts at the last tick: slot, time of claim, bytes.
    seen: Vec<(usize, u64, u64)>,
    /// At the last look.
    launches: u64,
    /// What dead processes had counted in slots that a look zeroed.
    ended: Tally,
}

impl Overhead {
    /// For the pages in `dir`, which name the GPUs `uuids` in this order.
    ///
    /// # Errors
    /// The usage page is not there.
    pub fn new(
        discovery: Box<dyn Discovery>,
        dir: &Path,
        uuids: impl Iterator<Item = String>,
    ) -> std::io::Result<Self> {
        let page = std::fs::metadata(dir.join(USAGE_FILE))?;
        Ok(Self {
            discovery,
            gpus: uuids.map(|uuid| (uuid, Gauge::new(0))).collect(),
            rhythm: Rhythm::new(Instant::now()),
            procs: Procs::default(),
            page: (page.dev(), page.ino()),
            seen: Vec::new(),
            launches: 0,
            ended: Tally::default(),
        })
    }

    /// What dead processes had counted in slots that a look zeroed.
    pub fn ended(&self) -> &Tally {
        &self.ended
    }

    /// Looks if it is time, or if contexts or processes have come or gone since the last tick.
    pub fn tick(&mut self, snapshot: &Snapshot, quota: &QuotaWriter, usage: &UsageFile) {
        let contexts = |slot: &tessera_region::usage::SlotView| {
            (slot.index, slot.claimed_ns, slot.kinds[Kind::Overhead as usize])
        };
        let seen: Vec<_> = snapshot.slots.iter().map(contexts).collect();
        let now = Instant::now();
        if seen != self.seen {
            self.seen = seen;
            self.rhythm.news(now, None);
        }
        if self.rhythm.due() > now {
            return;
        }
        let verdicts: Vec<Verdict> =
            (0..self.gpus.len()).filter_map(|gpu| self.look(gpu, quota, usage)).collect();
        let launches = snapshot.slots.iter().fold(0u64, |sum, s| sum.saturating_add(s.launches));
        let busy = std::mem::replace(&mut self.launches, launches) != launches;
        self.rhythm.looked(Instant::now(), &verdicts, busy);
    }

    /// `None` where page or driver do not tell.
    fn look(&mut self, gpu: usize, quota: &QuotaWriter, usage: &UsageFile) -> Option<Verdict> {
        self.ended.merge(&usage.recover_dead().ok()?.tally);
        let before = usage.snapshot().ok()?.slots;
        let processes = self.discovery.processes(&self.gpus[gpu].0).ok()?;
        let now = Instant::now();
        let mut members = Vec::new();
        for GpuProcess { pid, used_bytes } in processes {
            if !self.procs.maps(pid, self.page) {
                continue;
            }
            let Some(identity) = self.procs.living(pid) else { continue };
            let slot = slot_of(&before, None, identity.namespace_pid);
            members.push(Member { pid, start: identity.start, used_bytes, slot });
        }
        let sample = compose(&before, &usage.snapshot().ok()?.slots, gpu, members);
        let verdict = self.gpus[gpu].1.see(now, &sample);
        if let Verdict::Publish(bytes) = verdict {
            quota.set_observed_overhead(gpu, bytes);
        }
        Some(verdict)
    }
}
