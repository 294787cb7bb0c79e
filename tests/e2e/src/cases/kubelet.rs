//! Kubelet and the plugin, down and up at awkward moments.

use anyhow::{Result, bail, ensure};

use super::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::host;
use crate::invariants::{Invariants, Refusals, is_unavoidable};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// The plugin is stopped while kubelet waits for its answer, kubelet ends, and each comes back first
/// once. What was allocated for nobody is nobody's, and the replica can be had again.
pub fn kubelet_restarts_in_the_middle_of_allocate(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let watched = Invariants::watch(suite)?;
    for (name, plugin_first) in [("caught-a", true), ("caught-b", false)] {
        suite.signal_plugin("STOP")?;
        let idle = [Container::idle("main", 2)];
        let caught = Pod::create(suite.kubectl, name, Restart::Always, &[], &idle)?;
        wait_until_asked(suite, &caught)?;
        suite.stop_kubelet()?;
        if plugin_first {
            suite.signal_plugin("CONT")?;
            suite.start_kubelet()?;
        } else {
            suite.start_kubelet()?;
            suite.signal_plugin("CONT")?;
        }
        suite.plugin.wait_for_replicas(REPLICAS)?;
        admitted_or_refused_for_good_reason(&caught)?;
    }
    // All that is left: nothing is lost to what was allocated for nobody.
    let caught = ["caught-a", "caught-b"].map(|name| Pod::named(suite.kubectl, name));
    for pod in &caught {
        pod.delete()?;
    }
    // Until then their replicas are theirs.
    for pod in &caught {
        pod.wait_until_gone()?;
    }
    for (name, shares) in [("four", 4), ("two", 2)] {
        let pod = Pod::idle(suite.kubectl, name, shares)?;
        check_fill(pod.fill(shares * SHARE_BYTES)?, shares * SHARE_BYTES)?;
    }
    let report = watched.finish(Refusals::WhileReplaced)?;
    println!("     {} refused: {:?}", report.refusals.len(), report.refusals);
    Ok(())
}

/// Waits until kubelet has this pod and waits for the plugin, which is stopped: its connection holds
/// what nobody reads.
fn wait_until_asked(suite: &Suite<'_>, pod: &Pod<'_>) -> Result<()> {
    wait::until("the pod is bound to the node", wait::LIMIT, || {
        let object = pod.object()?;
        let bound = object["spec"]["nodeName"].is_string();
        Ok(Look::when(bound, object["status"].to_string()))
    })?;
    wait::until("kubelet asks the plugin", wait::LIMIT, || {
        // Bytes in a receive queue of a socket of the plugin's.
        let queued = suite.host("ss -xH state connected | awk '/tessera/ && $3 > 0' | head -1")?;
        Ok(Look::when(!queued.is_empty(), "nothing is queued"))
    })
}

fn admitted_or_refused_for_good_reason(pod: &Pod<'_>) -> Result<()> {
    let over = pod.wait_for_status("kubelet decides", |status| {
        status["phase"] == "Failed"
            || status["containerStatuses"][0]["state"]["running"].is_object()
    })?;
    if over["phase"] == "Failed" {
        let message = over["message"].as_str().unwrap_or_default();
        if over["reason"] != "UnexpectedAdmissionError"
            || !is_unavoidable(message, Refusals::WhileReplaced)
        {
            bail!("refused: {over}");
        }
        return Ok(());
    }
    ensure!(pod.gpu()?.total == 2 * SHARE_BYTES, "{:?}", pod.gpu()?);
    Ok(())
}

// A node that loses power and comes back.

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
                quiet.check_refused()?;
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
        server.wait_until_serving()?;
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
            let status = pod.status()?;
            ensure!(status["phase"] == "Running", "{status}");
        }
        println!("     late: {late}; kubelet kept [server, quiet]: {stay:?}");
    }
    Ok(())
}

/// Whether kubelet starts the pod's container again. If it fails the pod instead, for want of the plugin
/// that is not there yet, the pod is removed, as its controller would do.
fn goes_on(pod: &Pod<'_>, restarts: u64) -> Result<bool> {
    let status = pod.wait_for_status("kubelet decides on a pod of before", |status| {
        let count = status["containerStatuses"][0]["restartCount"].as_u64();
        count > Some(restarts) || status["phase"] == "Failed"
    })?;
    if status["phase"] != "Failed" {
        return Ok(true);
    }
    let message = status["message"].as_str().unwrap_or_default();
    let for_want_of_it = status["reason"] == "UnexpectedAdmissionError"
        && is_unavoidable(message, Refusals::WhileReplaced);
    ensure!(for_want_of_it, "failed for another reason: {status}");
    pod.end()?;
    Ok(false)
}
