//! One tenant's connections: their processes, their messages, their ends.
//!
//! As with `session.sock`, the kernel names the peer (`SO_PEERCRED`, unix(7)) and a process's death
//! is seen by pidfd. End-of-file is not death: a forked child keeps the socket open, and an
//! application may close what it does not know. But it can mean an `exec`, after which that
//! process launches nothing, so a process that is silent for a moment is not waited for any more.
//!
//! A tenant is heard at a bounded rate: a few packets at each turn of a connection, and so many a
//! second of all of them. What is not read fills its own queue.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use tessera_region::layout::GATE_SOCKET;
use tessera_region::session::Message;

use super::reactor::{PEER_NUMBERS, Reactor, Token};
use tessera_peers::Bucket;
use tessera_peers::closer::Closer;
use tessera_peers::socket;
use tessera_peers::socket::{Listening, PACKET};
use tessera_peers::tenant::MAX_GARBAGE;
use tessera_system::descriptors::Door;

/// Messages a second of one tenant, and how many at once. A lease takes three of each process.
const RATE: u32 = 20_000;
const BURST: u32 = 4_000;
/// Connections a second of one tenant, and how many at once.
const CONNECT_RATE: u32 = 200;
const CONNECT_BURST: u32 = 256;
/// Packets of a connection, and connections, that are taken at one turn.
const TURN: usize = 4;
/// How long a process without a connection is still waited for, and how long whoever cannot be
/// accepted waits.
const SETTLE: Duration = Duration::from_millis(20);
/// Least pause of whoever is too fast, and how many connections are heard again after one: so that
/// waking up is not what a flood costs.
const PAUSE: Duration = Duration::from_millis(5);
const RESUMED: usize = 16;

/// What the arbiter hears of a tenant's processes. A process keeps its number through reconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// It has said hello.
    Came(u64),
    /// It is dead, or has left.
    Gone(u64),
    /// It says.
    Said(u64, Message),
}

/// What it had to put up with since the arbiter began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misdeeds {
    /// Packets that were no message.
    pub garbage: u64,
    /// Connections closed because of it.
    pub dropped: u64,
    /// Connections turned away, because there were too many or for want of descriptors.
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
    garbage: u32,
    paused: bool,
    /// Until when it is waited for.
    leaves: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Lane {
    /// Its number in tokens.
    tenant: u32,
    listener: OwnedFd,
    refuses: bool,
    peers: BTreeMap<u32, Peer>,
    next_peer: u32,
    next_process: u64,
    most: usize,
    connects: Bucket,
    messages: Bucket,
    closer: Closer,
    /// When those that wait are to be looked at again.
    due: Option<Instant>,
    listens: bool,
    /// The connection after which pauses end next.
    turn: u32,
    misdeeds: Misdeeds,
}

impl Lane {
    /// A socket listening at `gate.sock` in `dir`, in place of what was there.
    pub fn listen(dir: &Path) -> io::Result<Listening> {
        socket::listen(dir, GATE_SOCKET, true)
    }

    pub fn open(
        listening: Listening,
        tenant: u32,
        most: usize,
        reactor: &Reactor,
        now: Instant,
    ) -> io::Result<Self> {
        let Listening { socket: listener, refuses } = listening;
        reactor.watch(&listener, Token::Listener(tenant))?;
        Ok(Lane {
            tenant,
            listener,
            refuses,
            peers: BTreeMap::new(),
            next_peer: 0,
            next_process: 0,
            most,
            connects: Bucket::new(CONNECT_BURST, CONNECT_RATE, now),
            messages: Bucket::new(BURST, RATE, now),
            closer: Closer::default(),
            due: None,
            listens: true,
            turn: 0,
            misdeeds: Misdeeds::default(),
        })
    }

    /// Listens at another socket; who is connected stays.
    pub fn listen_anew(&mut self, listening: Listening, reactor: &Reactor) -> io::Result<()> {
        reactor.forget(&self.listener);
        self.listener = listening.socket;
        self.refuses &= listening.refuses;
        self.listens = true;
        reactor.watch(&self.listener, Token::Listener(self.tenant))
    }

    pub fn misdeeds(&self) -> Misdeeds {
        self.misdeeds
    }

