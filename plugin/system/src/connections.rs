//! The connections of a listener: how many there may be, which one is closed for a new one, and until when each has to
//! be done.
//!
//! A connection without a request under way waits. Where there is no room for another, the one that has waited longest
//! is closed, of the client that has most. One whose request has been read is never closed for another.

use std::collections::{BTreeMap, HashMap};
use std::future::{Future, pending};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::descriptors::ListenerKind;
use crate::locks::lock;

/// How long nobody is accepted after an error, such as too many open files, or while all connections have a request
/// under way.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a connection may take for its first request, and for its next, with the end of the last answer unread or
/// not.
const SILENCE: Duration = Duration::from_secs(60);
/// How long an answer may take to be made and read.
const ANSWER: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct State {
    open: usize,
    /// Those that were closed for others, and have not left yet.
    leaving: usize,
    waiting: Waiting<Arc<Shared>>,
}

#[derive(Debug)]
pub struct Connections {
    kind: ListenerKind,
    most: usize,
    state: Mutex<State>,
    has_complained: AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    close: Notify,
    is_closed: AtomicBool,
    makes_room: AtomicBool,
    /// When it has to be done.
    until: Mutex<Option<Instant>>,
    moved: Notify,
}

impl Shared {
    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.close.notify_one();
    }

    fn set(&self, limit: Option<Duration>) {
        *lock(&self.until) = limit.map(|limit| Instant::now() + limit);
        self.moved.notify_one();
    }
}

/// A connection, to what serves its requests.
#[derive(Clone, Debug)]
pub struct Connection {
    shared: Arc<Shared>,
    /// The client that opened it, as the caller named it to [`Connections::accept`].
    pub client: u128,
}

impl Connection {
    /// Its answer has no end.
    pub fn streams(&self) {
        self.shared.set(None);
    }

    /// Ends it, whatever it is at.
    pub fn close(&self) {
        self.shared.close();
    }
}

/// The right of one connection to be open. Ends when dropped.
#[derive(Debug)]
pub struct Permit {
    connections: Arc<Connections>,
    pub connection: Connection,
    waits: Mutex<Option<u64>>,
}

/// A request is under way, until this is dropped.
#[derive(Debug)]
pub struct Busy(Arc<Permit>);

/// A client by its address, as far as it costs something to have another: an IPv6 host has 2⁶⁴.
pub fn client_at(address: IpAddr) -> u128 {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits() >> 64 << 64,
    }
}

impl Connections {
    /// Of a listener: as many as its kind may have.
    pub fn new(kind: ListenerKind) -> Arc<Self> {
        Self::of(kind, kind.max_connections())
    }

    fn of(kind: ListenerKind, most: usize) -> Arc<Self> {
        let (state, has_complained) = (Mutex::default(), AtomicBool::default());
        Arc::new(Connections { kind, most, state, has_complained })
    }

    /// The next connection, with its right to be open; `next` accepts one, `client` says whose it is. Those that make
    /// room for it have left by then: each has its descriptor until it does.
    pub async fn accept<S: AsFd, F: Future<Output = io::Result<S>>>(
        self: &Arc<Self>,
        next: impl Fn() -> F,
        client: impl Fn(&S) -> u128,
    ) -> (S, Arc<Permit>) {
        loop {
            while lock(&self.state).is_full(self.most) {
                sleep(PAUSE).await;
            }
            let accepted = next().await;
            let is_short = match &accepted {
                Ok(stream) => self.kind.is_reserved(stream),
                Err(error) => {
                    self.complain(error);
                    lock(&self.state).shed();
                    false
                }
            };
            let Some(stream) = accepted.ok() else {
                sleep(PAUSE).await;
                continue;
            };
            let Some(permit) = self.admit(client(&stream), is_short) else {
                self.complain(&"descriptors are short");
                drop(stream);
                sleep(PAUSE).await;
                continue;
            };
            self.room().await;
            return (stream, permit);
        }
    }

    /// Once: a flood is not to fill the log.
    fn complain(&self, why: &dyn std::fmt::Display) {
        if !self.has_complained.swap(true, Ordering::Relaxed) {
            tracing::warn!(listener = ?self.kind, "cannot take a connection, trying again: {why}");
        }
    }

    /// Admits a connection, and ends another where there is no room. `None` where none can be ended.
    fn admit(self: &Arc<Self>, client: u128, is_short: bool) -> Option<Arc<Permit>> {
        let mut state = lock(&self.state);
        if (state.open >= self.most || is_short) && !state.shed() {
            return None;
        }
        state.open += 1;
        let shared = Arc::<Shared>::default();
        let waits = Mutex::new(Some(state.waiting.enter(client, Arc::clone(&shared))));
        drop(state);
        shared.set(Some(SILENCE));
        let connection = Connection { shared, client };
        Some(Arc::new(Permit { connections: Arc::clone(self), connection, waits }))
    }

    /// Waits until those that made room have left. Every task has its turn meanwhile, and the kernel is asked who has
    /// spoken: accepting faster than requests are read would displace connections that have asked.
    async fn room(&self) {
        let left = async {
            while lock(&self.state).leaving > 0 {
                tokio::task::yield_now().await;
            }
        };
        let _ = timeout(PAUSE, left).await;
    }
}

impl State {
    fn is_full(&self, most: usize) -> bool {
        self.open >= most && self.waiting.order.is_empty()
    }

