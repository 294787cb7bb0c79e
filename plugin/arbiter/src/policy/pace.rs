//! How a tenant is to use its lease, by how it and its neighbours have behaved lately.
//!
//! **Pauses.** A tenant that is idle gives its lease back, and waits at least until the next one has
//! had its least: a loop that pauses after every step would never get more than every other turn.
//! Whose pauses have been short is therefore left its lease over them, as anticipatory disk schedulers
//! do (Iyer and Druschel, 2001). It pays for them; the GPU loses no more than the pauses, where handing
//! it over and back would have cost a good part of them, too. Not whose pauses are long beside the work
//! between them; not who has had more than its share. And whose pauses are all long is idle the sooner:
//! the GPU is idle with it.
//!
//! **Narrow windows.** Who wakes waits for what is in flight of the holder. Where somebody with as
//! large a share has worked lately and may be back at any time, holders keep less in flight.

use super::Policy;
use super::tenant::{Slot, Tenant};
use super::types::{Pace, Settings, State};

/// Short pauses in a row, of late, from which on the next is expected to be short.
const ENOUGH: u32 = 4;
/// They count no further: two long pauses end what many short ones began.
const MOST: u32 = 8;
/// Long pauses in a row from which on the next is expected to be long; and how many more it takes after
/// a short one: who is taken for idle in the middle of its work has to wait for its next lease.
const LONG: i32 = 8;
const LONG_AGAIN: i32 = 1000;
/// Leases in a row without a word of being idle, after which pauses are looked at again.
const LOOK_AGAIN: u32 = 32;

/// Who has nothing in flight drains sooner, nanoseconds.
const CROSSED: u64 = 250_000;

/// What is known of a tenant's pauses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rhythm {
    /// Since when it has been idle; until it wants again.
    idle: Option<u64>,
    /// The longest pause lately, of the short ones, and what is worked before one, nanoseconds.
    pause: u64,
    work: u64,
    short: u32,
    /// Long pauses in a row.
    long: i32,
    /// Leases since it was last idle.
    leases: u32,
}

impl Rhythm {
    /// It has been idle since `since`, and had worked from `begun` on, if that is known: pauses that
    /// were waited for are not.
    pub(super) fn idle(&mut self, begun: Option<u64>, since: u64) {
        self.idle = Some(since);
        self.leases = 0;
        if let Some(work) = begun.map(|begun| since.saturating_sub(begun)) {
            self.work = if self.work == 0 { work } else { self.work - self.work / 4 + work / 4 };
        }
    }

    /// Its lease was closed at `closed` because it was idle, and took so long to drain that it must have
    /// been back before it saw that.
    pub(super) fn drained(&mut self, closed: u64, took: u64, set: &Settings) {
        if took > CROSSED {
            self.back(closed, set);
        }
    }

    /// It wants again.
    pub(super) fn back(&mut self, now: u64, set: &Settings) {
        let Some(since) = self.idle.take() else { return };
        let pause = now.saturating_sub(since);
        if pause > set.idle_most {
            self.short /= 2;
            self.long = (self.long + 1).min(LONG);
            return;
        }
        self.long = -LONG_AGAIN;
        self.short = (self.short + 1).min(MOST);
        self.pause = pause.max(self.pause - self.pause / 8);
    }

    /// It has a lease.
    pub(super) fn granted(&mut self) {
        self.leases = if self.leases < LOOK_AGAIN { self.leases + 1 } else { 0 };
    }

    /// After how long it is idle that has nothing to do, where others wait and its pauses are not waited for.
    fn least(&self, set: &Settings) -> u64 {
        if self.long >= LONG { set.idle_least.min(set.idle) } else { set.idle }
    }

    /// How long its next pause is worth waiting for.
    fn patience(&self, set: &Settings) -> u64 {
        let expected = self.short >= ENOUGH && self.pause <= self.work / 2;
        if !expected || self.leases >= LOOK_AGAIN {
            return self.least(set);
        }
        (self.pause + self.pause / 2).clamp(set.idle, set.idle_most.max(set.idle))
    }
}

impl Policy {
    /// How `slot` is to use a lease in this state.
    pub(super) fn pace(&self, now: u64, slot: Slot, state: State) -> Pace {
        let idle_ns = match (&self.tenants[slot], state) {
            (Some(tenant), State::Yield) if self.competes(slot) && !self.is_ahead(slot) => {
                tenant.rhythm.patience(&self.settings)
            }
            (Some(tenant), State::Yield) if self.competes(slot) => {
                tenant.rhythm.least(&self.settings)
            }
            _ => self.settings.idle,
        };
        let is_narrow = matches!(state, State::Open | State::Yield) && self.may_be_woken(now, slot);
        Pace { idle_ns, is_narrow }
    }

    /// Whether it has had more than its share, on any of its GPUs.
    fn is_ahead(&self, slot: Slot) -> bool {
        self.gpus_of(slot).any(|gpu| {
            let gpu = &self.gpus[gpu];
            gpu.seat(slot).is_some_and(|seat| seat.v > gpu.v)
        })
    }

    /// Whether somebody who wants nothing now, but has lately, has as large a share.
    fn may_be_woken(&self, now: u64, slot: Slot) -> bool {
        let millis = self.tenants[slot].as_ref().map_or(0, |tenant| tenant.share.millis);
        let naps = |other: &Tenant| {
            let recent = |last: u64| now < last.saturating_add(self.settings.solo_after);
            // Whose lease has just ended may have more to do, and not have said so yet.
            let idle = other.rhythm.idle.is_some() || now >= other.counts_until;
            let as_large = other.share.millis >= millis;
            !other.active() && idle && as_large && other.last_active.is_some_and(recent)
        };
        self.gpus_of(slot).any(|gpu| {
            let seats = self.gpus[gpu].seats.iter().filter(|seat| seat.slot != slot);
            seats.filter_map(|seat| self.tenants[seat.slot].as_ref()).any(naps)
        })
    }
}
