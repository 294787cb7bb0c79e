//! The account of one process: [`crate::ledger`] on the real pages, with time and locks.
//!
//! A request is reserved before the driver is called, committed with what the driver really gave,
//! or rolled back by dropping the [`Reservation`]. Within the limit none of this makes a system
//! call, takes a lock or allocates.
//!
//! Failure cases:
//!
//! | What | Then |
//! |---|---|
//! | process killed with bytes granted or reserved | they stay charged until the driver has them back: the plugin sees that, or the page's departure passes. A request that does not fit only because of them waits, up to [`DEPARTURE_PATIENCE`] |
//! | holder of the queue lock killed | the kernel releases the lock |
//! | no descriptor left, or the path leads elsewhere (`chroot`) | no queue and no recovery by this process: it waits and retries, and refuses what does not fit |
//! | a process stopped in the middle of a driver call | who would only fit without its bytes waits up to [`PATIENCE`], then is refused as [`Reason::Contended`] |
//! | the limit lowered, or overhead observed, so that more is in use than may be | new requests are refused, nothing is taken back |
//! | the driver took more than was set aside, and keeps it ([`Account::owe`]) | as if the limit had been lowered, until it is released |
//! | a release of more than is held | stops at zero |

mod parts;

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use core::time::Duration;

use crate::attach::AttachError;
use crate::layout::{IMPORTED, Kind, LAUNCH_SHARDS, MAX_GPUS, Slot};
pub use crate::ledger::Reason;
use crate::ledger::{self, Split};
use crate::os;
use crate::share::{Part, ShareSet};
use crate::spin::Spin;
use crate::usage::OwnedSlot;
use parts::{Waiting, Words};

/// How long a request that would fit waits for others' unsettled ones.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long a request that would fit waits for what dead processes held. The plugin keeps that charged
/// for as long as it sees the driver hold it.
pub const DEPARTURE_PATIENCE: Duration = Duration::from_secs(120);

/// The account of this process in the pages of its shares: a slot in each. Shared by all its threads; kept
/// until the process ends. A forked child must neither use nor drop it: see [`crate::usage`].
///
/// A GPU is an index of the [`ShareSet`]. What the process holds of one that several shares have is charged
/// in parts; whose part is given back is nobody's affair: bytes are bytes.
#[derive(Debug)]
pub struct Account {
    shares: ShareSet,
    slots: Vec<OwnedSlot>,
    /// Of GPUs that several shares have: what is reserved in each, by all threads. Held over every change
    /// of the own words, so that threads do not take the same bytes back.
    reserved: [Spin<Split>; MAX_GPUS],
}

/// A request that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Why.
    pub reason: Reason,
    /// Index of the GPU in the quota page.
    pub gpu: usize,
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes granted to all processes of the tenant at about that time. Requests under way are not
    /// among them: they may be refused themselves.
    pub granted: u64,
    /// Bytes that the tenant's processes hold beyond what is charged; they count like granted ones.
    pub overhead: u64,
    /// The limit.
    pub limit: u64,
}

impl Refused {
    /// Bytes in use at about that time, overhead included; never more than the limit.
    pub fn used(&self) -> u64 {
        self.granted.saturating_add(self.overhead).min(self.limit)
    }
}

/// Bytes set aside for one driver call. Dropping it gives them back.
#[derive(Debug)]
#[must_use = "dropping a reservation gives its bytes back"]
pub struct Reservation<'a> {
    account: &'a Account,
    gpu: usize,
    bytes: u64,
}

/// The driver gave more than was reserved, and the rest did not fit.
///
/// Free what the driver gave *before* dropping this, which gives the reservation back.
#[derive(Debug)]
#[must_use = "free what the driver gave before dropping this"]
pub struct Overrun<'a> {
    /// The refusal of the bytes beyond the reservation.
    pub refused: Refused,
    /// Still held.
    pub reservation: Reservation<'a>,
}

impl From<Overrun<'_>> for Refused {
    fn from(overrun: Overrun<'_>) -> Self {
        overrun.refused
    }
}

impl Account {
    /// Claims a slot in each share. On failure the shares come back, with which has none and why, and no slot is kept.
    pub fn claim(shares: ShareSet) -> Result<Self, (ShareSet, usize, AttachError)> {
        let mut slots = Vec::new();
        for (at, share) in shares.shares().iter().enumerate() {
            match share.usage.claim_within(share.quota.departure_ns()) {
                Ok(slot) => slots.push(slot),
                Err(error) => return Err((shares, at, error)),
            }
        }
        Ok(Self::of(shares, slots))
    }

