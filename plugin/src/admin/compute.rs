//! GPU time in `status`: who holds a GPU, what was asked for and what was got.

use serde_json::{Value, json};
use tessera_kubelet::admin::{Allocation, ComputeUse, Gpu};

use crate::arbiter::policy::State;
use crate::arbiter::{TenantShare, View};

/// What an allocation got.
pub(super) fn of_allocation(share: &TenantShare) -> ComputeUse {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let gate = match share.state {
        State::Solo => "solo",
        State::Open => "open",
        State::Yield => "yield",
        State::Closed => "closed",
    };
    ComputeUse {
        gate: gate.to_owned(),
        got_1s_millis: share.got_1s_millis,
        got_10s_millis: share.got_10s_millis,
        leased_us: share.leased_ns / 1000,
        waited_us: share.waited_ns / 1000,
        waiting_us: share.waiting_ns.map(|ns| ns / 1000),
        leases: share.leases,
        overlaps: share.overlaps,
        processes: count(share.processes),
        undrained: count(share.owing),
    }
}

/// Who holds a GPU.
pub(super) fn add_lease(gpu: &mut Gpu, view: &View) {
    let Some(lease) = view.gpus.iter().find(|lease| lease.uuid == gpu.uuid) else { return };
    gpu.lease_holder = lease.holder.clone().unwrap_or_default();
    gpu.lease_late.clone_from(&lease.late);
    gpu.lease_waiting = u32::try_from(lease.waiting).unwrap_or(u32::MAX);
    gpu.lease_quantum_us = lease.quantum_ns / 1000;
}

/// What is wrong with how a tenant behaves at its gate.
pub(super) fn warnings(name: &str, share: &TenantShare) -> Vec<String> {
    let misdeeds = share.misdeeds;
    [
        (misdeeds.garbage, "sends garbage to its gate socket"),
        (misdeeds.throttled, "floods its gate socket and is slowed down"),
        (misdeeds.turned_away, "opens too many connections to its gate"),
        (share.overlaps, "drained the GPU too late, so that others ran beside it"),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, text)| format!("{name}: {text} ({count} times)"))
    .collect()
}

/// The holder of a GPU's lease, as a pod where that is known.
pub(super) fn holder(gpu: &Gpu, allocations: &[Allocation]) -> String {
    let name = |id: &str| {
        let holder = allocations.iter().find(|a| a.id == id).and_then(|a| a.holder.as_ref());
        holder.map_or_else(|| id.to_owned(), |h| format!("{}/{}", h.namespace, h.pod))
    };
    let mut text = match gpu.lease_holder.as_str() {
        "" => "-".to_owned(),
        id => name(id),
    };
    gpu.lease_late.iter().for_each(|id| text.push_str(&format!(" and late {}", name(id))));
    if gpu.lease_waiting > 0 {
        text.push_str(&format!(" ({} wait)", gpu.lease_waiting));
    }
    text
}

/// What an allocation got in the last second and in the last ten, and how it stands.
pub(super) fn cell(allocation: &Allocation) -> String {
    let Some(compute) = &allocation.compute else { return "-".to_owned() };
    format!("{}m {}m {}", compute.got_1s_millis, compute.got_10s_millis, compute.gate)
}

/// [`ComputeUse`] with the names of `admin_v1.proto`.
pub(super) fn json(compute: &ComputeUse) -> Value {
    json!({
        "gate": compute.gate,
        "got_1s_millis": compute.got_1s_millis,
        "got_10s_millis": compute.got_10s_millis,
        "leased_us": compute.leased_us,
        "waited_us": compute.waited_us,
        "waiting_us": compute.waiting_us,
        "leases": compute.leases,
        "overlaps": compute.overlaps,
        "processes": compute.processes,
        "undrained": compute.undrained,
    })
}
