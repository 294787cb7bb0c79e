//! What the scheduler is given to choose from.

use anyhow::{Result, ensure};

use crate::deploy::SHARE_BYTES;
use crate::dra::claims::{self, Claim, Request};
use crate::dra::slices::{self, bytes};
use crate::dra::{STEP_BYTES, mode};
use crate::suite::{Server, Suite};

/// Of a GPU's 4 GiB 256 MiB are kept in reserve (overlay/config.toml), and something for contexts.
const MOST_BYTES: u64 = (4 << 30) - (256 << 20);

pub fn dra_gpus_are_published_as_devices_that_claims_share(suite: &Suite<'_>) -> Result<()> {
    let devices = mode::published(suite)?;
    for device in &devices {
        let object = &device.object;
        ensure!(object["allowMultipleAllocations"] == true, "{object}");
        ensure!(device.memory <= MOST_BYTES, "more than a share may have: {object}");
        ensure!(device.memory > MOST_BYTES - (512 << 20), "too little: {object}");
        // What one replica is, to a step.
        ensure!(device.default_memory <= SHARE_BYTES, "{object}");
        ensure!(device.default_memory > SHARE_BYTES - STEP_BYTES, "{object}");
        ensure!(device.default_cores == 25, "{object}");
        ensure!(bytes(&object["capacity"]["cores"]["value"])? == 100, "{object}");
        let range = &object["capacity"]["memory"]["requestPolicy"]["validRange"];
        ensure!(bytes(&range["step"])? == STEP_BYTES, "{object}");
        for attribute in ["productName", "driverVersion", "cudaDriverVersion", "engine"] {
            let value = &object["attributes"][attribute];
            ensure!(value.is_object(), "no {attribute}: {object}");
        }
        // Its name outlives a reboot: it is made of the UUID.
        let digits: String = device.uuid.chars().filter(char::is_ascii_hexdigit).collect();
        let named: String = device.name.chars().filter(char::is_ascii_hexdigit).collect();
        let tail = &digits[digits.len() - 8..];
        ensure!(named.contains(&tail.to_lowercase()), "{} of {}", device.name, device.uuid);
    }
    ensure!(devices[0].uuid != devices[1].uuid, "{devices:?}");
    let node = suite.kubectl.get(&["node", &suite.node])?;
    for slice in slices::slices(suite)? {
        let spec = &slice["spec"];
        ensure!(spec["pool"]["name"] == suite.node.as_str(), "{spec}");
        ensure!(spec["pool"]["generation"].as_u64().is_some_and(|n| n >= 1), "{spec}");
        let owner = &slice["metadata"]["ownerReferences"][0];
        ensure!(owner["kind"] == "Node" && owner["uid"] == node["metadata"]["uid"], "{owner}");
    }
    // The device plugin has none to sell.
    ensure!(suite.plugin.allocatable()? == 0, "{} replicas", suite.plugin.allocatable()?);
    Ok(())
}

/// A taint keeps new claims away; what runs goes on.
pub fn dra_cordoned_gpu_is_tainted_and_given_to_nobody(suite: &Suite<'_>) -> Result<()> {
    let all = mode::published(suite)?;
    let claim = Claim::of(&[Request::share("gpu", "1Gi", 25).of_gpu(&all[0].uuid)]);
    claim.create_template(suite, "first")?;
    let main = Server::container(0).claiming(None);
    let pod = claims::create(suite, "server", claims::Source::Template("first"), &[main])?;
    pod.wait_until_running()?;
    let server = Server::serving(pod)?;

    suite.plugin.exec(&["tessera", "cordon", &all[0].uuid, "--reason", "maintenance"])?;
    let tainted = |devices: &[slices::Device]| {
        let of = |uuid: &str| devices.iter().find(|d| d.uuid == uuid).map(slices::Device::taints);
        of(&all[0].uuid).is_some_and(|t| t.iter().any(|t| t.ends_with(":NoSchedule")))
            && of(&all[1].uuid).is_some_and(|t| t.is_empty())
    };
    slices::wait_for(suite, "the cordoned GPU alone is tainted", tainted)?;
    let same = claims::idle_waiting(suite, "same", "first")?;
    claims::wait_until_refused(&same, "cannot allocate all claims")?;
    let other = claims::pod(suite, "other", &Claim::share("1Gi", 25))?;
    ensure!(other.gpu()?.uuid == all[1].uuid, "a new pod got the cordoned GPU");
    server.check_untouched()?;
    suite.plugin.exec(&["tessera", "uncordon", &all[0].uuid])?;
    same.wait_until_running()?;
    ensure!(same.gpu()?.uuid == all[0].uuid);
    server.check_untouched()
}
