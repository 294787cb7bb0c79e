//! The tenant's side of the usage page: attach, claim a slot, recover dead owners' slots.

use alloc::ffi::CString;
use alloc::string::String;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use crate::attach::{self, AttachError, Errno};
use crate::layout::{
    DEPARTURE_NS, Past, SLOTS, Slot, USAGE_BYTES, USAGE_FILE, USAGE_MAGIC, UsagePage, is_departing,
    slot_lock_offset,
};
use crate::os::{self, Fd, Map};

/// Rounds over all slots before they count as taken, a millisecond apart: a process that looks for
/// dead owners holds a free slot's lock for some microseconds.
const CLAIM_ROUNDS: usize = 4;
/// The same where slots are free but for what the driver has of dead owners still.
const DEPARTING_ROUNDS: usize = 64;

/// A mapping of the usage page.
#[derive(Debug)]
pub struct UsageMap {
    page: Map<UsagePage>,
    path: CString,
    inode: (u64, u64),
}

/// A slot of this process, for as long as this lives: the mapping inside keeps the lock. See the
/// [module](super) about forks.
#[derive(Debug)]
pub struct OwnedSlot {
    index: usize,
    keeper: Map<UsagePage>,
}

impl UsageMap {
    /// Maps the usage page in `dir` and checks that it is one.
    pub fn attach_in(dir: &CStr) -> Result<Self, AttachError> {
        attach::page(dir, USAGE_FILE, Self::attach_at)
    }

    /// As [`attach_in`](Self::attach_in).
    #[cfg(feature = "std")]
    pub fn attach(dir: &std::path::Path) -> Result<Self, AttachError> {
        Self::attach_in(&attach::c_dir(dir)?)
    }

    fn attach_at(path: &CStr) -> Result<Self, String> {
        let (fd, stat) = attach::open(path, libc::O_RDWR, USAGE_BYTES)?;
        // SAFETY: `UsagePage` is atomics only and page-aligned at most; the file is long enough.
        let page =
            unsafe { Map::<UsagePage>::new(fd.as_raw_fd(), true) }.map_err(attach::why_not)?;
        // Acquire: pairs with the publication of the magic.
        let magic = page.header.magic.load(Ordering::Acquire);
        attach::check(magic, USAGE_MAGIC, page.header.abi.load(Ordering::Relaxed))?;
        let slots = page.header.slot_count.load(Ordering::Relaxed);
        if usize::try_from(slots) != Ok(SLOTS) {
            return Err(text!("impossible count {slots}"));
        }
        Ok(Self { page, path: path.into(), inode: stat.inode })
    }

    /// Bytes that all processes of the tenant have charged on a GPU, with what is departing, for a process
    /// that only looks and has no account. Saturates.
    pub fn charged_total(&self, gpu: usize) -> u64 {
        (0..self.high_water())
            .map(|slot| self.slot(slot).charged[gpu].load(Ordering::Acquire))
            .fold(0, u64::saturating_add)
    }

    /// Bytes that the living processes of the tenant have charged on a GPU, for a process that only
    /// looks and has no account. Saturates.
    pub fn living_total(&self, gpu: usize) -> u64 {
        (0..self.high_water())
            .filter(|&slot| !self.is_departing(slot))
            .map(|slot| self.slot(slot).charged[gpu].load(Ordering::Acquire))
            .fold(0, u64::saturating_add)
    }

    /// Whether anything is departing of dead processes that had imported memory of others'.
    pub(crate) fn any_importer_departing(&self) -> bool {
        let departs = |&slot: &usize| self.is_departing(slot);
        (0..self.high_water()).filter(departs).any(|slot| self.slot(slot).imports_any())
    }

    /// Whether a slot holds what its dead owner has left with the driver.
    #[inline]
    pub(crate) fn is_departing(&self, index: usize) -> bool {
        let departing = self.page.header.departing_ns[index].load(Ordering::Relaxed);
        departing != 0
            && is_departing(self.slot(index).claimed_ns.load(Ordering::Relaxed), departing)
    }

    /// The living processes that hold bytes on a GPU: their pids, as they say, in their own pid
    /// namespaces, and the bytes granted to each. Opens the file to know the living; if it cannot,
    /// all count.
    pub(crate) fn each_holder(&self, gpu: usize, mut see: impl FnMut(u32, u64)) {
        let fd = self.reopen().ok();
        for (index, slot) in self.page.slots[..self.high_water()].iter().enumerate() {
            let granted = slot.granted[gpu].load(Ordering::Relaxed);
            let claimed = slot.claimed_ns.load(Ordering::Acquire);
            if granted == 0 || claimed == 0 || self.is_departing(index) {
                continue;
            }
            let lives = fd.as_ref().is_none_or(|fd| {
                os::is_locked(fd.as_raw_fd(), slot_lock_offset(index), 1) != Ok(false)
            });
            if lives {
                see(slot.pid.load(Ordering::Relaxed), granted);
            }
        }
    }

