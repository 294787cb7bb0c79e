//! GPU time in `status`: the holder of each GPU, shares, and time received.

use serde_json::{Value, json};
use tessera_kubelet_api::admin::{Allocation, ComputeUse, Gpu};

use tessera_arbiter::policy::State;
use tessera_arbiter::{TenantShare, View};
use tessera_model::percent::format_cores;

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
    let got = [compute.got_1s_millis, compute.got_10s_millis].map(format_cores);
    format!("{} {} {}", got[0], got[1], compute.gate)
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

#[cfg(test)]
mod tests {
    use tessera_kubelet_api::admin::{GpuUse, Holder, StatusResponse};

    use super::*;
    use crate::admin::table;

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

    /// The cell of the row that has `of` below the header `title`.
    fn cell(text: &str, title: &str, of: &str) -> String {
        let mut lines = text.lines().skip_while(|line| !line.contains(title));
        let at = lines.next().unwrap().find(title).unwrap();
        let row = lines.find(|line| line.contains(of)).unwrap();
        row[at..].split("  ").next().unwrap().to_owned()
    }

    #[test]
    fn text_says_who_has_the_lease_and_what_each_got() {
        let text = table::text(&status());
        assert_eq!(cell(&text, "LEASE", "GPU-a"), "ns/llm-0 and late id-gone (2 wait)");
        assert_eq!(cell(&text, "GOT 1s 10s", "llm-0"), "62% 50.5% closed");
        assert_eq!(cell(&text, "GOT 1s 10s", "quiet"), "-");
        let idle = Gpu { uuid: "GPU-a".into(), ..Gpu::default() };
        let text = table::text(&StatusResponse { gpus: vec![idle], ..status() });
        assert_eq!(cell(&text, "LEASE", "GPU-a"), "-");
    }

    #[test]
    fn json_has_the_lease_and_all_that_the_arbiter_counts() {
        let json = table::json(&status());
        let gpu = &json["gpus"][0];
        assert_eq!((&gpu["lease_holder"], &gpu["lease_waiting"]), (&"id-a".into(), &2.into()));
        assert_eq!(
            (&gpu["lease_late"][0], &gpu["lease_quantum_us"]),
            (&"id-gone".into(), &5000.into())
        );
        let expected = serde_json::json!({
            "gate": "closed", "got_1s_millis": 620, "got_10s_millis": 505, "leased_us": 7_000_000,
            "waited_us": 3_000_000, "waiting_us": 1500, "leases": 900, "overlaps": 2, "processes": 3,
            "undrained": 1,
        });
        assert_eq!(json["allocations"][0]["compute"], expected);
        assert!(json["allocations"][1]["compute"].is_null(), "nobody divides its time");
    }
}
