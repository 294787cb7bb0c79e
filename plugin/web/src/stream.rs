//! `/api/v1/stream`: the fleet whenever it changes, as server-sent events.
//!
//! What a caller may see is asked again for each event: a right that was withdrawn, or a token that has expired, ends
//! the stream with an event `error`.

use std::collections::hash_map::RandomState;
use std::convert::Infallible;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::CACHE_CONTROL;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use futures_util::{StreamExt, stream};
use tessera_system::connections::Connection;
use tessera_system::locks::lock;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::narrow::{self, Rights};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::answers::{broken, only, view, with_type};
use crate::caller::{Caller, Origin};
use crate::query::Parameters;
use crate::routes::App;
use crate::source::Refusal;

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
        let mut all = lock(&self.0);
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
        let mut all = lock(&self.0.0);
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

/// Encodings of the present fleet that are kept: of so many sets of rights.
const KEPT: usize = 8;

/// What is remembered of a fleet that was sent, to know later what has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Digest {
    pub name: String,
    /// Each node, and a hash of all but its clocks.
    pub nodes: Vec<(String, u64)>,
}

/// A fleet as a reader may see it, in JSON: made once for all readers with equal rights, and shared by their answers. A
/// fleet is large, and many readers may read slowly.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub digest: Arc<Digest>,
    /// All before the nodes.
    head: Bytes,
    /// In the order of the digest.
    nodes: Vec<Bytes>,
}

impl Encoded {
    fn new(
        fleet: &Fleet,
        rights: &Rights,
        node: &str,
        state: &RandomState,
    ) -> serde_json::Result<Self> {
        let (mut digests, mut nodes) = (Vec::new(), Vec::new());
        for entry in fleet.nodes.iter().filter(|entry| node.is_empty() || entry.node == node) {
            let entry = narrow::entry(entry.clone(), rights);
            digests.push((entry.node.clone(), hash(&entry, state)?));
            nodes.push(serde_json::to_vec(&entry)?.into());
        }
        let api_version = serde_json::to_string(&fleet.api_version)?;
        let name = serde_json::to_string(&fleet.name)?;
        let at = fleet.at_unix_ms;
        let head =
            format!(r#"{{"api_version":{api_version},"name":{name},"at_unix_ms":{at},"nodes":["#);
        let digest = Digest { name: fleet.name.clone(), nodes: digests };
        Ok(Encoded { digest: Arc::new(digest), head: head.into(), nodes })
    }

    /// The JSON of the fleet, in pieces.
    pub fn whole(&self) -> Vec<Bytes> {
        let all = (0..self.nodes.len()).collect::<Vec<_>>();
        let mut pieces = vec![self.head.clone()];
        pieces.extend(self.listed(&all));
        pieces.push(Bytes::from_static(b"]}"));
        pieces
    }

    /// The JSON of an array of some nodes, by their places, in pieces.
    pub fn some(&self, places: &[usize]) -> Vec<Bytes> {
        let mut pieces = vec![Bytes::from_static(b"[")];
        pieces.extend(self.listed(places));
        pieces.push(Bytes::from_static(b"]"));
        pieces
    }

    fn listed(&self, places: &[usize]) -> impl Iterator<Item = Bytes> {
        places.iter().enumerate().flat_map(|(number, place)| {
            let comma = (number > 0).then(|| Bytes::from_static(b","));
            comma.into_iter().chain([self.nodes[*place].clone()])
        })
    }
}

/// A time that only says that a node was looked at again is no change; that of one that is silent stands still.
fn hash(entry: &Entry, state: &RandomState) -> serde_json::Result<u64> {
    let mut still = Entry { answered_unix_ms: 0, ..entry.clone() };
    if let Some(view) = &mut still.view {
        view.at_unix_ms = 0;
    }
    Ok(state.hash_one(serde_json::to_vec(&still)?))
}

/// The encodings of the present fleet.
#[derive(Debug, Default)]
pub(crate) struct Encodings {
    state: RandomState,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    of: Weak<Fleet>,
    /// By rights and the node that was asked for, the newest last.
    all: Vec<(Rights, String, Arc<Encoded>)>,
}

impl Encodings {
    /// What a reader with these rights sees of a fleet, of one node where one is named.
    pub fn get(
        &self,
        fleet: &Arc<Fleet>,
        rights: &Rights,
        node: &str,
    ) -> serde_json::Result<Arc<Encoded>> {
        // Held while it is made: others that want the same wait for it.
        let mut kept = lock(&self.kept);
        if !Weak::ptr_eq(&kept.of, &Arc::downgrade(fleet)) {
            *kept = Kept { of: Arc::downgrade(fleet), all: Vec::new() };
        }
        let same = kept.all.iter().find(|(known, name, _)| known == rights && name == node);
        if let Some((_, _, encoded)) = same {
            return Ok(Arc::clone(encoded));
        }
        let encoded = Arc::new(Encoded::new(fleet, rights, node, &self.state)?);
        if kept.all.len() == KEPT {
            kept.all.remove(0);
        }
        kept.all.push((rights.clone(), node.to_owned(), Arc::clone(&encoded)));
        Ok(encoded)
    }
}

#[cfg(test)]
mod tests {
    use tessera_view::fixtures::{Layout, MadeUp};

