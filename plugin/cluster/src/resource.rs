//! DRA's objects, `resource.k8s.io/v1`, for one driver on one node: claims are read one by one, slices are the
//! driver's own.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::params::WatchParams;
use kube::core::{ObjectList, ObjectMeta, PartialObjectMeta, Request, WatchEvent};
use serde::de::IgnoredAny;
use serde_json::json;

use crate::client::{Client, body, in_time};
use crate::error::{ApiError, Call, Failure, Kind, Verb, found, refused};

/// Which claim: a name can be used again, a UID cannot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// What happened to one of the driver's own slices. Small: the object itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SliceEvent {
    /// A slice was made or changed. The writer knows its own change by the resource version of the answer.
    Changed {
        name: String,
        resource_version: String,
    },
    Removed {
        name: String,
    },
}

/// Intervals; tests shorten them.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Longest wait for one request, connecting included.
    pub limit: Duration,
    /// How long the server is asked to keep a watch up.
    pub watch: Duration,
    /// How long a watch may be silent before it counts as broken.
    pub silence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            limit: Duration::from_secs(10),
            watch: Duration::from_secs(1500),
            silence: Duration::from_secs(300),
        }
    }
}

/// The API server, for one driver on one node. Every call is one request, and nothing is remembered between calls. A
/// clone is the same client.
#[derive(Clone, Debug)]
pub struct ResourceClient {
    client: Client,
    timing: Timing,
    driver: Arc<str>,
    node: Arc<str>,
}

fn slices() -> Request {
    Request::new("/apis/resource.k8s.io/v1/resourceslices")
}

