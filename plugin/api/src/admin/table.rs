//! `tessera status` for people, and the same as JSON.

use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};
use tessera_kubelet_api::admin::{
    Allocation, AllocationState, ComputePolicy, Configuration, Gpu, GpuState, GpuUse, Health,
    Plugin, Registration, Resource, StatusResponse,
};

use super::compute;
use tessera_config::Config;
use tessera_model::duration;
use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_rules::shares;

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
    if plugin.resources.len() > 1 || plugin.resources.iter().any(|resource| resource.retired) {
        line(&mut out, "");
        line(&mut out, "RESOURCES");
        let header = ["  NAME", "REGISTRATION", "HEALTHY", "REPLICAS"];
        table(&mut out, &header, plugin.resources.iter().map(resource_row).collect());
    }
    line(&mut out, "");
    if status.gpus.is_empty() {
        line(&mut out, "No GPUs.");
    } else {
        line(&mut out, "GPUS");
        let header = [
            "  GPU", "NAME", "UUID", "HEALTH", "MEMORY", "USED", "LIMITS", "CHARGED", "CORES",
            "REPLICAS", "LEASE",
        ];
        let row = |gpu: &Gpu| {
            let mut row = gpu_row(gpu);
            row.push(compute::holder(gpu, &status.allocations));
            row
        };
        table(&mut out, &header, status.gpus.iter().map(row).collect());
        for gpu in status.gpus.iter().filter(|gpu| gpu.state() != GpuState::Healthy) {
            line(&mut out, &trouble(gpu, status.at_unix_ms));
        }
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
            "RESOURCE",
            "REPLICAS",
            "GPU",
            "MEMORY",
            "USED",
            "OVERHEAD",
            "NVML",
            "PEAK",
            "CORES",
            "GOT 1s 10s",
            "PROCESSES",
            "REFUSED",
            "ID",
        ];
        table(&mut out, &header, status.allocations.iter().flat_map(allocation_rows).collect());
        let mut used = status.allocations.iter().flat_map(|allocation| &allocation.gpus);
        if used.any(|used| used.allocated.is_some()) {
            line(&mut out, "  * changed while it runs; see `tessera quota show`");
        }
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

/// What each GPU would be sold as.
#[must_use]
pub fn offers(gpus: &[tessera_model::gpu::Gpu], config: &Config) -> String {
    let header = ["GPU", "NAME", "UUID", "RESOURCE", "REPLICAS", "MEMORY", "CORES"];
    let rows = gpus.iter().flat_map(|gpu| {
        shares::cut(gpu, config).into_iter().enumerate().map(|(i, share)| {
            // What belongs to the GPU stands in its first row.
            let once = |text: String| if i == 0 { text } else { String::new() };
            vec![
                once(gpu.index.to_string()),
                once(gpu.name.clone()),
                once(gpu.uuid.clone()),
                share.resource,
                share.count.to_string(),
                format_bytes(share.limit.memory_bytes),
                format!("{} {}", format_cores(share.limit.cores_millis), share.compute.name()),
            ]
        })
    });
    let mut out = String::new();
    table(&mut out, &header, rows.collect());
    out
}

fn line(out: &mut String, text: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{}", printable::line(text));
}

fn plugin_line(plugin: &Plugin) -> String {
    let registration = registration_text(plugin.registration());
    format!(
        "tessera {} (pid {}) serves {}: {registration}",
        plugin.version, plugin.pid, plugin.resource_name
    )
}

fn registration_text(registration: Registration) -> &'static str {
    match registration {
        Registration::Live => "registered, kubelet watches",
        Registration::Accepted => "registered, kubelet does not watch yet",
        Registration::Waiting | Registration::Unspecified => "not registered",
    }
}

fn resource_row(resource: &Resource) -> Vec<String> {
    let retired = if resource.retired { "; retired, served while it is held" } else { "" };
    vec![
        format!("  {}", resource.name),
        format!("{}{retired}", registration_text(resource.registration())),
        resource.healthy.to_string(),
        resource.replicas.to_string(),
    ]
}

/// `3 of 4 free`; with several resources, each by its name.
fn free_replicas(gpu: &Gpu) -> String {
    let mut names: Vec<&str> = gpu.replicas.iter().map(|r| r.resource_name.as_str()).collect();
    names.dedup();
    let count = |name: &str| {
        let of = gpu.replicas.iter().filter(|replica| replica.resource_name == name);
        let free = |r: &&tessera_kubelet_api::admin::Replica| {
            r.allocation_id.is_empty() && r.health() == Health::Healthy
        };
        format!("{} of {} free", of.clone().filter(free).count(), of.count())
    };
    match names.as_slice() {
        [] => "0 of 0 free".to_owned(),
        [name] => count(name),
        several => {
            let each: Vec<_> = several.iter().map(|n| format!("{n}: {}", count(n))).collect();
            each.join(", ")
        }
    }
}

