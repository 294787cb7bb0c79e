//! GPU time in `status`: the holder of each GPU, shares, and time received.

use serde_json::{Value, json};
use tessera_kubelet_api::admin::{ComputeUse, Gpu};

use tessera_arbiter::policy::GateState;
use tessera_arbiter::{TenantShare, View};

/// What an allocation got.
pub(super) fn of_allocation(share: &TenantShare) -> ComputeUse {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let gate = match share.state {
        GateState::Solo => "solo",
        GateState::Open => "open",
        GateState::Yield => "yield",
        GateState::Closed => "closed",
    };
    ComputeUse {
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

/// What is wrong with how a tenant behaves at its gate, and how often.
pub(super) fn violations(share: &TenantShare) -> [(u64, &'static str); 5] {
    let violations = share.violations;
    [
        (violations.garbage, "sends garbage to its gate socket"),
        (violations.nonsense, "sends its gate messages that make no sense there"),
        (violations.throttled, "floods its gate socket and is slowed down"),
        (violations.turned_away, "opens too many connections to its gate"),
        (share.totals.overlaps, "drained the GPU too late, so that others ran beside it"),
    ]
}

/// [`ComputeUse`] with the names of `admin_v1.proto`.
pub(super) fn json(compute: &ComputeUse) -> Value {
    json!({
        "gate": compute.gate,
        "got_1s_millis": compute.got_1s_millis,
        "got_10s_millis": compute.got_10s_millis,
        "used_10s_millis": compute.used_10s_millis,
        "leased_us": compute.leased_us,
        "used_us": compute.used_us,
        "measured_us": compute.measured_us,
        "waited_us": compute.waited_us,
        "waiting_us": compute.waiting_us,
        "leases": compute.leases,
        "overlaps": compute.overlaps,
        "processes": compute.processes,
        "undrained": compute.undrained,
    })
}

#[cfg(test)]
mod tests {
    use tessera_kubelet_api::admin::{Allocation, GpuUse, Holder, StatusResponse};

    use super::*;
    use crate::admin::json;

    fn pod(id: &str, pod: &str, compute: Option<ComputeUse>) -> Allocation {
        let holder = Holder { namespace: "ns".into(), pod: pod.into(), container: "c".into() };
        let gpus = vec![GpuUse { gpu_uuid: "GPU-a".into(), ..GpuUse::default() }];
        Allocation { id: id.into(), holder: Some(holder), gpus, compute, ..Allocation::default() }
    }

    fn status() -> StatusResponse {
        let got = ComputeUse {
            gate: "closed".into(),
            got_1s_millis: 620,
            got_10s_millis: 505,
            leased_us: 7_000_000,
            waited_us: 3_000_000,
            waiting_us: Some(1500),
            leases: 900,
            overlaps: 2,
            processes: 3,
            undrained: 1,
            used_us: 5_000_000,
            measured_us: 6_000_000,
            used_10s_millis: None,
        };
        StatusResponse {
            gpus: vec![Gpu {
                uuid: "GPU-a".into(),
                lease_holder: "id-a".into(),
                lease_late: vec!["id-gone".into()],
                lease_waiting: 2,
                lease_quantum_us: 5000,
                ..Gpu::default()
            }],
            allocations: vec![pod("id-a", "llm-0", Some(got)), pod("id-b", "quiet", None)],
            ..StatusResponse::default()
        }
    }

    #[test]
    fn json_has_the_lease_and_all_that_the_arbiter_counts() {
        let json = json::json(&status());
        let gpu = &json["gpus"][0];
        assert_eq!((&gpu["lease_holder"], &gpu["lease_waiting"]), (&"id-a".into(), &2.into()));
        assert_eq!(
            (&gpu["lease_late"][0], &gpu["lease_quantum_us"]),
            (&"id-gone".into(), &5000.into())
        );
        let expected = serde_json::json!({
            "gate": "closed", "got_1s_millis": 620, "got_10s_millis": 505, "leased_us": 7_000_000,
            "waited_us": 3_000_000, "waiting_us": 1500, "leases": 900, "overlaps": 2, "processes": 3,
            "undrained": 1, "used_10s_millis": null, "used_us": 5_000_000, "measured_us": 6_000_000,
        });
        assert_eq!(json["allocations"][0]["compute"], expected);
        assert!(json["allocations"][1]["compute"].is_null(), "nobody divides its time");
    }
}
