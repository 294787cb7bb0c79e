//! Which pods get a share when there are few.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::delivery::check_fill;
use crate::deploy::{RESOURCE, SHARE_BYTES};
use crate::kubectl::Applied;
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// Both GPUs are full: a pod waits, one of a higher priority takes the place of another, and the first gets that of one
/// that is deleted by force and may still be dying. Neither inherits a byte.
pub fn pods_beyond_the_last_share_wait_and_get_what_is_freed_at_once(
    suite: &Suite<'_>,
) -> Result<()> {
    let _class = Applied::new(
        suite.kubectl,
        json!({
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "tessera-e2e-urgent"},
            "value": 1000,
        }),
    )?;
    let hold = [Container::new("main", 4, &["tessera-tenant", "hold", "--bytes", "3Gi"])];
    let start = |name: &str| Pod::create(suite.kubectl, name, Restart::Always, &[], &hold);
    let low = [start("low-0")?, start("low-1")?];
    let mut uuids = Vec::new();
    for pod in &low {
        pod.wait_until_running()?;
        pod.wait_for_event("main", "ready")?;
        uuids.push(pod.gpu()?.uuid);
    }
    ensure!(uuids[0] != uuids[1], "both on one GPU");
    let idle = [Container::idle("main", 4)];
    let third = Pod::create(suite.kubectl, "third", Restart::Always, &[], &idle)?;
    wait::until("the third pod is unschedulable", wait::LIMIT, || {
        let seen = third.object()?["status"]["conditions"].to_string();
        Ok(Look::when(seen.contains(&format!("Insufficient {RESOURCE}")), seen))
    })?;

    let mut urgent = pods::manifest("urgent", Restart::Always, &[], &idle);
    urgent["spec"]["priorityClassName"] = json!("tessera-e2e-urgent");
    suite.kubectl.create_pod(&urgent)?;
    let urgent = Pod::named(suite.kubectl, "urgent");
    urgent.wait_until_running()?;
    let stay = low.iter().zip(&uuids).find(|(pod, _)| pod.gpu().is_ok());
    let (stay, uuid) = stay.context("both pods were preempted")?;
    ensure!(urgent.gpu()?.uuid != *uuid, "not the GPU that became free");
    check_fill(urgent.fill(4 * SHARE_BYTES)?, 4 * SHARE_BYTES)?;

    stay.forget()?;
    third.wait_until_running()?;
    ensure!(third.gpu()?.uuid == *uuid, "not the GPU that became free");
    // The driver itself gives the memory back only when the old process is gone.
    wait::until("the successor gets its whole quota", wait::LIMIT, || {
        let filled = third.fill(4 * SHARE_BYTES).and_then(|held| check_fill(held, 4 * SHARE_BYTES));
        Ok(match filled {
            Ok(()) => Look::Done(()),
            Err(error) => Look::NotYet(format!("{error:#}")),
        })
    })
}

pub fn more_shares_than_a_gpu_has_are_refused(suite: &Suite<'_>) -> Result<()> {
    let idle = [Container::idle("main", 5)];
    let pod = Pod::create(suite.kubectl, "five", Restart::Never, &[], &idle)?;
    let status = pod.wait_until_over()?["status"].clone();
    ensure!(status["phase"] == "Failed", "{status}");
    ensure!(status["reason"] == "UnexpectedAdmissionError", "{status}");
    let message = status["message"].as_str().unwrap_or_default();
    ensure!(message.contains("GPU"), "says nothing of the cause: {message}");
    Ok(())
}
