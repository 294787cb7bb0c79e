//! The memory quota holds, whatever the tenant does.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{CONTEXT_BYTES, SHARE_BYTES};
use crate::pods::{self, Container, Pod};
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

pub fn processes_of_a_container_share_one_quota(suite: &Suite<'_>) -> Result<()> {
    let hold = ["tessera-tenant", "hold", "--processes", "4", "--bytes", "100Mi"];
    let pod = Pod::start(suite.kubectl, "many", Container::new("main", 1, &hold))?;
    wait::until("four processes hold memory", wait::LIMIT, || {
        let log = pod.log("main", false)?;
        Ok(Look::when(pods::events(&log, "ready").len() == 4, log))
    })?;
    let left = SHARE_BYTES - 4 * ((100 << 20) + CONTEXT_BYTES);
    let gpu = pod.gpu()?;
    ensure!(gpu.free == left - CONTEXT_BYTES, "a fifth process sees {gpu:?}, {left} are left");
    check_fill(pod.fill(left)?, left)
}

pub fn cleared_environment_is_still_held(suite: &Suite<'_>) -> Result<()> {
    let pod = Pod::idle(suite.kubectl, "cleared", 1)?;
    let [config, state] = pods::hardware();
    let text = pod.exec(&[
        "env",
        "-i",
        &config,
        &state,
        "/usr/local/bin/tessera-tenant",
        "greedy",
        "--getproc",
    ])?;
    check_fill(pods::held(&text, "full")?, SHARE_BYTES)
}

pub fn own_preload_is_still_held(suite: &Suite<'_>) -> Result<()> {
    let container = Container::idle("main", 1).env("LD_PRELOAD", "libgcc_s.so.1");
    let pod = Pod::start(suite.kubectl, "preloading", container)?;
    let environment = pod.exec(&["env"])?;
    ensure!(environment.contains("LD_PRELOAD=libgcc_s.so.1"), "{environment}");
    check_fill(pod.fill(SHARE_BYTES)?, SHARE_BYTES)
}

pub fn killed_process_gives_its_memory_back(suite: &Suite<'_>) -> Result<()> {
    let pod = Pod::idle(suite.kubectl, "killed", 1)?;
    // Killed while it holds most of the quota; the next one gets as much, without a restart.
    let script = "tessera-tenant hold --bytes 800Mi > /tmp/out & \
                  until grep -q ready /tmp/out; do usleep 50000; done; kill -9 $!; wait $!; \
                  exec tessera-tenant hold --bytes 800Mi --for 1";
    let text = pod.exec(&["sh", "-c", script])?;
    ensure!(pods::held(&text, "ready")? == 800 << 20, "{text}");
    Ok(())
}

/// A container that got at a GPU it was not given, for instance by a device node of its own.
pub fn gpu_that_was_not_given_is_refused(suite: &Suite<'_>) -> Result<()> {
    let pod = Pod::idle(suite.kubectl, "intruder", 1)?;
    ensure!(pod.gpu()?.total == SHARE_BYTES, "{:?}", pod.gpu()?);
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

pub fn ruined_usage_page_hurts_only_its_tenant(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    let container = Container::new("main", 1, &["sh", "-c", "sleep 2147483647 & wait $!"]);
    let pod = Pod::start(suite.kubectl, "vandal", container)?;
    let usage = "/usr/local/tessera/pages/*/usage";
    let works = || -> Result<bool> {
        Ok(pod.try_exec(&["tessera-tenant", "hold", "--bytes", "1Mi", "--for", "1"])?.code
            == Some(0))
    };
    // Cut: no quota can be kept with it, so no memory, until the plugin has put it right; the
    // container need not be restarted for that.
    pod.exec(&["sh", "-c", &format!("for f in {usage}; do : > $f; done")])?;
    wait::until("the usage page is put right", wait::LIMIT, || {
        Ok(Look::when(works()?, "no memory yet"))
    })?;
    pod.exec(&["killall", "sleep"])?;
    pod.wait_for_restart(0)?;
    ensure!(works()?, "refused after a restart");
    // Grown until the file system that holds all pages is full: nobody else's is touched.
    let grow =
        pod.try_exec(&["sh", "-c", &format!("dd if=/dev/zero of=$(echo {usage}) bs=1M seek=1")])?;
    ensure!(grow.stderr.contains("No space left"), "the pages' file system has no end: {grow:?}");
    neighbour.check_untouched()?;
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
