//! One GPU of one share, as the accounting sees it.

use core::sync::atomic::AtomicU64;

use crate::layout::queue_lock_offset;
use crate::ledger::{self, Ledger};
use crate::os::Fd;
use crate::share::Share;

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
