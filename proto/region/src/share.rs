//! The shares of one process, and which GPUs they are of.
//!
//! A share is one allocation: a quota page and a usage page. A container has one or several. A GPU that
//! several of them name is one GPU of the process, of which it has their sum: each of the shares then
//! holds a [`Part`] of it. GPUs get numbers of their own in the process, in the order of the shares' ids, and
//! in each share in the order of its page; where there is one share, that is the page's own order.

use alloc::vec::Vec;

use crate::layout::{MAX_GPUS, SLOTS};
use crate::ledger::MAX_PARTS;
use crate::quota::{Policy, QuotaReader};
use crate::usage::UsageMap;

/// Most shares of one process.
pub const MAX_SHARES: usize = MAX_PARTS;

/// Both pages of one allocation.
#[derive(Debug)]
pub struct Share {
    /// The limits, read-only.
    pub quota: QuotaReader,
    /// The usage by process.
    pub usage: UsageMap,
}

/// What one share has of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Index among the process's shares.
    pub share: u8,
    /// Index in that share's pages.
    pub gpu: u8,
}

/// One GPU of the process.
#[derive(Clone, Debug)]
struct Gpu {
    parts: [Part; MAX_PARTS],
    count: usize,
}

impl Gpu {
    fn parts(&self) -> &[Part] {
        &self.parts[..self.count]
    }
}

/// What is wrong with a process that has no share.
pub const NO_SHARE: &str = "it holds no share";
/// The same of one that has more than [`MAX_SHARES`].
pub const TOO_MANY_SHARES: &str = "it holds more than 16 shares";
const TOO_MANY_GPUS: &str = "its shares are of more than 16 GPUs";
const _: () = assert!(MAX_SHARES == 16 && MAX_GPUS == 16);

/// See the module. Indices of GPUs are below [`gpu_count`](Self::gpu_count); others panic.
#[derive(Debug)]
pub struct ShareSet {
    shares: Vec<Share>,
    gpus: Vec<Gpu>,
    lead: usize,
}

