//! Kubelet and the plugin, down and up at awkward moments.

use anyhow::{Result, bail, ensure};

use super::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::invariants::{Invariants, Refusals, is_unavoidable};
use crate::pods::{Container, Pod, Restart};
use crate::suite::Suite;
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
    let report = watched.finish(false, Refusals::WhileReplaced)?;
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
    let over = wait::until("kubelet decides", wait::LIMIT, || {
        let status = pod.object()?["status"].clone();
        let decided = status["phase"] == "Failed"
            || status["containerStatuses"][0]["state"]["running"].is_object();
        Ok(if decided { Look::Done(status) } else { Look::NotYet(status.to_string()) })
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

pub fn plugin_and_kubelet_down_and_up_in_either_order(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let watched = Invariants::watch(suite)?;
    // The plugin goes first and comes last, then the other way round.
    suite.hold_plugin()?;
    suite.stop_kubelet()?;
    suite.start_kubelet()?;
    suite.release_plugin()?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    let first = Pod::idle(suite.kubectl, "first", 1)?;

    suite.stop_kubelet()?;
    suite.hold_plugin()?;
    suite.release_plugin()?;
    wait::until("the plugin is up and waits for kubelet", wait::LIMIT, || {
        let pids = suite.host("serving")?;
        Ok(Look::when(!pids.is_empty(), "no plugin"))
    })?;
    suite.start_kubelet()?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    let second = Pod::idle(suite.kubectl, "second", 1)?;
    for pod in [first, second] {
        check_fill(pod.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    }
    watched.finish(false, Refusals::None).map(drop)
}
