//! GPU time in `status`: the holder of each GPU, shares, and time received.

use tessera_view::status::Gpu;
use tessera_view::tenant::Compute;

use tessera_arbiter::policy::GateState;
use tessera_arbiter::{TenantShare, View};

/// What an allocation got.
pub(super) fn of_allocation(share: &TenantShare) -> Compute {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let gate = match share.state {
        GateState::Solo => "solo",
        GateState::Open => "open",
        GateState::Yield => "yield",
        GateState::Closed => "closed",
    };
    Compute {
        gate: gate.to_owned(),
        got_1s_millis: share.got_1s_millis,
        got_10s_millis: share.got_10s_millis,
        leased_us: share.totals.leased_ns / 1000,
        waited_us: share.totals.waited_ns / 1000,
        waiting_us: share.waiting_ns.map(|ns| ns / 1000),
        leases: share.totals.leases,
        overlaps: share.totals.overlaps,
        processes: count(share.processes),
        undrained: count(share.owing),
        used_us: share.totals.used_ns / 1000,
        measured_us: share.totals.measured_ns / 1000,
        used_10s_millis: share.used_10s_millis,
    }
}

/// The holder of a GPU.
pub(super) fn add_lease(gpu: &mut Gpu, view: &View) {
    let Some(lease) = view.gpus.iter().find(|lease| lease.uuid == gpu.uuid) else { return };
    gpu.lease_holder = lease.holder.clone().unwrap_or_default();
    gpu.lease_late.clone_from(&lease.late);
    gpu.lease_waiting = u32::try_from(lease.waiting).unwrap_or(u32::MAX);
    gpu.lease_quantum_us = lease.quantum_ns / 1000;
}
