//! Somebody removes what lies on the host. Containers that start without it are refused CUDA or not
//! started; nothing is handed out before it is whole again. What the plugin makes again by itself,
//! tests/suites/agent shows (`adversity::lost_paths`).

use anyhow::{Context, Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::invariants::{Invariants, Refusals};
use crate::pods::Pod;
use crate::suite::Suite;
use crate::wait::{self, Look};

pub fn host_paths_deleted_under_a_running_plugin(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let watched = Invariants::watch(suite)?;
    let victim = Pod::idle(suite.kubectl, "victim", 1)?;
    let usage = Pod::idle(suite.kubectl, "usage", 1)?;
    let dir = |pod: &Pod<'_>| -> Result<String> {
        let mounts = pod.exec(&["cat", "/proc/self/mountinfo"])?;
        let line = mounts.lines().find(|line| line.contains(" /usr/local/tessera/pages/"));
        let root = line.and_then(|line| line.split(' ').nth(3)).context("pages")?;
        Ok(root.trim_start_matches('/').to_owned())
    };

    // One allocation's directory; another's usage file.
    suite.host(&format!("rm -r $pages/{}; rm $pages/{}/usage", dir(&victim)?, dir(&usage)?))?;
    for (pod, comes_back) in [(&victim, false), (&usage, true)] {
        let output = pod.try_exec(&["tessera-tenant", "info"])?;
        // A page is made again where it was; of a directory that was mounted, the container has the one that is gone.
        if comes_back && output.code == Some(0) {
            ensure!(pod.gpu()?.total == SHARE_BYTES, "a GPU without its quota: {}", output.stdout);
        } else {
            ensure!(output.code != Some(0), "a GPU without a quota: {}", output.stdout);
            // The usage file is mounted by itself: the new one is in reach through its directory, which is read-only.
            let is_said =
                ["absent", "not accessible"].iter().any(|word| output.stderr.contains(word));
            ensure!(is_said, "says nothing of it: {}", output.stderr);
        }
        pod.restart_container(suite)?;
        check_fill(pod.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    }

    // All pages at once. Running processes run on; new processes in containers from before find no page.
    suite.host("rm -r $pages/*")?;
    let fresh = Pod::idle(suite.kubectl, "fresh", 1)?;
    check_fill(fresh.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    watched.finish(true, Refusals::None).map(drop)
}

pub fn host_paths_deleted_while_the_plugin_is_away(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let watched = Invariants::watch(suite)?;
    let victim = Pod::idle(suite.kubectl, "victim", 1)?;
    let (before, _) = victim.incarnation()?;
    suite.hold_plugin()?;
    suite.host(
        "rm -rf $pages/* $pages/.spare $state/shim $state/ledger.redb
         rm -f /var/lib/kubelet/device-plugins/tessera*",
    )?;
    // Its container ends, and must not come back with a GPU that nobody limits.
    suite.host(&format!("kill -9 {}", victim.host_pid(suite)?))?;
    let unlimited = wait::until("kubelet has tried", wait::LIMIT, || {
        let status = victim.object()?["status"]["containerStatuses"][0].clone();
        let restarts = status["restartCount"].as_u64().unwrap_or(0);
        let running = status["state"]["running"].is_object() && restarts > before;
        let waits = status["state"]["waiting"]["reason"].is_string();
        Ok(if running || waits { Look::Done(running) } else { Look::NotYet(status.to_string()) })
    })?;
    if unlimited {
        let output = victim.try_exec(&["tessera-tenant", "info"])?;
        ensure!(output.code != Some(0), "a GPU without a quota: {}", output.stdout);
    }
    suite.release_plugin()?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    if unlimited {
        victim.restart_container(suite)?;
    } else {
        victim.wait_for_restart(before)?;
    }
    check_fill(victim.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    let fresh = Pod::idle(suite.kubectl, "fresh", 1)?;
    check_fill(fresh.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    watched.finish(true, Refusals::None).map(drop)
}
