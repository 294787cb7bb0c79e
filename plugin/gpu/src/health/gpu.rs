//! One GPU's state machine.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Condition, Silence, View};
use tessera_config::{Health, XidAction};
use tessera_model::duration;
use tessera_model::health::{Moment, Remembered, State};

/// See the parent's text. The state changes at most once per call.
#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    state: State,
    reason: String,
    since: Option<Instant>,
    /// The last trouble of any kind.
    disturbed: Option<Instant>,
    /// Suspicions within the window, the oldest first; never more than count.
    suspicions: VecDeque<Instant>,
    /// Probes in a row.
    failed: u32,
    passed: u32,
    /// Only a reset ends this: why.
    locked: Option<String>,
    /// The driver had no such GPU; one that answers now was initialised again.
    gone: bool,
    /// What NVML says stands against it now.
    stands: Option<String>,
    needed_recovery: bool,
    uncorrectable: Option<u64>,
    energy_mj: Option<u64>,
    /// When it was last sold again, and how often it has fallen ill soon after that.
    recovered: Option<Instant>,
    relapses: u32,
}

impl Machine {
    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    pub(super) fn xid(&mut self, xid: u64, policy: &Health, now: Instant) {
        let reason = format!("XID {xid}");
        match policy.action(xid) {
            XidAction::Ignore => {}
            XidAction::Suspect => self.suspect(reason, policy, now),
            XidAction::Unhealthy => self.fall(reason, policy, now),
            XidAction::UntilReset => {
                // The first one tells what happened, the others follow from it.
                self.locked.get_or_insert_with(|| reason.clone());
                self.fall(reason, policy, now);
            }
        }
    }

    pub(super) fn failed(&mut self, silence: &Silence, policy: &Health, now: Instant) {
        self.failed = self.failed.saturating_add(1);
        self.gone |= silence.gone;
        let reason = format!("NVML: {}", silence.why);
        if self.failed >= policy.probes_failed || !self.state.is_sold() {
            self.fall(reason, policy, now);
        } else {
            self.disturb(now);
            if self.state == State::Healthy {
                self.enter(State::Suspect, reason, now);
            }
        }
    }

    pub(super) fn passed(&mut self, policy: &Health, now: Instant) {
        self.failed = 0;
        self.passed = self.passed.saturating_add(1);
        if std::mem::take(&mut self.gone) {
            self.was_reset();
            // What they have reached is to be read still.
            (self.uncorrectable, self.energy_mj) = (None, None);
        }
        if self.passed < policy.probes_passed {
            return;
        }
        match self.state {
            State::Healthy => {}
            State::Suspect => {
                if self.quiet(now) >= policy.suspect_window {
                    self.suspicions.clear();
                    let reason = format!("quiet for {}", duration::format(policy.suspect_window));
                    self.enter(State::Healthy, reason, now);
                }
            }
            State::Unhealthy => {
                if self.locked.is_none() && self.stands.is_none() {
                    self.enter(State::Recovering, self.reason.clone(), now);
                }
            }
            State::Recovering => {
                let needed = self.recovery(policy);
                if self.quiet(now) >= needed {
                    self.suspicions.clear();
                    self.recovered = Some(now);
                    let reason = format!("quiet for {}", duration::format(needed));
                    self.enter(State::Healthy, reason, now);
                }
            }
        }
    }

    pub(super) fn condition(&mut self, condition: Condition, policy: &Health, now: Instant) {
        let needs = condition.recovery.filter(|action| *action != 0);
        self.stands = match needs {
            Some(action) => Some(format!("NVML: it takes {}", repair(action))),
            None if condition.remap_failed == Some(true) => {
                Some("NVML: a row of its memory cannot be remapped".to_owned())
            }
            None => None,
        };
        // The driver asked for a repair and no longer does.
        let repaired = self.needed_recovery && condition.recovery == Some(0);
        if condition.recovery.is_some() {
            self.needed_recovery = needs.is_some();
        }
        let before = self.uncorrectable;
        self.uncorrectable = condition.uncorrectable.or(before);
        let fewer = matches!((before, condition.uncorrectable), (Some(b), Some(n)) if n < b);
        let more = matches!((before, condition.uncorrectable), (Some(b), Some(n)) if n > b);
        let energy = self.energy_mj;
        self.energy_mj = condition.energy_mj.or(energy);
        let anew = matches!((energy, condition.energy_mj), (Some(b), Some(n)) if n < b);
        // Counters restart with the GPU.
        if repaired || fewer || anew {
            self.was_reset();
            // Of those that were not read now nothing is known any more.
            (self.uncorrectable, self.energy_mj) = (condition.uncorrectable, condition.energy_mj);
        }
        if let Some(reason) = self.stands.clone() {
            self.fall(reason, policy, now);
        } else if more {
            self.suspect("uncorrectable ECC errors".to_owned(), policy, now);
        }
    }

    pub(super) fn view(&self, policy: &Health, now: Instant) -> View {
        View {
            state: self.state,
            reason: self.reason.clone(),
            since: self.since,
            waits_for: self.waits_for(policy, now),
        }
    }