    /// The account that `slot` of `usage` is, under the limits of `quota`: of a process with one share.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn new(
        quota: crate::quota::QuotaReader,
        usage: crate::usage::UsageMap,
        slot: OwnedSlot,
    ) -> Self {
        let shares = ShareSet::new(alloc::vec![crate::share::Share { quota, usage }]);
        Self::of(shares.expect("one page has no more GPUs than a process may"), alloc::vec![slot])
    }

    fn of(shares: ShareSet, slots: Vec<OwnedSlot>) -> Self {
        Self { shares, slots, reserved: [const { Spin::new([0; ledger::MAX_PARTS]) }; MAX_GPUS] }
    }

    /// The shares.
    #[inline]
    pub fn shares(&self) -> &ShareSet {
        &self.shares
    }

    /// The index of this process's slot in its first share.
    pub fn slot_index(&self) -> usize {
        self.slots[0].index()
    }

    /// The same, in any of its shares.
    pub fn slot_index_in(&self, share: usize) -> usize {
        self.slots[share].index()
    }

    /// The slot's words in the share that a part is of.
    #[inline]
    fn slot(&self, part: Part) -> &Slot {
        self.slots[usize::from(part.share)].words()
    }

    #[inline]
    fn words(&self, part: Part) -> Words<'_> {
        let share = usize::from(part.share);
        Words::new(&self.shares.shares()[share], self.slots[share].index(), part.gpu.into())
    }

    /// Reserves `bytes` of a GPU (an index below the set's GPUs; others panic), for a driver
    /// call that is about to be made. Round up to the most the driver may take.
    ///
    /// A thread holds no other uncommitted reservation of that GPU meanwhile: two threads that do
    /// could wait for each other until one is refused. Reserve the sum instead.
    ///
    /// # Errors
    /// [`Refused`], counted in the usage page. Takes long only if other processes' driver calls
    /// decide, at most about [`PATIENCE`].
    #[inline]
    pub fn reserve(&self, gpu: usize, bytes: u64) -> Result<Reservation<'_>, Refused> {
        self.try_reserve(gpu, bytes).map_err(|reason| self.refuse(reason, gpu, bytes))
    }

    /// As [`Account::reserve`], for a caller that has another way if it fails: not counted as a
    /// refusal. Where that way ends too, [`Account::refuse`] counts it.
    #[inline]
    pub fn try_reserve(&self, gpu: usize, bytes: u64) -> Result<Reservation<'_>, Reason> {
        match self.shares.only(gpu) {
            Some(only) => ledger::reserve(&self.words(only), bytes, || Waiting::new(self, gpu))?,
            None => self.reserve_in_parts(gpu, bytes)?,
        }
        Ok(Reservation { account: self, gpu, bytes })
    }

    /// Settles a reservation, and keeps the peak.
    #[inline]
    fn grant(&self, gpu: usize, reserved: u64, actual: u64, kind: Kind) {
        match self.shares.only(gpu) {
            Some(only) => self.grant_part(only, reserved, actual, kind),
            None => self.grant_in_parts(gpu, reserved, actual, kind),
        }
    }

    #[inline]
    fn grant_part(&self, part: Part, reserved: u64, actual: u64, kind: Kind) {
        let slot = self.slot(part);
        let peak = &slot.peak[usize::from(part.gpu)];
        let held = ledger::commit(&self.words(part), reserved, actual);
        if peak.load(Ordering::Relaxed) < held {
            peak.fetch_max(held, Ordering::Relaxed);
        }
        slot.kinds[kind as usize].fetch_add(actual, Ordering::Relaxed);
    }

    /// Charges `bytes` that the driver took beyond what was set aside and does not give back yet,
    /// even where the limit has no room for them: they are in use, so nobody else may have them.
    #[cold]
    pub fn owe(&self, gpu: usize, bytes: u64, kind: Kind) {
        let (parts, mut left) = (self.shares.parts(gpu), bytes);
        for (at, &part) in parts.iter().enumerate() {
            let words = self.words(part);
            let room = words.room();
            // What no share has room for is the last one's.
            let here = if at + 1 == parts.len() { left } else { left.min(room) };
            if here > 0 {
                let held = ledger::owe(&words, here);
                let slot = self.slot(part);
                slot.peak[usize::from(part.gpu)].fetch_max(held, Ordering::Relaxed);
                slot.kinds[kind as usize].fetch_add(here, Ordering::Relaxed);
                left -= here;
            }
        }
    }

    /// Gives back bytes that were committed, after the driver released them.
    #[inline]
    pub fn release(&self, gpu: usize, bytes: u64, kind: Kind) {
        match self.shares.only(gpu) {
            Some(only) => {
                subtract(&self.slot(only).kinds[kind as usize], bytes);
                ledger::release(&self.words(only), bytes);
            }
            None => self.release_in_parts(gpu, bytes, kind),
        }
    }

    /// Turns granted bytes into reserved ones again.
    #[cold]
    fn unsettle(&self, gpu: usize, bytes: u64, kind: Kind) {
        match self.shares.only(gpu) {
            Some(only) => {
                subtract(&self.slot(only).kinds[kind as usize], bytes);
                ledger::unsettle(&self.words(only), bytes);
            }
            None => self.unsettle_in_parts(gpu, bytes, kind),
        }
    }

    /// Takes reserved bytes back.
    #[inline]
    fn withdraw(&self, gpu: usize, bytes: u64) {
        match self.shares.only(gpu) {
            Some(only) => ledger::withdraw(&self.words(only), bytes),
            None => self.grant_in_parts(gpu, bytes, 0, Kind::Plain),
        }
    }

    /// Whether anything is departing of dead processes that had imported memory of others'.
    pub fn any_importer_departing(&self) -> bool {
        self.shares.shares().iter().any(|share| share.usage.any_importer_departing())
    }

    /// Whether anything of dead processes is departing on a GPU.
    pub fn any_departing(&self, gpu: usize) -> bool {
        self.shares.parts(gpu).iter().any(|&part| ledger::departing_sum(&self.words(part)) > 0)
    }

    /// Looks for dead processes of the tenant with bytes on a GPU: notices them as departing, and takes
    /// back what has departed. Whether it changed any. For a caller whom the driver refused: a refusal of
    /// the quota has looked already.
    pub fn recover_dead(&self, gpu: usize) -> bool {
        let mut any = false;
        for &part in self.shares.parts(gpu) {
            let share = self.shares.share(part);
            if let Ok(fd) = share.usage.reopen() {
                any |= self.words(part).recover_dead(&fd);
            }
        }
        any
    }
}