    /// Zeroes a dead owner's slot, whose lock the caller holds. What it counted stays in the header.
    fn recover(&self, slot: &Slot) {
        if slot.charged.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
            // For shims that know nothing of departing slots.
            self.page.header.recovered_ns.store(os::monotonic_ns(), Ordering::Relaxed);
        }
        self.page.header.past.take(slot);
        slot.zero();
    }

    /// What becomes of a dead owner's slot, whose lock the caller holds: it is departing for
    /// `departure_ns`, unless it holds nothing.
    fn bury(&self, index: usize, departure_ns: u64) -> Buried {
        let (slot, now) = (self.slot(index), os::monotonic_ns());
        let stamp = &self.page.header.departing_ns[index];
        let since = stamp.load(Ordering::Relaxed);
        let claimed = slot.claimed_ns.load(Ordering::Relaxed);
        if !slot.holds()
            || is_departing(claimed, since) && now.saturating_sub(since) >= departure_ns
        {
            self.recover(slot);
            return Buried::Gone;
        }
        if is_departing(claimed, since) && since <= now {
            return Buried::Departing;
        }
        // A slot without a claim was left half zeroed, for which its writer had a reason; and one of
        // the future was never claimed.
        if claimed == 0 || claimed > now {
            self.recover(slot);
            return Buried::Gone;
        }
        stamp.store(now.max(claimed), Ordering::Release);
        Buried::Begun
    }

    /// A slot's words. Only the owner may write them.
    pub(crate) fn slot(&self, index: usize) -> &Slot {
        &self.page.slots[index]
    }

    /// How many slots sums must look at. Loaded after the fence of a publication: every claim
    /// of a slot raised it before.
    pub(crate) fn high_water(&self) -> usize {
        let mark = self.page.header.high_water.load(Ordering::Acquire);
        usize::try_from(mark).unwrap_or(SLOTS).min(SLOTS)
    }

    /// A fresh open file description of the mapped file, or `errno`: `ESTALE` where the path leads to another one (a
    /// changed root or mount namespace).
    pub(crate) fn reopen(&self) -> Result<Fd, i32> {
        let fd = os::open(&self.path, libc::O_RDWR)?;
        match os::fstat(fd.as_raw_fd())?.inode == self.inode {
            true => Ok(fd),
            false => Err(libc::ESTALE),
        }
    }

    /// [`Self::claim_within`] the time that pages begin with.
    pub fn claim(&self) -> Result<OwnedSlot, AttachError> {
        self.claim_within(DEPARTURE_NS)
    }

    /// Takes the lowest slot that no living process owns, and in which nothing of a dead one's is
    /// departing: for `departure_ns`, see [`crate::quota::QuotaReader::departure_ns`]. Where there is
    /// no other, waits for the first that is free.
    ///
    /// Call it once per process and keep the result until the process ends.
    pub fn claim_within(&self, departure_ns: u64) -> Result<OwnedSlot, AttachError> {
        let fd = self.reopen().map_err(|errno| match errno {
            libc::EMFILE | libc::ENFILE => {
                AttachError(text!("no file descriptor left to claim a slot with: {}", Errno(errno)))
            }
            libc::ESTALE => AttachError("the usage page's path leads to another file now".into()),
            _ => unclaimed("open", errno),
        })?;
        let (mut round, mut departing) = (0, false);
        let pause = departure_ns / u64::try_from(DEPARTING_ROUNDS / 2).unwrap_or(1);
        let pause = Duration::from_nanos(pause).max(Duration::from_millis(1));
        while round < if departing { DEPARTING_ROUNDS } else { CLAIM_ROUNDS } {
            if round > 0 {
                os::sleep(if departing { pause } else { Duration::from_millis(1) });
            }
            departing = false;
            for index in 0..SLOTS {
                let offset = slot_lock_offset(index);
                let lock = os::try_lock(fd.as_raw_fd(), offset);
                if !lock.map_err(|errno| unclaimed("fcntl", errno))? {
                    continue;
                }
                if self.bury(index, departure_ns) == Buried::Gone {
                    return self.take(fd, index, departure_ns);
                }
                os::unlock(fd.as_raw_fd(), offset);
                departing = true;
            }
            round += 1;
        }
        Err(AttachError(text!("{SLOTS} processes of this container use CUDA already")))
    }

    /// Makes the slot whose lock `fd` holds this process's.
    fn take(&self, fd: Fd, index: usize, departure_ns: u64) -> Result<OwnedSlot, AttachError> {
        // SAFETY: as in `attach_at`: the same file.
        let keeper = unsafe { Map::<UsagePage>::new(fd.as_raw_fd(), true) }
            .map_err(|errno| unclaimed("mmap", errno))?;
        let slot = self.slot(index);
        self.recover(slot);
        let mark = u32::try_from(index + 1).unwrap_or(u32::MAX);
        // Before any byte is charged here; see `high_water`.
        self.page.header.high_water.fetch_max(mark, Ordering::AcqRel);
        // Never 0, which says that the slot is free.
        slot.claimed_ns.store(os::monotonic_ns().max(1), Ordering::Release);
        slot.pid.store(os::pid(), Ordering::Relaxed);
        // An earlier owner's.
        self.page.header.departing_ns[index].store(0, Ordering::Relaxed);
        // What is free is said without the dead, so they are noticed before the first look.
        self.recover_dead(&fd, index, None, departure_ns);
        // The descriptor goes, the mapping keeps description and lock.
        drop(fd);
        Ok(OwnedSlot { index, keeper })
    }

    /// Looks at the slots other than `own` that have bytes charged on `gpu` (any, where none is named) or
    /// imports, and whose owners are gone, through a description of its own: notices them as departing,
    /// and zeroes them `departure_ns` later. Returns whether it changed any.
    pub(crate) fn recover_dead(
        &self,
        fd: &Fd,
        own: usize,
        gpu: Option<usize>,
        departure_ns: u64,
    ) -> bool {
        let mut any = false;
        for index in (0..self.high_water()).filter(|&index| index != own) {
            let slot = self.slot(index);
            let charged = |gpu: usize| slot.charged[gpu].load(Ordering::Relaxed) != 0;
            // Marks of imports keep bytes charged elsewhere.
            if !gpu.map_or_else(|| slot.holds(), |gpu| charged(gpu) || slot.imports_any()) {
                continue;
            }
            let offset = slot_lock_offset(index);
            if os::try_lock(fd.as_raw_fd(), offset) == Ok(true) {
                any |= self.bury(index, departure_ns) != Buried::Departing;
                os::unlock(fd.as_raw_fd(), offset);
            }
        }
        any
    }
}

