//! How a claim looks in JSON.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::{Asked, Claim, Consumer, DeviceResult, OpaqueConfig};
use crate::answer;

impl Claim {
    /// From an object.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_object(object: Value) -> Result<Self, String> {
        serde_json::from_value(object).map_err(|error| error.to_string()).and_then(Self::of)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Self, String> {
        answer::read(body).map_err(|error| error.to_string()).and_then(Self::of)
    }

    fn of(object: Object) -> Result<Self, String> {
        let Object { metadata, spec, status } = object;
        if metadata.uid.is_empty() {
            return Err("metadata.uid is missing".to_owned());
        }
        let (allocated, config) = match status.allocation {
            None => (None, Vec::new()),
            Some(Allocation { devices: Devices { results, config } }) => {
                (Some(results), config.into_iter().filter_map(Config::opaque).collect())
            }
        };
        Ok(Claim {
            uid: metadata.uid,
            namespace: metadata.namespace,
            name: metadata.name,
            resource_version: metadata.resource_version,
            asked: spec.devices.requests.into_iter().flat_map(Request::asked).collect(),
            allocated: allocated.map(|all| all.into_iter().map(ResultObject::into).collect()),
            config,
            reserved_for: status.reserved_for,
            deleting: metadata.deletion_timestamp.is_some(),
        })
    }
}

#[derive(Deserialize)]
struct Object {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    resource_version: String,
    deletion_timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Spec {
    devices: SpecDevices,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SpecDevices {
    requests: Vec<Request>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Request {
    name: String,
    exactly: Exact,
    first_available: Vec<Exact>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Exact {
    #[serde(rename = "name")]
    alternative: String,
    device_class_name: String,
    allocation_mode: String,
    count: Option<i64>,
    admin_access: Option<bool>,
    capacity: Capacity,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Capacity {
    requests: BTreeMap<String, String>,
}

impl Request {
    fn asked(self) -> Vec<Asked> {
        let Request { name, exactly, first_available } = self;
        if first_available.is_empty() {
            return vec![exactly.asked(name)];
        }
        let one = |one: Exact| {
            let request = format!("{name}/{}", one.alternative);
            one.asked(request)
        };
        first_available.into_iter().map(one).collect()
    }
}

impl Exact {
    fn asked(self, request: String) -> Asked {
        let all = self.allocation_mode == "All";
        Asked {
            request,
            class: self.device_class_name,
            count: (!all).then(|| self.count.unwrap_or(1)),
            capacity: self.capacity.requests,
            admin_access: self.admin_access.unwrap_or(false),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Vec<Consumer>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Devices,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Devices {
    results: Vec<ResultObject>,
    config: Vec<Config>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ResultObject {
    request: String,
    driver: String,
    pool: String,
    device: String,
    #[serde(rename = "shareID")]
    share_id: Option<String>,
    #[serde(default)]
    consumed_capacity: BTreeMap<String, String>,
    admin_access: Option<bool>,
}

impl From<ResultObject> for DeviceResult {
    fn from(object: ResultObject) -> Self {
        let ResultObject { request, driver, pool, device, share_id, .. } = object;
        DeviceResult {
            request,
            driver,
            pool,
            device,
            share_id,
            consumed_capacity: object.consumed_capacity,
            admin_access: object.admin_access.unwrap_or(false),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    source: String,
    requests: Vec<String>,
    opaque: Option<Opaque>,
}

#[derive(Deserialize)]
struct Opaque {
    driver: String,
    #[serde(default)]
    parameters: Value,
}

impl Config {
    fn opaque(self) -> Option<OpaqueConfig> {
        let Opaque { driver, parameters } = self.opaque?;
        let from_class = self.source == "FromClass";
        Some(OpaqueConfig { from_class, requests: self.requests, driver, parameters })
    }
}
