//! A node that is steered while pods run.

use anyhow::{Result, ensure};

use crate::deploy::{CONTEXT_BYTES, NAMESPACE, REPLICAS, SHARE_BYTES};
use crate::pods::{Container, Pod};
use crate::suite::Suite;
use crate::wait::{self, Look};

pub fn limits_change_under_a_running_pod_and_a_cordoned_gpu_goes_to_nobody(
    suite: &Suite<'_>,
) -> Result<()> {
    let hold = ["tessera-tenant", "hold", "--bytes", "300Mi"];
    let pod = Pod::start(suite.kubectl, "steered", Container::new("main", 1, &hold))?;
    pod.wait_for_event("main", "ready")?;
    let name = format!("{NAMESPACE}/steered");
    wait::until("kubelet has named the pod", wait::LIMIT, || {
        let said = suite.plugin.exec(&["tessera", "quota", "show", &name])?;
        Ok(Look::when(said.contains("the same"), said))
    })?;

    // It grows: a free replica makes room, and the process that runs sees more.
    let set = |bytes: u64| {
        let bytes = bytes.to_string();
        suite.plugin.try_exec(&["tessera", "quota", "set", &name, "--memory", &bytes])
    };
    set(2 * SHARE_BYTES)?.success("quota set")?;
    let held = (300 << 20) + CONTEXT_BYTES;
    let gpu = pod.gpu()?;
    ensure!(gpu.total == 2 * SHARE_BYTES, "{gpu:?}");
    // The asking process has a context, too.
    ensure!(gpu.free == 2 * SHARE_BYTES - held - CONTEXT_BYTES, "{gpu:?}");
    suite.plugin.wait_for_replicas(REPLICAS - 1)?;

    // Neither below what it holds nor beyond the GPU.
    for (bytes, expected) in [(held - 1, "--force"), (100 << 30, "are possible")] {
        let refused = set(bytes)?;
        ensure!(refused.code != Some(0) && refused.stderr.contains(expected), "{refused:?}");
    }

    // The container starts again, on a GPU that is cordoned.
    suite.plugin.exec(&["tessera", "cordon", &gpu.uuid, "--reason", "maintenance"])?;
    pod.restart_container(suite)?;
    ensure!(pod.gpu()?.total == 2 * SHARE_BYTES, "its limit did not outlast its restart");
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    let other = Pod::idle(suite.kubectl, "other", 1)?;
    ensure!(other.gpu()?.uuid != gpu.uuid, "a new pod got the cordoned GPU");
    suite.plugin.exec(&["tessera", "uncordon", &gpu.uuid])?;
    suite.plugin.exec(&["tessera", "quota", "reset", &name])?;
    ensure!(pod.gpu()?.total == SHARE_BYTES, "reset");
    suite.plugin.wait_for_replicas(REPLICAS)
}
