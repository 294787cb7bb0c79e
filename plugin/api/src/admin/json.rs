//! `tessera status -o json`: the message with the field names of `admin_v1.proto`, and enumerations as words.

use serde_json::{Value, json};
use tessera_kubelet_api::admin::{
    Allocation, Claim, Configuration, Dra, Gpu, Holder, Plugin, Refusal, Registration, Resource,
    StatusResponse, Warning,
};
use tessera_view::API_VERSION;

use super::compute;
use super::words::{health_name, policy, registration_name, state_name, state_of_gpu};

/// The message with the field names of `admin_v1.proto`, and enumerations as words.
pub fn json(status: &StatusResponse) -> Value {
    json!({
        "api_version": API_VERSION,
        "plugin": status.plugin.as_ref().map(plugin_json),
        "gpus": status.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
        "allocations": status.allocations.iter().map(allocation_json).collect::<Vec<_>>(),
        "warnings": status.warnings,
        "warning_details": status.warning_details.iter().map(warning_json).collect::<Vec<_>>(),
        "refusals": status.refusals.iter().map(refusal_json).collect::<Vec<_>>(),
        "at_unix_ms": status.at_unix_ms,
    })
}

/// Pods that were refused.
pub fn refusal_json(refusal: &Refusal) -> Value {
    let Refusal { namespace, pods, claim, reason, since_unix_ms, last_unix_ms, times } = refusal;
    json!({
        "namespace": namespace,
        "pods": pods,
        "claim": claim,
        "reason": reason,
        "since_unix_ms": since_unix_ms,
        "last_unix_ms": last_unix_ms,
        "times": times,
    })
}

fn warning_json(warning: &Warning) -> Value {
    let Warning { text, since_unix_ms, last_unix_ms, times } = warning;
    json!({
        "text": text,
        "since_unix_ms": since_unix_ms,
        "last_unix_ms": last_unix_ms,
        "times": times,
    })
}

fn plugin_json(plugin: &Plugin) -> Value {
    json!({
        "version": plugin.version,
        "pid": plugin.pid,
        "started_unix_ms": plugin.started_unix_ms,
        "resource_name": plugin.resource_name,
        "dra": plugin.dra.as_ref().map(dra_json),
        "registration": registration_name(plugin.registration()),
        "registered_unix_ms": plugin.registered_unix_ms,
        "registrations": plugin.registrations,
        "registration_error": plugin.registration_error,
        "sees_host_pids": plugin.sees_host_pids,
        "config_path": plugin.config_path,
        "shim_path": plugin.shim_path,
        "others_seen_by": plugin.others_seen_by,
        "resources": plugin.resources.iter().map(resource_json).collect::<Vec<_>>(),
        "configuration": plugin.configuration.as_ref().map(configuration_json),
    })
}

fn dra_json(dra: &Dra) -> Value {
    json!({
        "driver": dra.driver,
        "registered": dra.registration() == Registration::Live,
        "registration_error": dra.registration_error,
        "pool": dra.pool,
        "publication": dra.publication,
        "devices": dra.devices,
        "slices": dra.slices,
        "generation": dra.generation,
        "writes": dra.writes,
        "wipes": dra.wipes,
        "claims": dra.claims,
    })
}

/// How it stands with the configuration's file.
pub fn configuration_json(configuration: &Configuration) -> Value {
    json!({
        "hash": configuration.hash,
        "attempted_unix_ms": configuration.attempted_unix_ms,
        "succeeded_unix_ms": configuration.succeeded_unix_ms,
        "errors": configuration.errors,
        "waiting_keys": configuration.waiting_keys,
        "applied": configuration.applied,
        "refused": configuration.refused,
    })
}

fn resource_json(resource: &Resource) -> Value {
    json!({
        "name": resource.name,
        "retired": resource.retired,
        "registration": registration_name(resource.registration()),
        "registered_unix_ms": resource.registered_unix_ms,
        "registrations": resource.registrations,
        "registration_error": resource.registration_error,
        "replicas": resource.replicas,
        "healthy": resource.healthy,
    })
}

