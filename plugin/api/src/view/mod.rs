//! `status` as the view that the command line, the JSON API, metrics and the page share.
//!
//! - [`node`]: pure, from what `status` says
//! - [`NodeSource`]: answers the JSON API's questions about this node

mod source;
mod trace;

use std::cmp::Reverse;

use tessera_rules::front_end::FrontEnd;
use tessera_view::gpu as view;
use tessera_view::node::{Node, Plugin};
use tessera_view::status::{self, Allocation, Health, Holder, Status};
use tessera_view::tenant::Tenant;
use tessera_view::{API_VERSION, workload};

pub use source::NodeSource;

/// The node, as `status` has it. `amiss` is what keeps it from offering everything, a sentence each.
pub fn node(name: &str, status: &Status, amiss: Vec<String>) -> Node {
    Node {
        api_version: API_VERSION.to_owned(),
        node: name.to_owned(),
        at_unix_ms: status.at_unix_ms,
        plugin: plugin(status, amiss),
        gpus: status.gpus.iter().map(gpu).collect(),
        tenants: status.allocations.iter().map(tenant).collect(),
        others: Vec::new(),
        hidden_tenants: 0,
        warnings: status.warning_details.clone(),
    }
}

fn plugin(status: &Status, amiss: Vec<String>) -> Plugin {
    let plugin = &status.plugin;
    let errors = plugin.configuration.as_ref().map(|one| one.errors.join("; "));
    Plugin {
        version: plugin.version.clone(),
        started_unix_ms: plugin.started_unix_ms,
        registration: plugin.registration.name().to_owned(),
        ready: amiss.is_empty(),
        amiss,
        resources: plugin.resources.iter().map(|resource| resource.name.clone()).collect(),
        dra_driver: plugin.dra.as_ref().map(|dra| dra.driver.clone()).unwrap_or_default(),
        config_error: errors.unwrap_or_default(),
    }
}

