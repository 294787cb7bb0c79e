//! `tessera status` for people, and the same as JSON.

use std::fmt::Write;

use serde_json::{Value, json};
use tessera_kubelet::admin::{
    Allocation, AllocationState, ComputePolicy, Gpu, Health, Plugin, Registration, StatusResponse,
};

use crate::config::quantity::format_bytes;

/// Aligned text.
pub(super) fn text(status: &StatusResponse) -> String {
    let mut out = String::new();
    let plugin = status.plugin.clone().unwrap_or_default();
    line(&mut out, &plugin_line(&plugin));
    if !plugin.registration_error.is_empty() {
        line(&mut out, &format!("  last error: {}", plugin.registration_error));
    }
    if !matches!(plugin.others_seen_by.as_str(), "" | "GetAllocatableResources") {
        let text = format!(
            "  other device plugins are seen by {} only: this kubelet has no GetAllocatableResources",
            plugin.others_seen_by
        );
        line(&mut out, &text);
    }
    line(&mut out, "");
    if status.gpus.is_empty() {
        line(&mut out, "No GPUs.");
    } else {
        line(&mut out, "GPUS");
        let header = [
            "  GPU", "NAME", "UUID", "HEALTH", "MEMORY", "USED", "LIMITS", "CHARGED", "CORES",
            "REPLICAS",
        ];
        table(&mut out, &header, status.gpus.iter().map(gpu_row).collect());
    }
    line(&mut out, "");
    if status.allocations.is_empty() {
        line(&mut out, "No allocations.");
    } else {
        line(&mut out, "ALLOCATIONS");
        let header = [
            "  POD",
            "CONTAINER",
            "STATE",
            "REPLICAS",
            "GPU",
            "MEMORY",
            "USED",
            "OVERHEAD",
            "NVML",
            "PEAK",
            "CORES",
            "PROCESSES",
            "REFUSED",
            "ID",
        ];
        table(&mut out, &header, status.allocations.iter().flat_map(allocation_rows).collect());
    }
    if !status.warnings.is_empty() {
        line(&mut out, "");
        line(&mut out, "WARNINGS");
        for warning in &status.warnings {
            line(&mut out, &format!("  {warning}"));
        }
    }
    out
}

fn line(out: &mut String, text: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{text}");
}

fn plugin_line(plugin: &Plugin) -> String {
    let registration = match plugin.registration() {
        Registration::Live => "registered, kubelet watches",
        Registration::Accepted => "registered, kubelet does not watch yet",
        Registration::Waiting | Registration::Unspecified => "not registered",
    };
    format!(
        "tessera {} (pid {}) serves {}: {registration}",
        plugin.version, plugin.pid, plugin.resource_name
    )
}

fn cores(millis: u32) -> String {
    format!("{millis}m")
}

fn gpu_row(gpu: &Gpu) -> Vec<String> {
    let free = gpu
        .replicas
        .iter()
        .filter(|r| r.allocation_id.is_empty() && r.health() == Health::Healthy)
        .count();
    let health = match gpu.health() {
        Health::Healthy => "healthy".to_owned(),
        _ => format!("unhealthy: {}", gpu.health_reason),
    };
    vec![
        format!("  {}", gpu.index),
        gpu.name.clone(),
        gpu.uuid.clone(),
        health,
        format_bytes(gpu.memory_total_bytes),
        format_bytes(gpu.memory_used_bytes),
        format_bytes(gpu.memory_limits_bytes),
        format_bytes(gpu.memory_charged_bytes),
        cores(gpu.cores_millis),
        format!("{free} of {} free", gpu.replicas.len()),
    ]
}