    fn waits_for(&self, policy: &Health, now: Instant) -> String {
        let quiet_for = |needed: Duration| {
            let left = needed.saturating_sub(self.quiet(now));
            if left.is_zero() {
                "the next probe".to_owned()
            } else {
                format!("{} without trouble", duration::format(left))
            }
        };
        match self.state {
            State::Healthy => String::new(),
            State::Suspect => quiet_for(policy.suspect_window),
            State::Unhealthy if self.gone => "NVML to find the GPU again".to_owned(),
            State::Unhealthy => match (&self.stands, &self.locked) {
                (Some(reason), _) => format!("NVML to say otherwise ({reason})"),
                (None, Some(reason)) => format!("a reset of the GPU, because of {reason}"),
                (None, None) => format!("{} answered probes in a row", policy.probes_passed),
            },
            State::Recovering => quiet_for(self.recovery(policy)),
        }
    }

    /// How long it must be quiet, by how often it relapsed.
    fn recovery(&self, policy: &Health) -> Duration {
        let factor = 2u32.checked_pow(self.relapses).unwrap_or(u32::MAX);
        policy.recovery.saturating_mul(factor).min(policy.recovery_max)
    }

    fn quiet(&self, now: Instant) -> Duration {
        self.disturbed.map_or(Duration::MAX, |then| now.saturating_duration_since(then))
    }

    /// The driver had no such GPU, and was asked before this program watched.
    pub(super) fn was_gone(&mut self) {
        self.gone = true;
    }

    /// What a later start has to know; `None` of one that never had trouble and does not count errors.
    pub(super) fn remember(&self, now: Instant) -> Option<Remembered> {
        self.since.map(drop).or(self.uncorrectable.map(drop))?;
        let ago = |then: Instant| {
            u64::try_from(now.saturating_duration_since(then).as_millis()).unwrap_or(u64::MAX)
        };
        Some(Remembered {
            at: Moment::default(),
            state: self.state,
            reason: self.reason.clone(),
            since_ms: self.since.map(ago),
            disturbed_ms: self.disturbed.map(ago),
            suspicions_ms: self.suspicions.iter().copied().map(ago).collect(),
            locked: self.locked.clone(),
            gone: self.gone,
            stands: self.stands.clone(),
            needed_recovery: self.needed_recovery,
            uncorrectable: self.uncorrectable,
            energy_mj: self.energy_mj,
            recovered_ms: self.recovered.map(ago),
            relapses: self.relapses,
        })
    }

    /// Goes on with what was so at an earlier moment, `at` being now. A reboot is a reset.
    pub(super) fn recall(known: &Remembered, at: &Moment, now: Instant) -> Self {
        let elapsed = known.at.until(at);
        let then = |ago_ms: u64| {
            let ago = Duration::from_millis(ago_ms).saturating_add(elapsed);
            // A machine that has not run for so long: the time counts from here.
            now.checked_sub(ago).unwrap_or(now)
        };
        let mut machine = Machine {
            state: known.state,
            reason: known.reason.clone(),
            since: known.since_ms.map(then),
            disturbed: known.disturbed_ms.map(then),
            suspicions: known.suspicions_ms.iter().copied().map(then).collect(),
            failed: 0,
            passed: 0,
            locked: known.locked.clone(),
            gone: known.gone,
            stands: known.stands.clone(),
            needed_recovery: known.needed_recovery,
            uncorrectable: known.uncorrectable,
            energy_mj: known.energy_mj,
            recovered: known.recovered_ms.map(then),
            relapses: known.relapses,
        };
        if known.at.is_before_boot_of(at) {
            machine.was_reset();
            (machine.uncorrectable, machine.energy_mj) = (None, None);
            // NVML says anew what stands against it.
            (machine.stands, machine.needed_recovery, machine.gone) = (None, false, false);
        }
        machine
    }

    fn was_reset(&mut self) {
        self.locked = None;
    }

    fn disturb(&mut self, now: Instant) {
        self.disturbed = Some(now);
        self.passed = 0;
    }

    fn suspect(&mut self, reason: String, policy: &Health, now: Instant) {
        let window = policy.suspect_window;
        self.suspicions.retain(|then| now.saturating_duration_since(*then) < window);
        self.suspicions.push_back(now);
        let count = self.suspicions.len();
        if count >= policy.suspect_count as usize {
            self.suspicions.pop_front();
            let within = duration::format(window);
            self.fall(format!("{reason}, number {count} within {within}"), policy, now);
        } else if self.state == State::Recovering {
            self.fall(reason, policy, now);
        } else {
            self.disturb(now);
            if self.state == State::Healthy {
                self.enter(State::Suspect, reason, now);
            }
        }
    }

    fn fall(&mut self, reason: String, policy: &Health, now: Instant) {
        self.disturb(now);
        if self.state.is_sold() {
            let soon = |then| now.saturating_duration_since(then) < policy.recovery_max;
            self.relapses =
                if self.recovered.is_some_and(soon) { self.relapses.saturating_add(1) } else { 0 };
        }
        // What keeps it out tells more than what follows from that.
        let reason = self.locked.clone().unwrap_or(reason);
        if self.state == State::Unhealthy {
            self.reason = reason;
        } else {
            self.enter(State::Unhealthy, reason, now);
        }
    }

    fn enter(&mut self, state: State, reason: String, now: Instant) {
        self.state = state;
        self.reason = reason;
        self.since = Some(now);
    }
}

/// A recovery action of NVML, in words.
fn repair(action: u64) -> String {
    match action {
        1 => "a reset of the GPU".to_owned(),
        2 => "a reboot of the node".to_owned(),
        3 => "an end of all peer-to-peer traffic".to_owned(),
        4 => "an end of all peer-to-peer traffic and a reset of the GPU".to_owned(),
        newer => format!("recovery action {newer} of NVML"),
    }
}
