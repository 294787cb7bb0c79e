//! What a process does with a GPU that several of its shares have.
//!
//! What a request has reserved is a number of bytes in all, not so many of this share and so many of that:
//! the lists here know the sums, and each change takes from where there is enough. So a reservation is as
//! small as that of one share, and a free needs not to know what was charged where.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use super::{Account, DEPARTURE_PATIENCE, PATIENCE, Reason, subtract};
use crate::layout::{Kind, queue_lock_offset};
use crate::ledger::{self, Contention, Ledger, MAX_PARTS};
use crate::os::{self, Fd};
use crate::share::Share;

impl Account {
    /// The words of a GPU in all shares that have it; beyond their number the first is repeated.
    fn all_words(&self, gpu: usize) -> ([Words<'_>; MAX_PARTS], usize) {
        let parts = self.shares.parts(gpu);
        let words = |at: usize| self.words(*parts.get(at).unwrap_or(&parts[0]));
        (core::array::from_fn(words), parts.len())
    }

    #[inline(never)]
    pub(super) fn reserve_in_parts(&self, gpu: usize, bytes: u64) -> Result<(), Reason> {
        let (words, count) = self.all_words(gpu);
        let mut split = [0; MAX_PARTS];
        let waiting = || Waiting::new(self, gpu);
        ledger::reserve_in_parts(&words[..count], bytes, &mut split, waiting)?;
        let mut reserved = self.reserved[gpu].lock();
        for (all, part) in reserved.iter_mut().zip(split) {
            *all += part;
        }
        Ok(())
    }

    /// Turns reserved bytes into granted ones, of the first shares first, and gives the rest back.
    #[inline(never)]
    pub(super) fn grant_in_parts(&self, gpu: usize, reserved: u64, actual: u64, kind: Kind) {
        let mut all = self.reserved[gpu].lock();
        let (mut grant, mut rest) = (actual, reserved.saturating_sub(actual));
        for (all, &part) in all.iter_mut().zip(self.shares.parts(gpu)) {
            let here = grant.min(*all);
            if here > 0 {
                self.grant_part(part, here, here, kind);
                (grant, *all) = (grant - here, *all - here);
            }
        }
        for (all, &part) in all.iter_mut().zip(self.shares.parts(gpu)) {
            let here = rest.min(*all);
            ledger::withdraw(&self.words(part), here);
            (rest, *all) = (rest - here, *all - here);
        }
    }

    /// Gives granted bytes back, of the last shares first: the first are filled first.
    #[inline(never)]
    pub(super) fn release_in_parts(&self, gpu: usize, bytes: u64, kind: Kind) {
        let _one_at_a_time = self.reserved[gpu].lock();
        self.take_granted(gpu, bytes, kind, |_, words, here| ledger::release(words, here));
    }

    pub(super) fn unsettle_in_parts(&self, gpu: usize, bytes: u64, kind: Kind) {
        let mut all = self.reserved[gpu].lock();
        self.take_granted(gpu, bytes, kind, |at, words, here| {
            ledger::unsettle(words, here);
            all[at] += here;
        });
    }

    /// Takes bytes from where they are granted: first from shares in which as many are of `kind`, so that
    /// the statistics stay true. Stops where nothing is left.
    fn take_granted(
        &self,
        gpu: usize,
        bytes: u64,
        kind: Kind,
        mut take: impl FnMut(usize, &Words<'_>, u64),
    ) {
        let mut left = bytes;
        for of_kind in [true, false] {
            for (at, &part) in self.shares.parts(gpu).iter().enumerate().rev() {
                let slot = self.slot(part);
                let kinds = &slot.kinds[kind as usize];
                let granted = slot.granted[usize::from(part.gpu)].load(Ordering::Relaxed);
                let most = match of_kind {
                    true => granted.min(kinds.load(Ordering::Relaxed)),
                    false => granted,
                };
                let here = left.min(most);
                if here > 0 {
                    subtract(kinds, here);
                    take(at, &self.words(part), here);
                    left -= here;
                }
            }
        }
    }
}

/// One GPU's words of the pages.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    share: &'a Share,
    own: usize,
    gpu: usize,
}

impl<'a> Words<'a> {
    /// Of the GPU `gpu` of a share's pages, for the owner of its slot `own`.
    #[inline]
    pub(super) fn new(share: &'a Share, own: usize, gpu: usize) -> Self {
        Self { share, own, gpu }
    }

    /// What the limit leaves beside what is charged.
    pub(super) fn room(&self) -> u64 {
        self.limit().saturating_sub(ledger::charged_total(self))
    }

