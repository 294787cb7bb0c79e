//! DRA's objects, `resource.k8s.io/v1`, for one driver on one node: claims are read one by one, slices are the
//! driver's own.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::params::WatchParams;
use kube::core::{ObjectList, PartialObjectMeta, Request, WatchEvent};
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep, timeout};

use crate::client::{Client, body};
use crate::error::{ApiError, Call, Kind, Retry, Verb};

/// Which claim: a name can be used again, a UID cannot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
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
        let call = Call::of(Verb::Get, Kind::Claims, namespace, name);
        let get = claims(namespace).get(name, &GetParams::default());
        match self.client.ask(&call, get).await {
            Err(ApiError::NotFound { .. }) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Makes these entries the driver's part of the claim's `status.devices`, by server-side apply: other drivers'
    /// entries stay, and those of this driver that are not named go.
    /// Errors: [`ApiError::NotFound`] where the claim is gone or has another UID; [`ApiError::Invalid`] for a device
    /// that is not allocated to the claim; see [`ApiError`].
    pub async fn set_device_status(
        &self,
        claim: &ClaimRef,
        devices: &[AllocatedDeviceStatus],
    ) -> Result<(), ApiError> {
        let ClaimRef { namespace, name, uid } = claim;
        let call = Call::of(Verb::Patch, Kind::ClaimStatus, namespace, name);
        let params = &PatchParams::apply(&self.driver).force();
        let object = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "namespace": namespace, "name": name, "uid": uid },
            "status": { "devices": devices },
        });
        let apply =
            claims(namespace).patch_subresource("status", name, params, &Patch::Apply(object));
        match self.client.ask(&call, apply).await {
            Ok(IgnoredAny) => Ok(()),
            // Another claim has the name now.
            Err(ApiError::Conflict { call, message }) if message.contains("UID") => {
                Err(ApiError::NotFound { call, message })
            }
            Err(ApiError::Invalid { call, field: Some(field), message })
                if field == "metadata.uid" =>
            {
                Err(ApiError::NotFound { call, message })
            }
            Err(error) => Err(error),
        }
    }

    /// All slices of this driver and node, in the server's order.
    pub async fn own_slices(&self) -> Result<Vec<ResourceSlice>, ApiError> {
        let call = Call::new(Verb::List, Kind::Slices, "");
        let list = slices().list(&ListParams::default().fields(&self.own()));
        let list: ObjectList<ResourceSlice> = self.client.ask(&call, list).await?;
        Ok(list.items)
    }

    /// Makes a slice; the answer is what the server kept. A field that it dropped is missing there.
    /// Errors: [`ApiError::Invalid`] names the field; see [`ApiError`].
    pub async fn create_slice(&self, slice: &ResourceSlice) -> Result<ResourceSlice, ApiError> {
        let call = Call::new(Verb::Create, Kind::Slices, "");
        self.client.ask(&call, slices().create(&PostParams::default(), body(slice))).await
    }

    /// Replaces a slice, by its name and with the resource version that it carries; the answer is what the server
    /// kept.
    /// Errors: [`ApiError::Conflict`] where it was changed since that resource version, [`ApiError::NotFound`] where
    /// it is gone; see [`ApiError`].
    pub async fn update_slice(&self, slice: &ResourceSlice) -> Result<ResourceSlice, ApiError> {
        let name = slice.metadata.name.as_deref().unwrap_or_default();
        let call = Call::new(Verb::Update, Kind::Slices, name);
        self.client.ask(&call, slices().replace(name, &PostParams::default(), body(slice))).await
    }

    /// Removes a slice; one that is gone already is no error.
    pub async fn delete_slice(&self, name: &str) -> Result<(), ApiError> {
        let call = Call::new(Verb::Delete, Kind::Slices, name);
        match self.client.ask(&call, slices().delete(name, &DeleteParams::default())).await {
            Ok(IgnoredAny) | Err(ApiError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Follows changes of this driver's slices on this node, by whomever: kubelet removes them when it starts. The
    /// watch begins with [`SliceEvent::Restarted`], goes on through failures with pauses, and ends when the
    /// receiver is dropped. To be called within a runtime.
    pub fn watch_own_slices(&self) -> mpsc::Receiver<SliceEvent> {
        let (events, receiver) = mpsc::channel(16);
        tokio::spawn(watch(self.clone(), events));
        receiver
    }

    /// The UID of the node, for owner references.
    pub async fn node_uid(&self) -> Result<String, ApiError> {
        let call = Call::new(Verb::Get, Kind::Nodes, &self.node);
        let get = Request::new("/api/v1/nodes").get_metadata(&self.node, &GetParams::default());
        let node: PartialObjectMeta<Node> = self.client.ask(&call, get).await?;
        Ok(node.metadata.uid.unwrap_or_default())
    }
}

/// A watch that ended sooner, with nothing to say, is tried again with a pause.
const SHORT: Duration = Duration::from_secs(1);

type Slice = PartialObjectMeta<ResourceSlice>;

/// Nobody listens any more.
struct Left;

/// How a watch ended.
enum End {
    /// The server's time for it was over, or the connection broke: it goes on from the last line.
    Over,
    /// What the server remembers begins later: it begins again.
    Expired,
    /// It did not begin, or broke.
    Failed(ApiError),
}

// === The watch of the driver's own slices, without a store: only their metadata is asked for ===

/// Watches until the receiver is dropped.
async fn watch(client: ResourceClient, events: Sender<SliceEvent>) {
    let watching = Watch { client, events: events.clone(), at: None, failing: false };
    tokio::select! {
        () = events.closed() => {}
        _ = watching.run() => {}
    }
}

struct Watch {
    client: ResourceClient,
    events: Sender<SliceEvent>,
    /// The resource version of the last line.
    at: Option<String>,
    /// Whether the listener knows of a failure.
    failing: bool,
}

impl Watch {
    async fn run(mut self) -> Result<(), Left> {
        let [first, longest] = self.client.timing.pause;
        let mut pause = first;
        loop {
            let begun = Instant::now();
            let before = self.at.clone();
            let end = self.once().await?;
            let lasted = begun.elapsed() >= SHORT;
            match end {
                End::Over if lasted || self.at != before => {
                    pause = first;
                    continue;
                }
                End::Over => {}
                End::Expired => self.at = None,
                End::Failed(error) => {
                    let later = error.retry() == Retry::Later;
                    if !self.failing {
                        self.failing = true;
                        self.say(SliceEvent::Failed(error)).await?;
                    }
                    if later {
                        pause = longest;
                    }
                }
            }
            sleep(pause).await;
            pause = if lasted { first } else { (pause * 2).min(longest) };
        }
    }

    async fn say(&self, event: SliceEvent) -> Result<(), Left> {
        self.events.send(event).await.map_err(|_| Left)
    }

    /// One request, until it ends.
    async fn once(&mut self) -> Result<End, Left> {
        let call = &Call::new(Verb::Watch, Kind::Slices, "");
        let (fields, at) = (self.client.own(), self.at.clone().unwrap_or_default());
        let seconds = u32::try_from(self.client.timing.watch.as_secs()).unwrap_or(u32::MAX).max(1);
        let params = &WatchParams::default().fields(&fields).timeout(seconds);
        let begin = slices().watch_metadata(params, &at);
        let told = match self.client.client.watch::<Slice>(call, begin).await {
            Ok(told) => told,
            // 410: it remembers no more as far back.
            Err(ApiError::Expired { .. }) => return Ok(End::Expired),
            Err(error) => return Ok(End::Failed(error)),
        };
        if self.at.is_none() || self.failing {
            self.say(SliceEvent::Restarted).await?;
        }
        self.failing = false;
        self.follow(call, told).await
    }

    async fn follow(
        &mut self,
        call: &Call,
        told: impl Stream<Item = Result<WatchEvent<Slice>, ApiError>>,
    ) -> Result<End, Left> {
        let mut told = pin!(told);
        loop {
            let limit = self.client.timing.silence;
            let told = match timeout(limit, told.try_next()).await {
                Err(_) => return Ok(End::Failed(ApiError::Slow { call: call.clone(), limit })),
                Ok(Err(error)) => return Ok(End::Failed(error)),
                Ok(Ok(None)) => return Ok(End::Over),
                Ok(Ok(Some(told))) => told,
            };
            let event = match told {
                WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                    let resource_version = slice.metadata.resource_version.unwrap_or_default();
                    self.at = Some(resource_version.clone());
                    let name = slice.metadata.name.unwrap_or_default();
                    SliceEvent::Changed { name, resource_version }
                }
                WatchEvent::Deleted(slice) => {
                    self.at = slice.metadata.resource_version;
                    SliceEvent::Removed { name: slice.metadata.name.unwrap_or_default() }
                }
                WatchEvent::Bookmark(bookmark) => {
                    self.at = Some(bookmark.metadata.resource_version);
                    continue;
                }
                // The resource version to begin with is too old.
                WatchEvent::Error(status) if status.code == 410 => return Ok(End::Expired),
                WatchEvent::Error(status) => {
                    let (call, reason) = (call.clone(), status.message);
                    return Ok(End::Failed(ApiError::Unreachable { call, reason }));
                }
            };
            self.say(event).await?;
        }
    }
}
