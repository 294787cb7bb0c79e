//! What operators see of a pod, and what they change while it runs.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{CONTEXT_BYTES, NAMESPACE, REPLICAS, SHARE_BYTES};
use crate::pods::{Container, Pod};
use crate::suite::Suite;
use crate::wait::{self, Look};

const HELD: u64 = (300 << 20) + CONTEXT_BYTES;

pub fn status_shows_a_pod_whose_limits_change_and_a_cordoned_gpu_goes_to_nobody(
    suite: &Suite<'_>,
) -> Result<()> {
    let hold = ["tessera-tenant", "hold", "--bytes", "300Mi"];
    let pod = Pod::start(suite.kubectl, "steered", Container::new("main", 1, &hold))?;
    pod.wait_for_event("main", "ready")?;
    shows(suite)?;

    // It grows: a free replica makes room, and the process that runs sees more.
    let name = format!("{NAMESPACE}/steered");
    let bytes = (2 * SHARE_BYTES).to_string();
    suite.plugin.exec(&["tessera", "quota", "set", &name, "--memory", &bytes])?;
    let gpu = pod.gpu()?;
    ensure!(gpu.total == 2 * SHARE_BYTES, "{gpu:?}");
    // The asking process has a context, too.
    ensure!(gpu.free == 2 * SHARE_BYTES - HELD - CONTEXT_BYTES, "{gpu:?}");
    suite.plugin.wait_for_replicas(REPLICAS - 1)?;

    // The container is killed with its memory and starts again, on a GPU that is cordoned.
    suite.plugin.exec(&["tessera", "cordon", &gpu.uuid, "--reason", "maintenance"])?;
    pod.restart_container(suite)?;
    pod.wait_for_event("main", "ready")?;
    let again = pod.gpu()?;
    ensure!(
        (again.total, again.free) == (gpu.total, gpu.free),
        "{gpu:?} before its restart, {again:?} after"
    );
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    let other = Pod::idle(suite.kubectl, "other", 1)?;
    ensure!(other.gpu()?.uuid != gpu.uuid, "a new pod got the cordoned GPU");
    suite.plugin.exec(&["tessera", "uncordon", &gpu.uuid])?;
    suite.plugin.exec(&["tessera", "quota", "reset", &name])?;
    ensure!(pod.gpu()?.total == SHARE_BYTES, "reset");
    suite.plugin.wait_for_replicas(REPLICAS)
}

/// What only a real kubelet tells: the pod's name, its process on the host, and which replica it preferred.
fn shows(suite: &Suite<'_>) -> Result<()> {
    // Kubelet names the holder only after the container has started.
    let (status, allocation) = wait::until("status names the pod", wait::LIMIT, || {
        let status = suite.plugin.status()?;
        let mut all = status["allocations"].as_array().into_iter().flatten();
        let found = all.find(|allocation| allocation["holder"]["pod"] == "steered").cloned();
        Ok(match found {
            Some(allocation) => Look::Done((status, allocation)),
            None => Look::NotYet(status["allocations"].to_string()),
        })
    })?;
    ensure!(status["plugin"]["registration"] == "live", "{}", status["plugin"]);
    ensure!(status["plugin"]["sees_host_pids"] == true, "{}", status["plugin"]);
    ensure!(status["warnings"] == json!([]), "{}", status["warnings"]);
    ensure!(allocation["state"] == "started", "{allocation}");
    ensure!(allocation["holder"]["namespace"] == NAMESPACE, "{allocation}");
    ensure!(allocation["holder"]["container"] == "main", "{allocation}");
    ensure!(allocation["gpus"][0]["memory_charged_bytes"] == HELD, "{allocation}");
    let processes = allocation["processes"].as_array().context("processes")?;
    ensure!(processes.len() == 1, "{processes:?}");
    let host_pid = &processes[0]["host_pid"];
    let name = suite.plugin.exec(&["cat", &format!("/proc/{host_pid}/comm")])?;
    ensure!(name.trim() == "tessera-tenant", "host pid {host_pid} is {name}");
    let answer = suite.plugin.exec(&["tessera", "explain", "steered", "-o", "json"])?;
    let answer: Value = serde_json::from_str(&answer)?;
    let placement = &answer["allocations"][0]["placement"];
    ensure!(placement["as_preferred"] == true, "{placement}");
    suite.plugin.exec(&["tessera", "status", "--ready"]).map(drop)
}