/// A GPU, as `status -o json` has it.
pub fn gpu_json(gpu: &Gpu) -> Value {
    let replicas = gpu.replicas.iter().map(|replica| {
        json!({
            "id": replica.id,
            "resource_name": replica.resource_name,
            "index": replica.index,
            "health": health_name(replica.health()),
            "health_reason": replica.health_reason,
            "memory_limit_bytes": replica.memory_limit_bytes,
            "cores_millis": replica.cores_millis,
            "allocation_id": replica.allocation_id,
        })
    });
    json!({
        "uuid": gpu.uuid,
        "index": gpu.index,
        "name": gpu.name,
        "pci_bus_id": gpu.pci_bus_id,
        "numa_node": gpu.numa_node,
        "health": health_name(gpu.health()),
        "health_reason": gpu.health_reason,
        "state": state_of_gpu(gpu.state()),
        "state_reason": gpu.state_reason,
        "state_since_unix_ms": gpu.state_since_unix_ms,
        "state_waits_for": gpu.state_waits_for,
        "cordon": gpu.cordon,
        "cordoned_with_node": gpu.cordoned_with_node,
        "front_end": gpu.front_end,
        "moving": gpu.moving,
        "lease_holder": gpu.lease_holder,
        "lease_late": gpu.lease_late,
        "lease_waiting": gpu.lease_waiting,
        "lease_quantum_us": gpu.lease_quantum_us,
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_reserve_bytes": gpu.memory_reserve_bytes,
        "memory_limits_bytes": gpu.memory_limits_bytes,
        "memory_charged_bytes": gpu.memory_charged_bytes,
        "memory_outside_bytes": gpu.memory_outside_bytes,
        "context_overhead_bytes": gpu.context_overhead_bytes,
        "context_overhead_source": gpu.context_overhead_source,
        "cores_millis": gpu.cores_millis,
        "left_memory_bytes": gpu.left_memory_bytes,
        "left_cores_millis": gpu.left_cores_millis,
        "no_room": gpu.no_room,
        "default_memory_bytes": gpu.default_memory_bytes,
        "default_cores_millis": gpu.default_cores_millis,
        "replicas": replicas.collect::<Vec<_>>(),
    })
}

/// An allocation, as `status -o json` has it.
pub fn allocation_json(allocation: &Allocation) -> Value {
    let gpus = allocation.gpus.iter().map(|used| {
        json!({
            "gpu_uuid": used.gpu_uuid,
            "memory_limit_bytes": used.memory_limit_bytes,
            "memory_charged_bytes": used.memory_charged_bytes,
            "memory_granted_bytes": used.memory_granted_bytes,
            "memory_peak_bytes": used.memory_peak_bytes,
            "context_overhead_bytes": used.context_overhead_bytes,
            "memory_overhead_bytes": used.memory_overhead_bytes,
            "memory_nvml_bytes": used.memory_nvml_bytes,
            "cores_millis": used.cores_millis,
            "policy": policy(used.policy()),
            "allocated": used.allocated.as_ref().map(|limits| json!({
                "memory_limit_bytes": limits.memory_limit_bytes,
                "cores_millis": limits.cores_millis,
                "policy": policy(limits.policy()),
            })),
            "memory_owed_bytes": used.memory_owed_bytes,
        })
    });
    let processes = allocation.processes.iter().map(|process| {
        json!({
            "host_pid": process.host_pid,
            "container_pid": process.container_pid,
            "slot": process.slot,
            "memory_charged_bytes": process.memory_charged_bytes,
        })
    });
    json!({
        "id": allocation.id,
        "state": state_name(allocation.state()),
        "generation": allocation.generation,
        "resource_name": allocation.resource_name,
        "replica_ids": allocation.replica_ids,
        "holder": allocation.holder.as_ref().map(holder_json),
        "other_holders": allocation.other_holders.iter().map(holder_json).collect::<Vec<_>>(),
        "allocated_unix_ms": allocation.allocated_unix_ms,
        "started_unix_ms": allocation.started_unix_ms,
        "claim": allocation.claim.as_ref().map(claim_json),
        "gpus": gpus.collect::<Vec<_>>(),
        "processes": processes.collect::<Vec<_>>(),
        "refusals": allocation.refusals,
        "driver_refusals": allocation.driver_refusals,
        "launches": allocation.launches,
        "gpu_time_us": allocation.gpu_time_us,
        "gate_wait_us": allocation.gate_wait_us,
        "gate_waits": allocation.gate_waits,
        "gate_timeouts": allocation.gate_timeouts,
        "window_waits": allocation.window_waits,
        "compute": allocation.compute.as_ref().map(compute::json),
        "tamperings": allocation.tamperings,
        "unaccounted": allocation.unaccounted,
        "pages_dir": allocation.pages_dir,
    })
}

/// The container that holds an allocation.
pub(crate) fn holder_json(holder: &Holder) -> Value {
    json!({
        "namespace": holder.namespace,
        "pod": holder.pod,
        "container": holder.container,
    })
}

/// What an allocation is of a claim.
pub(crate) fn claim_json(claim: &Claim) -> Value {
    json!({
        "namespace": claim.namespace,
        "name": claim.name,
        "uid": claim.uid,
        "request": claim.request,
        "pool": claim.pool,
        "devices": claim.devices,
        "share_ids": claim.share_ids,
    })
}