fn tenant(allocation: &Allocation) -> Tenant {
    let holder = allocation.holder.clone().unwrap_or_default();
    let claim = allocation.claim.as_ref();
    Tenant {
        id: allocation.id.clone(),
        generation: allocation.generation,
        state: allocation.state.name().to_owned(),
        namespace: allocation.namespace().to_owned(),
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

/// A GPU, and what still fits on it.
fn gpu(gpu: &status::Gpu) -> view::Gpu {
    let is_withheld = gpu.health == Health::Unhealthy && gpu.cordon.is_empty();
    let withheld = if is_withheld { gpu.health_reason.clone() } else { String::new() };
    view::Gpu {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        name: gpu.name.clone(),
        pci_bus_id: gpu.pci_bus_id.clone(),
        numa_node: gpu.numa_node,
        state: gpu.state.name().to_owned(),
        state_reason: gpu.state_reason.clone(),
        state_since_unix_ms: gpu.state_since_unix_ms,
        state_waits_for: gpu.state_waits_for.clone(),
        cordon: gpu.cordon.clone(),
        withheld,
        front_end: gpu.front_end.clone(),
        moving: gpu.moving,
        memory_total_bytes: gpu.memory_total_bytes,
        memory_used_bytes: gpu.memory_used_bytes,
        memory_reserve_bytes: gpu.memory_reserve_bytes,
        memory_limits_bytes: gpu.memory_limits_bytes,
        memory_charged_bytes: gpu.memory_charged_bytes,
        memory_outside_bytes: gpu.memory_outside_bytes,
        context_overhead_bytes: gpu.context_overhead_bytes,
        cores_millis: gpu.cores_millis,
        left_memory_bytes: gpu.left_memory_bytes,
        left_cores_millis: gpu.left_cores_millis,
        no_room: gpu.no_room.clone(),
        default_memory_bytes: gpu.default_memory_bytes,
        default_cores_millis: gpu.default_cores_millis,
        lease: lease(gpu),
        replicas: gpu.by_resource(),
        fits: fits(gpu),
    }
}

/// There is a quantum where the arbiter divides its time.
fn lease(gpu: &status::Gpu) -> Option<view::Lease> {
    (gpu.lease_quantum_us > 0).then(|| view::Lease {
        holder: gpu.lease_holder.clone(),
        waiting: gpu.lease_waiting,
        quantum_us: gpu.lease_quantum_us,
    })
}

/// What can be handed out now: free replicas, or for claims what is left.
fn fits(gpu: &status::Gpu) -> Vec<view::Fit> {
    if gpu.front_end == FrontEnd::Dra.as_str() {
        return left(gpu).into_iter().collect();
    }
    let fit = |of: view::Replicas| view::Fit {
        resource_name: of.resource_name,
        count: of.free,
        memory_bytes: of.memory_limit_bytes,
        cores_millis: of.cores_millis,
    };
    let free = gpu.by_resource().into_iter().filter(|of| of.free > 0);
    let mut fits: Vec<view::Fit> = free.map(fit).collect();
    fits.sort_by_key(|fit| Reverse((fit.memory_bytes, fit.cores_millis)));
    fits
}

fn left(gpu: &status::Gpu) -> Option<view::Fit> {
    let is_sold = gpu.health == Health::Healthy && gpu.cordon.is_empty() && !gpu.moving;
    (is_sold && gpu.no_room.is_empty()).then(|| view::Fit {
        count: 1,
        memory_bytes: gpu.left_memory_bytes,
        cores_millis: gpu.left_cores_millis,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use tessera_view::status::{Gpu, Replica};

    use super::*;

    fn replica(resource: &str, gib: u64, holder: &str, health: Health) -> Replica {
        Replica {
            resource_name: resource.into(),
            memory_limit_bytes: gib << 30,
            allocation_id: holder.into(),
            health,
            ..Replica::default()
        }
    }

    #[test]
    fn what_fits_is_what_is_free_and_healthy_the_largest_first() {
        let gpu = Gpu {
            replicas: vec![
                replica("small", 10, "", Health::Healthy),
                replica("small", 10, "", Health::Healthy),
                replica("small", 10, "held", Health::Healthy),
                replica("large", 40, "", Health::Unhealthy),
                replica("large", 40, "", Health::Healthy),
            ],
            front_end: FrontEnd::DevicePlugin.as_str().to_owned(),
            ..Gpu::default()
        };
        let seen = super::gpu(&gpu);
        let fits: Vec<_> =
            seen.fits.iter().map(|f| (&*f.resource_name, f.count, f.memory_bytes >> 30)).collect();
        assert_eq!(fits, [("large", 1, 40), ("small", 2, 10)]);
        let cut: Vec<_> =
            seen.replicas.iter().map(|r| (&*r.resource_name, r.count, r.held, r.free)).collect();
        assert_eq!(cut, [("small", 3, 1, 2), ("large", 2, 0, 1)]);
        assert_eq!(seen.lease, None);
    }

    #[test]
    fn of_a_gpu_for_claims_fits_what_is_left_while_it_is_sold() {
        let gpu = Gpu {
            front_end: FrontEnd::Dra.as_str().to_owned(),
            health: Health::Healthy,
            left_memory_bytes: 59 << 30,
            left_cores_millis: 750,
            ..Gpu::default()
        };
        let fit =
            view::Fit { count: 1, memory_bytes: 59 << 30, cores_millis: 750, ..Default::default() };
        assert_eq!(super::gpu(&gpu).fits, [fit]);
        let cordoned = Gpu { cordon: "c".into(), ..gpu.clone() };
        assert!(super::gpu(&cordoned).fits.is_empty() && super::gpu(&cordoned).withheld.is_empty());
        assert!(super::gpu(&Gpu { moving: true, ..gpu.clone() }).fits.is_empty());
        assert!(super::gpu(&Gpu { no_room: "GPU time".into(), ..gpu }).fits.is_empty());
    }
}
