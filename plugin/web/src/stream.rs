//! `/api/v1/stream`: the fleet whenever it changes, as server-sent events.
//!
//! What a caller may see is asked again for each event: a right that was withdrawn, or a token that has expired, ends
//! the stream with an event `error`.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::CACHE_CONTROL;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use futures_util::{StreamExt, stream};
use tessera_system::connections::Connection;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::answers::{broken, only, view, with_type};
use crate::caller::{Caller, Origin};
use crate::encoded::{Digest, Encoded};
use crate::problem::Refusal;
use crate::query::Parameters;
use crate::routes::App;

/// A comment keeps proxies from closing a stream in which nothing changes.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a reader may leave an event unread before the stream ends.
const UNREAD: Duration = Duration::from_secs(30);
/// Nodes from which on only those are sent that changed.
const WHOLE: usize = 20;
/// Nodes of one event: a browser reads one in a few milliseconds.
const BATCH: usize = 16;
/// Streams at a time: in all, and of one caller.
const STREAMS: usize = 64;
const STREAMS_OF_ONE: usize = 16;

/// The readers with a stream.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<Vec<String>>);

/// The right to one stream. Ends when dropped.
struct Turn(Arc<Streams>, String);

impl Streams {
    fn take(self: &Arc<Self>, caller: &str) -> Result<Turn, Refusal> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = all.iter().filter(|name| *name == caller).count();
        if all.len() >= STREAMS || own >= STREAMS_OF_ONE {
            let text = "too many streams at once, in all or of this caller: close one, or ask for /api/v1/fleet \
                        now and then";
            return Err(Refusal::new(StatusCode::TOO_MANY_REQUESTS, text));
        }
        all.push(caller.to_owned());
        Ok(Turn(Arc::clone(self), caller.to_owned()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut all = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = all.iter().position(|name| *name == self.1) {
            all.swap_remove(at);
        }
    }
}

/// Begins one.
pub(crate) async fn begin(
    app: Arc<App>,
    headers: HeaderMap,
    caller: Caller,
    asked: Parameters,
    connection: Connection,
) -> Result<Response<Body>, Refusal> {
    let turn = app.streams.take(caller.name())?;
    // What would be refused is refused before the stream begins.
    view(&app.fleets, &caller, &asked, app.interval).await?;
    let (events, receiver) = mpsc::channel::<Event>(1);
    connection.streams();
    tokio::spawn(async move {
        let _turn = turn;
        follow(&app, &headers, caller, &asked, &connection, &events).await;
    });
    let mut response = with_type("text/event-stream", body(receiver));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that would collect events are asked not to (nginx).
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// Events as they come, and a comment where none comes for a while.
fn body(receiver: mpsc::Receiver<Event>) -> Body {
    let events = stream::unfold(receiver, |mut receiver| async {
        let event = match timeout(KEEP_ALIVE, receiver.recv()).await {
            Ok(event) => event?,
            Err(_) => vec![Bytes::from_static(b": keep-alive\n\n")],
        };
        Some((stream::iter(event.into_iter().map(Ok::<_, Infallible>)), receiver))
    });
    Body::from_stream(events.flatten())
}

async fn follow(
    app: &Arc<App>,
    headers: &HeaderMap,
    mut caller: Caller,
    asked: &Parameters,
    connection: &Connection,
    events: &mpsc::Sender<Event>,
) {
    let mut ticks = interval(app.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Of what was sent, this is all that stays: a stream may last for days.
    let mut last: Option<Arc<Digest>> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = events.closed() => return,
        }
        // Of root's socket nobody is a user.
        if let Caller::User(..) = caller {
            match Caller::of(Origin::Network, headers, &app.authorisation).await {
                Ok(same) => caller = same,
                Err(refusal) => return fail(events, connection, &refusal).await,
            }
        }
        let (fleet, rights) = match view(&app.fleets, &caller, asked, app.interval).await {
            Ok(found) => found,
            Err(refusal) => return fail(events, connection, &refusal).await,
        };
        let now = match app.encodings.get(&fleet, &only(&rights, asked), &asked.node) {
            Ok(now) => now,
            Err(error) => return fail(events, connection, &broken(&error)).await,
        };
        drop(fleet);
        for event in changed(last.as_deref(), &now) {
            if !send(events, connection, event).await {
                return;
            }
        }
        last = Some(Arc::clone(&now.digest));
    }
}

async fn fail(events: &mpsc::Sender<Event>, connection: &Connection, refusal: &Refusal) {
    send(events, connection, event("error", vec![refusal.json().into()])).await;
}

/// False where nobody reads any more.
async fn send(events: &mpsc::Sender<Event>, connection: &Connection, event: Event) -> bool {
    match timeout(UNREAD, events.send(event)).await {
        Ok(sent) => sent.is_ok(),
        Err(_) => {
            // What is in the socket's buffer will not be read either.
            connection.close();
            false
        }
    }
}

/// One event, in pieces that streams share.
type Event = Vec<Bytes>;

/// JSON has no line breaks: an event's data is one line.
fn event(name: &str, data: Vec<Bytes>) -> Event {
    let mut pieces = vec![Bytes::from(format!("event: {name}\ndata: "))];
    pieces.extend(data);
    pieces.push(Bytes::from_static(b"\n\n"));
    pieces
}

/// What to send: nothing where only clocks have changed.
fn changed(last: Option<&Digest>, now: &Encoded) -> Vec<Event> {
    let whole = || vec![event("fleet", now.whole())];
    let Some(last) = last else { return whole() };
    let digest = &now.digest;
    let pairs = || last.nodes.iter().zip(&digest.nodes);
    let is_same_nodes = last.nodes.len() == digest.nodes.len()
        && pairs().all(|(before, after)| before.0 == after.0);
    if last.name != digest.name || !is_same_nodes {
        return whole();
    }
    let differs = pairs().enumerate().filter(|(_, (before, after))| before != after);
    let places: Vec<usize> = differs.map(|(place, _)| place).collect();
    match places.is_empty() {
        true => Vec::new(),
        false if digest.nodes.len() <= WHOLE => whole(),
        false => places.chunks(BATCH).map(|some| event("nodes", now.some(some))).collect(),
    }
}
