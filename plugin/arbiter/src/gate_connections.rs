//! The connections of one tenant's processes to `gate.sock`.
//!
//! As with `session.sock`, the kernel names the peer (`SO_PEERCRED`, unix(7)) and a pidfd shows a process's
//! death. End-of-file is not death: a forked child keeps the socket open, and an application may close
//! unknown descriptors. But it can mean an `exec`, after which the process launches nothing, so the arbiter
//! soon stops waiting for it.
//!
//! A tenant is read at a bounded rate: a few packets at each turn of a connection, and so many a second of
//! all of them. What is not read fills the tenant's own queue.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use tessera_region::flight::FlightReader;
use tessera_region::layout::GATE_SOCKET;
use tessera_region::session::Message;

use super::reactor::{PEER_NUMBERS, Reactor, Token};
use tessera_peers::TokenBucket;
use tessera_peers::socket::{self, Closer, PACKET};
use tessera_peers::tenant::MAX_GARBAGE;
use tessera_system::descriptors::ListenerKind;

/// Messages of one tenant a second, and at once. A lease takes three of each process.
const RATE: u32 = 20_000;
const BURST: u32 = 4_000;
/// Connections of one tenant a second, and at once.
const CONNECT_RATE: u32 = 200;
const CONNECT_BURST: u32 = 256;
/// Packets of a connection, and connections, taken in one turn.
const TURN: usize = 4;
/// How long the arbiter waits for a process without a connection, and how long a connection waits that
/// cannot be accepted.
const SETTLE: Duration = Duration::from_millis(20);
/// Shortest pause after exceeding the rate, and how many connections resume after one, so that a flood does
/// not cost wake-ups.
const PAUSE: Duration = Duration::from_millis(5);
const RESUMED: usize = 16;

/// An event of a tenant's processes. A process keeps its number through reconnects.
#[derive(Debug)]
pub(super) enum GateEvent {
    /// It has said hello.
    Hello(u64),
    /// With its hello came its flight page.
    Page(u64, FlightReader),
    /// It is dead, or has left.
    Exited(u64),
    /// It sent a message.
    Message(u64, Message),
    /// On this connection speaks the process of that token, which has several shares; whether it keeps to this
    /// gate. Once for a connection.
    Joined(u32, u64, bool),
    /// A connection on which one did has ended.
    Left(u32),
}

/// A descriptor came that nobody takes.
struct Refused;

/// Protocol violations of a tenant since the arbiter took it on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtocolViolations {
    /// Packets that were no message.
    pub garbage: u64,
    /// Messages that make no sense where they came: of a kind that the gate does not take, before the hello that
    /// they need, or other words about a process than the connection's first.
    pub nonsense: u64,
    /// Connections closed because of either.
    pub dropped: u64,
    /// Connections refused, because there were too many or descriptors were short.
    pub turned_away: u64,
    /// Times that the tenant had to wait for the rate limit.
    pub throttled: u64,
}

#[derive(Debug)]
struct Peer {
    /// `None` after end-of-file.
    socket: Option<OwnedFd>,
    death: Option<OwnedFd>,
    pid: Option<u32>,
    /// Its number, from its hello on.
    process: Option<u64>,
    /// Packets that were no message or made no sense.
    garbage: u32,
    paused: bool,
    /// Until when the arbiter waits for it.
    leaves: Option<Instant>,
    /// What its process, which has several shares, is called, and whether it keeps to this gate.
    joined: Option<(u64, bool)>,
}

#[derive(Debug)]
pub(super) struct GateConnections {
    /// Its number in tokens.
    tenant: u32,
    listener: OwnedFd,
    peers: BTreeMap<u32, Peer>,
    next_peer: u32,
    next_process: u64,
    max_processes: usize,
    connects: TokenBucket,
    messages: TokenBucket,
    closer: Closer,
    /// When to look at paused connections again.
    due: Option<Instant>,
    listens: bool,
    /// The first connection to resume after the next pause.
    turn: u32,
    violations: ProtocolViolations,
}

impl GateConnections {
    /// Listens at `gate.sock` in `dir`, replacing what was there.
    pub fn listen(dir: &Path) -> io::Result<OwnedFd> {
        socket::listen(dir, GATE_SOCKET)
    }

