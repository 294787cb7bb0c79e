//! A node that loses power and comes back.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::host;
use crate::pods::{self, Pod};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// The tmpfs is empty, what kubelet remembers and the ledger are there. Kubelet starts all pods again,
/// the plugin's among them: once all at a time, and once the plugin so late that containers surely start
/// without it. Those are refused CUDA; a server ends then, is started again, and finds its pages. A
/// program that does not use CUDA runs on, and is closed until somebody starts it again.
pub fn node_reboot_keeps_every_pod_and_its_quota(suite: &Suite<'_>) -> Result<()> {
    suite.plugin.supervise()?;
    let server = Server::start(suite.kubectl, "server")?;
    let quiet = Pod::idle(suite.kubectl, "quiet", 2)?;
    let gpus = [server.pod.gpu()?.uuid, quiet.gpu()?.uuid];
    for late in [false, true] {
        let before = [server.pod.incarnation()?, quiet.incarnation()?];
        suite.stop_kubelet()?;
        if late {
            suite.host(&format!("touch {}", host::HOLD))?;
        }
        suite.power_off()?;
        suite.start_kubelet()?;
        if late {
            // Without a plugin: kubelet starts it, and it is refused.
            quiet.wait_for_restart(before[1].0)?;
            let output = quiet.try_exec(&["tessera-tenant", "info"])?;
            ensure!(output.code != Some(0), "a GPU without a quota: {}", output.stdout);
            ensure!(pods::events(&server.pod.log("main", false)?, "progress").is_empty());
            suite.release_plugin()?;
        }
        suite.plugin.wait_for_replicas(REPLICAS)?;
        wait::until("the server serves again", wait::LIMIT, || {
            let log = server.pod.log("main", false).unwrap_or_default();
            Ok(Look::when(!pods::events(&log, "progress").is_empty(), log))
        })?;
        quiet.wait_for_restart(before[1].0)?;
        if quiet.try_exec(&["tessera-tenant", "info"])?.code != Some(0) {
            quiet.restart_container(suite)?;
        }
        let quota = [server.pod.gpu()?, quiet.gpu()?];
        ensure!(quota[0].total == SHARE_BYTES && quota[1].total == 2 * SHARE_BYTES, "{quota:?}");
        ensure!(quota[0].uuid == gpus[0] && quota[1].uuid == gpus[1], "{quota:?}, not {gpus:?}");
        check_fill(quiet.fill(2 * SHARE_BYTES)?, 2 * SHARE_BYTES)?;
        for pod in [&server.pod, &quiet] {
            let status = pod.object()?["status"].clone();
            ensure!(status["phase"] == "Running", "{status}");
        }
    }
    Ok(())
}
