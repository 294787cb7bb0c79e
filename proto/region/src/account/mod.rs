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
//! | process killed with bytes granted or reserved | they stay charged until the driver has them back: the plugin sees that, or the page's departure passes. Who does not fit beside them alone waits, up to [`DEPARTURE_PATIENCE`] |
//! | holder of the queue lock killed | the kernel releases the lock |
//! | no descriptor left, or the path leads elsewhere (`chroot`) | no queue and no recovery by this process: it waits and retries, and refuses what does not fit |
//! | a process stopped in the middle of a driver call | who would only fit without its bytes waits up to [`PATIENCE`], then is refused as [`Reason::Contended`] |
//! | the limit lowered, or overhead observed, so that more is in use than may be | new requests are refused, nothing is taken back |
//! | the driver took more than was set aside, and keeps it ([`Account::owe`]) | as if the limit had been lowered, until it is released |
//! | a release of more than is held | stops at zero |

mod imports;

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use crate::fd::Fd;
use crate::layout::{Kind, LAUNCH_SHARDS, SLOTS, queue_lock_offset};
pub use crate::ledger::Reason;
use crate::ledger::{self, Contention, Ledger, Obstacle};
use crate::os::{self, TryLock};
use crate::quota::QuotaReader;
use crate::size::Size;
use crate::usage::{OwnedSlot, UsageMap};

/// How long a request that would fit waits for others' unsettled ones.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long a request that would fit waits for what dead processes held. The plugin keeps that charged
/// for as long as it sees the driver hold it.
pub const DEPARTURE_PATIENCE: Duration = Duration::from_secs(20);

/// The account of this process in its tenant's pages. Shared by all its threads; kept until the
/// process ends. A forked child must neither use nor drop it: see [`crate::usage`].
#[derive(Debug)]
pub struct Account {
    quota: QuotaReader,
    usage: UsageMap,
    slot: OwnedSlot,
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

impl Account {
    /// The account that `slot` of `usage` is, under the limits of `quota`.
    pub fn new(quota: QuotaReader, usage: UsageMap, slot: OwnedSlot) -> Self {
        Self { quota, usage, slot }
    }

    /// The limits.
    pub fn quota(&self) -> &QuotaReader {
        &self.quota
    }

    /// The index of this process's slot.
    pub fn slot_index(&self) -> usize {
        self.slot.index()
    }

    /// Reserves `bytes` of a GPU (an index below the quota page's GPUs; others panic), for a driver
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
        let words = Words { account: self, gpu };
        ledger::reserve(&words, bytes, || Waiting::new(self, gpu))?;
        Ok(Reservation { account: self, gpu, bytes })
    }

    /// Counts a request as refused, and describes it.
    #[cold]
    pub fn refuse(&self, reason: Reason, gpu: usize, bytes: u64) -> Refused {
        let slot = self.slot.words();
        slot.refusals.fetch_add(1, Ordering::Relaxed);
        slot.last_refused_bytes.store(bytes, Ordering::Relaxed);
        slot.last_refused_ns.store(os::monotonic_ns(), Ordering::Relaxed);
        let granted = self.granted_total(gpu);
        let (overhead, limit) = (self.quota.observed_overhead(gpu), self.quota.memory_limit(gpu));
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
        let words = Words { account: self, gpu };
        ledger::granted_total(&words).unwrap_or_else(|| ledger::granted_sum(&words))
    }

