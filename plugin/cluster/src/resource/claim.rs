//! A claim, as far as a driver needs it.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as api;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::Value;

/// Which claim: a name can be used again, a UID cannot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Claim {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// What its author asked for, of every driver: for views. Alternatives are entries of their own.
    pub asked: Vec<Asked>,
    /// What was allocated, of every driver; `None` before the allocation.
    pub allocated: Option<Vec<DeviceResult>>,
    /// Parameters for drivers, of class and claim: those of classes first, as the server lists them. A later one
    /// takes precedence.
    pub config: Vec<OpaqueConfig>,
    /// The pods that may use it now.
    pub reserved_for: Vec<Consumer>,
    /// Whether it is being deleted.
    pub deleting: bool,
}

impl TryFrom<api::ResourceClaim> for Claim {
    type Error = String;

    fn try_from(object: api::ResourceClaim) -> Result<Self, String> {
        let api::ResourceClaim { metadata, spec, status } = object;
        let uid = metadata.uid.filter(|uid| !uid.is_empty()).ok_or("metadata.uid is missing")?;
        let requests = spec.devices.and_then(|devices| devices.requests).unwrap_or_default();
        let status = status.unwrap_or_default();
        let allocated = status.allocation.map(|allocation| allocation.devices.unwrap_or_default());
        let (results, config) = match allocated {
            Some(devices) => (Some(devices.results.unwrap_or_default()), devices.config),
            None => (None, None),
        };
        let consumer = |one: api::ResourceClaimConsumerReference| Consumer {
            resource: one.resource,
            name: one.name,
            uid: one.uid,
        };
        Ok(Claim {
            uid,
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            asked: requests.into_iter().flat_map(asked).collect(),
            allocated: results.map(|all| all.into_iter().map(DeviceResult::from).collect()),
            config: config.into_iter().flatten().filter_map(opaque).collect(),
            reserved_for: status.reserved_for.into_iter().flatten().map(consumer).collect(),
            deleting: metadata.deletion_timestamp.is_some(),
        })
    }
}

/// A request, or each of its alternatives.
fn asked(request: api::DeviceRequest) -> Vec<Asked> {
    let name = request.name;
    let one = |request: String, class, mode: Option<String>, count: Option<i64>| Asked {
        request,
        class,
        count: (mode.as_deref() != Some("All")).then(|| count.unwrap_or(1)),
        ..Asked::default()
    };
    let capacity = |asked: Option<api::CapacityRequirements>| {
        quantities(asked.and_then(|asked| asked.requests))
    };
    let alternatives = request.first_available.unwrap_or_default().into_iter();
    let mut all: Vec<Asked> = alternatives
        .map(|sub| Asked {
            capacity: capacity(sub.capacity),
            ..one(
                format!("{name}/{}", sub.name),
                sub.device_class_name,
                sub.allocation_mode,
                sub.count,
            )
        })
        .collect();
    if all.is_empty() {
        let exactly = request.exactly.unwrap_or_default();
        all.push(Asked {
            capacity: capacity(exactly.capacity),
            admin_access: exactly.admin_access.unwrap_or(false),
            ..one(name, exactly.device_class_name, exactly.allocation_mode, exactly.count)
        });
    }
    all
}

fn opaque(config: api::DeviceAllocationConfiguration) -> Option<OpaqueConfig> {
    let api::OpaqueDeviceConfiguration { driver, parameters } = config.opaque?;
    let (from_class, requests) =
        (config.source == "FromClass", config.requests.unwrap_or_default());
    Some(OpaqueConfig { from_class, requests, driver, parameters: parameters.0 })
}

fn quantities(all: Option<BTreeMap<String, Quantity>>) -> BTreeMap<String, String> {
    all.into_iter().flatten().map(|(name, quantity)| (name, quantity.0)).collect()
}

impl From<api::DeviceRequestAllocationResult> for DeviceResult {
    fn from(result: api::DeviceRequestAllocationResult) -> Self {
        DeviceResult {
            request: result.request,
            driver: result.driver,
            pool: result.pool,
            device: result.device,
            share_id: result.share_id,
            consumed_capacity: quantities(result.consumed_capacity),
            admin_access: result.admin_access.unwrap_or(false),
        }
    }
}

impl Claim {
    /// From an object in JSON.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_object(object: Value) -> Result<Self, String> {
        let read = serde_json::from_value::<api::ResourceClaim>(object);
        read.map_err(|error| error.to_string())?.try_into()
    }

    pub fn reference(&self) -> ClaimRef {
        let (namespace, name, uid) = (&self.namespace, &self.name, &self.uid);
        ClaimRef { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() }
    }
}

/// One request of a claim, or one alternative of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The request; `request/alternative` for an alternative, as in [`DeviceResult::request`].
    pub request: String,
    /// The name of its DeviceClass.
    pub class: String,
    /// How many devices; `None` for all that match.
    pub count: Option<i64>,
    /// How much of each capacity, as it was written.
    pub capacity: BTreeMap<String, String>,
    /// Whether it is for monitoring alone.
    pub admin_access: bool,
}

