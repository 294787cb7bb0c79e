//! Which observations count, and what to publish: a state machine per tenant and GPU, pure.
//!
//! What is published moves every view of free memory in the container, so it must be right and it
//! must rest. Only quiet looks count ([`Sample::overhead`]). Then:
//!
//! - **Up** at once when all looks of at least [`CONFIRM`], two or more, show more than is published:
//!   to the least of them, rounded up to [`STEP`]. So what is published covers what was seen, and
//!   pages that small allocations fill and leave do not move it.
//! - **Down** when a process or a context has gone since and two consecutive looks show less, to the
//!   larger of the two.
//! - **Down** otherwise only when all looks of [`PERSISTENT`], at least [`LOOKS`], showed less: to
//!   the most they showed. So overhead that is gone is gone within a second, with [`WATCH`] between two
//!   looks. Looks during which the ledger grew count here, too: what they show is an upper bound of overhead.
//!   Looks during which something was given back are no bound: the driver may have been asked between a free and
//!   the next allocation. They count only when [`FREEING`] in a row show less.

use std::time::{Duration, Instant};

use super::sample::Sample;

/// Published figures are multiples of this, bytes: eight of the driver's pages.
pub const STEP: u64 = 16 << 20;
/// Least time between two looks that confirm each other.
pub const CONFIRM: Duration = Duration::from_millis(5);
/// How long less must show, without a reason, before less is published.
pub const PERSISTENT: Duration = Duration::from_millis(300);
/// The longest time between two looks while overhead is published, and while it falls.
pub const WATCH: Duration = Duration::from_millis(350);
pub const WATCH_FALL: Duration = Duration::from_millis(90);
/// How many looks that takes at least.
pub const LOOKS: u32 = 3;
/// How many looks in a row must show less where something was given back during each of them. Of one such look in
/// seven at most the ledger was fuller before and after than while the driver was asked.
pub const FREEING: u32 = 32;

#[derive(Clone, Debug)]
pub struct OverheadEstimator {
    published: u64,
    /// A first look that shows more.
    rising: Option<(Instant, u64)>,
    falling: Option<Falling>,
    /// The processes when last nothing was pending: pid, start, bytes of contexts.
    members: Vec<(u32, u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Falling {
    since: Instant,
    most: u64,
    looks: u32,
    /// Looks in a row that show less and are no bound.
    freeing: u32,
    /// A process or context has gone.
    gone: bool,
}

/// What a look came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Publish this many bytes.
    Publish(u64),
    /// What is published stands.
    Steady,
    /// Another look should follow, no sooner than [`CONFIRM`].
    Confirm,
    /// The look could not tell.
    Unclear,
}

impl OverheadEstimator {
    /// Begins with what is published already, by this plugin or the one before it.
    pub fn new(published: u64) -> Self {
        OverheadEstimator { published, rising: None, falling: None, members: Vec::new() }
    }

    pub fn published(&self) -> u64 {
        self.published
    }

    /// Takes a look. Looks come in the order of time.
    pub fn see(&mut self, now: Instant, sample: &Sample) -> Verdict {
        let Some(overhead) = sample.overhead() else { return self.see_moving(now, sample) };
        let here: Vec<_> = sample.members.iter().map(|(m, c)| (m.pid, m.start, *c)).collect();
        let target = overhead.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
        let gone = self.has_gone(&here);
        let verdict = if overhead > self.published {
            self.falling = None;
            self.rise(now, overhead)
        } else if target < self.published {
            self.rising = None;
            self.fall(now, target, gone, false)
        } else {
            (self.rising, self.falling) = (None, None);
            Verdict::Steady
        };
        self.members = here;
        verdict
    }

    /// A look during which the ledger moved: it can show less, and not more.
    fn see_moving(&mut self, now: Instant, sample: &Sample) -> Verdict {
        let target = sample.most().and_then(|most| most.checked_next_multiple_of(STEP));
        let Some(target) = target.filter(|target| *target < self.published) else {
            if let Some(falling) = &mut self.falling {
                falling.freeing = 0;
            }
            return Verdict::Unclear;
        };
        // What may have moved is whose members are whose, too.
        let gone = false;
        match self.fall(now, target, gone, sample.freed) {
            Verdict::Publish(bytes) => Verdict::Publish(bytes),
            _ => Verdict::Unclear,
        }
    }

    /// The longest time until the next look.
    pub fn watch(&self) -> Option<Duration> {
        match (self.published, self.falling) {
            (0, _) => None,
            (_, None) => Some(WATCH),
            (_, Some(_)) => Some(WATCH_FALL),
        }
    }

    /// Whether less shows than is published, and more looks must say so.
    pub fn is_falling(&self) -> bool {
        self.falling.is_some()
    }

    fn rise(&mut self, now: Instant, overhead: u64) -> Verdict {
        let Some((since, first)) = self.rising else {
            self.rising = Some((now, overhead));
            return Verdict::Confirm;
        };
        if now.saturating_duration_since(since) < CONFIRM {
            // Too soon to confirm, but not to deny.
            self.rising = Some((since, first.min(overhead)));
            return Verdict::Confirm;
        }
        self.publish(first.min(overhead).checked_next_multiple_of(STEP).unwrap_or(u64::MAX));
        // It may be rising still.
        self.rising = (overhead > self.published).then_some((now, overhead));
        Verdict::Publish(self.published)
    }

    /// `freed`: see [`Sample::freed`].
    fn fall(&mut self, now: Instant, target: u64, gone: bool, freed: bool) -> Verdict {
        let new = Falling { since: now, most: target, looks: 0, freeing: 0, gone };
        let falling = self.falling.get_or_insert(new);
        if gone && !falling.gone {
            // What showed before may have been theirs.
            *falling = new;
        }
        if freed {
            falling.freeing += 1;
        } else {
            falling.looks += 1;
        }
        falling.most = falling.most.max(target);
        let lasted = now.saturating_duration_since(falling.since);
        let sure = if falling.gone {
            lasted >= CONFIRM && falling.looks >= 2
        } else {
            lasted >= PERSISTENT && (falling.looks >= LOOKS || falling.freeing >= FREEING)
        };
        match (sure, falling.gone) {
            (true, _) => {
                let most = falling.most;
                self.publish(most);
                Verdict::Publish(most)
            }
            (false, true) => Verdict::Confirm,
            (false, false) => Verdict::Steady,
        }
    }

    fn publish(&mut self, bytes: u64) {
        self.published = bytes;
        (self.rising, self.falling) = (None, None);
    }

    /// Whether somebody who was there is not, or has fewer contexts.
    fn has_gone(&self, here: &[(u32, u64, u64)]) -> bool {
        self.members.iter().any(|(pid, start, contexts)| {
            !here.iter().any(|(p, s, c)| (p, s) == (pid, start) && c >= contexts)
        })
    }
}

#[cfg(test)]
#[path = "overhead_tests.rs"]
mod tests;