/// Saturating subtraction from a statistic.
fn subtract(word: &AtomicU64, bytes: u64) {
    ledger::Word::subtract(word, bytes, Ordering::Relaxed);
}

impl<'a> Reservation<'a> {
    /// The bytes set aside.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The driver call succeeded and took `actual` bytes: they are granted, the rest of the
    /// reservation is given back. If it took more than was reserved, the rest is reserved now.
    ///
    /// # Errors
    /// [`Overrun`] if that does not fit. Free what the driver gave, then drop the error.
    #[inline]
    pub fn commit(self, actual: u64, kind: Kind) -> Result<(), Overrun<'a>> {
        let Self { account, gpu, bytes } = self;
        if actual > bytes {
            return self.commit_more(actual, kind);
        }
        core::mem::forget(self);
        account.grant(gpu, bytes, actual, kind);
        account.count_grant(gpu);
        Ok(())
    }

    /// The driver has given what was reserved and more, so the reservation counts as granted while
    /// the rest is asked for: two that asked with reserved bytes in their hands could wait for each
    /// other.
    #[cold]
    fn commit_more(self, actual: u64, kind: Kind) -> Result<(), Overrun<'a>> {
        let Self { account, gpu, bytes } = self;
        account.grant(gpu, bytes, bytes, kind);
        match account.reserve(gpu, actual - bytes) {
            Ok(more) => {
                let more = core::mem::ManuallyDrop::new(more);
                core::mem::forget(self);
                account.grant(gpu, more.bytes, more.bytes, kind);
                account.count_grant(gpu);
                Ok(())
            }
            Err(refused) => {
                account.unsettle(gpu, bytes, kind);
                Err(Overrun { refused, reservation: self })
            }
        }
    }
}

impl Drop for Reservation<'_> {
    #[inline]
    fn drop(&mut self) {
        self.account.withdraw(self.gpu, self.bytes);
    }
}

// What a process counts, in its slots. A GPU's refusals are counted in the first share that has it; launches and gates in
// the share whose gate the process keeps to.

impl Account {
    /// Counts a request as refused, and describes it.
    #[cold]
    pub fn refuse(&self, reason: Reason, gpu: usize, bytes: u64) -> Refused {
        let slot = self.first_slot(gpu);
        slot.refusals.fetch_add(1, Ordering::Relaxed);
        slot.last_refused_bytes.store(bytes, Ordering::Relaxed);
        slot.last_refused_ns.store(os::monotonic_ns(), Ordering::Relaxed);
        let granted = self.granted_total(gpu);
        let (overhead, limit) = (self.shares.observed_overhead(gpu), self.shares.memory_limit(gpu));
        Refused { reason, gpu, bytes, granted, overhead, limit }
    }

    /// Describes a refusal after what the driver had already taken was given back: as it was before the
    /// request, and with all the bytes that it would have taken.
    #[cold]
    pub fn undone(&self, refused: &Refused) -> Refused {
        let granted = self.granted_total(refused.gpu);
        let whole = refused.granted.saturating_add(refused.bytes);
        Refused { granted, bytes: whole.saturating_sub(granted).max(refused.bytes), ..*refused }
    }

