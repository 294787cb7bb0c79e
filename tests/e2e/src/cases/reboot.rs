//! A node that loses power and comes back.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::host;
use crate::invariants::{Refusals, is_unavoidable};
use crate::pods::{self, Pod};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// The tmpfs is empty, what kubelet remembers and the ledger are there. Kubelet starts all pods again,
/// the plugin's among them: once all at a time, and once the plugin so late that containers surely start
/// without it.
///
/// Kubelets differ. Older ones start the containers. Those are refused CUDA; a server ends then, is started
/// again, and finds its pages. A program that does not use CUDA runs on, and is closed until somebody starts
/// it again. Newer ones (seen: 1.36) admit every pod again and fail those whose devices have not come back
/// yet, for good: a controller makes another in its place, which here the case does. Either way what runs
/// has its quota, and nobody has a GPU without one.
pub fn node_reboot_keeps_every_pod_and_its_quota(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let mut server = Server::start(suite.kubectl, "server")?;
    let mut quiet = Pod::idle(suite.kubectl, "quiet", 2)?;
    for late in [false, true] {
        let gpus = [server.pod.gpu()?.uuid, quiet.gpu()?.uuid];
        let before = [server.pod.incarnation()?.0, quiet.incarnation()?.0];
        suite.stop_kubelet()?;
        if late {
            suite.host(&format!("touch {}", host::HOLD))?;
        }
        suite.power_off()?;
        suite.start_kubelet()?;
        let stay = [goes_on(&server.pod, before[0])?, goes_on(&quiet, before[1])?];
        if late {
            // Without a plugin: what kubelet starts is refused.
            if stay[1] {
                quiet.wait_for_restart(before[1])?;
                let output = quiet.try_exec(&["tessera-tenant", "info"])?;
                ensure!(output.code != Some(0), "a GPU without a quota: {}", output.stdout);
            }
            if stay[0] {
                let log = server.pod.log("main", false).unwrap_or_default();
                ensure!(pods::events(&log, "progress").is_empty(), "without a quota: {log}");
            }
            suite.release_plugin()?;
        }
        suite.plugin.wait_for_replicas(REPLICAS)?;
        if !stay[0] {
            server = Server::start(suite.kubectl, "server")?;
        }
        if !stay[1] {
            quiet = Pod::idle(suite.kubectl, "quiet", 2)?;
        }
        wait::until("the server serves again", wait::LIMIT, || {
            let log = server.pod.log("main", false).unwrap_or_default();
            Ok(Look::when(!pods::events(&log, "progress").is_empty(), log))
        })?;
        if stay[1] {
            quiet.wait_for_restart(before[1])?;
            if quiet.try_exec(&["tessera-tenant", "info"])?.code != Some(0) {
                quiet.restart_container(suite)?;
            }
        }
        let quota = [server.pod.gpu()?, quiet.gpu()?];
        ensure!(quota[0].total == SHARE_BYTES && quota[1].total == 2 * SHARE_BYTES, "{quota:?}");
        for ((stays, now), then) in stay.into_iter().zip(&quota).zip(&gpus) {
            ensure!(!stays || now.uuid == *then, "{quota:?}, not {gpus:?}");
        }
        check_fill(quiet.fill(2 * SHARE_BYTES)?, 2 * SHARE_BYTES)?;
        for pod in [&server.pod, &quiet] {
            let status = pod.object()?["status"].clone();
            ensure!(status["phase"] == "Running", "{status}");
        }
        println!("     late: {late}; kubelet kept [server, quiet]: {stay:?}");
    }
    Ok(())
}

/// Whether kubelet starts the pod's container again. If it fails the pod instead, for want of the plugin
/// that is not there yet, the pod is removed, as its controller would do.
fn goes_on(pod: &Pod<'_>, restarts: u64) -> Result<bool> {
    let status = wait::until("kubelet decides on a pod of before", wait::LIMIT, || {
        let status = pod.object()?["status"].clone();
        let count = status["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
        let decided = count > restarts || status["phase"] == "Failed";
        Ok(if decided { Look::Done(status) } else { Look::NotYet(status.to_string()) })
    })?;
    if status["phase"] != "Failed" {
        return Ok(true);
    }
    let message = status["message"].as_str().unwrap_or_default();
    let for_want_of_it = status["reason"] == "UnexpectedAdmissionError"
        && is_unavoidable(message, Refusals::WhileReplaced);
    ensure!(for_want_of_it, "failed for another reason: {status}");
    pod.delete()?;
    pod.wait_until_gone()?;
    Ok(false)
}