    /// Looks for dead owners with bytes here, through a description of the usage page of its own.
    pub(super) fn recover_dead(&self, fd: &Fd) -> bool {
        let departure_ns = self.share.quota.departure_ns();
        self.share.usage.recover_dead(fd, self.own, Some(self.gpu), departure_ns)
    }

    /// A fresh description of the usage page.
    pub(super) fn reopen(&self) -> Option<Fd> {
        self.share.usage.reopen().ok()
    }

    /// The byte for which requests queue.
    pub(super) fn queue_offset(&self) -> u64 {
        queue_lock_offset(self.gpu)
    }
}

impl Ledger for Words<'_> {
    type Word = AtomicU64;

    #[inline]
    fn own(&self) -> usize {
        self.own
    }
    #[inline]
    fn high_water(&self) -> usize {
        self.share.usage.high_water()
    }
    #[inline]
    fn charged(&self, slot: usize) -> &AtomicU64 {
        &self.share.usage.slot(slot).charged[self.gpu]
    }
    #[inline]
    fn granted(&self, slot: usize) -> &AtomicU64 {
        &self.share.usage.slot(slot).granted[self.gpu]
    }
    #[inline]
    fn claimed(&self, slot: usize) -> &AtomicU64 {
        &self.share.usage.slot(slot).claimed_ns
    }
    #[inline]
    fn frees(&self, slot: usize) -> &AtomicU64 {
        &self.share.usage.slot(slot).frees
    }
    #[inline]
    fn is_departing(&self, slot: usize) -> bool {
        self.share.usage.is_departing(slot)
    }
    #[inline]
    fn limit(&self) -> u64 {
        self.share.quota.effective_limit(self.gpu)
    }
}

/// A request in contention: its time, its randomness, and its own open file description of each share's
/// usage page (locks of different descriptions exclude each other within one process, too).
pub(super) struct Waiting<'a> {
    account: &'a Account,
    gpu: usize,
    since_ns: u64,
    random: u64,
    rounds: u32,
    fds: [Option<Fd>; MAX_PARTS],
    /// Shares whose queue this one holds: the first so many of the GPU's.
    queued: usize,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(account: &'a Account, gpu: usize) -> Self {
        let since_ns = os::monotonic_ns();
        // Threads differ in their stacks, processes in their slots.
        let here = core::ptr::from_ref(&since_ns).addr();
        let here = u64::try_from(here).unwrap_or(0);
        let slot = u64::try_from(account.slot_index()).unwrap_or(0);
        let random = (since_ns ^ here.rotate_left(32) ^ (slot << 17)) | 1;
        Self {
            account,
            gpu,
            since_ns,
            random,
            rounds: 0,
            fds: [const { None }; MAX_PARTS],
            queued: 0,
        }
    }

    /// xorshift64: enough to part two that collided.
    fn random_below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    /// The words of one part, and a description of their page, if there can be one now.
    fn part(&mut self, at: usize) -> Option<(Words<'a>, &Fd)> {
        let words = self.account.words(*self.account.shares.parts(self.gpu).get(at)?);
        let fd = self.fds.get_mut(at)?;
        if fd.is_none() {
            *fd = words.reopen();
        }
        fd.as_ref().map(|fd| (words, fd))
    }

    fn count(&self) -> usize {
        self.account.shares.parts(self.gpu).len()
    }
}

impl Contention for Waiting<'_> {
    fn recover_dead(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.count() {
            any |= self.part(at).is_some_and(|(words, fd)| words.recover_dead(fd));
        }
        any
    }

    /// The shares' queues one after the other, in the order that all processes have; those that it holds it
    /// keeps.
    fn try_queue(&mut self) -> bool {
        while self.queued < self.count() {
            let lock = |(words, fd): (Words<'_>, &Fd)| {
                os::try_lock(fd.as_raw_fd(), words.queue_offset()) == Ok(true)
            };
            if !self.part(self.queued).is_some_and(lock) {
                return false;
            }
            self.queued += 1;
        }
        true
    }

    fn pause(&mut self, reason: Reason) -> bool {
        const SPINNING: u32 = 1;
        let patience = match reason {
            Reason::Departing => DEPARTURE_PATIENCE,
            Reason::Contended | Reason::OverQuota => PATIENCE,
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
            os::sleep(Duration::from_nanos(if self.queued > 0 { 20_000 } else { time }));
        }
        self.rounds += 1;
        true
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        for at in 0..self.queued {
            if let Some((words, fd)) = self.part(at) {
                os::unlock(fd.as_raw_fd(), words.queue_offset());
            }
        }
    }
}
