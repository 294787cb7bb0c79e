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

use std::collections::BTreeMap;
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
                let known = self.remembered.remove(uuid).unwrap_or_default();
                self.gpus.insert(uuid.clone(), Machine::recall(known, at.0, at.1));
            }
        }
    }

    /// The driver had no such GPU before it was watched: one that answers now was initialised again.
    pub fn was_gone(&mut self, uuid: &str) {
        if let Some(gpu) = self.gpus.get_mut(uuid) {
            gpu.known.gone = true;
        }
    }

    /// What a later plugin has to know of the GPUs, by UUID: nothing of one that never had trouble.
    pub fn remember(&self, at: &Moment, now: Instant) -> BTreeMap<String, Remembered> {
        let of = |(uuid, gpu): (&String, &Machine)| {
            let known = gpu.at(now).known;
            // One that never had trouble, and does not count errors, has nothing to say.
            let says = known.since_ms.is_some() || known.uncorrectable.is_some();
            says.then(|| (uuid.clone(), Remembered { at: at.clone(), ..known }))
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
        (!gpu.known.state.is_sold()).then_some(gpu.known.reason.as_str())
    }

    pub fn is_suspect(&self, uuid: &str) -> bool {
        self.gpus.get(uuid).is_some_and(|gpu| gpu.known.state != State::Healthy)
    }

    pub fn view(&self, uuid: &str, now: Instant) -> View {
        self.gpus.get(uuid).map(|gpu| gpu.at(now).view(&self.policy, now)).unwrap_or_default()
    }

    fn apply(
        &mut self,
        uuid: String,
        observation: &Observation,
        now: Instant,
    ) -> Option<Transition> {
        let (policy, gpu) = (&self.policy, self.gpus.get_mut(&uuid)?);
        *gpu = gpu.at(now);
        let from = gpu.known.state;
        match observation {
            Observation::Xid { xid, .. } => gpu.xid(*xid, policy),
            Observation::Probe { answer: Ok(()), .. } => gpu.passed(policy),
            Observation::Probe { answer: Err(silence), .. } | Observation::Driver(silence) => {
                gpu.failed(silence, policy);
            }
            Observation::Condition { condition, .. } => gpu.condition(*condition, policy),
        }
        let to = gpu.known.state;
        (from != to).then(|| Transition { uuid, from, to, reason: gpu.known.reason.clone() })
    }
}

/// One GPU's. The state changes at most once per call.
#[derive(Clone, Debug)]
struct Machine {
    /// All that a later start has to know. Its ages are of the moment `seen`; suspicions are those within the window,
    /// and never more than count.
    known: Remembered,
    seen: Instant,
    failed: u32,
    passed: u32,
}

impl Machine {
    /// Goes on with what was so at an earlier moment, `at` being now. A reboot is a reset.
    fn recall(mut known: Remembered, at: &Moment, now: Instant) -> Self {
        let passed = known.at.until(at);
        age(&mut known, passed);
        if known.at.is_before_boot_of(at) {
            (known.locked, known.uncorrectable, known.energy_mj) = (None, None, None);
            // NVML reports again each fault that persists.
            (known.stands, known.needed_recovery, known.gone) = (None, false, false);
        }
        Machine { known, seen: now, failed: 0, passed: 0 }
    }

    /// It as it is at a later moment.
    fn at(&self, now: Instant) -> Self {
        let mut later = self.clone();
        let passed = now.saturating_duration_since(self.seen);
        // What is less than a millisecond counts the next time.
        later.seen =
            self.seen.max(now) - Duration::from_nanos(u64::from(passed.subsec_nanos() % 1_000_000));
        age(&mut later.known, passed);
        later
    }

    fn xid(&mut self, xid: u64, policy: &config::Health) {
        let reason = format!("XID {xid}");
        match policy.action(xid) {
            XidAction::Ignore => {}
            XidAction::Suspect => self.suspect(reason, policy),
            XidAction::Unhealthy => self.fall(reason, policy),
            XidAction::UntilReset => {
                // The first one tells what happened, the others follow from it.
                self.known.locked.get_or_insert_with(|| reason.clone());
                self.fall(reason, policy);
            }
        }
    }

    fn failed(&mut self, silence: &Silence, policy: &config::Health) {
        self.failed = self.failed.saturating_add(1);
        self.known.gone |= silence.gone;
        let reason = format!("NVML: {}", silence.why);
        if self.failed >= policy.probes_failed || !self.known.state.is_sold() {
            self.fall(reason, policy);
        } else {
            self.disturb();
            if self.known.state == State::Healthy {
                self.enter(State::Suspect, reason);
            }
        }
    }

    fn passed(&mut self, policy: &config::Health) {
        self.failed = 0;
        self.passed = self.passed.saturating_add(1);
        if std::mem::take(&mut self.known.gone) {
            self.known.locked = None;
            // What they have reached is to be read still.
            (self.known.uncorrectable, self.known.energy_mj) = (None, None);
        }
        if self.passed < policy.probes_passed {
            return;
        }
        match self.known.state {
            State::Healthy => {}
            State::Suspect => {
                if self.quiet() >= policy.suspect_window {
                    self.known.suspicions_ms.clear();
                    let reason = format!("quiet for {}", duration::format(policy.suspect_window));
                    self.enter(State::Healthy, reason);
                }
            }
            State::Unhealthy => {
                if self.known.locked.is_none() && self.known.stands.is_none() {
                    self.enter(State::Recovering, self.known.reason.clone());
                }
            }
            State::Recovering => {
                let needed = self.recovery(policy);
                if self.quiet() >= needed {
                    self.known.suspicions_ms.clear();
                    self.known.recovered_ms = Some(0);
                    let reason = format!("quiet for {}", duration::format(needed));
                    self.enter(State::Healthy, reason);
                }
            }
        }
    }

