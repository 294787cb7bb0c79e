//! What operators see.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::deploy::{CONTEXT_BYTES, NAMESPACE, SHARE_BYTES};
use crate::pods::{Container, Pod};
use crate::suite::Suite;
use crate::wait::{self, Look};

pub fn status_shows_pods_quota_and_use(suite: &Suite<'_>) -> Result<()> {
    let hold = ["tessera-tenant", "hold", "--bytes", "300Mi"];
    let holder = Pod::start(suite.kubectl, "holder", Container::new("main", 2, &hold))?;
    holder.wait_for_event("main", "ready")?;

    // Kubelet names the holder only after the container has started.
    let (status, allocation) = wait::until("status names the pod", wait::LIMIT, || {
        let status = suite.plugin.status()?;
        let found = allocation_of(&status, "holder");
        Ok(match found {
            Some(allocation) => Look::Done((status, allocation)),
            None => Look::NotYet(status["allocations"].to_string()),
        })
    })?;
    ensure!(status["plugin"]["registration"] == "live", "{}", status["plugin"]);
    ensure!(status["plugin"]["sees_host_pids"] == true, "{}", status["plugin"]);
    ensure!(status["warnings"] == Value::Array(Vec::new()), "{}", status["warnings"]);
    ensure!(status["gpus"].as_array().map(Vec::len) == Some(2), "{}", status["gpus"]);

    ensure!(allocation["state"] == "started", "{allocation}");
    ensure!(allocation["holder"]["namespace"] == NAMESPACE, "{allocation}");
    ensure!(allocation["holder"]["container"] == "main", "{allocation}");
    ensure!(allocation["replica_ids"].as_array().map(Vec::len) == Some(2), "{allocation}");
    let quota = &allocation["gpus"][0];
    ensure!(quota["memory_limit_bytes"] == 2 * SHARE_BYTES, "{quota}");
    ensure!(quota["memory_charged_bytes"] == (300 << 20) + CONTEXT_BYTES, "{quota}");
    let processes = allocation["processes"].as_array().context("processes")?;
    ensure!(processes.len() == 1, "{processes:?}");
    let host_pid = &processes[0]["host_pid"];
    let name = suite.plugin.exec(&["cat", &format!("/proc/{host_pid}/comm")])?;
    ensure!(name.trim() == "tessera-tenant", "host pid {host_pid} is {name}");

    let text = suite.plugin.exec(&["tessera", "status"])?;
    let row = text.lines().find(|line| line.contains("holder")).with_context(|| text.clone())?;
    ensure!(row.contains(NAMESPACE), "{text}");
    suite.plugin.exec(&["tessera", "status", "--ready"]).map(drop)
}

/// The allocation that status says this pod holds.
fn allocation_of(status: &Value, pod: &str) -> Option<Value> {
    let allocations = status["allocations"].as_array()?;
    allocations.iter().find(|allocation| allocation["holder"]["pod"] == pod).cloned()
}
