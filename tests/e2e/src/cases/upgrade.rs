//! A plugin of another version, with another shim and another page ABI, under running pods.

use anyhow::{Result, ensure};
use serde_json::json;

use super::delivery::check_fill;
use crate::deploy::SHARE_BYTES;
use crate::images;
use crate::invariants::{Invariants, Refusals};
use crate::pods::Pod;
use crate::suite::Suite;

/// Running containers go on, and start again, with the shim and pages of before; new ones get the new ones.
pub fn new_shim_and_page_version_under_running_pods(suite: &Suite<'_>) -> Result<()> {
    images::load_next(suite.cluster, suite.repo, suite.artefacts)?;
    let watched = Invariants::watch(suite)?;
    let old = Pod::idle(suite.kubectl, "old", 1)?;
    let before = versions(&old)?;
    suite.plugin.roll_out(&with_image(images::NEXT))?;
    let outcome = (|| {
        let new = Pod::idle(suite.kubectl, "new", 1)?;
        let today = versions(&new)?;
        ensure!(today.0 == before.0 + 1 && today.1 != before.1, "{before:?}, then {today:?}");
        check_fill(new.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        ensure!(versions(&old)? == before, "{before:?} became {:?}", versions(&old)?);
        check_fill(old.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        old.restart_container(suite)?;
        ensure!(versions(&old)? == before, "{before:?} became {:?}", versions(&old)?);
        check_fill(old.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        let status = suite.plugin.status()?;
        ensure!(status["warnings"] == json!([]), "{}", status["warnings"]);
        let installed = suite.host("ls -d $state/shim/*/libtessera.so")?;
        ensure!(installed.lines().count() == 2, "{installed}");
        new.delete()
    })();
    suite.plugin.roll_out(&with_image(images::PLUGIN))?;
    outcome?;
    watched.finish(false, Refusals::None).map(drop)
}

fn with_image(image: &str) -> serde_json::Value {
    json!({
        "initContainers": [{"name": "prepare-host", "image": image}],
        "containers": [{"name": "tessera", "image": image}],
    })
}

/// The page version that a container sees, and its shim's checksum.
fn versions(pod: &Pod<'_>) -> Result<(u32, String)> {
    // Containers of plugins before several shares have one share's pages in the directory itself.
    let quota = "$(ls /usr/local/tessera/pages/quota /usr/local/tessera/pages/*/quota 2>/dev/null)";
    let abi = pod.exec(&["sh", "-c", &format!("od -An -t u4 -j 8 -N 4 {quota}")])?;
    let shim = pod.exec(&["md5sum", "/usr/local/tessera/libtessera.so"])?;
    Ok((abi.trim().parse()?, shim))
}