    /// Closes one that waits; whether there was one.
    fn shed(&mut self) -> bool {
        let Some(shed) = self.waiting.shed() else { return false };
        shed.makes_room.store(true, Ordering::Release);
        shed.close();
        self.leaving += 1;
        true
    }
}

impl Permit {
    /// A request has come: it is not closed for another connection until that is answered.
    pub fn begin(self: &Arc<Self>) -> Busy {
        let waits = lock(&self.waits).take();
        if let Some(waits) = waits {
            drop(lock(&self.connections.state).waiting.leave(waits));
        }
        self.connection.shared.set(Some(ANSWER));
        Busy(Arc::clone(self))
    }

    pub async fn over(&self) {
        let shared = &self.connection.shared;
        while !shared.is_closed.load(Ordering::Acquire) {
            let until = *lock(&shared.until);
            let late = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = late => return,
                () = shared.close.notified() => return,
                () = shared.moved.notified() => {}
            }
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let Permit { connections, connection: Connection { shared, client }, waits } = &*self.0;
        shared.set(Some(SILENCE));
        let entered = lock(&connections.state).waiting.enter(*client, Arc::clone(shared));
        lock(waits).replace(entered);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = lock(&self.connections.state);
        state.open -= 1;
        state.leaving -= usize::from(self.connection.shared.makes_room.load(Ordering::Acquire));
        if let Some(waits) = lock(&self.waits).take() {
            drop(state.waiting.leave(waits));
        }
    }
}

/// Connections without a request under way in the order in which they came, each with whom it is from and what ends it.
#[derive(Debug)]
struct Waiting<H> {
    order: BTreeMap<u64, (u128, H)>,
    of: HashMap<u128, usize>,
    next: u64,
}

impl<H> Default for Waiting<H> {
    fn default() -> Self {
        Waiting { order: BTreeMap::new(), of: HashMap::new(), next: 0 }
    }
}

impl<H> Waiting<H> {
    fn enter(&mut self, client: u128, handle: H) -> u64 {
        let id = self.next;
        self.next += 1;
        *self.of.entry(client).or_default() += 1;
        self.order.insert(id, (client, handle));
        id
    }

    /// One waits no longer. `None` if it was shed before.
    fn leave(&mut self, id: u64) -> Option<H> {
        let (client, handle) = self.order.remove(&id)?;
        if let Some(count) = self.of.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.of.remove(&client);
            }
        }
        Some(handle)
    }

    /// Takes out the one that has waited longest of those whose client has most: who floods makes the room itself.
    fn shed(&mut self) -> Option<H> {
        let most = *self.of.values().max()?;
        let heaviest = |client: &u128| self.of.get(client).is_some_and(|count| *count == most);
        let (id, _) = self.order.iter().find(|(_, (client, _))| heaviest(client))?;
        let id = *id;
        self.leave(id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_closed(permit: &Permit) -> bool {
        permit.connection.shared.is_closed.load(Ordering::Acquire)
    }

    #[test]
    fn a_flood_makes_room_by_itself_and_what_is_answered_stays() {
        let connections = Connections::of(ListenerKind::Api, 3);
        let permit = |client| connections.admit(client, false).unwrap();
        let other = permit(1);
        let flood = [permit(2), permit(2)];
        let busy = flood[0].begin();
        let third = permit(2);
        // One each without a request: the older goes.
        assert!(is_closed(&other) && !is_closed(&flood[0]) && !is_closed(&flood[1]));
        let fourth = permit(2);
        assert!(is_closed(&flood[1]) && !is_closed(&third) && !is_closed(&fourth));
        drop((other, third, fourth, busy));
        permit(3);
    }

    #[test]
    fn nobody_is_let_in_where_all_are_answered() {
        let connections = Connections::of(ListenerKind::Api, 2);
        let open = [connections.admit(1, false).unwrap(), connections.admit(2, false).unwrap()];
        let busy: Vec<Busy> = open.iter().map(Permit::begin).collect();
        assert!(connections.admit(3, false).is_none());
        drop(busy);
        assert!(connections.admit(3, false).is_some());
        assert!(is_closed(&open[0]));
    }

    #[test]
    fn a_host_is_one_client_however_many_addresses_of_its_network_it_takes() {
        let client = |text: &str| client_at(text.parse().unwrap());
        assert_eq!(client("fd00:1:2:3::1"), client("fd00:1:2:3:4::5"));
        assert_eq!(client("::ffff:10.0.0.2"), client("10.0.0.2"));
        assert_ne!(client("10.0.0.3"), client("10.0.0.2"));
    }

    proptest! {
        #[test]
        fn a_client_with_fewer_than_another_loses_nothing(
            steps in prop::collection::vec((0u8..3, 0u128..5), 1..200),
        ) {
            let mut waiting = Waiting::default();
            let mut model: Vec<(u64, u128)> = Vec::new();
            for (step, client) in steps {
                match step {
                    0 | 1 => model.push((waiting.enter(client, (client, model.len())), client)),
                    _ => {
                        let count = |client: u128| model.iter().filter(|(_, c)| *c == client).count();
                        let most = model.iter().map(|(_, client)| count(*client)).max().unwrap_or(0);
                        let first = model.iter().position(|(_, client)| count(*client) == most);
                        let shed = waiting.shed().map(|(client, _)| client);
                        prop_assert_eq!(shed, first.map(|at| model.remove(at).1));
                    }
                }
                prop_assert_eq!(waiting.order.len(), model.len());
            }
        }
    }
}
