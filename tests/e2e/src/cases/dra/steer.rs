//! Shares of claims that are steered while they are held.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::deploy::NAMESPACE;
use crate::dra::claims::{self, Claim};
use crate::dra::{DRIVER, mode};
use crate::pods::Pod;
use crate::suite::Suite;
use crate::wait::{self, Look};

const GIB: u64 = 1 << 30;

/// What the driver says of a pod's claim, once it says so.
fn wait_for_device_status(
    suite: &Suite<'_>,
    pod: &Pod<'_>,
    what: &str,
    holds: impl Fn(&Value) -> bool,
) -> Result<Value> {
    wait::until(&format!("the claim's status says {what}"), wait::LIMIT, || {
        let claim = claims::of_pod(suite, pod)?;
        let devices = &claim["status"]["devices"];
        let device = &devices[0];
        ensure!(devices.as_array().is_none_or(|all| all.len() == 1), "{devices}");
        Ok(if holds(device) {
            Look::Done(device.clone())
        } else {
            Look::NotYet(devices.to_string())
        })
    })
}

/// The device's condition `Ready` is true, and it names its share.
fn is_ready(device: &Value) -> bool {
    let conditions = device["conditions"].as_array().into_iter().flatten();
    device["driver"] == DRIVER
        && conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// The limit in force, in whatever way the data say it.
fn says_limit(device: &Value, bytes: u64) -> bool {
    let mebibytes = format!("{}Mi", bytes >> 20);
    let data = device["data"].to_string();
    data.contains(&bytes.to_string()) || data.contains(&mebibytes)
}

/// A limit can be raised and lowered under a running pod, within what the GPU has left; the claim's status says
/// what is in force, its allocation what the scheduler counts.
pub fn dra_quota_changes_under_a_running_claim(suite: &Suite<'_>) -> Result<()> {
    mode::published(suite)?;
    let pod = claims::pod(suite, "steered", &Claim::share("1Gi", 25))?;
    let uuid = pod.gpu()?.uuid;
    let ready = wait_for_device_status(suite, &pod, "Ready and 1Gi", |device| {
        is_ready(device) && says_limit(device, GIB)
    })?;
    ensure!(ready["data"].to_string().contains(&uuid), "no UUID: {ready}");
    ensure!(ready["shareID"].is_string() && ready["pool"] == suite.node.as_str(), "{ready}");
    let claim = claims::of_pod(suite, &pod)?;
    let name = format!("{NAMESPACE}/steered");
    wait::until("the pod is known by name", wait::LIMIT, || {
        let output = suite.plugin.try_exec(&["tessera", "quota", "show", &name])?;
        Ok(Look::when(output.stdout.contains("the same"), output.stdout + &output.stderr))
    })?;
    let set = |bytes: u64| {
        let bytes = bytes.to_string();
        suite.plugin.try_exec(&["tessera", "quota", "set", &name, "--memory", &bytes])
    };
    for bytes in [2 * GIB, GIB / 2] {
        set(bytes)?.success("quota set")?;
        ensure!(pod.gpu()?.total == bytes, "{:?}, not {bytes}", pod.gpu()?);
        wait_for_device_status(suite, &pod, "the new limit", |d| {
            is_ready(d) && says_limit(d, bytes)
        })?;
        let now = claims::of_pod(suite, &pod)?;
        ensure!(now["status"]["allocation"] == claim["status"]["allocation"], "{now}");
    }
    let refused = set(100 * GIB)?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("are possible"), "{refused:?}");

    // The scheduler does not know what was given above the claim: a claim that no longer fits is refused with
    // numbers, and given what it asked for when there is room.
    set(2 * GIB)?.success("quota set")?;
    let rest = claims::waiting(suite, "rest", &Claim::share("2560Mi", 25))?;
    let on_the_same = wait::until("the claim is allocated", wait::LIMIT, || {
        let object = rest.object()?;
        if !object["spec"]["nodeName"].is_string() {
            return Ok(Look::NotYet(object["status"].to_string()));
        }
        let claim = claims::of_pod(suite, &rest)?;
        let first = claims::results(&claim)?.into_iter().next().context("no result")?;
        let mine = claims::results(&claims::of_pod(suite, &pod)?)?[0]["device"].clone();
        Ok(Look::Done(first["device"] == mine))
    })?;
    if on_the_same {
        wait::until("the refusal has numbers", wait::LIMIT, || {
            let events = suite.events_of("rest")?;
            let text = Value::from(events).to_string();
            Ok(Look::when(
                text.contains("FailedPrepareDynamicResources")
                    && text.contains("others hold 2 GiB: 2.5 GiB do not fit"),
                text,
            ))
        })?;
    }
    suite.plugin.exec(&["tessera", "quota", "reset", &name])?;
    ensure!(pod.gpu()?.total == GIB, "reset");
    rest.wait_until_running()?;
    ensure!(rest.gpu()?.total == 2560 << 20, "{:?}", rest.gpu()?);
    Ok(())
}
