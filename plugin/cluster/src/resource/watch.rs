//! The watch of the driver's own slices, without a store: only their metadata is asked for.

use std::pin::pin;
use std::time::Duration;

use futures_util::{Stream, TryStreamExt};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::core::params::WatchParams;
use kube::core::{PartialObjectMeta, WatchEvent};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep, timeout};

use super::{ResourceClient, SliceEvent, slices};
use crate::error::{ApiError, Call, Kind, Retry, Verb};

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

/// Watches until the receiver is dropped.
pub(super) async fn run(client: ResourceClient, events: Sender<SliceEvent>) {
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
