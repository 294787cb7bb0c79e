//! `/api/v1/stream`: the fleet whenever it changes, as server-sent events.
//!
//! What a caller may see is asked again for each event: a right that was withdrawn, or a token that has expired, ends
//! the stream with an event `error`.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use serde::Serialize;
use tessera_view::fleet::{Entry, Fleet};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;

use crate::answers::{narrowed, view};
use crate::caller::Caller;
use crate::connections::Connection;
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
///
/// # Errors
/// The caller may see nothing, or there are too many.
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
    let (events, receiver) = mpsc::channel::<Result<Event, Infallible>>(1);
    connection.streams();
    tokio::spawn(async move {
        let _turn = turn;
        follow(&app, &headers, caller, &asked, &connection, &events).await;
    });
    let keep = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
    let stream = Sse::new(ReceiverStream::new(receiver)).keep_alive(keep);
    let mut response = stream.into_response();
    // Proxies that would collect events are asked not to (nginx).
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

async fn follow(
    app: &Arc<App>,
    headers: &HeaderMap,
    mut caller: Caller,
    asked: &Parameters,
    connection: &Connection,
    events: &mpsc::Sender<Result<Event, Infallible>>,
) {
    let mut ticks = interval(app.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last: Option<Fleet> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = events.closed() => return,
        }
        if let Caller::User(..) = caller {
            match Caller::of(connection.origin(), headers, &app.authorisation).await {
                Ok(same) => caller = same,
                Err(refusal) => return fail(events, connection, &refusal).await,
            }
        }
        let (fleet, rights) = match view(&app.fleets, &caller, asked, app.interval).await {
            Ok(found) => found,
            Err(refusal) => return fail(events, connection, &refusal).await,
        };
        let now = narrowed(&fleet, &rights, asked);
        drop(fleet);
        for event in change(last.as_ref(), &now).events() {
            if !send(events, connection, event).await {
                return;
            }
        }
        last = Some(now);
    }
}

async fn fail(
    events: &mpsc::Sender<Result<Event, Infallible>>,
    connection: &Connection,
    refusal: &Refusal,
) {
    send(events, connection, Event::default().event("error").data(refusal.json())).await;
}

/// False where nobody reads any more.
async fn send(
    events: &mpsc::Sender<Result<Event, Infallible>>,
    connection: &Connection,
    event: Event,
) -> bool {
    match timeout(UNREAD, events.send(Ok(event))).await {
        Ok(sent) => sent.is_ok(),
        Err(_) => {
            // What is in the socket's buffer will not be read either.
            connection.close();
            false
        }
    }
}

/// What to send.
enum Change<'a> {
    /// Nothing changed but clocks.
    Nothing,
    /// All of it.
    Whole(&'a Fleet),
    /// These nodes.
    Nodes(Vec<&'a Entry>),
}

impl Change<'_> {
    /// Events one by one, each made when the one before was taken: a fleet is large.
    fn events(&self) -> Box<dyn Iterator<Item = Event> + Send + '_> {
        match self {
            Change::Nothing => Box::new(std::iter::empty()),
            Change::Whole(fleet) => Box::new(event("fleet", fleet).into_iter()),
            Change::Nodes(nodes) => {
                Box::new(nodes.chunks(BATCH).filter_map(|some| event("nodes", &some)))
            }
        }
    }
}

fn change<'a>(last: Option<&Fleet>, now: &'a Fleet) -> Change<'a> {
    let Some(last) = last else { return Change::Whole(now) };
    let names =
        |fleet: &Fleet| fleet.nodes.iter().map(|entry| entry.node.clone()).collect::<Vec<_>>();
    if last.name != now.name || names(last) != names(now) {
        return Change::Whole(now);
    }
    let pairs = last.nodes.iter().zip(&now.nodes);
    let changed: Vec<&Entry> =
        pairs.filter(|(before, after)| !is_same(before, after)).map(|(_, after)| after).collect();
    match changed.len() {
        0 => Change::Nothing,
        _ if now.nodes.len() <= WHOLE => Change::Whole(now),
        _ => Change::Nodes(changed),
    }
}

fn is_same(before: &Entry, after: &Entry) -> bool {
    // A time that only says that it was looked again is no change; that of one that is silent stands still.
    before.node == after.node
        && before.answers == after.answers
        && before.error == after.error
        && match (&before.view, &after.view) {
            (Some(before), Some(after)) => {
                before.api_version == after.api_version
                    && before.node == after.node
                    && before.plugin == after.plugin
                    && before.gpus == after.gpus
                    && before.tenants == after.tenants
                    && before.others == after.others
                    && before.warnings == after.warnings
            }
            (before, after) => before.is_none() && after.is_none(),
        }
}

fn event(name: &str, data: &impl Serialize) -> Option<Event> {
    Event::default().event(name).json_data(data).ok()
}