fn gpu_row(gpu: &Gpu) -> Vec<String> {
    let health = match (gpu.state(), gpu.health()) {
        // Also one that is held back for another reason than its health.
        (GpuState::Healthy | GpuState::Unspecified, Health::Unhealthy) => {
            format!("unhealthy: {}", gpu.health_reason)
        }
        // Why, and what it waits for, is told below the table.
        (state, _) => state_of_gpu(state).to_owned(),
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
        format_cores(gpu.cores_millis),
        free_replicas(gpu),
    ]
}

/// One GPU's trouble in a sentence.
fn trouble(gpu: &Gpu, now_unix_ms: i64) -> String {
    let ago = now_unix_ms.saturating_sub(gpu.state_since_unix_ms);
    let ago = Duration::from_millis(u64::try_from(ago).unwrap_or(0));
    let (state, ago) = (state_of_gpu(gpu.state()), duration::format(ago));
    let mut text = format!("  GPU {} is {state} since {ago}: {}", gpu.index, gpu.state_reason);
    if !gpu.state_waits_for.is_empty() {
        let _ = write!(text, "; waits for {}", gpu.state_waits_for);
    }
    text
}

/// A GPU's state, in lower case.
#[must_use]
pub fn state_of_gpu(state: GpuState) -> &'static str {
    match state {
        GpuState::Healthy => "healthy",
        GpuState::Suspect => "suspect",
        GpuState::Unhealthy => "unhealthy",
        GpuState::Recovering => "recovering",
        GpuState::Unspecified => "unknown",
    }
}

/// Marks a limit that was changed while the allocation ran.
fn changed(text: String, used: &GpuUse) -> String {
    if used.allocated.is_some() { text + "*" } else { text }
}

fn allocation_rows(allocation: &Allocation) -> Vec<Vec<String>> {
    let (pod, container) = match &allocation.holder {
        Some(holder) => (format!("{}/{}", holder.namespace, holder.pod), holder.container.clone()),
        None => ("-".to_owned(), "-".to_owned()),
    };
    let row = |(i, used): (usize, &GpuUse)| {
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
            once(match allocation.resource_name.as_str() {
                "" => "-".to_owned(),
                name => name.to_owned(),
            }),
            indexes.join(","),
            used.gpu_uuid.clone(),
            changed(format_bytes(used.memory_limit_bytes), used),
            format_bytes(used.memory_charged_bytes),
            format_bytes(used.memory_overhead_bytes),
            used.memory_nvml_bytes.map_or_else(|| "-".to_owned(), format_bytes),
            format_bytes(used.memory_peak_bytes),
            changed(
                format!("{} {}", format_cores(used.cores_millis), policy_name(used.policy())),
                used,
            ),
            once(compute::cell(allocation)),
            once(allocation.processes.len().to_string()),
            once(allocation.refusals.to_string()),
            once(allocation.id.clone()),
        ]
    };
    allocation.gpus.iter().enumerate().map(row).collect()
}

/// Writes `rows` below `header`, in columns as wide as their widest cell.
pub fn table(out: &mut String, header: &[&str], mut rows: Vec<Vec<String>>) {
    // As they are printed, so that columns are as wide as that.
    for cell in rows.iter_mut().flatten() {
        if let Cow::Owned(printed) = printable::line(cell) {
            *cell = printed;
        }
    }
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

/// An allocation's state, in lower case.
#[must_use]
pub fn state_name(state: AllocationState) -> &'static str {
    match state {
        AllocationState::Allocated => "allocated",
        AllocationState::Started => "started",
        AllocationState::Parked => "parked",
        AllocationState::Unspecified => "unknown",
    }
}

/// A compute policy, as the configuration has it.
#[must_use]
pub fn policy_name(policy: ComputePolicy) -> &'static str {
    match policy {
        ComputePolicy::Burst => "burst",
        ComputePolicy::Strict => "strict",
        ComputePolicy::None => "none",
        ComputePolicy::Unspecified => "unknown",
    }
}

pub(crate) fn health_name(health: Health) -> &'static str {
    match health {
        Health::Healthy => "healthy",
        Health::Unhealthy => "unhealthy",
        Health::Unspecified => "unknown",
    }
}