    /// Says what the application had asked for, where that is other than the bytes that were refused: less
    /// than a pool would have grown by, say.
    pub fn asked(&self, bytes: u64) {
        self.slot.words().last_refused_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Settles a reservation, and keeps the peak.
    #[inline]
    fn grant(&self, gpu: usize, reserved: u64, actual: u64) {
        let peak = &self.slot.words().peak[gpu];
        let held = ledger::commit(&Words { account: self, gpu }, reserved, actual);
        if peak.load(Ordering::Relaxed) < held {
            peak.fetch_max(held, Ordering::Relaxed);
        }
    }

    /// Charges `bytes` that the driver took beyond what was set aside and does not give back yet,
    /// even where the limit has no room for them: they are in use, so nobody else may have them.
    #[cold]
    pub fn owe(&self, gpu: usize, bytes: u64, kind: Kind) {
        let held = ledger::owe(&Words { account: self, gpu }, bytes);
        self.slot.words().peak[gpu].fetch_max(held, Ordering::Relaxed);
        self.slot.words().kinds[kind as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that the tenant has in use beyond the limit: the limit was lowered, or something is owed.
    pub fn excess(&self, gpu: usize) -> u64 {
        self.charged_total(gpu).saturating_sub(self.quota.effective_limit(gpu))
    }

    #[inline]
    fn count_grant(&self, bytes: u64, kind: Kind) {
        let slot = self.slot.words();
        slot.kinds[kind as usize].fetch_add(bytes, Ordering::Relaxed);
        slot.allocations.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives back bytes that were committed, after the driver released them.
    #[inline]
    pub fn release(&self, gpu: usize, bytes: u64, kind: Kind) {
        subtract(&self.slot.words().kinds[kind as usize], bytes);
        ledger::release(&Words { account: self, gpu }, bytes);
    }

    /// Bytes that all processes of the tenant have charged on a GPU, unsettled requests and what is
    /// departing included. Saturates.
    #[inline]
    pub fn charged_total(&self, gpu: usize) -> u64 {
        ledger::charged_total(&Words { account: self, gpu })
    }

    /// The same without what is departing: the rest of the limit is granted, now or when the driver has
    /// that back.
    #[inline]
    pub fn living_total(&self, gpu: usize) -> u64 {
        self.usage.living_total(gpu)
    }

    /// Whether anything is departing of dead processes that had imported memory of others'.
    pub fn any_importer_departing(&self) -> bool {
        let departs = |&slot: &usize| self.usage.is_departing(slot);
        (0..self.usage.high_water()).filter(departs).any(|slot| self.usage.slot(slot).imports_any())
    }

    /// Whether anything of dead processes is departing on a GPU.
    pub fn any_departing(&self, gpu: usize) -> bool {
        ledger::departing_sum(&Words { account: self, gpu }) > 0
    }

    /// See [`UsageMap::holders`].
    pub fn holders(&self, gpu: usize, into: &mut [(u32, u64); SLOTS]) -> usize {
        self.usage.holders(gpu, into)
    }

    /// Bytes that this process has been granted on a GPU.
    #[cfg(test)]
    fn granted_here(&self, gpu: usize) -> u64 {
        self.slot.words().granted[gpu].load(Ordering::Relaxed)
    }

    /// Counts a request within the quota that the driver refused.
    pub fn count_driver_refusal(&self) {
        self.slot.words().driver_refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// Looks for dead processes of the tenant with bytes on a GPU: notices them as departing, and takes
    /// back what has departed. Whether it changed any. For a caller whom the driver refused: a refusal of
    /// the quota has looked already.
    pub fn recover_dead(&self, gpu: usize) -> bool {
        let Ok(fd) = self.usage.reopen() else { return false };
        let departure_ns = self.quota.departure_ns();
        self.usage.recover_dead(&fd, self.slot_index(), Some(gpu), departure_ns)
    }

    /// The launch counter's shards, for threads that count without a call. Only this process
    /// writes them.
    pub fn launches(&self) -> &[AtomicU64; LAUNCH_SHARDS] {
        &self.slot.words().launches
    }

    /// Adds time waited at the gate by one launch.
    pub fn add_gate_wait(&self, ns: u64) {
        self.slot.words().gate_waits.fetch_add(1, Ordering::Relaxed);
        self.slot.words().gate_wait_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts that this process rations itself, because the arbiter is silent.
    pub fn count_gate_timeout(&self) {
        self.slot.words().gate_timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a launch that found the window full.
    pub fn count_window_wait(&self) {
        self.slot.words().window_waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds GPU time used.
    pub fn add_gpu_time(&self, ns: u64) {
        self.slot.words().gpu_time_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

/// Saturating subtraction from a statistic.
fn subtract(word: &AtomicU64, bytes: u64) {
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
        account.grant(gpu, bytes, actual);
        account.count_grant(actual, kind);
        Ok(())
    }

    /// The driver has given what was reserved and more, so the reservation counts as granted while
    /// the rest is asked for: two that asked with reserved bytes in their hands could wait for each
    /// other.
    #[cold]
    fn commit_more(self, actual: u64, kind: Kind) -> Result<(), Overrun<'a>> {
        let Self { account, gpu, bytes } = self;
        account.grant(gpu, bytes, bytes);
        match account.reserve(gpu, actual - bytes) {
            Ok(more) => {
                let more = core::mem::ManuallyDrop::new(more);
                core::mem::forget(self);
                account.grant(gpu, more.bytes, more.bytes);
                account.count_grant(actual, kind);
                Ok(())
            }
            Err(refused) => {
                ledger::unsettle(&Words { account, gpu }, bytes);
                Err(Overrun { refused, reservation: self })
            }
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        ledger::withdraw(&Words { account: self.account, gpu: self.gpu }, self.bytes);
    }
}

/// One GPU's words of the pages.
struct Words<'a> {
    account: &'a Account,
    gpu: usize,
}

impl Ledger for Words<'_> {
    type Word = AtomicU64;

    #[inline]
    fn own(&self) -> usize {
        self.account.slot.index()
    }
    #[inline]
    fn high_water(&self) -> usize {
        self.account.usage.high_water()
    }
    #[inline]
    fn charged(&self, slot: usize) -> &AtomicU64 {
        &self.account.usage.slot(slot).charged[self.gpu]
    }
    #[inline]
    fn granted(&self, slot: usize) -> &AtomicU64 {
        &self.account.usage.slot(slot).granted[self.gpu]
    }
    #[inline]
    fn claimed(&self, slot: usize) -> &AtomicU64 {
        &self.account.usage.slot(slot).claimed_ns
    }
    #[inline]
    fn frees(&self, slot: usize) -> &AtomicU64 {
        &self.account.usage.slot(slot).frees
    }
    #[inline]
    fn is_departing(&self, slot: usize) -> bool {
        self.account.usage.is_departing(slot)
    }
    #[inline]
    fn limit(&self) -> u64 {
        self.account.quota.effective_limit(self.gpu)
    }
}

/// A request in contention: its time, its randomness, and its own open file description (locks of
/// different descriptions exclude each other within one process, too).
struct Waiting<'a> {
    account: &'a Account,
    gpu: usize,
    since_ns: u64,
    random: u64,
    rounds: u32,
    fd: Option<Fd>,
    queued: bool,
}

impl<'a> Waiting<'a> {
    fn new(account: &'a Account, gpu: usize) -> Self {
        let since_ns = os::monotonic_ns();
        // Threads differ in their stacks, processes in their slots.
        let here = core::ptr::from_ref(&since_ns).addr();
        let here = u64::try_from(here).unwrap_or(0);
        let slot = u64::try_from(account.slot_index()).unwrap_or(0);
        let random = (since_ns ^ here.rotate_left(32) ^ (slot << 17)) | 1;
        Self { account, gpu, since_ns, random, rounds: 0, fd: None, queued: false }
    }

    /// xorshift64: enough to part two that collided.
    fn random_below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    /// Its own description, if there can be one now.
    fn fd(&mut self) -> Option<&Fd> {
        if self.fd.is_none() {
            self.fd = self.account.usage.reopen().ok();
        }
        self.fd.as_ref()
    }
}

impl Contention for Waiting<'_> {
    fn recover_dead(&mut self) -> bool {
        let (account, gpu, own) = (self.account, Some(self.gpu), self.account.slot_index());
        let departure_ns = account.quota.departure_ns();
        self.fd().is_some_and(|fd| account.usage.recover_dead(fd, own, gpu, departure_ns))
    }

    fn try_queue(&mut self) -> bool {
        let offset = queue_lock_offset(self.gpu);
        let locked = self.fd().map(|fd| os::try_lock(fd.as_raw_fd(), offset));
        self.queued |= locked == Some(Ok(TryLock::Held));
        self.queued
    }

    fn pause(&mut self, obstacle: Obstacle) -> bool {
        const SPINNING: u32 = 1;
        let patience = match obstacle {
            Obstacle::Unsettled => PATIENCE,
            Obstacle::Departing => DEPARTURE_PATIENCE,
        };
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        if os::monotonic_ns().saturating_sub(self.since_ns) > patience {
            return false;
        }
        if self.rounds < SPINNING {
            for _ in 0..self.random_below(512) {
                core::hint::spin_loop();
            }
        } else {
            // 20 to 40 µs at first, up to 1 ms: what others wait for is a driver call.
            let most = 20_000 << self.rounds.min(5);
            let time = most + self.random_below(most);
            os::sleep(Duration::from_nanos(if self.queued { 20_000 } else { time }));
        }
        self.rounds += 1;
        true
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let (true, Some(fd)) = (self.queued, &self.fd) {
            os::unlock(fd.as_raw_fd(), queue_lock_offset(self.gpu));
        }
    }
}

#[cfg(test)]
mod tests;
