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

mod imports;
mod parts;
mod statistics;
mod waiting;
mod words;

use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use core::time::Duration;

use crate::error::ClaimError;
use crate::layout::{Kind, MAX_GPUS, Slot};
pub use crate::ledger::Reason;
use crate::ledger::{self, Split};
use crate::share::{Part, ShareSet};
use crate::size::Size;
use crate::spin::Spin;
use crate::usage::OwnedSlot;
use waiting::Waiting;
use words::Words;

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

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, gpu, .. } = self;
        let [bytes, used, limit] = [self.bytes, self.used(), self.limit].map(Size);
        let reason = match reason {
            Reason::OverQuota => "over the memory quota",
            Reason::Contended => "another process's request stayed unsettled too long",
            Reason::Departing => "the driver has not given back what processes that ended held",
        };
        write!(f, "{bytes:.3} on GPU {gpu} refused: {reason} ({used:.3} of {limit:.3} in use)")
    }
}

impl Refused {
    /// Bytes in use at about that time, overhead included; never more than the limit.
    pub fn used(&self) -> u64 {
        self.granted.saturating_add(self.overhead).min(self.limit)
    }
}

impl core::error::Error for Refused {}

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

/// A process got no slot in one of its shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unclaimed {
    /// Which of the [`ShareSet`]'s.
    pub share: usize,
    /// Why.
    pub error: ClaimError,
}

impl Account {
    /// Claims a slot in each share. On failure the shares come back, and no slot is kept.
    ///
    /// # Errors
    /// [`Unclaimed`].
    pub fn claim(shares: ShareSet) -> Result<Self, (ShareSet, Unclaimed)> {
        let mut slots = Vec::new();
        for (at, share) in shares.shares().iter().enumerate() {
            match share.usage.claim_within(share.quota.departure_ns()) {
                Ok(slot) => slots.push(slot),
                Err(error) => return Err((shares, Unclaimed { share: at, error })),
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
    ///
    /// # Errors
    /// Why it cannot be.
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
            None => self.withdraw_in_parts(gpu, bytes),
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
fn subtract(word: &core::sync::atomic::AtomicU64, bytes: u64) {
    crate::sync::Word::subtract(word, bytes, Ordering::Relaxed);
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

#[cfg(test)]
mod parts_tests;
#[cfg(test)]
mod sequence_tests;
#[cfg(test)]
mod tests;
