//! What a driver says of a device in a claim's status (KEP 4817).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

/// One entry of a claim's `status.devices`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceStatus {
    /// The driver; entries of other drivers are refused.
    pub driver: String,
    /// The pool, as in the allocation.
    pub pool: String,
    /// The device, as in the allocation.
    pub device: String,
    /// The share, as in the allocation: a device with shares may be there more than once.
    pub share_id: Option<String>,
    /// At most 8, of different types.
    pub conditions: Vec<Condition>,
    /// Whatever the driver has to say, as an object; at most 10 KiB as JSON.
    pub data: Option<Value>,
}

impl DeviceStatus {
    /// As an entry of `status.devices`.
    pub fn object(&self) -> Value {
        let mut object = json!({ "driver": self.driver, "pool": self.pool, "device": self.device });
        if let Some(share_id) = &self.share_id {
            object["shareID"] = json!(share_id);
        }
        if !self.conditions.is_empty() {
            object["conditions"] = json!(self.conditions);
        }
        if let Some(data) = &self.data {
            object["data"] = data.clone();
        }
        object
    }

    /// The entries of a claim, of all drivers, with `driver`'s replaced by `devices`.
    pub fn merged(before: Vec<Value>, driver: &str, devices: &[DeviceStatus]) -> Vec<Value> {
        let others = before.into_iter().filter(|entry| entry["driver"] != driver);
        others.chain(devices.iter().map(DeviceStatus::object)).collect()
    }
}
