//! A request in contention.

use core::time::Duration;

use super::{Account, DEPARTURE_PATIENCE, PATIENCE, Words};
use crate::ledger::{Contention, MAX_PARTS, Obstacle};
use crate::os::{self, Fd, TryLock};

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
                os::try_lock(fd.as_raw_fd(), words.queue_offset()) == Ok(TryLock::Held)
            };
            if !self.part(self.queued).is_some_and(lock) {
                return false;
            }
            self.queued += 1;
        }
        true
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
