//! Shares of any size: those that fit are held, others wait.

use anyhow::{Result, ensure};

use crate::cases::delivery::check_fill;
use crate::dra::claims::{self, Claim, Request};
use crate::dra::slices::{self, bytes};
use crate::dra::{STEP_BYTES, mode};
use crate::pods::Pod;
use crate::suite::Suite;

const MIB: u64 = 1 << 20;

/// What is asked for, rounded up to a step, is what the scheduler counts, what the container sees, and all that it
/// can have.
pub fn dra_claims_of_any_size_are_held_in_their_containers(suite: &Suite<'_>) -> Result<()> {
    let all = mode::published(suite)?;
    let sizes = [("one", "1Gi", 10, 1024), ("odd", "1500Mi", 30, 1536), ("small", "300Mi", 5, 320)];
    let mut pods = Vec::new();
    for (name, memory, cores, want) in sizes {
        let pod = claims::pod(suite, name, &Claim::share(memory, cores))?;
        let claim = claims::of_pod(suite, &pod)?;
        let [result] = &claims::results(&claim)?[..] else { anyhow::bail!("{claim}") };
        let consumed = &result["consumedCapacity"];
        ensure!(bytes(&consumed["memory"])? == want * MIB, "{name}: {result}");
        ensure!(bytes(&consumed["cores"])? == u64::from(cores), "{name}: {result}");
        ensure!(result["shareID"].is_string(), "{name}: {result}");
        let gpu = pod.gpu()?;
        ensure!(gpu.total == want * MIB, "{name}: {gpu:?}");
        let device = all.iter().find(|d| result["device"] == d.name.as_str());
        ensure!(device.is_some_and(|d| d.uuid == gpu.uuid), "{name}: {result}, {gpu:?}");
        pods.push((pod, want * MIB));
    }
    let unsized_claim = Claim::of(&[Request::new("gpu")]);
    let pod = claims::pod(suite, "default", &unsized_claim)?;
    pods.push((pod, all[0].default_memory));
    // Each to its end, while the others live.
    for (pod, want) in &pods {
        check_fill(pod.fill(*want)?, *want)?;
    }
    let status = suite.plugin.status()?;
    for (name, ..) in sizes {
        let known = status["allocations"].to_string();
        ensure!(known.contains(name), "{name} is not in {known}");
    }
    Ok(())
}

pub fn dra_claim_that_does_not_fit_waits_for_room(suite: &Suite<'_>) -> Result<()> {
    let all = mode::published(suite)?;
    let large = Claim::share("3Gi", 60);
    let first = claims::pod(suite, "first", &large)?;
    let second = claims::pod(suite, "second", &large)?;
    ensure!(first.gpu()?.uuid != second.gpu()?.uuid, "6 GiB of a GPU of 4 GiB");
    let third = claims::waiting(suite, "third", &large)?;
    claims::wait_until_refused(&third, "cannot allocate all claims")?;
    // Time is counted as memory is.
    let busy = claims::waiting(suite, "busy", &Claim::share("256Mi", 50))?;
    claims::wait_until_refused(&busy, "cannot allocate all claims")?;
    // More than there is of any GPU, by a step.
    let beyond = format!("{}", all[0].memory + STEP_BYTES);
    let never = claims::waiting(suite, "never", &Claim::share(&beyond, 1))?;
    claims::wait_until_refused(&never, "cannot allocate all claims")?;

    second.delete()?;
    third.wait_until_running()?;
    check_fill(third.fill(3 << 30)?, 3 << 30)?;
    claims::wait_until_refused(&never, "cannot allocate all claims")?;
    ensure!(busy.object()?["status"]["phase"] == "Pending", "{}", busy.object()?["status"]);
    third.delete()?;
    busy.wait_until_running()?;
    check_fill(first.fill(3 << 30)?, 3 << 30)?;
    // All that is published of a GPU can be had by one claim.
    first.end()?;
    let rest = all[0].memory.to_string();
    let whole = claims::pod(suite, "whole", &Claim::share(&rest, 50))?;
    ensure!(whole.gpu()?.total == all[0].memory, "{:?}", whole.gpu()?);
    check_fill(whole.fill(all[0].memory)?, all[0].memory)
}

/// `share.placement` decides the order of devices, and the scheduler takes the first that has room.
pub fn dra_claims_fill_one_gpu_before_the_next(suite: &Suite<'_>) -> Result<()> {
    mode::published(suite)?;
    let third = Claim::share("1Gi", 20);
    third.create_template(suite, "third")?;
    let of = |name: &str| -> Result<String> {
        Ok(claims::idle(suite, name, claims::Source::Template("third"))?.gpu()?.uuid)
    };
    let packed = [of("a")?, of("b")?, of("c")?];
    ensure!(packed.iter().all(|uuid| *uuid == packed[0]), "not packed: {packed:?}");
    let fourth = of("d")?;
    ensure!(fourth != packed[0], "4 GiB of a GPU that has less");
    // A hole in the fuller one is filled first.
    Pod::named(suite.kubectl, "b").end()?;
    wait_until_first(suite, &packed[0])?;
    ensure!(of("e")? == packed[0], "the emptier GPU was taken");
    Ok(())
}

/// Waits until the scheduler would try this GPU first.
fn wait_until_first(suite: &Suite<'_>, uuid: &str) -> Result<()> {
    let first = |devices: &[slices::Device]| devices.first().is_some_and(|d| d.uuid == uuid);
    slices::wait_for(suite, "the fuller GPU is first", first).map(drop)
}
