//! The memory quota holds, whatever the tenant does.

use anyhow::{Context, Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{CONTEXT_BYTES, SHARE_BYTES};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

pub fn over_quota_is_refused_and_the_neighbour_runs_on(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    // Fills its quota, and goes on asking for more.
    let command = ["tessera-tenant", "greedy", "--for", "0", "--retry-ms", "10"];
    let greedy = Pod::start(suite.kubectl, "greedy", Container::new("main", 1, &command))?;
    greedy.wait_for_event("main", "full")?;
    let given = |pod: &Pod<'_>| pod.exec(&["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]);
    let (one, other) = (given(&neighbour.pod)?, given(&greedy)?);
    ensure!(one == other, "not on one GPU: {one} {other}");

    neighbour.check_untouched()?;
    let report = greedy.wait_for_event("main", "progress")?;
    let held = report["held"].as_u64().unwrap_or(u64::MAX);
    check_fill(held, SHARE_BYTES)?;
    ensure!(report["refused"].as_u64() > Some(50), "it did not go on asking: {report}");
    Ok(())
}

/// One container with a preload of its own: processes without an environment, several at once, one that is killed with
/// its memory, and one that got at a GPU it was not given, for instance by a device node of its own.
pub fn processes_of_a_container_share_one_quota_whatever_they_do(suite: &Suite<'_>) -> Result<()> {
    let container = Container::idle("main", 1).env("LD_PRELOAD", "libgcc_s.so.1");
    let pod = Pod::start(suite.kubectl, "preloading", container)?;
    let environment = pod.exec(&["env"])?;
    ensure!(environment.contains("LD_PRELOAD=libgcc_s.so.1"), "{environment}");
    check_fill(pod.fill(SHARE_BYTES)?, SHARE_BYTES).context("a preload of its own")?;

    let [config, state] = pods::hardware();
    let greedy = ["/usr/local/bin/tessera-tenant", "greedy", "--getproc"];
    let text = pod.exec(&[&["env", "-i", &config, &state][..], &greedy].concat())?;
    check_fill(pods::held(&text, "full")?, SHARE_BYTES).context("no environment")?;

    // Four hold memory; a fifth gets the rest. Killed, they give it back: the next one gets as much without a restart.
    let script = "tessera-tenant hold --processes 4 --bytes 100Mi > /tmp/out & \
                  until [ $(grep -c ready /tmp/out) = 4 ]; do usleep 50000; done; \
                  tessera-tenant greedy; killall -9 tessera-tenant; wait; \
                  exec tessera-tenant hold --bytes 800Mi --for 1";
    let text = pod.exec(&["sh", "-c", script])?;
    let left = SHARE_BYTES - 4 * ((100 << 20) + CONTEXT_BYTES);
    check_fill(pods::held(&text, "full")?, left).context("a fifth process")?;
    ensure!(pods::held(&text, "ready")? == 800 << 20, "{text}");

    let others = "unset NVIDIA_VISIBLE_DEVICES; \
                  for n in 0 1; do tessera-tenant --device $n hold --bytes 1Mi --for 1; done";
    let output = pod.try_exec(&["sh", "-c", others])?;
    let held = pods::events(&output.stdout, "ready").len();
    ensure!(held == 1, "{held} of two GPUs could be used: {output:?}");
    // As on a device that is none.
    ensure!(
        output.stderr.contains("invalid device") && output.stderr.contains("101"),
        "{output:?}"
    );
    Ok(())
}

/// A usage page that grows until the file system that holds all pages is full: nobody else's is touched. What is done to
/// a page otherwise, tests/suites/agent shows (`adversity::hostile`).
pub fn ruined_usage_page_hurts_only_its_tenant(suite: &Suite<'_>) -> Result<()> {
    let vandal = [Container::idle("main", 1)];
    let pod = Pod::create(suite.kubectl, "vandal", Restart::Always, &[], &vandal)?;
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    pod.wait_until_running()?;
    let usage = "/usr/local/tessera/pages/*/usage";
    let grow =
        pod.try_exec(&["sh", "-c", &format!("dd if=/dev/zero of=$(echo {usage}) bs=1M seek=1")])?;
    ensure!(grow.stderr.contains("No space left"), "the pages' file system has no end: {grow:?}");
    wait::until("there is room again", wait::LIMIT, || {
        let size = pod.exec(&["sh", "-c", &format!("stat -c %s {usage}")])?;
        Ok(Look::when(size.trim().len() < 7, size))
    })?;
    let fresh = Pod::idle(suite.kubectl, "fresh", 1)?;
    check_fill(fresh.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    let status = suite.plugin.exec(&["tessera", "status"])?;
    ensure!(status.contains("vandal (main)") && status.contains("tampered"), "{status}");
    neighbour.check_untouched()
}
