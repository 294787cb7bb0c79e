//! The node between its two front ends: GPUs sold as counted units, or as devices that claims share.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};

use super::{DRIVER, claims, slices};
use crate::deploy::{Plugin, REPLICAS, as_deployed};
use crate::host::{CONFIG, CONFIGURED};
use crate::kubectl::Kubectl;
use crate::suite::Suite;
use crate::wait::{self, Look};

/// What is appended to the configuration so that every GPU is sold to claims.
pub const ALL: &str =
    "\n[dra]\nenabled = true\n\n[metrics]\nlisten = \"\"\n\n[api]\nlisten = \"\"\n";

/// Whether claims can be of any part of a device on this cluster. The API server judges a slice with such a device, and
/// does not keep it.
pub fn claims_share_devices(kubectl: &Kubectl) -> Result<bool> {
    if !kubectl.has_api("resource.k8s.io/v1")? {
        return Ok(false);
    }
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "tessera-e2e-probe"},
        "spec": {
            "driver": "probe.tessera.dev",
            "pool": {"name": "probe", "generation": 1, "resourceSliceCount": 1},
            "allNodes": true,
            "devices": [{"name": "probe", "allowMultipleAllocations": true}],
        },
    });
    let create = ["create", "--dry-run=server", "-o", "json", "-f", "-"];
    let kept = kubectl.feed(&create, &slice)?;
    let kept: Value = serde_json::from_str(&kept).context("a probe slice")?;
    Ok(kept["spec"]["devices"][0]["allowMultipleAllocations"] == true)
}

/// CDI devices of the simulated GPUs, as NVIDIA's toolkit makes them of real ones.
const NVIDIA: &str = include_str!("../../overlay/nvidia-cdi.json");
pub const NVIDIA_ON_NODE: &str = "/var/run/cdi/nvidia.json";
/// UUIDs of the simulated GPUs begin so. A real toolkit's file has no such UUID.
pub const SIMULATED: &str = "GPU-e2e00000";

/// What is deployed for claims, and what before and after.
const MANIFEST: &str = "deploy/tessera-dra.yaml";
const WITHOUT: &str = "deploy/tessera.yaml";

/// Gives the node's GPUs to claims, if they aren't already.
pub fn enter(suite: &Suite<'_>) -> Result<()> {
    if suite.plugin.offers() > 0 {
        deploy(suite)?;
    }
    published(suite).map(drop)
}

/// Deploys the driver, as users do it, where the device plugin was. It is supervised from the start.
pub fn deploy(suite: &Suite<'_>) -> Result<()> {
    // Cases leave the device plugin's configuration there, which the new pod would read instead of its own.
    suite.host(&format!("rm -f {CONFIGURED}"))?;
    suite.plugin.set_offers(0);
    let config = format!("{CONFIG}{ALL}");
    suite.plugin.apply(&suite.repo.join(MANIFEST), &config, |pod| {
        let plugin = &mut pod["containers"][0];
        plugin["command"] = Plugin::supervised();
        // In the node's network two instances cannot have one port: none is asked for, and each is asked inside
        // its container.
        if let Some(plugin) = plugin.as_object_mut() {
            plugin.remove("ports");
        }
        let ready = json!({"command": ["tessera", "status", "--ready"]});
        plugin["readinessProbe"] = json!({"exec": ready, "periodSeconds": 2, "timeoutSeconds": 10});
    })?;
    suite.plugin.wait_for_roll_out()?;
    suite.plugin.wait_until_offered()?;
    // What the toolkit writes when a node starts. Another's stays as it is.
    let write = format!(
        "if [ -e {NVIDIA_ON_NODE} ] && ! grep -q {SIMULATED} {NVIDIA_ON_NODE}; then \
         echo '{NVIDIA_ON_NODE} is of a real toolkit: these cases need a node without one' >&2; exit 1; fi\n\
         cat >{NVIDIA_ON_NODE} <<'END'\n{NVIDIA}\nEND\n"
    );
    suite.plugin.exec(&["sh", "-c", &write]).map(drop)
}

/// Gives them back to the device plugin, deployed as before.
pub fn leave(suite: &Suite<'_>) -> Result<()> {
    if suite.plugin.offers() > 0 {
        return Ok(());
    }
    suite.plugin.set_offers(REPLICAS);
    suite.plugin.exec(&["rm", "-f", NVIDIA_ON_NODE])?;
    suite.plugin.apply(&suite.repo.join(WITHOUT), &as_deployed(), |pod| {
        pod["containers"][0]["command"] = Plugin::supervised();
    })?;
    suite.plugin.wait_for_roll_out()?;
    suite.plugin.wait_until_offered()?;
    wait::until("no device is published", wait::LIMIT, || {
        let devices = slices::devices(suite)?;
        Ok(Look::when(devices.is_empty(), format!("{devices:?}")))
    })?;
    remove(suite.kubectl, suite.repo)
}

/// Removes what only the driver's manifest has, also of a run that was killed. Namespaces are left to others.
pub fn remove(kubectl: &Kubectl, repo: &Path) -> Result<()> {
    if !claims_share_devices(kubectl)? {
        return Ok(());
    }
    let objects = |file: &str| kubectl.read_manifest(&repo.join(file));
    let name =
        |object: &Value| (object["kind"].to_string(), object["metadata"]["name"].to_string());
    let stay: BTreeSet<_> = objects(WITHOUT)?.iter().map(name).collect();
    for object in objects(MANIFEST)?.iter().filter(|object| !stay.contains(&name(object))) {
        kubectl.delete(object)?;
    }
    Ok(())
}

/// The node's two GPUs as they are published when nothing is amiss.
pub fn published(suite: &Suite<'_>) -> Result<[slices::Device; 2]> {
    let sound = |devices: &[slices::Device]| {
        devices.len() == 2 && devices.iter().all(|device| device.taints.is_empty())
    };
    let devices = slices::wait_for(suite, "two sound devices are published", sound)?;
    devices.try_into().map_err(|devices| anyhow!("{DRIVER}: {devices:?}"))
}

/// Removes every tenant and claim, and waits until the driver holds nothing and both GPUs are published.
pub fn clear(suite: &Suite<'_>) -> Result<()> {
    suite.remove_tenants()?;
    claims::remove_all(suite)?;
    wait::until("the driver holds no share", wait::LIMIT, || {
        let status = suite.plugin.status()?;
        let left = status["allocations"].as_array().map_or(0, Vec::len);
        Ok(Look::when(left == 0, status["allocations"].to_string()))
    })?;
    published(suite).map(drop)
}
