//! An allocation, as a tenant.

use tessera_view::status::{Allocation, Holder};
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
        gpus: allocation.gpus.clone(),
        compute: allocation.compute.clone(),
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
