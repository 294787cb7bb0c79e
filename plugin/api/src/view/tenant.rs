//! An allocation, as a tenant.

use tessera_view::status::{Allocation, ComputeUse, GpuUse, Holder};
use tessera_view::{tenant as view, workload};

pub(super) fn view(allocation: &Allocation) -> view::Tenant {
    let holder = allocation.holder.clone().unwrap_or_default();
    let claim = allocation.claim.as_ref();
    // A claim is of a namespace, whether kubelet has named its pod or not.
    let namespace = match (holder.namespace.as_str(), claim) {
        ("", Some(claim)) => claim.namespace.clone(),
        _ => holder.namespace,
    };
    view::Tenant {
        id: allocation.id.clone(),
        generation: allocation.generation,
        state: allocation.state.name().to_owned(),
        namespace,
        workload: workload::of(&holder.pod).to_owned(),
        pod: holder.pod,
        container: holder.container,
        other_holders: allocation.other_holders.iter().map(name).collect(),
        claim: claim.map(|one| format!("{}/{}", one.namespace, one.name)).unwrap_or_default(),
        request: claim.map(|one| one.request.clone()).unwrap_or_default(),
        resource_name: allocation.resource_name.clone(),
        allocated_unix_ms: allocation.allocated_unix_ms,
        started_unix_ms: allocation.started_unix_ms,
        gpus: allocation.gpus.iter().map(used).collect(),
        compute: allocation.compute.as_ref().map(compute),
        processes: u32::try_from(allocation.processes.len()).unwrap_or(u32::MAX),
        refusals: allocation.refusals,
        driver_refusals: allocation.driver_refusals,
        launches: allocation.launches,
        gpu_time_us: allocation.gpu_time_us,
        gate_wait_us: allocation.gate_wait_us,
        unaccounted: allocation.unaccounted,
    }
}

fn name(holder: &Holder) -> String {
    format!("{}/{}/{}", holder.namespace, holder.pod, holder.container)
}

fn used(gpu: &GpuUse) -> view::Use {
    view::Use {
        gpu_uuid: gpu.gpu_uuid.clone(),
        memory_limit_bytes: gpu.memory_limit_bytes,
        memory_charged_bytes: gpu.memory_charged_bytes,
        memory_granted_bytes: gpu.memory_granted_bytes,
        memory_used_bytes: gpu.memory_used_bytes,
        memory_peak_bytes: gpu.memory_peak_bytes,
        memory_overhead_bytes: gpu.memory_overhead_bytes,
        context_overhead_bytes: gpu.context_overhead_bytes,
        memory_nvml_bytes: gpu.memory_nvml_bytes,
        cores_millis: gpu.cores_millis,
        policy: gpu.policy.name().to_owned(),
        changed: gpu.allocated.is_some(),
    }
}

fn compute(compute: &ComputeUse) -> view::Compute {
    view::Compute {
        gate: compute.gate.clone(),
        got_1s_millis: compute.got_1s_millis,
        got_10s_millis: compute.got_10s_millis,
        used_10s_millis: compute.used_10s_millis,
        leased_us: compute.leased_us,
        used_us: compute.used_us,
        measured_us: compute.measured_us,
        waited_us: compute.waited_us,
        waiting_us: compute.waiting_us,
        leases: compute.leases,
        overlaps: compute.overlaps,
    }
}
