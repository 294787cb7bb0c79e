//! An API server that does not know devices which claims share: 1.34 and 1.35 by default.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cases::delivery::check_fill;
use crate::deploy::{REPLICAS, SHARE_BYTES};
use crate::dra::claims::{self, Claim, Request, Source};
use crate::dra::slices::{bytes, slices};
use crate::dra::{STEP_BYTES, mode};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// Such a server drops what makes a device shareable, and a scheduler would give a whole GPU to one claim. So each
/// share is a device of its own, of one size.
pub fn dra_shares_are_whole_devices_where_claims_share_none(suite: &Suite<'_>) -> Result<()> {
    let outcome = mode::deploy(suite).and_then(|()| whole_shares(suite));
    suite.remove_tenants()?;
    claims::remove_all(suite)?;
    mode::leave(suite)?;
    outcome
}

fn whole_shares(suite: &Suite<'_>) -> Result<()> {
    let devices = wait::until("every share is published", wait::LIMIT, || {
        let slices = slices(suite)?;
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array());
        let devices: Vec<Value> = devices.flatten().cloned().collect();
        // At no time is there a device that is a whole GPU.
        for device in &devices {
            let memory = bytes(&device["capacity"]["memory"]["value"])?;
            let is_probe = device["name"] == "probe";
            ensure!(memory <= SHARE_BYTES || is_probe, "more than a share: {device}");
        }
        let all = devices.len() as u64 == REPLICAS;
        Ok(if all { Look::Done(devices) } else { Look::NotYet(format!("{devices:?}")) })
    })?;
    let share = bytes(&devices[0]["capacity"]["memory"]["value"])?;
    ensure!(share > SHARE_BYTES - STEP_BYTES, "{}", devices[0]);
    Claim::of(&[Request::new("gpu")]).create_template(suite, "one")?;
    let mut pods = Vec::new();
    for n in 0..REPLICAS {
        pods.push(claims::idle_waiting(suite, &format!("share-{n}"), "one")?);
    }
    for pod in &pods {
        pod.wait_until_running()?;
        ensure!(pod.gpu()?.total == share, "{:?}, not {share}", pod.gpu()?);
    }
    check_fill(pods[0].fill(share)?, share)?;
    let ninth = claims::idle_waiting(suite, "ninth", "one")?;
    claims::wait_until_refused(&ninth, "cannot allocate all claims")?;
    pods[0].delete()?;
    ninth.wait_until_running()?;
    check_fill(ninth.fill(share)?, share)?;
    // A request for less gets a share, which is what the server makes of it.
    ninth.delete()?;
    Claim::share("512Mi", 10).create_template(suite, "less")?;
    let less = claims::idle(suite, "less", Source::Template("less"))?;
    ensure!(less.gpu()?.total == share, "{:?}", less.gpu()?);
    let status = suite.plugin.status()?;
    let said = status.to_string();
    ensure!(said.contains("DRAConsumableCapacity"), "status does not name the gate: {said}");
    status["allocations"].as_array().context("allocations").map(drop)
}
