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
    let console = Pod::idle(suite.kubectl, "console", 1)?;
    let sick = console.gpu()?.uuid;
    let ctl = |args: &[&str]| {
        console.exec(&[&[format!("{SIM_DIR}/bin/simgpu-ctl").as_str()], args].concat()).map(drop)
    };

    // An error that only a reset heals.
    ctl(&["xid", &sick, "95"])?;
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    let gpu = state_of(suite, &sick, "unhealthy", "a reset of the GPU, because of XID 95")?;
    let replicas = gpu["replicas"].as_array().into_iter().flatten();
    ensure!(replicas.clone().count() == 4, "{gpu}");
    ensure!(replicas.clone().all(|replica| replica["health"] == "unhealthy"), "{gpu}");
    let hold = ["tessera-tenant", "hold", "--bytes", "300Mi"];
    // The scheduler subtracts what the sick GPU's pods hold from what the sound one offers: two are left.
    let other = Pod::start(suite.kubectl, "other", Container::new("main", 2, &hold))?;
    other.wait_for_event("main", "ready")?;
    let sound = other.gpus("main")?.remove(0).uuid;
    ensure!(sound != sick, "a new pod got the sick GPU");
    let idle = [Container::idle("main", 1)];
    let waiting = Pod::create(suite.kubectl, "waiting", crate::pods::Restart::Always, &[], &idle)?;
    wait::until("nothing is left for another pod", wait::LIMIT, || {
        let seen = waiting.object()?["status"]["conditions"].to_string();
        Ok(Look::when(seen.contains(&format!("Insufficient {RESOURCE}")), seen))
    })?;
    server.check_untouched()?;

    // The driver asks for the reset, and gets it.
    ctl(&["recovery", &sick, "reset"])?;
    state_of(suite, &sick, "unhealthy", "NVML to say otherwise")?;
    ctl(&["reset", &sick])?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    waiting.wait_until_running()?;
    let next = Pod::idle(suite.kubectl, "next", 2)?;
    ensure!(
        waiting.gpu()?.uuid == sick || next.gpu()?.uuid == sick,
        "the sound GPU has no room for both"
    );
    server.check_untouched()?;

    // The other one falls off the bus and comes back.
    ctl(&["lose", &sound])?;
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    state_of(suite, &sound, "unhealthy", "NVML to find the GPU again")?;
    ctl(&["restore", &sound])?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    server.check_untouched()
}

/// Waits until `status` says this of a GPU.
pub(crate) fn state_of(
    suite: &Suite<'_>,
    uuid: &str,
    state: &str,
    waits_for: &str,
) -> Result<Value> {
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
