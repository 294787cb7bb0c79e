//! [`ResourceApi`] over the network.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ObjectList, PartialObjectMeta, Request};
use serde_json::json;
use tokio::sync::mpsc;

use super::{Answer, Claim, ClaimRef, DeviceStatus, ResourceApi, SliceEvent, watch};
use crate::answer;
use crate::client::{Client, Outcomes, Request as Sent};
use crate::error::{ApiError, Call, Kind, Verb};

/// Intervals; tests shorten them.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Longest wait for one request, connecting included.
    pub limit: Duration,
    /// The pause after the watch broke, which doubles, at first and at most.
    pub pause: [Duration; 2],
    /// How long the server is asked to keep a watch up.
    pub watch: Duration,
    /// How long a watch may be silent before it counts as broken.
    pub silence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            limit: Duration::from_secs(10),
            pause: [Duration::from_secs(1), Duration::from_secs(60)],
            watch: Duration::from_secs(1500),
            silence: Duration::from_secs(300),
        }
    }
}

/// See the module's text. A clone is the same client.
#[derive(Clone, Debug)]
pub struct ResourceClient {
    pub(super) client: Client,
    pub(super) timing: Timing,
    driver: Arc<str>,
    node: Arc<str>,
}

impl ResourceClient {
    /// For the slices and statuses of a driver on a node. Nothing is asked yet.
    pub fn new(access: impl Into<crate::Access>, driver: &str, node: &str, timing: Timing) -> Self {
        ResourceClient {
            client: Client::new(access, timing.limit),
            timing,
            driver: driver.into(),
            node: node.into(),
        }
    }

    /// The requests so far, of all clones.
    pub fn requests(&self) -> BTreeMap<(Verb, Kind), Outcomes> {
        self.client.requests()
    }

    /// The field selector of its own slices.
    pub(super) fn own(&self) -> String {
        format!("spec.driver={},spec.nodeName={}", self.driver, self.node)
    }

    async fn sent_slice(&self, call: &Call, request: Sent) -> Result<ResourceSlice, ApiError> {
        let body = self.client.send(call, request).await?;
        answer::read(&body).map_err(|error| unreadable(call, &error))
    }
}

pub(super) fn slices() -> Request {
    Request::new("/apis/resource.k8s.io/v1/resourceslices")
}

fn claims(namespace: &str) -> Request {
    Request::new(format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"))
}

/// A slice as a request's body.
fn written(call: &Call, slice: &ResourceSlice) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(slice).map_err(|error| unreadable(call, &error))
}

fn unreadable(call: &Call, error: &dyn std::fmt::Display) -> ApiError {
    ApiError::Unreadable { call: call.clone(), reason: error.to_string() }
}

impl ResourceApi for ResourceClient {
    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Option<Claim>> {
        Box::pin(async move {
            let call = &Call::of(Verb::Get, Kind::Claims, namespace, name);
            let get = claims(namespace).get(name, &GetParams::default());
            match self.client.send(call, get).await {
                Ok(body) => {
                    let read =
                        answer::read::<ResourceClaim>(&body).map_err(|error| error.to_string());
                    read.and_then(Claim::try_from)
                        .map(Some)
                        .map_err(|reason| unreadable(call, &reason))
                }
                Err(ApiError::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    /// Server-side apply: what the driver applied before and does not name any more goes, and nobody else's change
    /// is in the way.
    fn set_device_status<'a>(
        &'a self,
        claim: &'a ClaimRef,
        devices: &'a [DeviceStatus],
    ) -> Answer<'a, ()> {
        Box::pin(async move {
            let ClaimRef { namespace, name, uid } = claim;
            let call = &Call::of(Verb::Patch, Kind::ClaimStatus, namespace, name);
            let entries: Vec<_> = devices.iter().map(DeviceStatus::object).collect();
            let params = &PatchParams::apply(&self.driver).force();
            let object = json!({
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": { "namespace": namespace, "name": name, "uid": uid },
                "status": { "devices": entries },
            });
            let apply =
                claims(namespace).patch_subresource("status", name, params, &Patch::Apply(object));
            self.client.send(call, apply).await.map(drop).map_err(|error| match error {
                // Another claim has the name now.
                ApiError::Conflict { call, message } if message.contains("UID") => {
                    ApiError::NotFound { call, message }
                }
                ApiError::Invalid { call, field: Some(field), message }
                    if field == "metadata.uid" =>
                {
                    ApiError::NotFound { call, message }
                }
                error => error,
            })
        })
    }

    fn own_slices(&self) -> Answer<'_, Vec<ResourceSlice>> {
        Box::pin(async move {
            let call = &Call::new(Verb::List, Kind::Slices, "");
            let params = &ListParams::default().fields(&self.own());
            let body = self.client.send(call, slices().list(params)).await?;
            let list: ObjectList<ResourceSlice> =
                answer::read(&body).map_err(|error| unreadable(call, &error))?;
            Ok(list.items)
        })
    }

    fn create_slice<'a>(&'a self, slice: &'a ResourceSlice) -> Answer<'a, ResourceSlice> {
        Box::pin(async move {
            let call = Call::new(Verb::Create, Kind::Slices, "");
            let create = slices().create(&PostParams::default(), written(&call, slice)?);
            self.sent_slice(&call, create).await
        })
    }

    fn update_slice<'a>(&'a self, slice: &'a ResourceSlice) -> Answer<'a, ResourceSlice> {
        Box::pin(async move {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let call = Call::new(Verb::Update, Kind::Slices, name);
            let replace = slices().replace(name, &PostParams::default(), written(&call, slice)?);
            self.sent_slice(&call, replace).await
        })
    }

    fn delete_slice<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = &Call::new(Verb::Delete, Kind::Slices, name);
            let delete = slices().delete(name, &DeleteParams::default());
            match self.client.send(call, delete).await.map(drop) {
                Err(ApiError::NotFound { .. }) => Ok(()),
                answer => answer,
            }
        })
    }

    fn watch_own_slices(&self) -> mpsc::Receiver<SliceEvent> {
        let (events, receiver) = mpsc::channel(16);
        tokio::spawn(watch::run(self.clone(), events));
        receiver
    }

    fn node_uid(&self) -> Answer<'_, String> {
        Box::pin(async move {
            let call = Call::new(Verb::Get, Kind::Nodes, &self.node);
            let request =
                Request::new("/api/v1/nodes").get_metadata(&self.node, &GetParams::default());
            let body = self.client.send(&call, request).await?;
            let node: PartialObjectMeta =
                answer::read(&body).map_err(|error| unreadable(&call, &error))?;
            node.metadata.uid.ok_or_else(|| unreadable(&call, &"metadata.uid is missing"))
        })
    }
}
