//! DRA's objects, `resource.k8s.io/v1`: claims are read one by one, slices are the driver's own.
//!
//! Slices are exchanged as `k8s_openapi`'s types, claims as [`Claim`].

mod claim;
mod client;
mod watch;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::error::ApiError;

pub use claim::{Asked, Claim, ClaimRef, Consumer, DeviceResult, OpaqueConfig};
pub use client::{ResourceClient, Timing};

/// An answer that is on its way.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send + 'a>>;

/// The API server, for one driver on one node. Every call is one request, or two where a conflict is retried;
/// nothing is remembered between calls. Each call ends within the client's limit of time.
pub trait ResourceApi: fmt::Debug + Send + Sync {
    /// One claim; `None` where there is none of that name. The caller compares the UID: a claim of the same name
    /// may be another one.
    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Option<Claim>>;

    /// Makes these entries the driver's part of the claim's `status.devices`. Other drivers' entries stay; entries
    /// of this driver that are not named go. Without entries, the driver's part is removed.
    ///
    /// # Errors
    /// [`ApiError::NotFound`] where the claim is gone or has another UID; [`ApiError::Invalid`] for a device that
    /// is not allocated to the claim; see [`ApiError`].
    fn set_device_status<'a>(
        &'a self,
        claim: &'a ClaimRef,
        devices: &'a [DeviceStatus],
    ) -> Answer<'a, ()>;

    /// All slices of this driver and node, in the server's order.
    fn own_slices(&self) -> Answer<'_, Vec<ResourceSlice>>;

    /// Makes a slice; the answer is what the server kept. A field that it dropped is missing there.
    ///
    /// # Errors
    /// [`ApiError::Invalid`] names the field; see [`ApiError`].
    fn create_slice<'a>(&'a self, slice: &'a ResourceSlice) -> Answer<'a, ResourceSlice>;

    /// Replaces a slice, by its name and with the resource version that it carries; the answer is what the server
    /// kept.
    ///
    /// # Errors
    /// [`ApiError::Conflict`] where it was changed since that resource version, [`ApiError::NotFound`] where it
    /// is gone; see [`ApiError`].
    fn update_slice<'a>(&'a self, slice: &'a ResourceSlice) -> Answer<'a, ResourceSlice>;

    /// Removes a slice; one that is gone already is no error.
    fn delete_slice<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;

    /// Follows changes of this driver's slices on this node, by whomever: kubelet removes them when it starts. The
    /// watch begins with [`SliceEvent::Restarted`], goes on through failures with pauses, and ends when the
    /// receiver is dropped. To be called within a runtime.
    fn watch_own_slices(&self) -> mpsc::Receiver<SliceEvent>;

    /// The UID of the node, for owner references.
    fn node_uid(&self) -> Answer<'_, String>;
}

/// What happened to the driver's own slices. Small: the object itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SliceEvent {
    /// The watch began, or began once more after a gap: list them to know what there is.
    Restarted,
    /// The watch broke or cannot begin, for this reason; it tries again by itself. Once for each row of failures.
    Failed(ApiError),
    /// A slice was made or changed. The writer knows its own change by the resource version of the answer.
    Changed {
        name: String,
        resource_version: String,
    },
    Removed {
        name: String,
    },
}

/// What a driver says of a device in a claim's status (KEP 4817): one entry of `status.devices`.
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
