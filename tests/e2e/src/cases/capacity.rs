//! Which pods get a share when there are few.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{CONTEXT_BYTES, NAMESPACE, RESOURCE, SHARE_BYTES};
use crate::pods::{Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

pub fn pods_beyond_the_last_share_wait_until_one_is_free(suite: &Suite<'_>) -> Result<()> {
    let hold = ["tessera-tenant", "hold", "--bytes", "3Gi"];
    let first = Pod::start(suite.kubectl, "first", Container::new("main", 4, &hold))?;
    let second = Pod::start(suite.kubectl, "second", Container::new("main", 4, &hold))?;
    first.wait_for_event("main", "ready")?;
    second.wait_for_event("main", "ready")?;
    ensure!(first.gpus("main")?[0].uuid != second.gpus("main")?[0].uuid, "both on one GPU");

    let idle = [Container::idle("main", 4)];
    let third = Pod::create(suite.kubectl, "third", Restart::Always, &[], &idle)?;
    wait::until("the third pod is unschedulable", wait::LIMIT, || {
        let seen = third.object()?["status"]["conditions"].to_string();
        Ok(Look::when(seen.contains(&format!("Insufficient {RESOURCE}")), seen))
    })?;

    let uuid = first.gpus("main")?.remove(0).uuid;
    first.delete()?;
    third.wait_until_running()?;
    let gpu = third.gpu()?;
    ensure!(gpu.uuid == uuid, "not the GPU that became free: {gpu:?}");
    ensure!(gpu.free == 4 * SHARE_BYTES - CONTEXT_BYTES, "inherits from its predecessor: {gpu:?}");
    Ok(())
}

pub fn share_of_a_force_deleted_pod_is_reused_at_once(suite: &Suite<'_>) -> Result<()> {
    // All shares, so that the successor has to get those of the pod that may still be dying.
    let other = Pod::idle(suite.kubectl, "other", 4)?;
    let hold = ["tessera-tenant", "hold", "--bytes", "3Gi"];
    let old = Pod::start(suite.kubectl, "old", Container::new("main", 4, &hold))?;
    old.wait_for_event("main", "ready")?;
    suite.kubectl.run(&[
        "delete",
        "pod",
        "-n",
        NAMESPACE,
        "old",
        "--force",
        "--grace-period=0",
        "--wait=false",
    ])?;
    let new = Pod::idle(suite.kubectl, "new", 4)?;
    // The driver itself gives the memory back only when the old process is gone.
    wait::until("the successor gets its whole quota", wait::LIMIT, || {
        let filled = new.fill(4 * SHARE_BYTES).and_then(|held| check_fill(held, 4 * SHARE_BYTES));
        Ok(match filled {
            Ok(()) => Look::Done(()),
            Err(error) => Look::NotYet(format!("{error:#}")),
        })
    })?;
    check_fill(other.fill(4 * SHARE_BYTES)?, 4 * SHARE_BYTES)
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
