//! An explanation as it is shown: the message with the field names of `admin_v1.proto`, and enumerations as words.

use serde_json::{Value, json};
use tessera_kubelet_api::admin::{AllocationStory, Behind, ExplainResponse, Stand, TrailLine};
use tessera_view::explain as view;

use crate::admin;
use crate::admin::{holder_json, words};

/// What is shown of a message, in full.
///
/// # Errors
/// A field that the view has otherwise: a bug.
pub(crate) fn view(explained: &ExplainResponse) -> serde_json::Result<view::Explanation> {
    serde_json::from_value(json(explained))
}

fn json(explained: &ExplainResponse) -> Value {
    json!({
        "api_version": tessera_view::API_VERSION,
        "allocations": explained.allocations.iter().map(allocation_json).collect::<Vec<_>>(),
        "gpus": explained.gpus.iter().map(|story| json!({
            "gpu": story.gpu.as_ref().map(admin::gpu_json),
            "cut": story.cut,
            "trail": trail_json(&story.trail),
        })).collect::<Vec<_>>(),
        "at_unix_ms": explained.at_unix_ms,
        "trail_since_unix_ms": explained.trail_since_unix_ms,
        "left_out": explained.left_out,
        "remarks": explained.remarks,
        "refusals": explained.refusals.iter().map(admin::refusal_json).collect::<Vec<_>>(),
        "apart": true,
    })
}

fn allocation_json(story: &AllocationStory) -> Value {
    let limits = story.limits.iter().map(|limit| {
        json!({
            "gpu_uuid": limit.gpu_uuid,
            "memory_limit_bytes": limit.memory_limit_bytes,
            "memory_origin": limit.memory_origin,
            "cores_millis": limit.cores_millis,
            "policy": words::policy(limit.policy()),
            "cores_origin": limit.cores_origin,
            "set_unix_ms": limit.set_unix_ms,
            "set_by": limit.set_by,
            "context_overhead_bytes": limit.context_overhead_bytes,
            "memory_overhead_bytes": limit.memory_overhead_bytes,
        })
    });
    let incidents = story.incidents.iter().map(|incident| {
        json!({
            "what": incident.what,
            "times": incident.times,
            "first_unix_ms": incident.first_unix_ms,
            "last_unix_ms": incident.last_unix_ms,
            "reason": incident.reason,
            "reason_is_own": incident.reason_is_own,
            "behind": incident.behind.as_ref().map(behind_json),
        })
    });
    json!({
        "id": story.id,
        "generation": story.generation,
        "resource_name": story.resource_name,
        "replica_ids": story.replica_ids,
        "holder": story.holder.as_ref().map(holder_json),
        "now": story.now.as_ref().map(admin::allocation_json),
        "allocated_unix_ms": story.allocated_unix_ms,
        "started_unix_ms": story.started_unix_ms,
        "released_unix_ms": story.released_unix_ms,
        "placement": story.placement.as_ref().map(|placement| json!({
            "preferred_replica_ids": placement.preferred_replica_ids,
            "as_preferred": placement.as_preferred,
            "reason": placement.reason,
            "gpus": placement.gpus,
            "stands": placement.stands.iter().map(stand).collect::<Vec<_>>(),
        })),
        "limits": limits.collect::<Vec<_>>(),
        "enforcement": story.enforcement.as_ref().map(|how| json!({
            "device_list_strategy": how.device_list_strategy,
            "injected_by": how.injected_by,
            "shim": how.shim,
            "page_version": how.page_version,
            "pages_dir": how.pages_dir,
            "remarks": how.remarks,
            "warnings": how.warnings,
        })),
        "incidents": incidents.collect::<Vec<_>>(),
        "trail": trail_json(&story.trail),
    })
}

fn trail_json(trail: &[TrailLine]) -> Vec<Value> {
    let line = |line: &TrailLine| {
        json!({
            "at_unix_ms": line.at_unix_ms,
            "what": line.what,
            "text": line.text,
            "reason": line.reason,
            "reason_is_own": line.reason_is_own,
            "behind": line.behind.as_ref().map(behind_json),
            "by": line.by,
            "gpu_uuid": line.gpu_uuid,
            "allocation_id": line.allocation_id,
            "generation": line.generation,
            "times": line.times,
            "holder": line.holder.as_ref().map(holder_json),
        })
    };
    trail.iter().map(line).collect()
}

fn behind_json(behind: &Behind) -> Value {
    let holder = behind.holder.clone().unwrap_or_default();
    json!({
        "allocation_id": behind.allocation_id,
        "namespace": holder.namespace,
        "pod": holder.pod,
    })
}

/// How a GPU stands, as it is shown.
pub(super) fn stand(stand: &Stand) -> view::Stand {
    view::Stand {
        gpu_uuid: stand.gpu_uuid.clone(),
        missing: stand.missing.clone(),
        index: stand.index,
        name: stand.name.clone(),
        numa_node: stand.numa_node,
        pci_bus_id: stand.pci_bus_id.clone(),
        state: stand.state.clone(),
        state_reason: stand.state_reason.clone(),
        cordon: stand.cordon.clone(),
        withheld: stand.withheld.clone(),
        free: stand.free.clone(),
    }
}