fn unclaimed(call: &str, errno: i32) -> AttachError {
    AttachError(text!("claiming a slot: {call}: {}", Errno(errno)))
}

/// What became of a dead owner's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buried {
    /// It is departing from now on.
    Begun,
    /// It goes on departing.
    Departing,
    /// It is empty.
    Gone,
}

impl OwnedSlot {
    /// The slot's index.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The slot's words.
    pub(crate) fn words(&self) -> &Slot {
        &self.keeper.slots[self.index]
    }
}

impl Slot {
    /// Whether the driver may hold anything for the owner.
    pub(crate) fn holds(&self) -> bool {
        self.charged.iter().any(|word| word.load(Ordering::Relaxed) != 0) || self.imports_any()
    }

    /// Whether any import is marked.
    pub(crate) fn imports_any(&self) -> bool {
        self.more_imports.load(Ordering::Relaxed) != 0
            || self.imports.iter().any(|mark| mark.load(Ordering::Relaxed) != 0)
    }

    /// Forgets everything. Only for the holder of the slot's lock that is not its living owner.
    ///
    /// `granted` goes before what shows that it went (`frees` and `claimed_ns`), `charged` last:
    /// the order of a release; see [`crate::ledger`].
    pub(crate) fn zero(&self) {
        let zero = |words: &[AtomicU64]| {
            for word in words {
                word.store(0, Ordering::Release);
            }
        };
        zero(&self.granted);
        zero(&self.peak);
        zero(&self.kinds);
        zero(&self.launches);
        for word in [
            &self.refusals,
            &self.allocations,
            &self.frees,
            &self.driver_refusals,
            &self.gate_wait_ns,
            &self.gate_waits,
            &self.gate_timeouts,
            &self.window_waits,
            &self.gpu_time_ns,
            &self.last_refused_bytes,
            &self.last_refused_ns,
            &self.claimed_ns,
        ] {
            word.store(0, Ordering::Release);
        }
        self.pid.store(0, Ordering::Relaxed);
        zero(&self.imports);
        self.more_imports.store(0, Ordering::Relaxed);
        for byte in &self.reserved {
            byte.store(0, Ordering::Relaxed);
        }
        zero(&self.charged);
    }
}

impl Past {
    /// Takes over what a dead owner's slot counted. Only for the holder of the slot's lock.
    ///
    /// Each counter leaves the slot before it is added here: one who is killed in between loses that one,
    /// and the next to take the slot counts nothing twice.
    pub(crate) fn take(&self, slot: &Slot) {
        for (peak, own) in self.peak.iter().zip(&slot.peak) {
            let own = own.load(Ordering::Relaxed);
            if own > peak.load(Ordering::Relaxed) {
                peak.fetch_max(own, Ordering::Relaxed);
            }
        }
        let add = |sum: &AtomicU64, word: &AtomicU64| {
            if word.load(Ordering::Relaxed) != 0 {
                sum.fetch_add(word.swap(0, Ordering::Relaxed), Ordering::Relaxed);
            }
        };
        for shard in &slot.launches {
            add(&self.launches, shard);
        }
        add(&self.refusals, &slot.refusals);
        add(&self.driver_refusals, &slot.driver_refusals);
        add(&self.gate_wait_ns, &slot.gate_wait_ns);
        add(&self.gpu_time_ns, &slot.gpu_time_ns);
        add(&self.gate_waits, &slot.gate_waits);
        add(&self.gate_timeouts, &slot.gate_timeouts);
        add(&self.window_waits, &slot.window_waits);
    }
}
