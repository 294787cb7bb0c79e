//! The watch of the driver's own slices, without a store: each line is read as far as the object's name.

use std::time::Duration;

use http_body_util::BodyExt;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::client::Body;
use kube::core::params::WatchParams;
use kube::core::{PartialObjectMeta, WatchEvent};
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, sleep, timeout};

use super::SliceEvent;
use super::client::{ResourceClient, slices};
use crate::answer;
use crate::error::{ApiError, Call, Kind, Retry, Verb};

/// Longest line. Objects come as their metadata alone; an API server that cannot do so sends all of a slice.
const LONGEST: usize = 4 << 20;
/// A watch that ended sooner, with nothing to say, is tried again with a pause.
const SHORT: Duration = Duration::from_secs(1);

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
        let body = match self.client.client.stream(call, begin).await {
            Ok(body) => body,
            // 410: it remembers no more as far back.
            Err(ApiError::Expired { .. }) => return Ok(End::Expired),
            Err(error) => return Ok(End::Failed(error)),
        };
        if self.at.is_none() || self.failing {
            self.say(SliceEvent::Restarted).await?;
        }
        self.failing = false;
        self.follow(call, body).await
    }

    async fn follow(&mut self, call: &Call, mut body: Body) -> Result<End, Left> {
        let mut lines = Lines::default();
        let broken =
            |reason: String| Ok(End::Failed(ApiError::Unreachable { call: call.clone(), reason }));
        loop {
            let limit = self.client.timing.silence;
            let frame = match timeout(limit, body.frame()).await {
                Err(_) => return Ok(End::Failed(ApiError::Slow { call: call.clone(), limit })),
                Ok(None) => return Ok(End::Over),
                Ok(Some(Err(error))) => return broken(error.to_string()),
                Ok(Some(Ok(frame))) => frame,
            };
            let Ok(data) = frame.into_data() else { continue };
            lines.take(&data);
            loop {
                let event = match lines.next() {
                    Ok(None) => break,
                    Ok(Some(event)) => event,
                    Err(reason) => return broken(reason),
                };
                let event = match event {
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
                    WatchEvent::Error(status) => return broken(status.message),
                };
                self.say(event).await?;
            }
        }
    }
}

/// Cuts what comes into lines.
#[derive(Default)]
struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    fn take(&mut self, data: &[u8]) {
        self.rest.extend_from_slice(data);
    }

    /// What the next line says; `None` where there is no whole one.
    fn next(&mut self) -> Result<Option<WatchEvent<PartialObjectMeta<ResourceSlice>>>, String> {
        let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') else {
            return match self.rest.len() > LONGEST {
                true => Err(format!("a line of more than {} MiB", LONGEST >> 20)),
                false => Ok(None),
            };
        };
        let line: Vec<u8> = self.rest.drain(..=end).collect();
        if self.rest.is_empty() {
            // Between changes nothing of it stays in memory.
            self.rest = Vec::new();
        }
        answer::read(&line)
            .map(Some)
            .map_err(|error| format!("a line that makes no sense: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    #[test]
    fn lines_come_in_pieces_and_say_name_and_resource_version() {
        let text = concat!(
            r#"{"type":"ADDED","object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"s","resourceVersion":"7"}}}"#,
            "\n",
            r#"{"type":"BOOKMARK","object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"9"}}}"#,
            "\n",
            r#"{"type":"DELETED","object":{"metadata":{"name":"s","resourceVersion":"10"}}}"#,
            "\n",
            r#"{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}"#,
            "\n",
            "nonsense\n",
        );
        let (mut lines, mut seen) = (Lines::default(), Vec::new());
        for piece in text.as_bytes().chunks(7) {
            lines.take(piece);
            while let Some(event) = lines.next().transpose() {
                seen.push(event);
            }
        }
        let Ok(WatchEvent::Added(slice)) = &seen[0] else { panic!("{:?}", seen[0]) };
        let ObjectMeta { name, resource_version, .. } = &slice.metadata;
        assert_eq!((name.as_deref(), resource_version.as_deref()), (Some("s"), Some("7")));
        let Ok(WatchEvent::Bookmark(bookmark)) = &seen[1] else { panic!("{:?}", seen[1]) };
        assert_eq!(bookmark.metadata.resource_version, "9");
        assert!(matches!(&seen[2], Ok(WatchEvent::Deleted(_))));
        assert!(matches!(&seen[3], Ok(WatchEvent::Error(status)) if status.code == 410));
        assert!(matches!(&seen[4], Err(text) if text.contains("no sense")));
        assert_eq!((seen.len(), lines.rest.capacity()), (5, 0));
    }
}
