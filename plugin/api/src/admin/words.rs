//! Enumerations of the admin service, and counts, as the words that people and programs read.

use tessera_kubelet_api::admin::{
    AllocationState, ComputePolicy, ComputeUse, GpuState, Health, Registration,
};

pub use state_name as allocation;
pub use state_of_gpu as gpu;
pub use tessera_model::counted::{plural, times};
use tessera_view::tenant::gate_text;

/// A GPU's state, in lower case.
pub fn state_of_gpu(state: GpuState) -> &'static str {
    match state {
        GpuState::Healthy => "healthy",
        GpuState::Suspect => "suspect",
        GpuState::Unhealthy => "unhealthy",
        GpuState::Recovering => "recovering",
        GpuState::Unspecified => "unknown",
    }
}

/// An allocation's state, in lower case.
pub fn state_name(state: AllocationState) -> &'static str {
    match state {
        AllocationState::Allocated => "allocated",
        AllocationState::Started => "started",
        AllocationState::Parked => "parked",
        AllocationState::Unspecified => "unknown",
    }
}

/// A compute policy, as the configuration has it.
pub fn policy(policy: ComputePolicy) -> &'static str {
    match policy {
        ComputePolicy::Burst => "burst",
        ComputePolicy::Strict => "strict",
        ComputePolicy::None => "none",
        ComputePolicy::Unspecified => "unknown",
    }
}

/// See [`gate_text`].
pub fn gate(compute: &ComputeUse) -> &str {
    gate_text(&compute.gate, compute.waiting_us)
}

pub(crate) fn health_name(health: Health) -> &'static str {
    match health {
        Health::Healthy => "healthy",
        Health::Unhealthy => "unhealthy",
        Health::Unspecified => "unknown",
    }
}

/// How it stands with kubelet, for programs.
pub(crate) fn registration_name(registration: Registration) -> &'static str {
    match registration {
        Registration::Live => "live",
        Registration::Accepted => "accepted",
        Registration::Waiting | Registration::Unspecified => "waiting",
    }
}

/// The same for people.
pub(super) fn registration(registration: Registration) -> &'static str {
    match registration {
        Registration::Live => "registered, kubelet watches",
        Registration::Accepted => "registered, kubelet does not watch yet",
        Registration::Waiting | Registration::Unspecified => "not registered",
    }
}