    fn condition(&mut self, condition: Condition, policy: &config::Health) {
        let known = &mut self.known;
        let needs = condition.recovery.filter(|action| *action != 0);
        known.stands = match needs {
            Some(action) => Some(format!("NVML: it takes {}", repair(action))),
            None if condition.remap_failed == Some(true) => {
                Some("NVML: a row of its memory cannot be remapped".to_owned())
            }
            None => None,
        };
        // The driver asked for a repair and no longer does.
        let repaired = known.needed_recovery && condition.recovery == Some(0);
        if condition.recovery.is_some() {
            known.needed_recovery = needs.is_some();
        }
        let before = known.uncorrectable;
        known.uncorrectable = condition.uncorrectable.or(before);
        let fewer = matches!((before, condition.uncorrectable), (Some(b), Some(n)) if n < b);
        let more = matches!((before, condition.uncorrectable), (Some(b), Some(n)) if n > b);
        let energy = known.energy_mj;
        known.energy_mj = condition.energy_mj.or(energy);
        let anew = matches!((energy, condition.energy_mj), (Some(b), Some(n)) if n < b);
        // Counters restart with the GPU.
        if repaired || fewer || anew {
            known.locked = None;
            // Of those that were not read now nothing is known any more.
            (known.uncorrectable, known.energy_mj) = (condition.uncorrectable, condition.energy_mj);
        }
        if let Some(reason) = known.stands.clone() {
            self.fall(reason, policy);
        } else if more {
            self.suspect("uncorrectable ECC errors".to_owned(), policy);
        }
    }

    fn view(self, policy: &config::Health, now: Instant) -> View {
        let since = |ago_ms| now.checked_sub(Duration::from_millis(ago_ms)).unwrap_or(now);
        View {
            waits_for: self.waits_for(policy),
            state: self.known.state,
            since: self.known.since_ms.map(since),
            reason: self.known.reason,
        }
    }

    fn waits_for(&self, policy: &config::Health) -> String {
        let quiet_for = |needed: Duration| {
            let left = needed.saturating_sub(self.quiet());
            if left.is_zero() {
                "the next probe".to_owned()
            } else {
                format!("{} without trouble", duration::format(left))
            }
        };
        match self.known.state {
            State::Healthy => String::new(),
            State::Suspect => quiet_for(policy.suspect_window),
            State::Unhealthy if self.known.gone => "NVML to find the GPU again".to_owned(),
            State::Unhealthy => match (&self.known.stands, &self.known.locked) {
                (Some(reason), _) => format!("NVML to say otherwise ({reason})"),
                (None, Some(reason)) => format!("a reset of the GPU, because of {reason}"),
                (None, None) => format!("{} answered probes in a row", policy.probes_passed),
            },
            State::Recovering => quiet_for(self.recovery(policy)),
        }
    }

    fn recovery(&self, policy: &config::Health) -> Duration {
        let factor = 2u32.checked_pow(self.known.relapses).unwrap_or(u32::MAX);
        policy.recovery.saturating_mul(factor).min(policy.recovery_max)
    }

    fn quiet(&self) -> Duration {
        self.known.disturbed_ms.map_or(Duration::MAX, Duration::from_millis)
    }

    fn disturb(&mut self) {
        self.known.disturbed_ms = Some(0);
        self.passed = 0;
    }

    fn suspect(&mut self, reason: String, policy: &config::Health) {
        let window = policy.suspect_window;
        self.known.suspicions_ms.retain(|ago_ms| Duration::from_millis(*ago_ms) < window);
        self.known.suspicions_ms.push(0);
        let count = self.known.suspicions_ms.len();
        if count >= policy.suspect_count as usize {
            self.known.suspicions_ms.remove(0);
            let within = duration::format(window);
            self.fall(format!("{reason}, number {count} within {within}"), policy);
        } else if self.known.state == State::Recovering {
            self.fall(reason, policy);
        } else {
            self.disturb();
            if self.known.state == State::Healthy {
                self.enter(State::Suspect, reason);
            }
        }
    }

    fn fall(&mut self, reason: String, policy: &config::Health) {
        self.disturb();
        if self.known.state.is_sold() {
            let recovered = self.known.recovered_ms.map(Duration::from_millis);
            let soon = recovered.is_some_and(|ago| ago < policy.recovery_max);
            self.known.relapses = if soon { self.known.relapses.saturating_add(1) } else { 0 };
        }
        // What keeps it out tells more than what follows from that.
        let reason = self.known.locked.clone().unwrap_or(reason);
        if self.known.state == State::Unhealthy {
            self.known.reason = reason;
        } else {
            self.enter(State::Unhealthy, reason);
        }
    }

    fn enter(&mut self, state: State, reason: String) {
        (self.known.state, self.known.reason) = (state, reason);
        self.known.since_ms = Some(0);
    }
}

fn age(known: &mut Remembered, by: Duration) {
    let by_ms = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
    let ages = [&mut known.since_ms, &mut known.disturbed_ms, &mut known.recovered_ms];
    for ago_ms in ages.into_iter().flatten().chain(&mut known.suspicions_ms) {
        *ago_ms = ago_ms.saturating_add(by_ms);
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