impl ShareSet {
    /// Those of a process, which its other processes name in the same order: that of their ids. Else what is wrong with
    /// the process.
    pub fn new(shares: Vec<Share>) -> Result<Self, &'static str> {
        match shares.len() {
            0 => return Err(NO_SHARE),
            1..=MAX_SHARES => {}
            _ => return Err(TOO_MANY_SHARES),
        }
        let mut gpus: Vec<Gpu> = Vec::new();
        for (at, share) in (0u8..).zip(&shares) {
            for gpu in 0..share.quota.gpu_count() {
                let part = Part { share: at, gpu: u8::try_from(gpu).unwrap_or(0) };
                let uuid = share.quota.uuid(gpu);
                let of_same = |gpu: &Gpu| {
                    let first = gpu.parts[0];
                    shares[usize::from(first.share)].quota.uuid(first.gpu.into()) == uuid
                };
                if let Some(known) = gpus.iter().position(of_same) {
                    // A page names a GPU once, so there are no more parts than shares.
                    let known = &mut gpus[known];
                    known.parts[known.count] = part;
                    known.count += 1;
                } else if gpus.len() < MAX_GPUS {
                    let mut parts = [Part::default(); MAX_PARTS];
                    parts[0] = part;
                    gpus.push(Gpu { parts, count: 1 });
                } else {
                    return Err(TOO_MANY_GPUS);
                }
            }
        }
        let is_gated = |share: &Share| share.quota.policy(0) != Policy::None;
        let lead = shares.iter().position(is_gated).unwrap_or(0);
        Ok(Self { shares, gpus, lead })
    }

    /// The share whose gate the process keeps to: the first whose compute is limited, or the first.
    pub fn lead(&self) -> &Share {
        &self.shares[self.lead]
    }

    /// Its index.
    pub fn lead_index(&self) -> usize {
        self.lead
    }

    /// The shares, in the order of their ids.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// GPUs in all of them.
    pub fn gpu_count(&self) -> usize {
        self.gpus.len()
    }

    /// What the shares have of a GPU; one part at least.
    #[inline]
    pub fn parts(&self, gpu: usize) -> &[Part] {
        self.gpus[gpu].parts()
    }

    /// The part of a GPU that one share alone has.
    #[inline]
    pub(crate) fn only(&self, gpu: usize) -> Option<Part> {
        if let [share] = &*self.shares {
            // The page's own order. One that is not there panics where it is looked up.
            debug_assert!(gpu < share.quota.gpu_count());
            return Some(Part { share: 0, gpu: u8::try_from(gpu).unwrap_or(u8::MAX) });
        }
        match *self.parts(gpu) {
            [only] => Some(only),
            _ => None,
        }
    }

    /// The share that a part is of.
    #[inline]
    pub fn share(&self, part: Part) -> &Share {
        &self.shares[usize::from(part.share)]
    }

    /// The same, and the GPU's index in its pages.
    fn each(&self, gpu: usize) -> impl Iterator<Item = (&Share, usize)> {
        self.parts(gpu).iter().map(|&part| (self.share(part), usize::from(part.gpu)))
    }

    fn sum(&self, gpu: usize, of: impl Fn(&Share, usize) -> u64) -> u64 {
        self.each(gpu).map(|(share, gpu)| of(share, gpu)).fold(0, u64::saturating_add)
    }

    /// The GPU's UUID as NVML prints it.
    pub fn uuid(&self, gpu: usize) -> &str {
        let first = self.parts(gpu)[0];
        self.share(first).quota.uuid(first.gpu.into())
    }

    /// The index of the GPU with this UUID.
    pub fn find(&self, uuid: &str) -> Option<usize> {
        (0..self.gpu_count()).find(|&gpu| self.uuid(gpu) == uuid)
    }

    /// Bytes that the shares allow together.
    pub fn memory_limit(&self, gpu: usize) -> u64 {
        self.sum(gpu, |share, gpu| share.quota.memory_limit(gpu))
    }

    /// Thousandths of the GPUs' time that the shares have of all of them at once: of that of which they have
    /// least.
    pub fn cores_millis(&self) -> u32 {
        let of = |gpu| {
            let sum = self.sum(gpu, |share, gpu| share.quota.cores_millis(gpu).into());
            u32::try_from(sum).unwrap_or(u32::MAX)
        };
        (0..self.gpu_count()).map(of).min().unwrap_or(0)
    }

    /// Bytes that NVML shows beyond what is charged; see [`QuotaReader::observed_overhead`].
    pub fn observed_overhead(&self, gpu: usize) -> u64 {
        self.sum(gpu, |share, gpu| share.quota.observed_overhead(gpu))
    }

    /// Whether the driver has memory of dead processes on a GPU; see [`QuotaReader::departing`].
    pub fn departing(&self, gpu: usize, now_ns: u64) -> Option<bool> {
        self.each(gpu)
            .map(|(share, gpu)| share.quota.departing(gpu, now_ns))
            .reduce(|all, one| Some(all? | one?))
            .flatten()
    }

    /// Bytes to charge for a context: a constant of the GPU's model.
    pub fn context_overhead(&self, gpu: usize) -> u64 {
        self.each(gpu).map(|(share, gpu)| share.quota.context_overhead(gpu)).max().unwrap_or(0)
    }

    /// Bytes of the shares that are in use: charged to the living, and seen beyond that. Never more than
    /// a share has: what one lacks is not taken from another.
    pub fn used(&self, gpu: usize) -> u64 {
        self.sum(gpu, |share, gpu| {
            let overhead = share.quota.observed_overhead(gpu);
            let taken = share.usage.living_total(gpu).saturating_add(overhead);
            taken.min(share.quota.memory_limit(gpu))
        })
    }

    /// Bytes that are left of the shares, now or when the driver has back what dead processes held.
    #[inline]
    pub fn room(&self, gpu: usize) -> u64 {
        self.sum(gpu, |share, gpu| {
            share.quota.effective_limit(gpu).saturating_sub(share.usage.living_total(gpu))
        })
    }

    /// Bytes in use beyond the limits: one was lowered, or something is owed.
    pub fn excess(&self, gpu: usize) -> u64 {
        self.sum(gpu, |share, gpu| {
            share.usage.charged_total(gpu).saturating_sub(share.quota.effective_limit(gpu))
        })
    }

    /// The living processes that hold bytes on a GPU, each once: their pids, as they say, in their own pid
    /// namespaces, and the bytes granted to each. Returns how many of `into` it filled.
    pub fn holders(&self, gpu: usize, into: &mut [(u32, u64); SLOTS]) -> usize {
        let mut count = 0;
        for (share, gpu) in self.each(gpu) {
            let before = count;
            share.usage.each_holder(gpu, |pid, bytes| {
                // A process has one slot in each share. Where two containers have a share in common, two of
                // them may have the same pid; they are one entry then.
                let known = into[..before].iter_mut().find(|known| known.0 == pid);
                if let Some(known) = known {
                    known.1 = known.1.saturating_add(bytes);
                } else if let Some(place) = into.get_mut(count) {
                    *place = (pid, bytes);
                    count += 1;
                }
            });
        }
        count
    }
}