fn allocation_rows(allocation: &Allocation) -> Vec<Vec<String>> {
    let (pod, container) = match &allocation.holder {
        Some(holder) => (format!("{}/{}", holder.namespace, holder.pod), holder.container.clone()),
        None => ("-".to_owned(), "-".to_owned()),
    };
    let row = |(i, used): (usize, &tessera_kubelet::admin::GpuUse)| {
        let indexes: Vec<&str> = allocation
            .replica_ids
            .iter()
            .filter_map(|id| id.rsplit_once("::"))
            .filter(|(uuid, _)| *uuid == used.gpu_uuid)
            .map(|(_, index)| index)
            .collect();
        // What belongs to the whole allocation stands in its first row.
        let once = |text: String| if i == 0 { text } else { String::new() };
        vec![
            format!("  {}", once(pod.clone())),
            once(container.clone()),
            once(state_name(allocation.state()).to_owned()),
            indexes.join(","),
            used.gpu_uuid.clone(),
            format_bytes(used.memory_limit_bytes),
            format_bytes(used.memory_charged_bytes),
            format_bytes(used.memory_overhead_bytes),
            used.memory_nvml_bytes.map_or_else(|| "-".to_owned(), format_bytes),
            format_bytes(used.memory_peak_bytes),
            format!("{} {}", cores(used.cores_millis), policy_name(used.policy())),
            once(allocation.processes.len().to_string()),
            once(allocation.refusals.to_string()),
            once(allocation.id.clone()),
        ]
    };
    allocation.gpus.iter().enumerate().map(row).collect()
}

fn table(out: &mut String, header: &[&str], rows: Vec<Vec<String>>) {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let header = header.iter().map(ToString::to_string).collect();
    for row in std::iter::once(header).chain(rows) {
        let mut text = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(text, "{cell:<width$}  ");
        }
        line(out, text.trim_end());
    }
}

fn state_name(state: AllocationState) -> &'static str {
    match state {
        AllocationState::Allocated => "allocated",
        AllocationState::Started => "started",
        AllocationState::Parked => "parked",
        AllocationState::Unspecified => "unknown",
    }
}

fn policy_name(policy: ComputePolicy) -> &'static str {
    match policy {
        ComputePolicy::Burst => "burst",
        ComputePolicy::Strict => "strict",
        ComputePolicy::None => "none",
        ComputePolicy::Unspecified => "unknown",
    }
}

fn health_name(health: Health) -> &'static str {
    match health {
        Health::Healthy => "healthy",
        Health::Unhealthy => "unhealthy",
        Health::Unspecified => "unknown",
    }
}

/// The message with the field names of `admin_v1.proto`, and enumerations as words.
pub(super) fn json(status: &StatusResponse) -> Value {
    let plugin = status.plugin.clone().unwrap_or_default();
    json!({
        "plugin": {
            "version": plugin.version,
            "pid": plugin.pid,
            "started_unix_ms": plugin.started_unix_ms,
            "resource_name": plugin.resource_name,
            "registration": match plugin.registration() {
                Registration::Live => "live",
                Registration::Accepted => "accepted",
                Registration::Waiting | Registration::Unspecified => "waiting",
            },
            "registered_unix_ms": plugin.registered_unix_ms,
            "registrations": plugin.registrations,
            "registration_error": plugin.registration_error,
            "sees_host_pids": plugin.sees_host_pids,
            "config_path": plugin.config_path,
            "shim_path": plugin.shim_path,
            "others_seen_by": plugin.others_seen_by,
        },
        "gpus": status.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
        "allocations": status.allocations.iter().map(allocation_json).collect::<Vec<_>>(),
        "warnings": status.warnings,
        "at_unix_ms": status.at_unix_ms,
    })
}

