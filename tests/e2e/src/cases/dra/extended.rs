//! Pods that ask as they always did, served by claims that the scheduler writes.

use anyhow::{Context, Result, ensure};

use crate::cases::delivery::check_fill;
use crate::deploy::{REPLICAS, RESOURCE};
use crate::dra::mode;
use crate::dra::{claims, slices};
use crate::pods::{Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

pub fn dra_serves_pods_that_ask_for_the_extended_resource(suite: &Suite<'_>) -> Result<()> {
    let all = mode::published(suite)?;
    wait_until_kubelet_has_forgotten(suite)?;
    let share = all[0].default_memory;
    let one = Pod::idle(suite.kubectl, "one", 1)?;
    ensure!(one.gpu()?.total == share, "{:?}", one.gpu()?);
    check_fill(one.fill(share)?, share)?;
    let claim = claims::of_pod(suite, &one)?;
    let result = claims::results(&claim)?.into_iter().next().context("no result")?;
    let consumed = slices::bytes(&result["consumedCapacity"]["memory"])?;
    ensure!(consumed == share, "{result}");
    ensure!(
        suite.plugin.status()?["allocations"].to_string().contains("one"),
        "status does not name the pod"
    );
    // The scheduler takes each device once for one request: two units are shares of two GPUs, and three wait for
    // a node with three.
    let two = Pod::idle(suite.kubectl, "two", 2)?;
    let gpus = two.gpus("main")?;
    ensure!(gpus.len() == 2 && gpus.iter().all(|gpu| gpu.total == share), "{gpus:?}");
    let three = waiting(suite, "three", 3)?;
    claims::wait_until_refused(&three, "cannot allocate all claims")?;
    // Four shares of 25 % fit on a GPU, so eight on the node.
    let rest: Vec<_> = (3..REPLICAS).map(|n| format!("rest-{n}")).collect();
    for name in &rest {
        waiting(suite, name, 1)?;
    }
    for name in &rest {
        Pod::named(suite.kubectl, name).wait_until_running()?;
    }
    let ninth = waiting(suite, "ninth", 1)?;
    claims::wait_until_refused(&ninth, "cannot allocate all claims")?;
    one.delete()?;
    ninth.wait_until_running()?;
    check_fill(ninth.fill(share)?, share)?;
    let status = ninth.object()?["status"]["extendedResourceClaimStatus"].clone();
    ensure!(status["resourceClaimName"].is_string(), "{status}");
    Ok(())
}

/// An idle pod that asks for so many units, without waiting for it.
fn waiting<'a>(suite: &Suite<'a>, name: &str, units: u64) -> Result<Pod<'a>> {
    Pod::create(suite.kubectl, name, Restart::Always, &[], &[Container::idle("main", units)])
}

/// Kubelet 1.36 remembers what a device plugin offered for five minutes after it has ended. Until then it looks for
/// that plugin's devices when a container starts that asks for the name, though a claim serves it: "no devices
/// found allocated in local cache".
pub fn wait_until_kubelet_has_forgotten(suite: &Suite<'_>) -> Result<()> {
    wait::until("kubelet has forgotten the device plugin", 2 * wait::LIMIT, || {
        let node = suite.kubectl.get(&["node", &suite.node])?;
        let capacity = node["status"]["capacity"][RESOURCE].as_str().unwrap_or("0").to_owned();
        Ok(Look::when(capacity == "0", format!("capacity {capacity}")))
    })
}
