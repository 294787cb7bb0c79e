//! How many connections the metrics' port may have, and which one is closed for a new one.
//!
//! Kubelet's probe is one connection that brings its request with it. So a connection with no request, or a
//! part of one, waits in one of two queues; when one of these is full, the oldest in it goes, of the address
//! that has most. A connection whose request has been read is in neither.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::net::TcpStream;
use tokio::sync::oneshot;

use tessera_peers::token_bucket::TokenBucket;
use tessera_system::descriptors::{ListenerKind, limit};
use tessera_system::eviction_queue::EvictionQueue;
use tessera_system::locks::lock;

/// Answers that may be slow to read, at a time: in all, and to one address.
const SCRAPES: usize = 16;
const SCRAPES_PER_CLIENT: usize = 4;
/// The same by time: scrapes a second of one address, and at once.
const RATE: u32 = 20;
const BURST: u32 = 40;
/// Addresses whose scrapes are remembered.
const ADDRESSES: usize = 256;

/// An address as far as it costs something to have another: an IPv6 host has 2⁶⁴.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client(IpAddr);

impl From<IpAddr> for Client {
    fn from(address: IpAddr) -> Self {
        Client(match address.to_canonical() {
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
            v4 => v4,
        })
    }
}

type Queue = EvictionQueue<Client, oneshot::Sender<()>>;

#[derive(Debug, Default)]
struct Connections {
    /// Connections of any kind.
    open: usize,
    /// Those of which nobody has looked yet whether they have spoken.
    fresh: usize,
    silent: Queue,
    /// Those that have begun to say what they want.
    speaking: Queue,
    scrapes: usize,
    scrapers: HashMap<Client, Scraper>,
}

#[derive(Debug)]
struct Scraper {
    open: usize,
    bucket: TokenBucket,
}

/// See the module.
#[derive(Debug)]
pub(super) struct ConnectionLimits {
    state: Mutex<Connections>,
    /// Silent ones, those that speak, and all.
    silent: usize,
    speaking: usize,
    most: usize,
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Fresh,
    Silent(u64),
    Speaking(u64),
    Asked,
}

impl ConnectionLimits {
    pub fn new() -> Self {
        Self::of(ListenerKind::Metrics.max_connections(), limit())
    }

    fn of(most: usize, limit: u64) -> Self {
        // Those that speak have buffers of 8 KiB.
        let speaking = usize::try_from(limit / 32).unwrap_or(usize::MAX).clamp(2, 128);
        ConnectionLimits {
            state: Mutex::default(),
            silent: most / 4 * 3,
            speaking: speaking.min(most / 8),
            most,
        }
    }

    /// Whether nobody can be let in before an answer is done.
    pub fn is_full(&self) -> bool {
        let state = lock(&self.state);
        state.open >= self.most && state.silent.len() + state.speaking.len() == 0
    }

    /// Whether one more may be accepted now. Otherwise earlier ones come first: accepting faster than they are
    /// read would displace connections that have asked.
    pub fn is_ready(&self) -> bool {
        lock(&self.state).fresh < (self.silent / 16).clamp(4, 128)
    }

    /// Accepts one, evicting another if necessary. `None` if none can be evicted.
    pub fn admit(
        self: &Arc<Self>,
        stream: &TcpStream,
        address: IpAddr,
    ) -> Option<ConnectionPermit> {
        let is_short = ListenerKind::Metrics.is_reserved(stream);
        let mut state = lock(&self.state);
        let is_full = state.open >= self.most;
        if (is_short || is_full) && !state.evict_one() {
            return None;
        }
        state.open += 1;
        state.fresh += 1;
        drop(state);
        let phase = Mutex::new(Phase::Fresh);
        Some(ConnectionPermit { limits: Arc::clone(self), client: Client::from(address), phase })
    }

    /// Evicts one connection, if any can be.
    pub fn shed(&self) -> bool {
        lock(&self.state).evict_one()
    }
}

