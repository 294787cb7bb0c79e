//! The state of a GPU's health.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

/// Whether a GPU is given out; `tessera_gpu::health` draws the transitions.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, IntoStaticStr,
)]
#[schemars(rename = "GpuState")]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum State {
    #[default]
    Healthy,
    /// AdvertisedGpu, but preferred last.
    Suspect,
    Unhealthy,
    /// Not sold yet.
    Recovering,
}

impl State {
    /// Whether kubelet may hand it out.
    pub fn is_sold(self) -> bool {
        matches!(self, State::Healthy | State::Suspect)
    }
}

/// What is known of a GPU's trouble, for a plugin that starts later. Times are ages at [`Remembered::at`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Remembered {
    pub at: Moment,
    pub state: State,
    pub reason: String,
    /// How long it has been in that state, milliseconds.
    pub since_ms: Option<u64>,
    /// How long the last trouble is ago, milliseconds.
    pub disturbed_ms: Option<u64>,
    /// How long each suspicion that counts is ago, milliseconds, the oldest first.
    pub suspicions_ms: Vec<u64>,
    /// What only a reset ends.
    pub locked: Option<String>,
    /// The driver had no such GPU.
    pub gone: bool,
    /// What NVML said stood against it.
    pub stands: Option<String>,
    /// NVML asked for a repair.
    pub needed_recovery: bool,
    /// Uncorrectable ECC errors since the driver initialised the GPU. Fewer are the evidence of a reset.
    pub uncorrectable: Option<u64>,
    /// Energy used since then, millijoules; likewise.
    pub energy_mj: Option<u64>,
    /// How long ago it was sold again after trouble, milliseconds.
    pub recovered_ms: Option<u64>,
    /// How often it has fallen ill soon after that.
    pub relapses: u32,
}

/// A moment that another process, or another boot, can compare with its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moment {
    /// The kernel's id of the boot; empty where it tells none.
    pub boot: String,
    pub monotonic_ms: u64,
    pub unix_ms: i64,
}

impl Moment {
    /// Whether the node was started again between this and a later moment. Every GPU was reset then.
    pub fn is_before_boot_of(&self, later: &Moment) -> bool {
        !self.boot.is_empty() && !later.boot.is_empty() && self.boot != later.boot
    }

    /// How long it is until a later moment: by the clock that nobody sets, or after a reboot by the one that people
    /// read. No less than nothing.
    pub fn until(&self, later: &Moment) -> Duration {
        let unix_ms = later.unix_ms.saturating_sub(self.unix_ms);
        Duration::from_millis(match self.boot == later.boot {
            true => later.monotonic_ms.saturating_sub(self.monotonic_ms),
            false => u64::try_from(unix_ms).unwrap_or(0),
        })
    }
}
