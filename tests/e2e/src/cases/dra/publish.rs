//! What the scheduler is given to choose from.

use anyhow::{Result, ensure};

use crate::deploy::SHARE_BYTES;
use crate::dra::slices::{self, bytes};
use crate::dra::{STEP_BYTES, mode};
use crate::suite::Suite;

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