impl Connections {
    fn evict_one(&mut self) -> bool {
        let oldest = self.silent.shed().or_else(|| self.speaking.shed());
        oldest.is_some_and(|oldest| oldest.send(()).is_ok())
    }
}

/// The right of one connection to be open. Ends when dropped.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    client: Client,
    phase: Mutex<Phase>,
}

impl ConnectionPermit {
    /// It has said nothing so far. What says from now on that it must go.
    pub fn is_silent(&self) -> oneshot::Receiver<()> {
        let (mut state, mut phase) = (lock(&self.limits.state), lock(&self.phase));
        if state.silent.len() >= self.limits.silent
            && let Some(oldest) = state.silent.shed()
        {
            let _ = oldest.send(());
        }
        let (evict, evicted) = oneshot::channel();
        state.fresh -= 1;
        *phase = Phase::Silent(state.silent.enter(self.client, evict));
        evicted
    }

    /// It has begun to speak. What says from now on that it must go; `None` if it has to at once.
    pub fn speaks(&self) -> Option<oneshot::Receiver<()>> {
        let (mut state, mut phase) = (lock(&self.limits.state), lock(&self.phase));
        match *phase {
            Phase::Fresh => state.fresh -= 1,
            Phase::Silent(id) => drop(state.silent.leave(id)?),
            Phase::Speaking(_) | Phase::Asked => return None,
        }
        if state.speaking.len() >= self.limits.speaking
            && let Some(oldest) = state.speaking.shed()
        {
            let _ = oldest.send(());
        }
        let (evict, evicted) = oneshot::channel();
        *phase = Phase::Speaking(state.speaking.enter(self.client, evict));
        Some(evicted)
    }

    /// Its request has been read: from now on it is not evicted.
    pub fn request_read(&self) {
        let (mut state, mut phase) = (lock(&self.limits.state), lock(&self.phase));
        if let Phase::Speaking(id) = *phase {
            drop(state.speaking.leave(id));
        }
        *phase = Phase::Asked;
    }

    /// The right to a long answer, while it is kept; `None` while others, or the same address, have as many as
    /// there may be, or the address asks too often.
    pub fn scrape(self: &Arc<Self>) -> Option<Scrape> {
        let now = Instant::now();
        let mut state = lock(&self.limits.state);
        if state.scrapes >= SCRAPES {
            return None;
        }
        if state.scrapers.len() >= ADDRESSES && !state.scrapers.contains_key(&self.client) {
            state.scrapers.retain(|_, scraper| scraper.open > 0 || !scraper.bucket.is_full(now));
            if state.scrapers.len() >= ADDRESSES {
                return None;
            }
        }
        let new = || Scraper { open: 0, bucket: TokenBucket::new(BURST, RATE, now) };
        let scraper = state.scrapers.entry(self.client).or_insert_with(new);
        if scraper.open >= SCRAPES_PER_CLIENT || scraper.bucket.take(now).is_err() {
            return None;
        }
        scraper.open += 1;
        state.scrapes += 1;
        Some(Scrape(Arc::clone(self)))
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut state = lock(&self.limits.state);
        state.open -= 1;
        match *lock(&self.phase) {
            Phase::Silent(id) => drop(state.silent.leave(id)),
            Phase::Speaking(id) => drop(state.speaking.leave(id)),
            Phase::Fresh => state.fresh -= 1,
            Phase::Asked => {}
        }
    }
}

/// See [`ConnectionPermit::scrape`].
#[derive(Debug)]
pub(super) struct Scrape(Arc<ConnectionPermit>);

impl Drop for Scrape {
    fn drop(&mut self) {
        let mut state = lock(&self.0.limits.state);
        state.scrapes -= 1;
        if let Some(scraper) = state.scrapers.get_mut(&self.0.client) {
            scraper.open -= 1;
        }
    }
}

#[cfg(test)]
mod tests;
