//! Whatever becomes of the plugin, running pods run on and limits hold.

use anyhow::{Result, ensure};

use super::delivery::check_fill;
use crate::deploy::SHARE_BYTES;
use crate::pods::Pod;
use crate::suite::{Server, Suite};

/// Its pod is replaced; then its process is killed, and kubelet starts its container again. On any cluster: where the
/// node is in reach, the cases of roll-outs, churn and kubelet show more.
pub fn plugin_is_replaced_and_killed_under_running_pods(suite: &Suite<'_>) -> Result<()> {
    let server = Server::start(suite.kubectl, "server")?;
    let quiet = Pod::idle(suite.kubectl, "quiet", 2)?;
    let before = quiet.incarnation()?;
    suite.plugin.replace_pod()?;
    server.check_untouched()?;
    suite.plugin.kill()?;
    // A process that first meets CUDA after the restart, in a container from before.
    check_fill(quiet.fill(2 * SHARE_BYTES)?, 2 * SHARE_BYTES)?;
    ensure!(quiet.incarnation()? == before, "restarted");
    let fresh = Pod::idle(suite.kubectl, "fresh", 1)?;
    check_fill(fresh.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    server.check_untouched()
}
