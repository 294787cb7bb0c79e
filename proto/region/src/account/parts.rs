//! What a process does with a GPU that several of its shares have.
//!
//! What a request has reserved is a number of bytes in all, not so many of this share and so many of that:
//! the lists here know the sums, and each change takes from where there is enough. So a reservation is as
//! small as that of one share, and a free needs not to know what was charged where.

use core::sync::atomic::Ordering;

use super::{Account, Reason, Waiting, Words, subtract};
use crate::layout::Kind;
use crate::ledger::{self, MAX_PARTS};

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

    #[inline(never)]
    pub(super) fn withdraw_in_parts(&self, gpu: usize, bytes: u64) {
        self.grant_in_parts(gpu, bytes, 0, Kind::Plain);
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
