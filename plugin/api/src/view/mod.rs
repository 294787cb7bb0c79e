//! `status` as the view that the command line, the JSON API, metrics and the page share.
//!
//! - [`node`]: pure, from what `status` says
//! - [`NodeSource`]: answers the JSON API's questions about this node
//! - [`Past`]: what the history answers, where one is kept

mod gpu;
mod past;
mod source;
mod trace;

use tessera_view::node::{Node, Plugin};
use tessera_view::status::{Allocation, Holder, Status};
use tessera_view::tenant::Tenant;
use tessera_view::{API_VERSION, workload};

pub use past::Past;
pub use source::NodeSource;

/// The node, as `status` has it. `amiss` is what keeps it from offering everything, a sentence each.
pub fn node(name: &str, status: &Status, amiss: Vec<String>) -> Node {
    Node {
        api_version: API_VERSION.to_owned(),
        node: name.to_owned(),
        at_unix_ms: status.at_unix_ms,
        plugin: plugin(status, amiss),
        gpus: status.gpus.iter().map(gpu::view).collect(),
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
    // A claim is of a namespace, whether kubelet has named its pod or not.
    let namespace = match (holder.namespace.as_str(), claim) {
        ("", Some(claim)) => claim.namespace.clone(),
        _ => holder.namespace,
    };
    Tenant {
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
