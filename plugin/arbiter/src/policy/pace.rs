//! How a tenant uses its lease, by how it and its neighbours have behaved lately.
//!
//! **Pauses.** An idle tenant gives its lease back, and waits at least until the next one has had its
//! minimum: a loop that pauses after every step would never get more than every other turn. So a tenant
//! whose pauses have been short keeps its lease over them, as anticipatory disk schedulers do (Iyer and
//! Druschel, 2001), and pays for them, where a hand-over and one back would take as long. This excludes tenants
//! whose pauses are long beside the work between them, and those ahead of their share. A tenant whose pauses are
//! all longer than that hands over as soon as nothing of it is in flight, and takes the GPU back when it returns.
//!
//! **Whole bursts.** Tenants that come to their pauses one after the other leave the GPU to each other; those
//! that take turns in the middle of their work end together, and the GPU is idle. So a lease lasts as long as
//! what a tenant does between two pauses, where that is not much more than a quantum.
//!
//! **Narrow windows.** A tenant that wakes waits for what the holder has in flight. Where a tenant with as
//! large a share has worked lately and may return at any time, holders keep less in flight.

use super::settle::SOLO_AFTER;
use super::tenant::{Slot, Tenant};
use super::types::{GateState, MS, Pace, Settings};
use super::{Policy, moving_mean};

/// How long a tenant pauses before it counts as idle, nanoseconds.
pub const IDLE: u64 = 100_000;
/// The shortest, for a tenant whose pauses are all long.
const IDLE_LEAST: u64 = 30_000;
/// A longer pause is worth a hand-over and one back.
const IDLE_WORTH: u64 = 300_000;
/// A lease is not taken away sooner, even by a tenant that is owed time, unless that one's pauses are shorter.
const MIN_HOLD: u64 = MS;

/// Recent short pauses in a row after which the next is expected to be short.
const ENOUGH: u32 = 4;
/// Short pauses count no further: two long pauses end what many short ones began.
const MOST: u32 = 8;
/// Long pauses in a row after which the next is expected to be long, and how many more after a short one: a
/// tenant taken for idle in the middle of its work waits for its next lease, which few of its requests should do.
const LONG: i32 = 8;
const LONG_AGAIN: i32 = 256;
/// Leases in a row without an idle report after which pauses are measured again.
const LOOK_AGAIN: u32 = 32;

/// A tenant with nothing in flight drains faster than this, nanoseconds.
const CROSSED: u64 = 250_000;

/// What is known of a tenant's pauses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PausePattern {
    /// Since when it has been idle; `None` once it wants again.
    idle: Option<u64>,
    /// The longest recent short pause, and the leased time between two pauses, nanoseconds.
    pause: u64,
    burst: u64,
    /// What it has been leased since the last one, up to this lease.
    done: u64,
    short: u32,
    /// Long pauses in a row.
    long: i32,
    /// Leases since it was last idle.
    leases: u32,
}

impl PausePattern {
    /// It has been idle since `since`, after so much of this lease. Where pauses are waited for, there were some before.
    pub(super) fn idle(&mut self, since: u64, lease_ns: u64, are_waited_for: bool) {
        self.idle = Some(since);
        self.leases = 0;
        let burst = std::mem::take(&mut self.done) + lease_ns;
        if !are_waited_for {
            self.burst = if self.burst == 0 { burst } else { moving_mean(self.burst, burst, 4) };
        }
    }

    /// Its lease is closed in the middle of its work.
    pub(super) fn interrupted(&mut self, lease_ns: u64) {
        self.done += lease_ns;
    }

    /// Whether its lease was closed because it was idle, and it has not wanted since.
    pub(super) fn is_idle(&self) -> bool {
        self.idle.is_some()
    }

    /// Its lease was closed at `closed` because it was idle, and took so long to drain that it must have
    /// been back before it saw the closing.
    pub(super) fn drained(&mut self, closed: u64, took: u64) {
        if took > CROSSED {
            self.back(closed);
        }
    }

    /// It wants again.
    pub(super) fn back(&mut self, now: u64) {
        let Some(since) = self.idle.take() else { return };
        let pause = now.saturating_sub(since);
        self.long = if pause > IDLE_WORTH { (self.long + 1).min(LONG) } else { -LONG_AGAIN };
        if pause > MIN_HOLD {
            self.short /= 2;
            return;
        }
        self.short = (self.short + 1).min(MOST);
        self.pause = pause.max(self.pause - self.pause / 8);
    }

    /// It has a lease.
    pub(super) fn granted(&mut self) {
        self.leases = if self.leases < LOOK_AGAIN { self.leases + 1 } else { 0 };
    }

    /// Whether its next pause is expected to be worth a hand-over.
    pub(super) fn are_long(&self) -> bool {
        self.long >= LONG
    }

    /// How long a lease takes in which it comes to a pause, where that is known and not much longer than others.
    pub(super) fn whole_burst(&self, set: &Settings) -> u64 {
        let is_known = self.leases <= ENOUGH && self.burst <= 2 * set.quantum;
        if is_known { self.burst + self.burst / 4 } else { 0 }
    }

    /// How long others at least keep what it leaves in a pause.
    pub(super) fn lent(&self) -> u64 {
        if self.short >= ENOUGH { self.pause.min(MIN_HOLD) } else { MIN_HOLD }
    }

    /// After how long without work it counts as idle, where others wait.
    fn patience(&self, is_ahead: bool) -> u64 {
        let is_short = self.short >= ENOUGH && self.pause <= IDLE_WORTH.min(self.burst / 2);
        if !is_short || is_ahead || self.leases >= LOOK_AGAIN {
            return if self.are_long() { IDLE_LEAST } else { IDLE };
        }
        IDLE.max(self.pause + self.pause / 2)
    }
}

impl Policy {
    /// How `slot` uses a lease in this state.
    pub(super) fn pace(&self, now: u64, slot: Slot, state: GateState) -> Pace {
        let idle_ns = match &self.tenants[slot] {
            Some(tenant) if state == GateState::Yield && self.competes(slot) => {
                tenant.pauses.patience(self.is_ahead(slot))
            }
            _ => IDLE,
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
            let recent = |last: u64| now < last.saturating_add(SOLO_AFTER);
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
