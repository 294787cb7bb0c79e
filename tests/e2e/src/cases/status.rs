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
    suite.plugin.exec(&["tessera", "status", "--ready"]).map(drop)?;
    top_shows_it(suite)?;
    explain_says_why(suite, &allocation)
}

fn top_shows_it(suite: &Suite<'_>) -> Result<()> {
    let frame = suite.plugin.exec(&["tessera", "top", "--once", "--interval", "200ms"])?;
    let row = frame.lines().find(|line| line.contains("holder/main"));
    let row = row.with_context(|| frame.clone())?;
    ensure!(row.starts_with(NAMESPACE) && row.contains("started"), "{frame}");
    let json = suite.plugin.exec(&["tessera", "top", "--once", "-o", "json"])?;
    let json: Value = serde_json::from_str(&json)?;
    let mut shown = json["nodes"][0]["view"]["tenants"].as_array().into_iter().flatten();
    let shown = shown.find(|tenant| tenant["pod"] == "holder").context("the pod")?;
    ensure!(shown["rates"]["refusals_per_second"] == 0.0, "{shown}");
    Ok(())
}

/// Kubelet asked which replicas are preferred, and took them; nobody but the configuration set the limits.
fn explain_says_why(suite: &Suite<'_>, allocation: &Value) -> Result<()> {
    let answer = suite.plugin.exec(&["tessera", "explain", "holder", "-o", "json"])?;
    let answer: Value = serde_json::from_str(&answer)?;
    let story = &answer["allocations"][0];
    ensure!(story["id"] == allocation["id"], "{story}");
    let placement = &story["placement"];
    let preferred = &placement["preferred_replica_ids"];
    ensure!(
        *preferred == allocation["replica_ids"] && placement["as_preferred"] == true,
        "{placement}"
    );
    let origin = story["limits"][0]["memory_origin"].as_str().unwrap_or_default();
    ensure!(origin.starts_with("2 × share.memory ("), "{}", story["limits"]);
    let trail = story["trail"].as_array().context("trail")?;
    let whats: Vec<&Value> = trail.iter().map(|line| &line["what"]).collect();
    ensure!(
        whats.contains(&&"allocated".into()) && whats.contains(&&"started".into()),
        "{trail:?}"
    );
    let text =
        suite.plugin.exec(&["tessera", "explain", &format!("{NAMESPACE}/holder"), "-o", "wide"])?;
    ensure!(text.contains("as preferred of") && text.contains("kubelet allocated it"), "{text}");
    Ok(())
}

/// The allocation that status says this pod holds.
fn allocation_of(status: &Value, pod: &str) -> Option<Value> {
    let allocations = status["allocations"].as_array()?;
    allocations.iter().find(|allocation| allocation["holder"]["pod"] == pod).cloned()
}
