//! What the driver has published.

use anyhow::{Context, Result};
use serde_json::Value;

use super::DRIVER;
use crate::suite::Suite;
use crate::wait::{self, Look};

#[derive(Clone, Debug)]
pub struct Device {
    pub name: String,
    pub uuid: String,
    /// Memory that claims of it can have together, in bytes.
    pub memory: u64,
    /// The share that a claim gets which asks for no size: bytes.
    pub default_memory: u64,
    /// As `key=value:effect`.
    pub taints: Vec<String>,
}

impl Device {
    fn read(object: &Value) -> Result<Self> {
        let text =
            |value: &Value| value.as_str().map(str::to_owned).with_context(|| object.to_string());
        let memory = &object["capacity"]["memory"];
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let taint =
            |t: &Value| format!("{}={}:{}", word(&t["key"]), word(&t["value"]), word(&t["effect"]));
        Ok(Self {
            name: text(&object["name"])?,
            uuid: text(&object["attributes"]["uuid"]["string"])?,
            memory: bytes(&memory["value"])?,
            default_memory: bytes(&memory["requestPolicy"]["default"])?,
            taints: object["taints"].as_array().into_iter().flatten().map(taint).collect(),
        })
    }
}

/// A quantity as the API server writes one.
pub fn bytes(quantity: &Value) -> Result<u64> {
    let text = quantity.as_str().with_context(|| format!("no quantity: {quantity}"))?;
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match &text[digits.len()..] {
        "" => 1,
        "k" => 1000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        other => anyhow::bail!("unit {other} of {text}"),
    };
    Ok(digits.parse::<u64>().with_context(|| text.to_owned())? * unit)
}

/// The driver's slices of the node, as the scheduler orders them.
fn slices(suite: &Suite<'_>) -> Result<Vec<Value>> {
    let mut slices = suite.kubectl.items(&["resourceslices"])?;
    slices.retain(|slice| {
        slice["spec"]["driver"] == DRIVER && slice["spec"]["nodeName"] == suite.node.as_str()
    });
    slices.sort_by_key(|slice| slice["metadata"]["name"].to_string());
    Ok(slices)
}

/// The driver's devices on the node, in the order in which the scheduler tries them.
pub fn devices(suite: &Suite<'_>) -> Result<Vec<Device>> {
    let slices = slices(suite)?;
    let devices = slices.iter().flat_map(|s| s["spec"]["devices"].as_array().into_iter().flatten());
    devices.map(Device::read).collect()
}

/// Waits until the devices are as `wanted`; all of them.
pub fn wait_for(
    suite: &Suite<'_>,
    what: &str,
    wanted: impl Fn(&[Device]) -> bool,
) -> Result<Vec<Device>> {
    wait::until(what, wait::LIMIT, || {
        let devices = devices(suite)?;
        let seen = format!("{devices:?}");
        Ok(Look::found(Some(devices).filter(|devices| wanted(devices)), seen))
    })
}
