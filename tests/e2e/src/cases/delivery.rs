//! A pod that asks for shares gets what belongs to them.

use anyhow::{Context, Result, ensure};

use crate::deploy::{CONTEXT_BYTES, SHARE_BYTES};
use crate::pods::{Container, Pod, Restart};
use crate::suite::Suite;

/// The one share's, as a shell names it.
const PAGES: &str = "/usr/local/tessera/pages/*";

pub fn container_gets_shim_pages_and_preload(suite: &Suite<'_>) -> Result<()> {
    let pod = Pod::idle(suite.kubectl, "tenant", 1)?;

    let object = pod.object()?;
    ensure!(object["spec"]["nodeName"] == suite.node.as_str(), "{}", object["spec"]["nodeName"]);
    let events = suite.events_of("tenant")?;
    let scheduled = events.iter().find(|e| e["reason"] == "Scheduled").context("not scheduled")?;
    let by = [&scheduled["source"]["component"], &scheduled["reportingComponent"]];
    ensure!(by.iter().any(|who| **who == "default-scheduler"), "{scheduled}");

    let preload = pod.exec(&["cat", "/etc/ld.so.preload"])?;
    ensure!(preload == "/usr/local/tessera/libtessera.so\n", "/etc/ld.so.preload: {preload:?}");
    pod.exec(&["test", "-r", "/usr/local/tessera/libtessera.so"])?;
    pod.exec(&["sh", "-c", &format!("test -S {PAGES}/session.sock")])?;

    let magic = |file: &str| pod.exec(&["sh", "-c", &format!("head -c 8 {PAGES}/{file}")]);
    ensure!(magic("quota")? == "TSRQUOTA", "no quota page");
    ensure!(magic("usage")? == "TSRUSAGE", "no usage page");

    // Root in the container, and still only the usage page can be written.
    let refused = |script: &str| -> Result<()> {
        let output = pod.try_exec(&["sh", "-c", script])?;
        ensure!(output.code != Some(0), "{script} succeeded");
        Ok(())
    };
    // A shell expands no pattern in a redirection.
    pod.exec(&["sh", "-c", &format!("cd {PAGES} && : >> usage")])?;
    pod.exec(&["sh", "-c", &format!("cd {PAGES} && cat quota >/dev/null")])?;
    refused(&format!("cd {PAGES} && : >> quota"))?;
    refused(&format!("cd {PAGES} && rm quota"))?;
    refused(&format!("cd {PAGES} && touch more"))?;
    refused(&format!("umount {PAGES}"))?;
    refused(": >> /usr/local/tessera/libtessera.so")?;
    refused(": > /etc/ld.so.preload")?;
    refused("rm /etc/ld.so.preload")?;

    let gpu = pod.gpu()?;
    ensure!(gpu.total == SHARE_BYTES, "{gpu:?}");
    ensure!(gpu.free == SHARE_BYTES - CONTEXT_BYTES, "{gpu:?}");
    Ok(())
}

/// An init container, and two that follow it: a share each has, one GPU each sees, and none counts another's memory.
pub fn containers_of_one_pod_have_quotas_of_their_own(suite: &Suite<'_>) -> Result<()> {
    let init = [Container::new("init", 1, &["tessera-tenant", "greedy"])];
    let hold = Container::new("first", 1, &["tessera-tenant", "hold", "--bytes", "700Mi"]);
    let containers = [hold, Container::idle("second", 2)];
    let pod = Pod::create(suite.kubectl, "family", Restart::Always, &init, &containers)?;
    pod.wait_until_running()?;
    pod.wait_for_event("first", "ready")?;
    check_fill(crate::pods::held(&pod.log("init", false)?, "full")?, SHARE_BYTES)
        .context("init")?;
    let second = pod.gpus("second")?;
    ensure!(second.len() == 1 && second[0].total == 2 * SHARE_BYTES, "{second:?}");
    ensure!(second[0].free == 2 * SHARE_BYTES - CONTEXT_BYTES, "counts its neighbour: {second:?}");
    let text = pod.try_exec_in("second", &["tessera-tenant", "greedy"])?.success("greedy")?;
    check_fill(crate::pods::held(&text, "full")?, 2 * SHARE_BYTES)?;
    let first = pod.gpus("first")?;
    // Two contexts: the holder's and that of `info`.
    let left = SHARE_BYTES - (700 << 20) - 2 * CONTEXT_BYTES;
    ensure!(first[0].total == SHARE_BYTES && first[0].free == left, "{first:?}");
    Ok(())
}

/// One process that took all it could get holds its limit less one context, to a chunk.
pub fn check_fill(held: u64, limit: u64) -> Result<()> {
    let most = limit - CONTEXT_BYTES;
    ensure!(held <= most, "{held} bytes held, {most} allowed");
    ensure!(held > most - (8 << 20), "refused at {held} bytes though {most} are allowed");
    Ok(())
}
