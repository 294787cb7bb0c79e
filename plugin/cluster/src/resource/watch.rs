//! The watch of the driver's own slices, without a store: each line is read as far as the object's name.

use std::time::Duration;

use http_body_util::BodyExt;
use kube::client::Body;
use kube::core::params::WatchParams;
use serde::Deserialize;
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
                match lines.next() {
                    Next::More => break,
                    Next::Line(Line::At(at)) => self.at = Some(at),
                    Next::Line(Line::Event(event, at)) => {
                        self.at = Some(at);
                        self.say(event).await?;
                    }
                    Next::Line(Line::Expired) => return Ok(End::Expired),
                    Next::Line(Line::Error(reason)) => return broken(reason),
                }
            }
        }
    }
}

/// Cuts what comes into lines.
#[derive(Default)]
struct Lines {
    rest: Vec<u8>,
}

enum Next {
    /// There is no whole line.
    More,
    Line(Line),
}

#[derive(Debug, PartialEq)]
enum Line {
    Event(SliceEvent, String),
    /// Nothing happened up to here.
    At(String),
    /// The resource version to begin with is too old.
    Expired,
    Error(String),
}

impl Lines {
    fn take(&mut self, data: &[u8]) {
        self.rest.extend_from_slice(data);
    }

    fn next(&mut self) -> Next {
        let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') else {
            if self.rest.len() > LONGEST {
                return Next::Line(Line::Error(format!(
                    "a line of more than {} MiB",
                    LONGEST >> 20
                )));
            }
            return Next::More;
        };
        let line: Vec<u8> = self.rest.drain(..=end).collect();
        if self.rest.is_empty() {
            // Between changes nothing of it stays in memory.
            self.rest = Vec::new();
        }
        Next::Line(Line::of(&line))
    }
}

impl Line {
    fn of(line: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Event {
            #[serde(rename = "type")]
            kind: String,
            object: Object,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Object {
            metadata: Metadata,
            code: u16,
            message: String,
        }
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Metadata {
            name: String,
            resource_version: String,
        }
        let Event { kind, object } = match answer::read(line) {
            Ok(event) => event,
            Err(error) => return Line::Error(format!("a line that makes no sense: {error}")),
        };
        let Metadata { name, resource_version: at } = object.metadata;
        match kind.as_str() {
            "ADDED" | "MODIFIED" => {
                let resource_version = at.clone();
                Line::Event(SliceEvent::Changed { name, resource_version }, at)
            }
            "DELETED" => Line::Event(SliceEvent::Removed { name }, at),
            "BOOKMARK" => Line::At(at),
            "ERROR" if object.code == 410 => Line::Expired,
            _ => Line::Error(format!("{kind}: {}", object.message)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_pieces_and_say_name_and_resource_version() {
        let text = concat!(
            r#"{"type":"ADDED","object":{"kind":"PartialObjectMetadata","metadata":{"name":"s","resourceVersion":"7"}}}"#,
            "\n",
            r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}"#,
            "\n",
            r#"{"type":"DELETED","object":{"metadata":{"name":"s","resourceVersion":"10"}}}"#,
            "\n",
            r#"{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}"#,
            "\n",
            r#"{"type":"ERROR","object":{"code":500,"message":"etcd"}}"#,
            "\nnonsense\n",
        );
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        for piece in text.as_bytes().chunks(7) {
            lines.take(piece);
            while let Next::Line(line) = lines.next() {
                seen.push(line);
            }
        }
        let changed = SliceEvent::Changed { name: "s".into(), resource_version: "7".into() };
        assert_eq!(seen[0], Line::Event(changed, "7".into()));
        assert_eq!(seen[1], Line::At("9".into()));
        assert_eq!(seen[2], Line::Event(SliceEvent::Removed { name: "s".into() }, "10".into()));
        assert_eq!(seen[3], Line::Expired);
        assert_eq!(seen[4], Line::Error("ERROR: etcd".into()));
        assert!(matches!(&seen[5], Line::Error(text) if text.contains("no sense")));
        assert_eq!((seen.len(), lines.rest.capacity()), (6, 0));
    }
}