/// The message with the field names of `admin_v1.proto`, and enumerations as words.
pub fn json(status: &StatusResponse) -> Value {
    let plugin = status.plugin.clone().unwrap_or_default();
    json!({
        "plugin": {
            "version": plugin.version,
            "pid": plugin.pid,
            "started_unix_ms": plugin.started_unix_ms,
            "resource_name": plugin.resource_name,
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
        },
        "gpus": status.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
        "allocations": status.allocations.iter().map(allocation_json).collect::<Vec<_>>(),
        "warnings": status.warnings,
        "at_unix_ms": status.at_unix_ms,
    })
}

fn registration_name(registration: Registration) -> &'static str {
    match registration {
        Registration::Live => "live",
        Registration::Accepted => "accepted",
        Registration::Waiting | Registration::Unspecified => "waiting",
    }
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
#[must_use]
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
        "replicas": replicas.collect::<Vec<_>>(),
    })
}

/// An allocation, as `status -o json` has it.
#[must_use]
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
            "policy": policy_name(used.policy()),
            "allocated": used.allocated.as_ref().map(|limits| json!({
                "memory_limit_bytes": limits.memory_limit_bytes,
                "cores_millis": limits.cores_millis,
                "policy": policy_name(limits.policy()),
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
        "gate_waits": allocation.gate_waits,
        "gate_timeouts": allocation.gate_timeouts,
        "window_waits": allocation.window_waits,
        "compute": allocation.compute.as_ref().map(compute::json),
        "tamperings": allocation.tamperings,
        "unaccounted": allocation.unaccounted,
        "pages_dir": allocation.pages_dir,
    })
}

#[cfg(test)]
mod tests {
    use tessera_kubelet_api::admin::{Holder, Limits, Process};

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
                resource_name: "tessera.dev/gpu".into(),
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
        let resource = "tessera.dev/gpu";
        assert_eq!(cells[..6], ["ns/llm-0", "server", "started", resource, "0,2", "GPU-a"]);
        assert_eq!(cells[6..8], ["8 GiB", "1.5 GiB"]);
        assert!(text.contains("take care"));
    }

    #[test]
    fn limits_that_were_changed_are_marked() {
        let mut status = status();
        assert!(!text(&status).contains('*'));
        let memory_limit_bytes = 4 << 30;
        let allocated = Limits { memory_limit_bytes, cores_millis: 250, ..Limits::default() };
        status.allocations[0].gpus[0].allocated = Some(allocated);
        let text = text(&status);
        assert!(text.contains("8 GiB*") && text.contains("50% burst*"), "{text}");
        assert!(text.contains("tessera quota show"), "{text}");
        let used = &json(&status)["allocations"][0]["gpus"][0];
        assert_eq!(used["allocated"]["memory_limit_bytes"], 4u64 << 30);
    }

    #[test]
    fn several_resources_are_told_apart() {
        let mut status = status();
        assert!(!text(&status).contains("RESOURCES"));
        let named = |name: &str, retired, healthy| Resource {
            name: name.into(),
            retired,
            registration: Registration::Live.into(),
            replicas: 2,
            healthy,
            ..Resource::default()
        };
        status.plugin.as_mut().unwrap().resources =
            vec![named("x.dev/large", false, 1), named("x.dev/old", true, 0)];
        let replica = |name: &str, holder: &str| tessera_kubelet_api::admin::Replica {
            resource_name: name.into(),
            allocation_id: holder.into(),
            health: Health::Healthy.into(),
            ..Default::default()
        };
        status.gpus[0].replicas = vec![replica("x.dev/large", ""), replica("x.dev/small", "id")];
        let text = text(&status);
        let cells = |line: &str| -> Vec<String> {
            line.split("  ").map(|c| c.trim().to_owned()).filter(|c| !c.is_empty()).collect()
        };
        let old = text.lines().find(|line| line.contains("x.dev/old")).unwrap();
        let told = "registered, kubelet watches; retired, served while it is held";
        assert_eq!(cells(old), ["x.dev/old", told, "0", "2"]);
        assert!(text.contains("x.dev/large: 1 of 1 free, x.dev/small: 0 of 1 free"), "{text}");
        let json = json(&status);
        assert_eq!(json["plugin"]["resources"][1]["retired"], true);
        assert_eq!(json["gpus"][0]["replicas"][1]["resource_name"], "x.dev/small");
        assert_eq!(json["allocations"][0]["resource_name"], "tessera.dev/gpu");
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
