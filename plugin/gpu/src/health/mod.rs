//! When a GPU is sold: a state machine over what the driver reports, with hysteresis.
//!
//! ```text
//!             suspicion, unanswered probe           several of them, or a grave fault
//!   HEALTHY ──────────────────────────► SUSPECT ─────────────────────────► UNHEALTHY ◄─┐
//!      ▲  └───────────────────────────────│──────── grave fault ─────────────►  │      │ any
//!      ├──────── quiet for the window ────┘                   answers, nothing  │      │ trouble
//!      │                                                      stands against it ▼      │
//!      └───────────────────────── quiet for the recovery time ────────────── RECOVERING┘
//! ```
//!
//! HEALTHY and SUSPECT are sold, UNHEALTHY and RECOVERING are not. The state is the GPU's: all its
//! replicas, of every resource, go together. Pure: time comes from the caller, XIDs mean what the
//! configuration says ([`tessera_config::Health`]).

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use tessera_config::{self as config, XidAction};
use tessera_model::duration;
use tessera_model::health::{Moment, Remembered, State};

/// What the driver reports. A GPU in MIG mode is named by the UUIDs of its instances: the watcher
/// resolves what the driver says of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    Xid {
        uuid: String,
        xid: u64,
    },
    Probe {
        uuid: String,
        answer: Result<(), Silence>,
    },
    /// NVML's facts about a GPU's memory and about what it would take to repair it.
    Condition {
        uuid: String,
        condition: Condition,
    },
    /// NVML as a whole does not answer, so no GPU does.
    Driver(Silence),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silence {
    pub why: String,
    /// The driver has no such GPU, or is itself not loaded. A GPU that answers after this has been
    /// initialised again.
    pub gone: bool,
}

/// Counters and flags of a GPU, as far as NVML knows them for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Uncorrectable ECC errors since the driver initialised the GPU (volatile counter).
    pub uncorrectable: Option<u64>,
    /// Energy used since then, millijoules.
    pub energy_mj: Option<u64>,
    pub remap_failed: Option<bool>,
    /// What the driver says it takes to repair the GPU (`nvmlDeviceGpuRecoveryAction_t`); 0 is nothing.
    pub recovery: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    pub uuid: String,
    pub from: State,
    pub to: State,
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    pub state: State,
    /// Why; empty for one that never had trouble.
    pub reason: String,
    /// Since when; `None` for one that never had trouble.
    pub since: Option<Instant>,
    pub waits_for: String,
}

/// Health of all GPUs. One that nobody complained about is healthy.
#[derive(Clone, Debug)]
pub struct Health {
    policy: config::Health,
    gpus: BTreeMap<String, Machine>,
    /// What an earlier plugin knew of GPUs that this one has not seen yet.
    remembered: BTreeMap<String, Remembered>,
}