/// One device, or a share of one, that was allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceResult {
    /// The request that it is for, `request` or `request/alternative`.
    pub request: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    /// Distinguishes shares of one device; `None` for a whole device.
    pub share_id: Option<String>,
    /// What the scheduler counts, as quantities; empty for a whole device.
    pub consumed_capacity: BTreeMap<String, String>,
    /// Whether it is for monitoring alone: never counted.
    pub admin_access: bool,
}

/// A driver's parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpaqueConfig {
    /// Whether a DeviceClass has it; otherwise the claim.
    pub from_class: bool,
    /// The requests that it is for; all if empty. A request's name stands for its alternatives too.
    pub requests: Vec<String>,
    pub driver: String,
    /// The parameters; not checked.
    pub parameters: Value,
}

impl OpaqueConfig {
    /// Whether it is for this request, as [`DeviceResult::request`] names it.
    pub fn is_for(&self, request: &str) -> bool {
        let base = request.split('/').next().unwrap_or(request);
        self.requests.is_empty() || self.requests.iter().any(|name| name == request || name == base)
    }
}

/// A pod that may use a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consumer {
    /// `pods`, in practice.
    pub resource: String,
    /// Its name, in the claim's namespace.
    pub name: String,
    pub uid: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn allocated() -> Value {
        json!({ "devices": {
            "results": [
                { "request": "gpu/half", "driver": "gpu.tessera.dev", "pool": "n1", "device": "gpu-a",
                  "shareID": "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff",
                  "consumedCapacity": { "memory": "6Gi", "cores": "30" } },
                { "request": "watch", "driver": "other", "pool": "n1", "device": "nic", "adminAccess": true },
            ],
            "config": [
                { "source": "FromClass", "opaque": { "driver": "gpu.tessera.dev", "parameters": { "a": 1 } } },
                { "source": "FromClaim", "requests": ["gpu"],
                  "opaque": { "driver": "gpu.tessera.dev", "parameters": { "a": 2 } } },
            ],
        } })
    }

    fn object(requests: &Value) -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "uid": "u", "namespace": "team", "name": "chat", "resourceVersion": "7",
                          "deletionTimestamp": "2026-11-22T09:45:00Z" },
            "spec": { "devices": { "requests": requests } },
            "status": {
                "allocation": allocated(),
                "reservedFor": [{ "resource": "pods", "name": "p", "uid": "pu" }],
                "devices": [{ "driver": "x" }],
            },
        })
    }

    #[test]
    fn a_claim_is_read_as_far_as_a_driver_needs_it() {
        let requests = json!([
            { "name": "gpu", "firstAvailable": [
                { "name": "half", "deviceClassName": "l4", "capacity": { "requests": { "memory": "6Gi" } } },
                { "name": "quarter", "deviceClassName": "h100", "count": 2 },
            ] },
            { "name": "watch", "exactly": { "deviceClassName": "nics", "allocationMode": "All", "adminAccess": true } },
        ]);
        let claim = Claim::of_object(object(&requests)).unwrap();
        assert_eq!(claim.uid, "u");
        assert!(claim.deleting);
        assert_eq!(claim.reserved_for[0].name, "p");
        let results = claim.allocated.as_ref().unwrap();
        assert_eq!(results[0].request, "gpu/half");
        assert_eq!(results[0].consumed_capacity["memory"], "6Gi");
        assert!(results[0].share_id.is_some() && !results[0].admin_access);
        assert!(results[1].admin_access && results[1].share_id.is_none());
        assert!(claim.config[0].from_class && claim.config[0].is_for("anything"));
        let second = &claim.config[1];
        assert!(!second.from_class && second.is_for("gpu/half") && !second.is_for("watch"));
        let asked: Vec<_> = claim.asked.iter().map(|a| (a.request.as_str(), a.count)).collect();
        assert_eq!(asked, [("gpu/half", Some(1)), ("gpu/quarter", Some(2)), ("watch", None)]);
        assert_eq!(claim.asked[0].capacity["memory"], "6Gi");
        assert!(claim.asked[2].admin_access);
    }

    #[test]
    fn a_claim_without_allocation_or_with_a_broken_one_is_distinguished() {
        let mut claim = object(&json!([]));
        claim["status"] = json!({});
        assert_eq!(Claim::of_object(claim).unwrap().allocated, None);
        let mut claim = object(&json!([]));
        claim["status"]["allocation"]["devices"]["results"][0]["pool"] = json!(7);
        assert!(Claim::of_object(claim).unwrap_err().contains("invalid type"));
        let error = Claim::of_object(json!({ "metadata": {} })).unwrap_err();
        assert_eq!(error, "metadata.uid is missing");
    }
}
