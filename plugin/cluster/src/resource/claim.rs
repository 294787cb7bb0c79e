//! A claim, as far as a driver needs it.

mod object;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Which claim: a name can be used again, a UID cannot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimRef {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Claim {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.resourceVersion`.
    pub resource_version: String,
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

impl Claim {
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Consumer {
    /// `pods`, in practice.
    pub resource: String,
    /// Its name, in the claim's namespace.
    pub name: String,
    pub uid: String,
}

#[cfg(test)]
mod tests;