    pub fn open(
        listener: OwnedFd,
        tenant: u32,
        max_processes: usize,
        reactor: &Reactor,
        now: Instant,
    ) -> io::Result<Self> {
        reactor.watch(&listener, Token::Listener(tenant))?;
        Ok(GateConnections {
            tenant,
            listener,
            peers: BTreeMap::new(),
            next_peer: 0,
            next_process: 0,
            max_processes,
            connects: TokenBucket::new(CONNECT_BURST, CONNECT_RATE, now),
            messages: TokenBucket::new(BURST, RATE, now),
            closer: Closer::default(),
            due: None,
            listens: true,
            turn: 0,
            violations: ProtocolViolations::default(),
        })
    }

    /// Listens at another socket; present connections stay.
    pub fn replace_listener(&mut self, listener: OwnedFd, reactor: &Reactor) -> io::Result<()> {
        reactor.forget(&self.listener);
        self.listener = listener;
        self.listens = true;
        reactor.watch(&self.listener, Token::Listener(self.tenant))
    }

    pub fn violations(&self) -> ProtocolViolations {
        self.violations
    }

    /// When [`GateConnections::resume`] is due.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Accepts waiting connections.
    pub fn accept(&mut self, reactor: &Reactor, now: Instant) {
        for _ in 0..TURN {
            if let Err(wait) = self.connects.take(now) {
                self.violations.throttled += 1;
                return self.pause_listening(reactor, now, wait);
            }
            if self.closer.is_behind() {
                return self.pause_listening(reactor, now, SETTLE);
            }
            match socket::accept(&self.listener) {
                // Reserved for other listeners.
                Ok(peer) if ListenerKind::Pages.is_reserved(&peer) => {
                    self.turn_away(peer);
                    return self.pause_listening(reactor, now, SETTLE);
                }
                Ok(peer) => self.admit(peer, reactor),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer has gone, or descriptors are short: later connections are served later.
                Err(_) => return self.pause_listening(reactor, now, SETTLE),
            }
        }
    }

    fn pause_listening(&mut self, reactor: &Reactor, now: Instant, wait: Duration) {
        reactor.forget(&self.listener);
        self.listens = false;
        self.wake_at(now + wait.max(PAUSE));
    }

