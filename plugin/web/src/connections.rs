//! How many connections there may be, which one is closed for a new one, and until when each has to be done.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_system::eviction_queue::EvictionQueue;
use tessera_system::locks::lock;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::caller::Origin;

/// How long an answer may take to be made and read.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a connection may wait for its next request, with the end of the last answer unread or not.
const IDLE: Duration = Duration::from_secs(60);
/// How often it is looked whether those that make room have left.
const LEAVE: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
struct State {
    open: usize,
    /// Those that were closed for others, and have not left yet.
    leaving: usize,
    /// Those that have no request under way.
    idle: EvictionQueue<Option<IpAddr>, Arc<Shared>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Connections {
    state: Mutex<State>,
    most: usize,
}

#[derive(Debug, Default)]
struct Shared {
    close: Notify,
    is_closed: AtomicBool,
    makes_room: AtomicBool,
    /// When it has to be done; `None` for a stream.
    until: Mutex<Option<Instant>>,
    moved: Notify,
}

impl Shared {
    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.close.notify_one();
    }

    fn set(&self, until: Option<Instant>) {
        *lock(&self.until) = until;
        self.moved.notify_one();
    }
}

/// A connection, to what serves its requests.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
    origin: Origin,
}

impl Connection {
    /// From where it is.
    pub fn origin(&self) -> Origin {
        self.origin
    }

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
pub(crate) struct Permit {
    connections: Arc<Connections>,
    client: Option<IpAddr>,
    connection: Connection,
    idle: Mutex<Option<u64>>,
}

/// A request is under way, until this is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Permit>);

impl Connections {
    /// So many at most.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Connections { state: Mutex::default(), most })
    }

    /// Lets one in, and another out if there is no room. `None` if there is none that could go.
    pub fn admit(
        self: &Arc<Self>,
        client: Option<IpAddr>,
        origin: Origin,
        crowded: bool,
    ) -> Option<Arc<Permit>> {
        let mut state = lock(&self.state);
        if state.open >= self.most || crowded {
            let shed = state.idle.shed()?;
            shed.makes_room.store(true, Ordering::Release);
            shed.close();
            state.leaving += 1;
        }
        state.open += 1;
        let shared = Arc::<Shared>::default();
        let idle = state.idle.enter(client, Arc::clone(&shared));
        drop(state);
        shared.set(Some(Instant::now() + IDLE));
        Some(Arc::new(Permit {
            connections: Arc::clone(self),
            client,
            connection: Connection { shared, origin },
            idle: Mutex::new(Some(idle)),
        }))
    }

    /// Waits until those that made room have left: each has its descriptor until then.
    pub async fn room(&self) {
        while lock(&self.state).leaving > 0 {
            tokio::time::sleep(LEAVE).await;
        }
    }
}

impl Permit {
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// A request has come: it is not closed for another connection until that is answered.
    pub fn begin(self: &Arc<Self>) -> Busy {
        let idle = lock(&self.idle).take();
        if let Some(idle) = idle {
            drop(lock(&self.connections.state).idle.leave(idle));
        }
        self.connection.shared.set(Some(Instant::now() + ANSWER));
        Busy(Arc::clone(self))
    }

    /// Done when the connection has to end.
    pub async fn over(&self) {
        let shared = &self.connection.shared;
        loop {
            if shared.is_closed.load(Ordering::Acquire) {
                return;
            }
            let until = *lock(&shared.until);
            let late = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
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
        let Permit { connections, client, connection, idle } = &*self.0;
        connection.shared.set(Some(Instant::now() + IDLE));
        let entered = lock(&connections.state).idle.enter(*client, Arc::clone(&connection.shared));
        lock(idle).replace(entered);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = lock(&self.connections.state);
        state.open -= 1;
        state.leaving -= usize::from(self.connection.shared.makes_room.load(Ordering::Acquire));
        if let Some(idle) = lock(&self.idle).take() {
            drop(state.idle.leave(idle));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permit(connections: &Arc<Connections>, last: u8) -> Option<Arc<Permit>> {
        connections.admit(Some(IpAddr::from([10, 0, 0, last])), Origin::Network, false)
    }

    fn is_closed(permit: &Permit) -> bool {
        permit.connection.shared.is_closed.load(Ordering::Acquire)
    }

    #[test]
    fn a_flood_makes_room_by_itself_and_what_is_answered_stays() {
        let connections = Connections::new(3);
        let other = permit(&connections, 1).unwrap();
        let flood = [permit(&connections, 2).unwrap(), permit(&connections, 2).unwrap()];
        let busy = flood[0].begin();
        let third = permit(&connections, 2).unwrap();
        // One each without a request: the older goes.
        assert!(is_closed(&other) && !is_closed(&flood[0]) && !is_closed(&flood[1]));
        let fourth = permit(&connections, 2).unwrap();
        assert!(is_closed(&flood[1]) && !is_closed(&third) && !is_closed(&fourth));
        drop((other, third, fourth, busy));
        assert!(permit(&connections, 3).is_some());
    }

    #[test]
    fn nobody_is_let_in_where_all_are_answered() {
        let connections = Connections::new(2);
        let open = [permit(&connections, 1).unwrap(), permit(&connections, 2).unwrap()];
        let busy: Vec<Busy> = open.iter().map(Permit::begin).collect();
        assert!(permit(&connections, 3).is_none());
        drop(busy);
        assert!(permit(&connections, 3).is_some());
        assert!(is_closed(&open[0]));
    }
}
