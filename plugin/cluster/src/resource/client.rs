//! [`ResourceApi`] over the network.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;

use super::versions::{self, GROUP};
use super::{Answer, Claim, ClaimRef, DeviceStatus, ResourceApi, SliceEvent, Version, watch};
use crate::answer;
use crate::client::Client;
use crate::counts::Outcomes;
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
    version: Arc<Mutex<Option<Version>>>,
}

impl ResourceClient {
    /// For the slices and statuses of a driver on a node. Nothing is asked yet.
    pub fn new(access: impl Into<crate::Access>, driver: &str, node: &str, timing: Timing) -> Self {
        ResourceClient {
            client: Client::new(access, timing.limit),
            timing,
            driver: driver.into(),
            node: node.into(),
            version: Arc::default(),
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

    /// The version is found out again with the next request: the server may be another one now.
    pub(super) fn forget_version(&self) {
        *self.version.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    async fn negotiated(&self) -> Result<Version, ApiError> {
        let known = *self.version.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(version) = known {
            return Ok(version);
        }
        let call = Call::new(Verb::Get, Kind::Versions, "");
        let request = Request::new("/apis").get(GROUP, &GetParams::default());
        let group = self.client.send(&call, request).await?;
        let newest = Version::newest(&group);
        let version = newest.map_err(|message| ApiError::NotServed { call, message })?;
        *self.version.lock().unwrap_or_else(PoisonError::into_inner) = Some(version);
        Ok(version)
    }

    /// Asks in the version of both; once more if the server has another one by now.
    pub(super) async fn asked<T, F>(&self, ask: impl Fn(Version) -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let version = self.negotiated().await?;
        match ask(version).await {
            Err(error @ ApiError::NotServed { .. }) => {
                self.forget_version();
                match self.negotiated().await? {
                    newer if newer != version => ask(newer).await,
                    _ => Err(error),
                }
            }
            answer => answer,
        }
    }

    async fn sent_slice(
        &self,
        call: &Call,
        slice: &ResourceSlice,
        request: impl Fn(Version, Vec<u8>) -> crate::client::Request,
    ) -> Result<ResourceSlice, ApiError> {
        self.asked(|version| {
            let request = &request;
            async move {
                let body = versions::written(slice, version).map_err(|e| unreadable(call, &e))?;
                let body = self.client.send(call, request(version, body)).await?;
                versions::read(&body, version).map_err(|error| unreadable(call, &error))
            }
        })
        .await
    }
}

pub(super) fn slices(version: Version) -> Request {
    Request::new(format!("/apis/{GROUP}/{version}/resourceslices"))
}

fn claims(version: Version, namespace: &str) -> Request {
    Request::new(format!("/apis/{GROUP}/{version}/namespaces/{namespace}/resourceclaims"))
}

fn unreadable(call: &Call, error: &dyn std::fmt::Display) -> ApiError {
    ApiError::Unreadable { call: call.clone(), reason: error.to_string() }
}

impl ResourceApi for ResourceClient {
    fn version(&self) -> Answer<'_, Version> {
        Box::pin(self.negotiated())
    }

    fn claim<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Option<Claim>> {
        Box::pin(async move {
            let call = &Call::of(Verb::Get, Kind::Claims, namespace, name);
            let get = |version| async move {
                let request = claims(version, namespace).get(name, &GetParams::default());
                self.client.send(call, request).await
            };
            match self.asked(get).await {
                Ok(body) => {
                    Claim::read(&body).map(Some).map_err(|reason| unreadable(call, &reason))
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
            let apply = |version: Version| {
                let object = json!({
                    "apiVersion": version.api_version(),
                    "kind": "ResourceClaim",
                    "metadata": { "namespace": namespace, "name": name, "uid": uid },
                    "status": { "devices": entries },
                });
                async move {
                    let requests = claims(version, namespace);
                    let request =
                        requests.patch_subresource("status", name, params, &Patch::Apply(object));
                    self.client.send(call, request).await.map(drop)
                }
            };
            self.asked(apply).await.map_err(|error| match error {
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
            let list = |version| async move {
                let body = self.client.send(call, slices(version).list(params)).await?;
                versions::read_list(&body, version).map_err(|error| unreadable(call, &error))
            };
            self.asked(list).await
        })
    }

    fn create_slice<'a>(&'a self, slice: &'a ResourceSlice) -> Answer<'a, ResourceSlice> {
        Box::pin(async move {
            let call = Call::new(Verb::Create, Kind::Slices, "");
            let create = |version, body| slices(version).create(&PostParams::default(), body);
            self.sent_slice(&call, slice, create).await
        })
    }

    fn update_slice<'a>(&'a self, slice: &'a ResourceSlice) -> Answer<'a, ResourceSlice> {
        Box::pin(async move {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let call = Call::new(Verb::Update, Kind::Slices, name);
            let replace =
                |version, body| slices(version).replace(name, &PostParams::default(), body);
            self.sent_slice(&call, slice, replace).await
        })
    }

    fn delete_slice<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = &Call::new(Verb::Delete, Kind::Slices, name);
            let delete = |version| async move {
                let request = slices(version).delete(name, &DeleteParams::default());
                self.client.send(call, request).await.map(drop)
            };
            match self.asked(delete).await {
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
        #[derive(Deserialize)]
        struct Node {
            metadata: Metadata,
        }
        #[derive(Deserialize)]
        struct Metadata {
            uid: String,
        }
        Box::pin(async move {
            let call = Call::new(Verb::Get, Kind::Nodes, &self.node);
            let request =
                Request::new("/api/v1/nodes").get_metadata(&self.node, &GetParams::default());
            let body = self.client.send(&call, request).await?;
            let node: Node = answer::read(&body).map_err(|error| unreadable(&call, &error))?;
            Ok(node.metadata.uid)
        })
    }
}