    fn granted_total(&self, gpu: usize) -> u64 {
        let of = |words: Words<'_>| {
            ledger::granted_total(&words).unwrap_or_else(|| ledger::granted_sum(&words))
        };
        let parts = self.shares.parts(gpu).iter();
        parts.map(|&part| of(self.words(part))).fold(0, u64::saturating_add)
    }

    /// Says what the application had asked for on a GPU, where that is other than the bytes that were refused:
    /// less than a pool would have grown by, say.
    pub fn asked(&self, gpu: usize, bytes: u64) {
        self.first_slot(gpu).last_refused_bytes.store(bytes, Ordering::Relaxed);
    }

    #[inline]
    fn count_grant(&self, gpu: usize) {
        self.first_slot(gpu).allocations.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    fn first_slot(&self, gpu: usize) -> &Slot {
        self.slot(self.shares.parts(gpu)[0])
    }

    /// The slot in the share whose gate the process keeps to.
    fn lead_slot(&self) -> &Slot {
        self.slots[self.shares.lead_index()].words()
    }

    /// Counts a request within the quota that the driver refused.
    pub fn count_driver_refusal(&self, gpu: usize) {
        self.first_slot(gpu).driver_refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// The launch counter's shards, for threads that count without a call. Only this process
    /// writes them.
    pub fn launches(&self) -> &[AtomicU64; LAUNCH_SHARDS] {
        &self.lead_slot().launches
    }

    /// Adds time waited at the gate by one launch.
    pub fn add_gate_wait(&self, ns: u64) {
        self.lead_slot().gate_waits.fetch_add(1, Ordering::Relaxed);
        self.lead_slot().gate_wait_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts that this process rations itself, because the arbiter is silent.
    pub fn count_gate_timeout(&self) {
        self.lead_slot().gate_timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a launch that found the window full.
    pub fn count_window_wait(&self) {
        self.lead_slot().window_waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds GPU time used.
    pub fn add_gpu_time(&self, ns: u64) {
        self.lead_slot().gpu_time_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

// Marks of imports: which memory of other processes this one keeps alive. Memory that a process exported and then freed
// lives on while anybody has it imported, so it must stay charged to the exporter. Importers therefore mark what they
// import in their own slots, and exporters look before they give the bytes back. What a mark says is up to the caller;
// here it is a word other than 0. A mark lives as long as its slot's owner: recovery zeroes it.

impl Account {
    /// Marks an import in the slot of each share, before the driver is asked for it. 0 marks nothing. The same mark
    /// may be there several times.
    pub fn mark_import(&self, mark: u64) {
        for slot in &self.slots {
            let slot = slot.words();
            if mark != 0 && !replace(&slot.imports, 0, mark) {
                slot.more_imports.fetch_add(1, Ordering::Relaxed);
            }
        }
        // With the one in `any_import`: of an import and a release that race, one sees the other.
        fence(Ordering::SeqCst);
    }

    /// Takes one such mark back, after the driver let go of the import.
    pub fn unmark_import(&self, mark: u64) {
        for slot in &self.slots {
            let slot = slot.words();
            if mark != 0 && !replace(&slot.imports, mark, 0) {
                let less = |more: u32| more.checked_sub(1);
                let _ = slot.more_imports.fetch_update(Ordering::Release, Ordering::Relaxed, less);
            }
        }
    }

    /// Notes that so many bytes of others' memory are here, or no longer here.
    pub fn note_imported(&self, bytes: u64, here: bool) {
        for slot in &self.slots {
            let imported = &slot.words().kinds[IMPORTED];
            let now = |old: u64| match here {
                true => Some(old.saturating_add(bytes)),
                false => Some(old.saturating_sub(bytes)),
            };
            let _ = imported.fetch_update(Ordering::Relaxed, Ordering::Relaxed, now);
        }
    }

    /// Whether any process with one of the shares, this one among them, has an import that `matches`, or more
    /// imports than it could mark.
    pub fn any_import(&self, matches: impl Fn(u64) -> bool) -> bool {
        fence(Ordering::SeqCst);
        let marked = |slot: &Slot| {
            slot.more_imports.load(Ordering::Acquire) != 0
                || slot.imports.iter().any(|word| {
                    let mark = word.load(Ordering::Acquire);
                    mark != 0 && matches(mark)
                })
        };
        self.shares.shares().iter().any(|share| {
            let usage = &share.usage;
            (0..usage.high_water()).any(|index| marked(usage.slot(index)))
        })
    }
}

/// Replaces one word that is `old`; false if there is none.
fn replace(words: &[AtomicU64], old: u64, new: u64) -> bool {
    words.iter().any(|word| {
        word.load(Ordering::Relaxed) == old
            && word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })
}

#[cfg(test)]
mod parts_tests;
#[cfg(test)]
mod sequence_tests;
#[cfg(test)]
mod tests;