    fn wake_at(&mut self, at: Instant) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    fn admit(&mut self, socket: OwnedFd, reactor: &Reactor) {
        let pid = socket::peer_pid(&socket);
        let death = match pid.map(socket::pidfd) {
            None => None,
            Some(Ok(pidfd)) if ListenerKind::Pages.is_reserved(&pidfd) => {
                return self.turn_away(socket);
            }
            Some(Ok(pidfd)) => Some(pidfd),
            // The process is dead already, and has sent nothing.
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                return self.closer.close(socket);
            }
            Some(Err(_)) => return self.turn_away(socket),
        };
        if self.peers.len() >= self.max_processes {
            return self.turn_away(socket);
        }
        while self.peers.contains_key(&self.next_peer) {
            self.next_peer = (self.next_peer + 1) % PEER_NUMBERS;
        }
        let number = self.next_peer;
        self.next_peer = (self.next_peer + 1) % PEER_NUMBERS;
        let watched = reactor.watch(&socket, Token::Peer(self.tenant, number)).and_then(|()| {
            death.as_ref().map_or(Ok(()), |d| reactor.watch(d, Token::Death(self.tenant, number)))
        });
        let peer = Peer {
            socket: Some(socket),
            death,
            pid,
            process: None,
            garbage: 0,
            paused: false,
            leaves: None,
            joined: None,
        };
        self.peers.insert(number, peer);
        if watched.is_err() {
            self.violations.turned_away += 1;
            // It has said nothing yet.
            self.remove(number, reactor, &mut Vec::new());
        }
    }

    fn turn_away(&mut self, socket: OwnedFd) {
        self.violations.turned_away += 1;
        self.closer.close(socket);
    }

    /// Reads messages of a connection.
    pub fn receive(
        &mut self,
        number: u32,
        reactor: &Reactor,
        now: Instant,
        events: &mut Vec<GateEvent>,
    ) {
        for _ in 0..TURN {
            let Some(peer) = self.peers.get_mut(&number) else { return };
            let Some(socket) = &peer.socket else { return };
            if let Err(wait) = self.messages.take(now) {
                self.violations.throttled += 1;
                reactor.forget(socket);
                peer.paused = true;
                return self.wake_at(now + wait.max(PAUSE));
            }
            let mut packet = [0; PACKET];
            // Before its hello it may send its flight page, and never anything else.
            let read = match peer.process {
                None => socket::receive_one(socket, &mut packet, &self.closer),
                Some(_) => socket::receive(socket, &mut packet).map(|length| (length, None)),
            };
            let (length, descriptor) = match read {
                Ok((0, _)) => return self.hung_up(number, reactor, now, events),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    // Reset, or it carries descriptors that no valid message does.
                    if error.kind() == io::ErrorKind::PermissionDenied {
                        self.violations.garbage += 1;
                        self.violations.dropped += 1;
                    }
                    return self.hung_up(number, reactor, now, events);
                }
            };
            let message = Message::decode_spoken(&packet[..length]).map(|(message, _)| message);
            let is_hello = matches!(message, Some(Message::Hello { .. }));
            let page = match descriptor.map(|descriptor| self.map(descriptor, is_hello)).transpose()
            {
                Ok(page) => page.flatten(),
                Err(Refused) => {
                    self.violations.garbage += 1;
                    self.violations.dropped += 1;
                    return self.hung_up(number, reactor, now, events);
                }
            };
            let count = match message {
                Some(message) if self.hear(number, message, page, reactor, events) => continue,
                Some(_) => &mut self.violations.nonsense,
                None => &mut self.violations.garbage,
            };
            *count += 1;
            let Some(peer) = self.peers.get_mut(&number) else { return };
            peer.garbage += 1;
            if peer.garbage >= MAX_GARBAGE {
                self.violations.dropped += 1;
                return self.hung_up(number, reactor, now, events);
            }
        }
    }

    /// The flight page behind a descriptor, which is closed. `None` where descriptors are short: the process is as one
    /// that has no page.
    fn map(&self, file: OwnedFd, is_hello: bool) -> Result<Option<FlightReader>, Refused> {
        match FlightReader::map(file.as_fd()) {
            Some(page) if is_hello => Ok((!ListenerKind::Pages.is_reserved(&file)).then_some(page)),
            Some(_) => Err(Refused),
            None => {
                self.closer.leave(file);
                Err(Refused)
            }
        }
    }

    /// Takes a message. False if it makes no sense here, and then nothing has changed.
    fn hear(
        &mut self,
        number: u32,
        message: Message,
        page: Option<FlightReader>,
        reactor: &Reactor,
        events: &mut Vec<GateEvent>,
    ) -> bool {
        let Some(peer) = self.peers.get_mut(&number) else { return false };
        match (message, peer.process) {
            (Message::Hello { .. }, None) => self.greet(number, page, reactor, events),
            (Message::Joins { token, leads }, process) => {
                // Only where it has said hello can it keep to the gate; the others hear nothing but this.
                if peer.joined.is_none() && (process.is_some() || !leads) {
                    peer.joined = Some((token, leads));
                    events.push(GateEvent::Joined(number, token, leads));
                }
                return peer.joined == Some((token, leads));
            }
            (
                Message::Want { .. }
                | Message::Drained { .. }
                | Message::Idle { .. }
                | Message::Late { .. },
                Some(process),
            ) => events.push(GateEvent::Message(process, message)),
            // Again, before the hello that it needs, or not for the gate.
            (
                Message::Hello { .. }
                | Message::Want { .. }
                | Message::Drained { .. }
                | Message::Idle { .. }
                | Message::Late { .. }
                | Message::Welcome { .. }
                | Message::Event(_),
                _,
            ) => return false,
        }
        true
    }

    /// A process said hello. If it had a connection before, it keeps that one's number and debts, and its page if none
    /// came.
    fn greet(
        &mut self,
        number: u32,
        page: Option<FlightReader>,
        reactor: &Reactor,
        events: &mut Vec<GateEvent>,
    ) {
        let Some(peer) = self.peers.get(&number) else { return };
        let same = |(other, before): &(&u32, &Peer)| {
            **other != number
                && before.pid.is_some()
                && before.pid == peer.pid
                && before.process.is_some()
        };
        let before = self.peers.iter().find(same).map(|(other, before)| (*other, before.process));
        let process = match before {
            Some((other, Some(process))) => {
                self.remove(other, reactor, events);
                process
            }
            _ => {
                self.next_process += 1;
                events.push(GateEvent::Hello(self.next_process));
                self.next_process
            }
        };
        if let Some(peer) = self.peers.get_mut(&number) {
            peer.process = Some(process);
        }
        events.extend(page.map(|page| GateEvent::Page(process, page)));
    }

    /// End-of-file, or closed by the arbiter. Where deaths are not visible it counts as one.
    fn hung_up(
        &mut self,
        number: u32,
        reactor: &Reactor,
        now: Instant,
        events: &mut Vec<GateEvent>,
    ) {
        let Some(peer) = self.peers.get_mut(&number) else { return };
        if peer.death.is_none() || peer.process.is_none() {
            return self.died(number, reactor, events);
        }
        if let Some(socket) = peer.socket.take() {
            reactor.forget(&socket);
            self.closer.close(socket);
        }
        peer.paused = false;
        peer.leaves = Some(now + SETTLE);
        self.wake_at(now + SETTLE);
    }

    /// The process of a connection is dead.
    pub fn died(&mut self, number: u32, reactor: &Reactor, events: &mut Vec<GateEvent>) {
        let process = self.remove(number, reactor, events);
        events.extend(process.map(GateEvent::Exited));
    }

    /// Its number, if it had one.
    fn remove(
        &mut self,
        number: u32,
        reactor: &Reactor,
        events: &mut Vec<GateEvent>,
    ) -> Option<u64> {
        let peer = self.peers.remove(&number)?;
        if peer.joined.is_some() {
            events.push(GateEvent::Left(number));
        }
        if let Some(death) = &peer.death {
            reactor.forget(death);
        }
        if let Some(socket) = peer.socket {
            reactor.forget(&socket);
            self.closer.close(socket);
        }
        peer.process
    }

    /// Resumes paused connections in turn, and removes those that have left.
    pub fn resume(&mut self, reactor: &Reactor, now: Instant, events: &mut Vec<GateEvent>) {
        if self.due.is_none_or(|due| due > now) {
            return;
        }
        self.due = None;
        if !self.listens {
            self.listens = reactor.watch(&self.listener, Token::Listener(self.tenant)).is_ok();
            if !self.listens {
                self.wake_at(now + SETTLE);
            }
        }
        let waiting = |(number, peer): (&u32, &Peer)| peer.paused.then_some(*number);
        let after = self.peers.range(self.turn..).filter_map(waiting);
        let before = self.peers.range(..self.turn).filter_map(waiting);
        let resumed: Vec<u32> = after.chain(before).take(RESUMED + 1).collect();
        for number in resumed.iter().take(RESUMED) {
            let Some(peer) = self.peers.get_mut(number) else { continue };
            let Some(socket) = &peer.socket else { continue };
            peer.paused = reactor.watch(socket, Token::Peer(self.tenant, *number)).is_err();
        }
        if let Some(next) = resumed.get(RESUMED) {
            self.turn = *next;
            self.wake_at(now + PAUSE);
        }
        let leaving: Vec<(u32, Instant)> =
            self.peers.iter().filter_map(|(number, peer)| Some((*number, peer.leaves?))).collect();
        for (number, at) in leaving {
            match at <= now {
                true => self.died(number, reactor, events),
                false => self.wake_at(at),
            }
        }
    }

    /// As if each connection's process were another, in a pid namespace that is not seen.
    #[cfg(test)]
    pub fn hide_pids(&mut self) {
        self.peers.values_mut().for_each(|peer| peer.pid = None);
    }

    /// Closes everything.
    pub fn close(&mut self, reactor: &Reactor) {
        reactor.forget(&self.listener);
        while let Some(number) = self.peers.keys().next().copied() {
            self.remove(number, reactor, &mut Vec::new());
        }
    }
}
