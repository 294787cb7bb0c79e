//! Marks of imports: which memory of other processes this one keeps alive.
//!
//! Memory that a process exported and then freed lives on while anybody has it imported, so it must
//! stay charged to the exporter. Importers therefore mark what they import in their own slots, and
//! exporters look before they give the bytes back. What a mark says is up to the caller; here it is
//! a word other than 0. A mark lives as long as its slot's owner: recovery zeroes it.

use core::sync::atomic::{AtomicU64, Ordering, fence};

use super::Account;
use crate::layout::{IMPORTED, Slot};

impl Account {
    /// Marks an import, before the driver is asked for it: in the slot of each share, with what `mark` says for
    /// that share. 0 marks nothing. The same mark may be there several times.
    pub fn mark_import(&self, mark: impl Fn(usize) -> u64) {
        for (at, slot) in self.slots.iter().enumerate() {
            let (mark, slot) = (mark(at), slot.words());
            if mark != 0 && !replace(&slot.imports, 0, mark) {
                slot.more_imports.fetch_add(1, Ordering::Relaxed);
            }
        }
        // With the one in `any_import`: of an import and a release that race, one sees the other.
        fence(Ordering::SeqCst);
    }

    /// Takes one such mark back, after the driver let go of the import.
    pub fn unmark_import(&self, mark: impl Fn(usize) -> u64) {
        for (at, slot) in self.slots.iter().enumerate() {
            let (mark, slot) = (mark(at), slot.words());
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

    /// Whether any process with one of the shares, this one among them, has an import that `matches` in that
    /// share, or more imports than it could mark.
    pub fn any_import(&self, matches: impl Fn(usize, u64) -> bool) -> bool {
        fence(Ordering::SeqCst);
        let marked = |share: usize, slot: &Slot| {
            slot.more_imports.load(Ordering::Acquire) != 0
                || slot.imports.iter().any(|word| {
                    let mark = word.load(Ordering::Acquire);
                    mark != 0 && matches(share, mark)
                })
        };
        self.shares.shares().iter().enumerate().any(|(at, share)| {
            let usage = &share.usage;
            (0..usage.high_water()).any(|index| marked(at, usage.slot(index)))
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