impl Health {
    /// All healthy, but those of which an earlier plugin knew otherwise.
    pub fn new<'a>(
        policy: config::Health,
        gpus: impl IntoIterator<Item = &'a String>,
        remembered: BTreeMap<String, Remembered>,
        at: (&Moment, Instant),
    ) -> Self {
        let mut health = Health { policy: policy.clone(), gpus: BTreeMap::new(), remembered };
        health.configure(policy, gpus, at);
        health
    }

    /// Goes on by another policy, with these GPUs: what is known of each stays. `at` is now, by both clocks.
    pub fn configure<'a>(
        &mut self,
        policy: config::Health,
        gpus: impl IntoIterator<Item = &'a String>,
        at: (&Moment, Instant),
    ) {
        self.policy = policy;
        for uuid in gpus {
            if !self.gpus.contains_key(uuid) {
                let known = self.remembered.remove(uuid);
                let machine = known.map(|known| Machine::recall(&known, at.0, at.1));
                self.gpus.insert(uuid.clone(), machine.unwrap_or_default());
            }
        }
    }

    /// The driver had no such GPU before it was watched: one that answers now was initialised again.
    pub fn was_gone(&mut self, uuid: &str) {
        if let Some(gpu) = self.gpus.get_mut(uuid) {
            gpu.gone = true;
        }
    }

    /// What a later plugin has to know of the GPUs, by UUID: nothing of one that never had trouble.
    pub fn remember(&self, at: &Moment, now: Instant) -> BTreeMap<String, Remembered> {
        let of = |(uuid, gpu): (&String, &Machine)| {
            let known = gpu.remember(now)?;
            Some((uuid.clone(), Remembered { at: at.clone(), ..known }))
        };
        self.gpus.iter().filter_map(of).collect()
    }

    /// Whether this says nothing of any GPU's health, as what a program brings upon itself.
    pub fn ignores(policy: &config::Health, observation: &Observation) -> bool {
        matches!(observation, Observation::Xid { xid, .. } if policy.action(*xid) == XidAction::Ignore)
    }

    pub fn observe(&mut self, observation: &Observation, now: Instant) -> Vec<Transition> {
        let uuids: Vec<&String> = match observation {
            Observation::Xid { uuid, .. }
            | Observation::Probe { uuid, .. }
            | Observation::Condition { uuid, .. } => vec![uuid],
            Observation::Driver(_) => self.gpus.keys().collect(),
        };
        // What is no GPU of ours would only take memory.
        let ours: Vec<String> =
            uuids.into_iter().filter(|uuid| self.gpus.contains_key(*uuid)).cloned().collect();
        ours.into_iter().filter_map(|uuid| self.apply(uuid, observation, now)).collect()
    }

    pub fn reason(&self, uuid: &str) -> Option<&str> {
        let gpu = self.gpus.get(uuid)?;
        (!gpu.state.is_sold()).then_some(gpu.reason.as_str())
    }

    pub fn is_suspect(&self, uuid: &str) -> bool {
        self.gpus.get(uuid).is_some_and(|gpu| gpu.state != State::Healthy)
    }

    pub fn view(&self, uuid: &str, now: Instant) -> View {
        self.gpus.get(uuid).map(|gpu| gpu.view(&self.policy, now)).unwrap_or_default()
    }

    fn apply(
        &mut self,
        uuid: String,
        observation: &Observation,
        now: Instant,
    ) -> Option<Transition> {
        let (policy, gpu) = (&self.policy, self.gpus.get_mut(&uuid)?);
        let from = gpu.state;
        match observation {
            Observation::Xid { xid, .. } => gpu.xid(*xid, policy, now),
            Observation::Probe { answer: Ok(()), .. } => gpu.passed(policy, now),
            Observation::Probe { answer: Err(silence), .. } | Observation::Driver(silence) => {
                gpu.failed(silence, policy, now);
            }
            Observation::Condition { condition, .. } => gpu.condition(*condition, policy, now),
        }
        let to = gpu.state;
        (from != to).then(|| Transition { uuid, from, to, reason: gpu.reason.clone() })
    }
}

/// One GPU's. The state changes at most once per call.
#[derive(Clone, Debug, Default)]
struct Machine {
    state: State,
    reason: String,
    since: Option<Instant>,
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
    fn xid(&mut self, xid: u64, policy: &config::Health, now: Instant) {
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

    fn failed(&mut self, silence: &Silence, policy: &config::Health, now: Instant) {
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

    fn passed(&mut self, policy: &config::Health, now: Instant) {
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

    fn condition(&mut self, condition: Condition, policy: &config::Health, now: Instant) {
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

    fn view(&self, policy: &config::Health, now: Instant) -> View {
        View {
            state: self.state,
            reason: self.reason.clone(),
            since: self.since,
            waits_for: self.waits_for(policy, now),
        }
    }

    fn waits_for(&self, policy: &config::Health, now: Instant) -> String {
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

    fn recovery(&self, policy: &config::Health) -> Duration {
        let factor = 2u32.checked_pow(self.relapses).unwrap_or(u32::MAX);
        policy.recovery.saturating_mul(factor).min(policy.recovery_max)
    }

    fn quiet(&self, now: Instant) -> Duration {
        self.disturbed.map_or(Duration::MAX, |then| now.saturating_duration_since(then))
    }

    /// What a later start has to know; `None` of one that never had trouble and does not count errors.
    fn remember(&self, now: Instant) -> Option<Remembered> {
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
    fn recall(known: &Remembered, at: &Moment, now: Instant) -> Self {
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

    fn suspect(&mut self, reason: String, policy: &config::Health, now: Instant) {
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

    fn fall(&mut self, reason: String, policy: &config::Health, now: Instant) {
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

fn repair(action: u64) -> String {
    match action {
        1 => "a reset of the GPU".to_owned(),
        2 => "a reboot of the node".to_owned(),
        3 => "an end of all peer-to-peer traffic".to_owned(),
        4 => "an end of all peer-to-peer traffic and a reset of the GPU".to_owned(),
        newer => format!("recovery action {newer} of NVML"),
    }
}

#[cfg(test)]
mod tests;
