//! How a tenant uses its lease, by how it and its neighbours have behaved lately.
//!
//! **Pauses.** An idle tenant gives its lease back, and waits at least until the next one has had its
//! minimum: a loop that pauses after every step would never get more than every other turn. So a tenant
//! whose pauses have been short keeps its lease over them, as anticipatory disk schedulers do (Iyer and
//! Druschel, 2001). It pays for them; the GPU loses no more than the pauses, where handing it over and back
//! would have cost a good part of them, too. This excludes tenants whose pauses are long beside the work
//! between them, and those ahead of their share. A tenant whose pauses are all long counts as idle sooner,
//! because the GPU is idle with it.
//!
//! **Narrow windows.** A tenant that wakes waits for what the holder has in flight. Where a tenant with as
//! large a share has worked lately and may return at any time, holders keep less in flight.

use super::tenant::{Slot, Tenant};
use super::types::{GateState, Pace, Settings};
use super::{Policy, moving_mean};

/// Recent short pauses in a row after which the next is expected to be short.
const ENOUGH: u32 = 4;
/// Short pauses count no further: two long pauses end what many short ones began.
const MOST: u32 = 8;
/// Long pauses in a row after which the next is expected to be long, and how many more after a short one: a
/// tenant taken for idle in the middle of its work waits for its next lease.
const LONG: i32 = 8;
const LONG_AGAIN: i32 = 1000;
/// Leases in a row without an idle report after which pauses are measured again.
const LOOK_AGAIN: u32 = 32;

/// A tenant with nothing in flight drains faster than this, nanoseconds.
const CROSSED: u64 = 250_000;

/// What is known of a tenant's pauses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PausePattern {
    /// Since when it has been idle; `None` once it wants again.
    idle: Option<u64>,
    /// The longest recent short pause, and the work before one, nanoseconds.
    pause: u64,
    work: u64,
    short: u32,
    /// Long pauses in a row.
    long: i32,
    /// Leases since it was last idle.
    leases: u32,
}

impl PausePattern {
    /// It has been idle since `since`. `begun`: when its work began, where that is known; pauses that were
    /// waited for are not.
    pub(super) fn idle(&mut self, begun: Option<u64>, since: u64) {
        self.idle = Some(since);
        self.leases = 0;
        if let Some(work) = begun.map(|begun| since.saturating_sub(begun)) {
            self.work = if self.work == 0 { work } else { moving_mean(self.work, work, 4) };
        }
    }

    /// Whether its lease was closed because it was idle, and it has not wanted since.
    pub(super) fn is_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Its lease was closed at `closed` because it was idle, and took so long to drain that it must have
    /// been back before it saw the closing.
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

    /// After how long without work it counts as idle, where others wait and its pauses are not waited for.
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
    /// How `slot` uses a lease in this state.
    pub(super) fn pace(&self, now: u64, slot: Slot, state: GateState) -> Pace {
        let idle_ns = match (&self.tenants[slot], state) {
            (Some(tenant), GateState::Yield) if self.competes(slot) && !self.is_ahead(slot) => {
                tenant.pauses.patience(&self.settings)
            }
            (Some(tenant), GateState::Yield) if self.competes(slot) => {
                tenant.pauses.least(&self.settings)
            }
            _ => self.settings.idle,
        };
        let is_narrow =
            matches!(state, GateState::Open | GateState::Yield) && self.may_be_woken(now, slot);
        Pace { idle_ns, is_narrow }
    }

    /// Whether it has had more than its share, on any of its GPUs.
    fn is_ahead(&self, slot: Slot) -> bool {
        self.gpus_of(slot).any(|gpu| {
            let gpu = &self.gpus[gpu];
            gpu.entity(slot).is_some_and(|entity| entity.v > gpu.v)
        })
    }

    /// Whether a tenant with as large a share wants nothing now, but has lately.
    fn may_be_woken(&self, now: u64, slot: Slot) -> bool {
        let millis = self.tenants[slot].as_ref().map_or(0, |tenant| tenant.share.millis);
        let naps = |other: &Tenant| {
            let recent = |last: u64| now < last.saturating_add(self.settings.solo_after);
            // A tenant whose lease has just ended may have more to do and not have reported it yet.
            let idle = other.pauses.is_idle() || now >= other.counts_until;
            let as_large = other.share.millis >= millis;
            !other.active() && idle && as_large && other.last_active.is_some_and(recent)
        };
        self.gpus_of(slot).any(|gpu| {
            let entities = self.gpus[gpu].entities.iter().filter(|entity| entity.slot != slot);
            entities.filter_map(|entity| self.tenants[entity.slot].as_ref()).any(naps)
        })
    }
}