fn gpu_json(gpu: &Gpu) -> Value {
    let replicas = gpu.replicas.iter().map(|replica| {
        json!({
            "id": replica.id,
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
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_reserve_bytes": gpu.memory_reserve_bytes,
        "memory_limits_bytes": gpu.memory_limits_bytes,
        "memory_charged_bytes": gpu.memory_charged_bytes,
        "memory_outside_bytes": gpu.memory_outside_bytes,
        "cores_millis": gpu.cores_millis,
        "replicas": replicas.collect::<Vec<_>>(),
    })
}

fn allocation_json(allocation: &Allocation) -> Value {
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
            "policy": policy_name(used.policy()),
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
        "replica_ids": allocation.replica_ids,
        "holder": allocation.holder.as_ref().map(|holder| json!({
            "namespace": holder.namespace,
            "pod": holder.pod,
            "container": holder.container,
        })),
        "allocated_unix_ms": allocation.allocated_unix_ms,
        "started_unix_ms": allocation.started_unix_ms,
        "gpus": gpus.collect::<Vec<_>>(),
        "processes": processes.collect::<Vec<_>>(),
        "refusals": allocation.refusals,
        "driver_refusals": allocation.driver_refusals,
        "launches": allocation.launches,
        "gpu_time_us": allocation.gpu_time_us,
        "gate_wait_us": allocation.gate_wait_us,
        "tamperings": allocation.tamperings,
        "unaccounted": allocation.unaccounted,
        "pages_dir": allocation.pages_dir,
    })
}

#[cfg(test)]
mod tests {
    use tessera_kubelet::admin::{GpuUse, Holder, Process};

    use super::*;

    fn status() -> StatusResponse {
        StatusResponse {
            plugin: Some(Plugin {
                version: "1.2.3".into(),
                pid: 7,
                resource_name: "tessera.dev/gpu".into(),
                registration: Registration::Live.into(),
                ..Plugin::default()
            }),
            gpus: vec![Gpu {
                uuid: "GPU-a".into(),
                name: "Example".into(),
                health: Health::Healthy.into(),
                memory_total_bytes: 80 << 30,
                ..Gpu::default()
            }],
            allocations: vec![Allocation {
                id: "abcd".into(),
                state: AllocationState::Started.into(),
                replica_ids: vec!["GPU-a::0".into(), "GPU-a::2".into()],
                holder: Some(Holder {
                    namespace: "ns".into(),
                    pod: "llm-0".into(),
                    container: "server".into(),
                }),
                gpus: vec![GpuUse {
                    gpu_uuid: "GPU-a".into(),
                    memory_limit_bytes: 8 << 30,
                    memory_charged_bytes: 3 << 29,
                    cores_millis: 500,
                    policy: ComputePolicy::Burst.into(),
                    ..GpuUse::default()
                }],
                processes: vec![Process { host_pid: 12, ..Process::default() }],
                refusals: 4,
                ..Allocation::default()
            }],
            warnings: vec!["take care".into()],
            at_unix_ms: 1,
        }
    }

    #[test]
    fn text_says_who_holds_what() {
        let text = text(&status());
        assert!(text.starts_with("tessera 1.2.3 (pid 7) serves tessera.dev/gpu: registered"));
        let row = text.lines().find(|line| line.contains("llm-0")).unwrap();
        let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect();
        assert_eq!(cells[..5], ["ns/llm-0", "server", "started", "0,2", "GPU-a"]);
        assert_eq!(cells[5..7], ["8 GiB", "1.5 GiB"]);
        assert!(text.contains("take care"));
    }

    #[test]
    fn columns_are_aligned() {
        let text = text(&status());
        let lines: Vec<&str> = text.lines().collect();
        let header = lines.iter().position(|line| line.starts_with("  POD")).unwrap();
        let column = lines[header].find("CONTAINER").unwrap();
        assert!(lines[header + 1][column..].starts_with("server"));
    }

    #[test]
    fn json_has_words_for_enumerations() {
        let json = json(&status());
        assert_eq!(json["plugin"]["registration"], "live");
        assert_eq!(json["allocations"][0]["state"], "started");
        assert_eq!(json["allocations"][0]["gpus"][0]["memory_limit_bytes"], 8u64 << 30);
        assert_eq!(json["allocations"][0]["holder"]["pod"], "llm-0");
    }
}