    use super::*;

    fn fleet() -> Arc<Fleet> {
        Arc::new(MadeUp::new(Layout::default()).fleet())
    }

    fn some(namespace: &str) -> Rights {
        Rights::Namespaces([namespace.to_owned()].into())
    }

    #[test]
    fn the_pieces_are_the_json_of_what_the_reader_may_see() {
        let (fleet, encodings) = (fleet(), Encodings::default());
        let namespace = fleet.nodes[0].view.as_ref().unwrap().tenants[0].namespace.clone();
        for rights in [Rights::All, some(&namespace), some("")] {
            let encoded = encodings.get(&fleet, &rights, "").unwrap();
            let seen: Fleet = serde_json::from_slice(&encoded.whole().concat()).unwrap();
            let mut narrowed = (*fleet).clone();
            let nodes = std::mem::take(&mut narrowed.nodes).into_iter();
            narrowed.nodes = nodes.map(|one| narrow::entry(one, &rights)).collect();
            assert_eq!(seen, narrowed);
            let nodes: Vec<Entry> =
                serde_json::from_slice(&encoded.some(&[0, 2]).concat()).unwrap();
            assert_eq!(nodes, [narrowed.nodes[0].clone(), narrowed.nodes[2].clone()]);
            let one = encodings.get(&fleet, &rights, &narrowed.nodes[1].node).unwrap();
            let one: Fleet = serde_json::from_slice(&one.whole().concat()).unwrap();
            assert_eq!(one.nodes, narrowed.nodes[1..2]);
            let none = encodings.get(&fleet, &rights, "no-such").unwrap();
            let none: Fleet = serde_json::from_slice(&none.whole().concat()).unwrap();
            assert_eq!(none.nodes, []);
        }
    }

    #[test]
    fn readers_with_equal_rights_share_one_and_others_never_do() {
        let (fleet, encodings) = (fleet(), Encodings::default());
        let first = encodings.get(&fleet, &Rights::All, "").unwrap();
        assert!(Arc::ptr_eq(&first, &encodings.get(&fleet, &Rights::All, "").unwrap()));
        for (rights, node) in [(some("a"), ""), (some("b"), ""), (Rights::All, "n")] {
            let other = encodings.get(&fleet, &rights, node).unwrap();
            assert!(!Arc::ptr_eq(&first, &other));
        }
        // The next look at the fleet is another, though nothing has changed but clocks.
        let later = encodings.get(&self::fleet(), &Rights::All, "").unwrap();
        assert!(!Arc::ptr_eq(&first, &later) && first.digest == later.digest);
        for number in 0..3 * KEPT {
            encodings.get(&fleet, &some(&number.to_string()), "").unwrap();
        }
        assert_eq!(encodings.kept.lock().unwrap().all.len(), KEPT);
    }
}