    /// When [`Lane::resume`] is due.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Somebody connects.
    pub fn accept(&mut self, reactor: &Reactor, now: Instant) {
        for _ in 0..TURN {
            if let Err(wait) = self.connects.take(now) {
                self.misdeeds.throttled += 1;
                return self.pause_listening(reactor, now, wait);
            }
            if self.closer.is_behind() {
                return self.pause_listening(reactor, now, SETTLE);
            }
            match socket::accept(&self.listener) {
                // Kept for others.
                Ok(peer) if Door::Pages.is_kept(&peer) => {
                    self.turn_away(peer);
                    return self.pause_listening(reactor, now, SETTLE);
                }
                Ok(peer) => self.admit(peer, reactor),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer has gone again, or descriptors are short: whoever waits is served later.
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
            Some(Ok(pidfd)) if Door::Pages.is_kept(&pidfd) => return self.turn_away(socket),
            Some(Ok(pidfd)) => Some(pidfd),
            // Dead already, and it has said nothing.
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                return self.closer.close(socket);
            }
            Some(Err(_)) => return self.turn_away(socket),
        };
        if self.peers.len() >= self.most {
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
        };
        self.peers.insert(number, peer);
        if watched.is_err() {
            self.misdeeds.turned_away += 1;
            self.remove(number, reactor);
        }
    }

    fn turn_away(&mut self, socket: OwnedFd) {
        self.misdeeds.turned_away += 1;
        self.closer.close(socket);
    }

    /// A connection has something to say.
    pub fn hear(&mut self, number: u32, reactor: &Reactor, now: Instant, heard: &mut Vec<Heard>) {
        for _ in 0..TURN {
            let Some(peer) = self.peers.get_mut(&number) else { return };
            let Some(socket) = &peer.socket else { return };
            if let Err(wait) = self.messages.take(now) {
                self.misdeeds.throttled += 1;
                reactor.forget(socket);
                peer.paused = true;
                return self.wake_at(now + wait.max(PAUSE));
            }
            let mut packet = [0; PACKET];
            let read = match self.refuses {
                true => socket::receive_refused(socket, &mut packet),
                false => socket::receive(socket, &mut packet),
            };
            let length = match read {
                Ok(0) => return self.hung_up(number, reactor, now, heard),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    // Reset, or it carries descriptors, which no message of ours does.
                    if error.kind() == io::ErrorKind::PermissionDenied {
                        self.misdeeds.garbage += 1;
                        self.misdeeds.dropped += 1;
                    }
                    return self.hung_up(number, reactor, now, heard);
                }
            };
            match Message::decode_spoken(&packet[..length]) {
                Ok((Message::Hello { .. }, _)) => self.greet(number, reactor, heard),
                Ok((message, _)) => {
                    heard.extend(peer.process.map(|process| Heard::Said(process, message)));
                }
                Err(_) => {
                    peer.garbage += 1;
                    self.misdeeds.garbage += 1;
                    if peer.garbage >= MAX_GARBAGE {
                        self.misdeeds.dropped += 1;
                        return self.hung_up(number, reactor, now, heard);
                    }
                }
            }
        }
    }

    /// A process says hello. It may have had a connection before, whose number and debts it keeps.
    fn greet(&mut self, number: u32, reactor: &Reactor, heard: &mut Vec<Heard>) {
        let Some(peer) = self.peers.get(&number) else { return };
        if peer.process.is_some() {
            return;
        }
        let same = |(other, before): &(&u32, &Peer)| {
            **other != number
                && before.pid.is_some()
                && before.pid == peer.pid
                && before.process.is_some()
        };
        let before = self.peers.iter().find(same).map(|(other, before)| (*other, before.process));
        let process = match before {
            Some((other, Some(process))) => {
                self.remove(other, reactor);
                process
            }
            _ => {
                self.next_process += 1;
                heard.push(Heard::Came(self.next_process));
                self.next_process
            }
        };
        if let Some(peer) = self.peers.get_mut(&number) {
            peer.process = Some(process);
        }
    }

    /// End of file, or thrown out. Where deaths can't be seen it counts as one.
    fn hung_up(&mut self, number: u32, reactor: &Reactor, now: Instant, heard: &mut Vec<Heard>) {
        let Some(peer) = self.peers.get_mut(&number) else { return };
        if peer.death.is_none() || peer.process.is_none() {
            return self.died(number, reactor, heard);
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
    pub fn died(&mut self, number: u32, reactor: &Reactor, heard: &mut Vec<Heard>) {
        let process = self.remove(number, reactor);
        heard.extend(process.map(Heard::Gone));
    }

    /// Its number, if it had one.
    fn remove(&mut self, number: u32, reactor: &Reactor) -> Option<u64> {
        let peer = self.peers.remove(&number)?;
        if let Some(death) = &peer.death {
            reactor.forget(death);
        }
        if let Some(socket) = peer.socket {
            reactor.forget(&socket);
            self.closer.close(socket);
        }
        peer.process
    }

    /// Hears again those that waited, in turn, and gives up those that have left.
    pub fn resume(&mut self, reactor: &Reactor, now: Instant, heard: &mut Vec<Heard>) {
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
                true => self.died(number, reactor, heard),
                false => self.wake_at(at),
            }
        }
    }

    /// Closes everything.
    pub fn close(&mut self, reactor: &Reactor) {
        reactor.forget(&self.listener);
        while let Some(number) = self.peers.keys().next().copied() {
            self.remove(number, reactor);
        }
    }
}
