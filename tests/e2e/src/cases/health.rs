//! GPUs that fall ill under running pods, and recover.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::deploy::{REPLICAS, RESOURCE};
use crate::images::SIM_DIR;
use crate::pods::{Container, Pod};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

pub fn sick_gpu_is_not_sold_and_its_pods_run_on(suite: &Suite<'_>) -> Result<()> {
    let server = Server::start(suite.kubectl, "server")?;
    let sick = server.pod.gpu()?.uuid;
    let ctl = format!("{SIM_DIR}/bin/simgpu-ctl");

    // An error that only a reset heals.
    server.pod.exec(&[&ctl, "xid", &sick, "95"])?;
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    state_of(suite, &sick, "unhealthy", "a reset of the GPU, because of XID 95")?;
    // The scheduler subtracts what the sick GPU's pods hold from what the sound one offers: three are left.
    let other = Pod::idle(suite.kubectl, "other", 3)?;
    ensure!(other.gpu()?.uuid != sick, "a new pod got the sick GPU");
    let idle = [Container::idle("main", 1)];
    let waiting = Pod::create(suite.kubectl, "waiting", crate::pods::Restart::Always, &[], &idle)?;
    wait::until("nothing is left for another pod", wait::LIMIT, || {
        let seen = waiting.object()?["status"]["conditions"].to_string();
        Ok(Look::when(seen.contains(&format!("Insufficient {RESOURCE}")), seen))
    })?;
    server.check_untouched()?;

    // The driver asks for the reset, and gets it.
    server.pod.exec(&[&ctl, "recovery", &sick, "reset"])?;
    state_of(suite, &sick, "unhealthy", "NVML to say otherwise")?;
    server.pod.exec(&[&ctl, "reset", &sick])?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    waiting.wait_until_running()?;
    server.check_untouched()
}

/// Waits until `status` says this of a GPU.
fn state_of(suite: &Suite<'_>, uuid: &str, state: &str, waits_for: &str) -> Result<Value> {
    wait::until(&format!("{uuid} is {state}"), wait::LIMIT, || {
        let text = suite.plugin.exec(&["tessera", "status", "-o", "json"])?;
        let status: Value = serde_json::from_str(&text)?;
        let gpus = status["gpus"].as_array().cloned().unwrap_or_default();
        let gpu = gpus.into_iter().find(|gpu| gpu["uuid"] == uuid).unwrap_or_default();
        let waits = gpu["state_waits_for"].as_str().unwrap_or_default();
        Ok(if gpu["state"] == state && waits.contains(waits_for) {
            Look::Done(gpu)
        } else {
            Look::NotYet(format!("{} {waits}", gpu["state"]))
        })
    })
}
