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

mod gpu;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Instant;
use tessera_model::health::{Moment, Remembered, State};

use gpu::Machine;
use tessera_config::{self as config, XidAction};

/// What the driver reports. A GPU in MIG mode is named by the UUIDs of its instances: the watcher
/// resolves what the driver says of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// An XID event on a GPU.
    Xid {
        uuid: String,
        /// NVIDIA's number.
        xid: u64,
    },
    /// A GPU answered, or did not.
    Probe {
        uuid: String,
        /// The driver's word.
        answer: Result<(), Silence>,
    },
    /// NVML's facts about a GPU's memory and about what it would take to repair it.
    Condition {
        uuid: String,
        /// What is known.
        condition: Condition,
    },
    /// NVML as a whole does not answer, so no GPU does.
    Driver(Silence),
}

/// Why a GPU did not answer.
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
    /// A row of memory could not be remapped.
    pub remap_failed: Option<bool>,
    /// What the driver says it takes to repair the GPU (`nvmlDeviceGpuRecoveryAction_t`); 0 is nothing.
    pub recovery: Option<u64>,
}

/// A GPU went from one state to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    pub uuid: String,
    /// From this …
    pub from: State,
    /// … to this,
    pub to: State,
    /// because of this.
    pub reason: String,
}

/// How a GPU stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    pub state: State,
    /// Why; empty for one that never had trouble.
    pub reason: String,
    /// Since when; `None` for one that never had trouble.
    pub since: Option<Instant>,
    /// What it takes to be healthy; empty where it is.
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
            gpu.was_gone();
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

    /// Takes an observation.
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

    /// Why a GPU is not sold; `None` for one that is.
    pub fn reason(&self, uuid: &str) -> Option<&str> {
        let gpu = self.gpus.get(uuid)?;
        (!gpu.state().is_sold()).then(|| gpu.reason())
    }

    /// Whether a GPU should be preferred last.
    pub fn is_suspect(&self, uuid: &str) -> bool {
        self.gpus.get(uuid).is_some_and(|gpu| gpu.state() != State::Healthy)
    }

    /// How a GPU stands.
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
        let from = gpu.state();
        match observation {
            Observation::Xid { xid, .. } => gpu.xid(*xid, policy, now),
            Observation::Probe { answer: Ok(()), .. } => gpu.passed(policy, now),
            Observation::Probe { answer: Err(silence), .. } | Observation::Driver(silence) => {
                gpu.failed(silence, policy, now);
            }
            Observation::Condition { condition, .. } => gpu.condition(*condition, policy, now),
        }
        let to = gpu.state();
        (from != to).then(|| Transition { uuid, from, to, reason: gpu.reason().to_owned() })
    }
}