fn claims(namespace: &str) -> Request {
    Request::new(format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"))
}

impl ResourceClient {
    /// For the slices and statuses of a driver on a node. Nothing is asked yet.
    pub fn new(access: impl Into<crate::Access>, driver: &str, node: &str, timing: Timing) -> Self {
        let client = Client::new(access, timing.limit);
        ResourceClient { client, timing, driver: driver.into(), node: node.into() }
    }

    /// The field selector of its own slices.
    fn own(&self) -> String {
        format!("spec.driver={},spec.nodeName={}", self.driver, self.node)
    }

    /// One claim; `None` where there is none of that name. The caller compares the UID: a claim of the same name
    /// may be another one.
    pub async fn claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ResourceClaim>, ApiError> {
        let call = Call::of(Verb::Get, Kind::CLAIMS, namespace, name);
        let get = claims(namespace).get(name, &GetParams::default());
        found(self.client.ask(&call, get).await)
    }

    /// Makes these entries the driver's part of the claim's `status.devices`, by server-side apply: other drivers'
    /// entries stay, and those of this driver that are not named go.
    /// Errors: [`Failure::NotFound`] where the claim is gone or has another UID; [`Failure::Invalid`] for a device
    /// that is not allocated to the claim; see [`ApiError`].
    pub async fn set_device_status(
        &self,
        claim: &ClaimRef,
        devices: &[AllocatedDeviceStatus],
    ) -> Result<(), ApiError> {
        let ClaimRef { namespace, name, uid } = claim;
        let call = Call::of(Verb::Patch, Kind::CLAIM_STATUS, namespace, name);
        let params = &PatchParams::apply(&self.driver).force();
        let object = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "namespace": namespace, "name": name, "uid": uid },
            "status": { "devices": devices },
        });
        let apply =
            claims(namespace).patch_subresource("status", name, params, &Patch::Apply(object));
        let applied = self.client.ask(&call, apply).await.map(|IgnoredAny| ());
        applied.map_err(|error| {
            let is_another = match &error.failure {
                Failure::Conflict => error.message.contains("UID"),
                Failure::Invalid(field) => field.as_deref() == Some("metadata.uid"),
                _ => false,
            };
            // Another claim has the name now.
            let failure = if is_another { Failure::NotFound } else { error.failure };
            ApiError { failure, ..error }
        })
    }

    /// All slices of this driver and node, in the server's order, and the resource version from which a watch goes on.
    pub async fn own_slices(&self) -> Result<(Vec<ResourceSlice>, String), ApiError> {
        let call = Call::new(Verb::List, Kind::SLICES, "");
        let list = slices().list(&ListParams::default().fields(&self.own()));
        let list: ObjectList<ResourceSlice> = self.client.ask(&call, list).await?;
        Ok((list.items, list.metadata.resource_version.unwrap_or_default()))
    }

    /// Makes a slice; the answer is what the server kept. A field that it dropped is missing there.
    /// Errors: [`Failure::Invalid`] names the field; see [`ApiError`].
    pub async fn create_slice(&self, slice: &ResourceSlice) -> Result<ResourceSlice, ApiError> {
        let call = Call::new(Verb::Create, Kind::SLICES, "");
        self.client.ask(&call, slices().create(&PostParams::default(), body(slice))).await
    }

    /// Replaces a slice, by its name and with the resource version that it carries; the answer is what the server
    /// kept.
    /// Errors: [`Failure::Conflict`] where it was changed since that resource version, [`Failure::NotFound`] where
    /// it is gone; see [`ApiError`].
    pub async fn update_slice(&self, slice: &ResourceSlice) -> Result<ResourceSlice, ApiError> {
        let name = slice.metadata.name.as_deref().unwrap_or_default();
        let call = Call::new(Verb::Update, Kind::SLICES, name);
        self.client.ask(&call, slices().replace(name, &PostParams::default(), body(slice))).await
    }

    /// Removes a slice; one that is gone already is no error.
    pub async fn delete_slice(&self, name: &str) -> Result<(), ApiError> {
        let call = Call::new(Verb::Delete, Kind::SLICES, name);
        let gone = self.client.ask(&call, slices().delete(name, &DeleteParams::default())).await;
        found(gone).map(|_: Option<IgnoredAny>| ())
    }

    /// Follows changes of this driver's slices on this node since `version`, by whomever: kubelet removes them when it
    /// starts. After its end, in an error or not, list them to know what there is. Bookmarks show that the connection
    /// is alive.
    pub async fn watch_own_slices(
        &self,
        version: &str,
    ) -> Result<impl Stream<Item = Result<SliceEvent, ApiError>> + Send + use<>, ApiError> {
        let call = Call::new(Verb::Watch, Kind::SLICES, "");
        let Timing { watch, silence, .. } = self.timing;
        let (own, seconds) =
            (self.own(), u32::try_from(watch.as_secs()).unwrap_or(u32::MAX).max(1));
        let params = WatchParams::default().fields(&own).timeout(seconds);
        let begin = slices().watch_metadata(&params, version);
        let told = self.client.watch::<PartialObjectMeta<ResourceSlice>>(&call, begin).await?;
        let events =
            stream::try_unfold((Box::pin(told), call), move |(mut told, call)| async move {
                loop {
                    let next = in_time(&call, silence, told.try_next()).await?;
                    let event = match next {
                        None => return Ok(None),
                        Some(WatchEvent::Added(slice) | WatchEvent::Modified(slice)) => {
                            let ObjectMeta { name, resource_version, .. } = slice.metadata;
                            SliceEvent::Changed {
                                name: name.unwrap_or_default(),
                                resource_version: resource_version.unwrap_or_default(),
                            }
                        }
                        Some(WatchEvent::Deleted(slice)) => {
                            SliceEvent::Removed { name: slice.metadata.name.unwrap_or_default() }
                        }
                        Some(WatchEvent::Bookmark(_)) => continue,
                        Some(WatchEvent::Error(status)) => {
                            return Err(refused(&call, &status));
                        }
                    };
                    return Ok(Some((event, (told, call))));
                }
            });
        Ok(events)
    }

    /// The UID of the node, for owner references.
    pub async fn node_uid(&self) -> Result<String, ApiError> {
        let call = Call::new(Verb::Get, Kind::NODES, &self.node);
        let get = Request::new("/api/v1/nodes").get_metadata(&self.node, &GetParams::default());
        let node: PartialObjectMeta<Node> = self.client.ask(&call, get).await?;
        Ok(node.metadata.uid.unwrap_or_default())
    }
}
