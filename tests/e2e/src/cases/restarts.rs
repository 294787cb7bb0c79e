//! Whatever is restarted, running pods run on and limits hold.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{self, SHARE_BYTES};
use crate::pods::{self, Container, Pod};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

pub fn crash_loop_keeps_the_limit(suite: &Suite<'_>) -> Result<()> {
    // Ends by a kill, with its memory still held, as a crashing server does.
    let script = "tessera-tenant greedy --for 0 & sleep 2; kill -9 $!; exit 1";
    let container = Container::new("main", 1, &["sh", "-c", script]);
    let pod = Pod::start(suite.kubectl, "crashing", container)?;
    for crashes in 0..2 {
        pod.wait_for_restart(crashes)?;
        let report = pod.wait_for_event("main", "full")?;
        check_fill(report["held"].as_u64().unwrap_or(u64::MAX), SHARE_BYTES)?;
    }
    Ok(())
}

/// Runs on before, during and after; limits hold, and new pods start.
fn survives(suite: &Suite<'_>, restart: impl FnOnce() -> Result<()>) -> Result<()> {
    let server = Server::start(suite.kubectl, "server")?;
    let quiet = Pod::idle(suite.kubectl, "quiet", 2)?;
    let before = quiet.incarnation()?;
    restart()?;
    server.check_untouched()?;
    // A process that first meets CUDA after the restart, in a container from before.
    check_fill(quiet.fill(2 * SHARE_BYTES)?, 2 * SHARE_BYTES)?;
    ensure!(quiet.incarnation()? == before, "restarted");
    let fresh = Pod::idle(suite.kubectl, "fresh", 1)?;
    ensure!(fresh.gpu()?.total == SHARE_BYTES, "{:?}", fresh.gpu()?);
    check_fill(fresh.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    server.check_untouched()
}

pub fn plugin_pod_is_replaced(suite: &Suite<'_>) -> Result<()> {
    survives(suite, || suite.plugin.replace_pod())
}

pub fn plugin_is_killed(suite: &Suite<'_>) -> Result<()> {
    survives(suite, || suite.plugin.kill())
}

pub fn kubelet_restarts(suite: &Suite<'_>) -> Result<()> {
    survives(suite, || suite.restart_kubelet())
}

/// What a reboot without the plugin amounts to: the tmpfs is lost, kubelet starts containers with
/// what it remembers, and nobody prepares them.
pub fn lost_pages_close_and_are_repaired(suite: &Suite<'_>) -> Result<()> {
    let script = "tessera-tenant hold --bytes 100Mi; sleep 3; exit 1";
    let container = Container::new("main", 1, &["sh", "-c", script]);
    let pod = Pod::start(suite.kubectl, "rebooted", container)?;
    pod.wait_for_event("main", "ready")?;

    suite.plugin.set_present(false)?;
    let closed = closes_without_pages(suite, &pod);
    // Whatever came of it: the cases that follow need the plugin.
    suite.plugin.set_present(true)?;
    closed?;
    wait::until("a restarted container has its quota", wait::LIMIT, || {
        let log = pod.log("main", false).unwrap_or_default();
        Ok(Look::when(!pods::events(&log, "ready").is_empty(), log))
    })?;
    ensure!(pod.gpus("main")?[0].total == SHARE_BYTES, "{:?}", pod.gpus("main")?);
    Ok(())
}

/// The pages go while there is no plugin, and the container starts again.
fn closes_without_pages(suite: &Suite<'_>, pod: &Pod<'_>) -> Result<()> {
    suite.on_node(&format!("umount -l {}", deploy::PAGES_ON_NODE))?;
    // Kubelet forgets the plugin: from now on it starts containers without asking anybody.
    suite.stop_kubelet()?;
    suite.start_kubelet()?;
    let (restarts, _) = pod.incarnation()?;
    pod.exec(&["killall", "-9", "tessera-tenant"])?;
    pod.wait_for_restart(restarts)?;
    let log = wait::until("CUDA is refused", wait::LIMIT, || {
        let log = pod.log("main", false)?;
        Ok(if log.is_empty() { Look::NotYet(log) } else { Look::Done(log) })
    })?;
    ensure!(pods::events(&log, "ready").is_empty(), "memory without a quota: {log}");
    ensure!(log.contains("/usr/local/tessera/pages"), "says nothing of the cause: {log}");
    Ok(())
}
