//! The state of a GPU's health.

use serde::{Deserialize, Serialize};

/// Whether a GPU is given out; `tessera_gpu::health` draws the transitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// AdvertisedGpu.
    #[default]
    Healthy,
    /// AdvertisedGpu, but preferred last.
    Suspect,
    /// Not sold.
    Unhealthy,
    /// Not sold yet.
    Recovering,
}

impl State {
    /// Whether kubelet may hand it out.
    #[must_use]
    pub fn is_sold(self) -> bool {
        matches!(self, State::Healthy | State::Suspect)
    }

    /// In lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            State::Healthy => "healthy",
            State::Suspect => "suspect",
            State::Unhealthy => "unhealthy",
            State::Recovering => "recovering",
        }
    }
}
