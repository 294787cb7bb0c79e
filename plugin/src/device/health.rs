//! When a GPU's replicas are Unhealthy: a state machine over what the driver reports.
//!
//! XIDs are NVIDIA's error numbers ("XID Errors", docs.nvidia.com/deploy/xid-errors). Those that a
//! faulty program causes hurt that program alone. Any other takes the GPU out of service, all its
//! replicas at once. It comes back after [`RECOVERY`] without another error in which NVML answered
//! each time it was asked, unless the error is one that only a reset heals.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a GPU must be quiet before it is sold again.
pub const RECOVERY: Duration = Duration::from_secs(300);

/// XIDs that a program brings upon itself.
const APPLICATION: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// XIDs after which only a reset or a new GPU helps: uncorrectable memory, fallen off the bus,
/// microcontroller and GSP halts, NVLink, contained and uncontained ECC.
const UNTIL_RESET: [u64; 11] = [48, 61, 62, 64, 74, 79, 95, 119, 120, 140, 143];

/// What the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// An XID event on a GPU.
    Xid {
        /// The GPU.
        uuid: String,
        /// NVIDIA's number.
        xid: u64,
    },
    /// A GPU answered, or did not and why.
    Probe {
        /// The GPU.
        uuid: String,
        /// The driver's word.
        answer: Result<(), String>,
    },
}

/// What an XID means for the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// A program's own fault.
    Application,
    /// Out of service, may come back.
    Transient,
    /// Out of service until the GPU is reset, which shows as a restart of the plugin.
    UntilReset,
}

/// See [`Severity`].
#[must_use]
pub fn severity(xid: u64) -> Severity {
    if APPLICATION.contains(&xid) {
        Severity::Application
    } else if UNTIL_RESET.contains(&xid) {
        Severity::UntilReset
    } else {
        Severity::Transient
    }
}

#[derive(Clone, Debug)]
struct Sickness {
    reason: String,
    quiet_since: Instant,
    until_reset: bool,
}

/// Health of all GPUs. A GPU nobody complained about is healthy.
#[derive(Clone, Debug, Default)]
pub struct Health {
    sick: BTreeMap<String, Sickness>,
}

impl Health {
    /// Takes an observation. True if a GPU's health changed.
    pub fn observe(&mut self, observation: Observation, now: Instant) -> bool {
        match observation {
            Observation::Xid { uuid, xid } => match severity(xid) {
                Severity::Application => false,
                severity => {
                    self.fall_ill(uuid, format!("XID {xid}"), severity == Severity::UntilReset, now)
                }
            },
            Observation::Probe { uuid, answer: Err(error) } => {
                self.fall_ill(uuid, format!("NVML: {error}"), false, now)
            }
            Observation::Probe { uuid, answer: Ok(()) } => {
                let recovers = self.sick.get(&uuid).is_some_and(|sickness| {
                    !sickness.until_reset
                        && now.saturating_duration_since(sickness.quiet_since) >= RECOVERY
                });
                recovers && self.sick.remove(&uuid).is_some()
            }
        }
    }

    /// Why a GPU is unhealthy; `None` for a healthy one.
    #[must_use]
    pub fn reason(&self, uuid: &str) -> Option<&str> {
        self.sick.get(uuid).map(|sickness| sickness.reason.as_str())
    }

    fn fall_ill(&mut self, uuid: String, reason: String, until_reset: bool, now: Instant) -> bool {
        match self.sick.get_mut(&uuid) {
            Some(sickness) => {
                sickness.quiet_since = now;
                // The graver reason stays.
                if !sickness.until_reset {
                    sickness.reason = reason;
                    sickness.until_reset = until_reset;
                }
                false
            }
            None => {
                self.sick.insert(uuid, Sickness { reason, quiet_since: now, until_reset });
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xid(xid: u64) -> Observation {
        Observation::Xid { uuid: "GPU-a".into(), xid }
    }

    fn probe(answer: Result<(), String>) -> Observation {
        Observation::Probe { uuid: "GPU-a".into(), answer }
    }

    #[test]
    fn a_programs_own_fault_leaves_the_gpu_healthy() {
        let mut health = Health::default();
        for number in APPLICATION {
            assert!(!health.observe(xid(number), Instant::now()));
        }
        assert_eq!(health.reason("GPU-a"), None);
    }

    #[test]
    fn a_sick_gpu_comes_back_after_quiet_and_not_before() {
        let (mut health, start) = (Health::default(), Instant::now());
        assert!(health.observe(xid(63), start));
        assert_eq!(health.reason("GPU-a"), Some("XID 63"));
        assert_eq!(health.reason("GPU-b"), None);
        assert!(!health.observe(probe(Ok(())), start + RECOVERY / 2));
        assert!(!health.observe(xid(63), start + RECOVERY / 2));
        assert!(!health.observe(probe(Ok(())), start + RECOVERY));
        assert!(health.observe(probe(Ok(())), start + RECOVERY * 3 / 2));
        assert_eq!(health.reason("GPU-a"), None);
    }

    #[test]
    fn a_gpu_off_the_bus_stays_out_until_reset() {
        let (mut health, start) = (Health::default(), Instant::now());
        assert!(health.observe(xid(79), start));
        assert!(!health.observe(xid(63), start));
        assert!(!health.observe(probe(Ok(())), start + RECOVERY * 100));
        assert_eq!(health.reason("GPU-a"), Some("XID 79"));
    }

    #[test]
    fn a_gpu_that_does_not_answer_is_unhealthy() {
        let (mut health, start) = (Health::default(), Instant::now());
        assert!(health.observe(probe(Err("GPU is lost".into())), start));
        assert_eq!(health.reason("GPU-a"), Some("NVML: GPU is lost"));
    }
}
