//! What the arbiter's thread waits for: epoll(7), a timer and a wake-up, all of them descriptors.
//!
//! The timer is a timerfd and not epoll's own time-out, which is rounded (to milliseconds before
//! Linux 5.11) and delayed by the thread's timer slack.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Who is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// Somebody wants something of the thread.
    Wake,
    /// It is time.
    Timer,
    /// Somebody connects to this tenant.
    Listener(u32),
    /// A connection of this tenant has something to say.
    Peer(u32, u32),
    /// The process of that connection is dead.
    Death(u32, u32),
}

/// Bits of a token that say what it is, and those for a connection's number.
const KIND_BITS: u32 = 3;
const PEER_BITS: u32 = 29;
/// Connections of a tenant are numbered below this, and then from the start.
pub(super) const PEER_NUMBERS: u32 = 1 << PEER_BITS;

impl Token {
    fn encode(self) -> EventData {
        let (kind, tenant, peer) = match self {
            Token::Wake => (0, 0, 0),
            Token::Timer => (1, 0, 0),
            Token::Listener(tenant) => (2, tenant, 0),
            Token::Peer(tenant, peer) => (3, tenant, peer),
            Token::Death(tenant, peer) => (4, tenant, peer),
        };
        let peer = u64::from(peer % PEER_NUMBERS) << KIND_BITS;
        EventData::new_u64(u64::from(tenant) << (KIND_BITS + PEER_BITS) | peer | kind)
    }

    #[expect(clippy::cast_possible_truncation, reason = "as it was encoded")]
    fn decode(data: EventData) -> Option<Self> {
        let word = data.u64();
        let tenant = (word >> (KIND_BITS + PEER_BITS)) as u32;
        let peer = (word >> KIND_BITS) as u32 % PEER_NUMBERS;
        Some(match word % (1 << KIND_BITS) {
            0 => Token::Wake,
            1 => Token::Timer,
            2 => Token::Listener(tenant),
            3 => Token::Peer(tenant, peer),
            4 => Token::Death(tenant, peer),
            _ => return None,
        })
    }
}

/// Most that is taken at once; the rest comes next, in turn.
const BATCH: usize = 64;

pub(super) struct Reactor {
    epoll: OwnedFd,
    timer: OwnedFd,
    wake: Arc<OwnedFd>,
    /// What the timer is set to, `CLOCK_MONOTONIC` nanoseconds.
    armed: Option<u64>,
}

/// Who is ready, with the room to find out.
pub(super) struct Ready {
    events: Vec<Event>,
    pub tokens: Vec<Token>,
}

impl Ready {
    pub fn new() -> Self {
        Ready { events: Vec::with_capacity(BATCH), tokens: Vec::with_capacity(BATCH) }
    }
}

impl Reactor {
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let reactor = Reactor { epoll, timer, wake: Arc::new(wake), armed: None };
        reactor.watch(&*reactor.wake, Token::Wake)?;
        reactor.watch(&reactor.timer, Token::Timer)?;
        Ok(reactor)
    }

    /// Writing eight bytes into it wakes the thread.
    pub fn waker(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    pub fn watch(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, token.encode(), EventFlags::IN)?)
    }

    /// Must be done before the descriptor is closed: a child that is just being started may still
    /// share it.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Wakes the thread at this time, or never.
    pub fn arm(&mut self, at_ns: Option<u64>) {
        if self.armed == at_ns {
            return;
        }
        self.armed = at_ns;
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // All zero would disarm it, and any time that has passed fires at once.
        let value = at_ns.map_or(zero, |at| Timespec {
            tv_sec: i64::try_from(at.max(1) / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(at.max(1) % 1_000_000_000).unwrap_or(0),
        });
        let spec = Itimerspec { it_interval: zero, it_value: value };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &spec);
    }

    /// Waits until something is ready.
    pub fn wait(&mut self, ready: &mut Ready) -> io::Result<()> {
        ready.tokens.clear();
        ready.events.clear();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut ready.events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &ready.events {
            let data = event.data;
            let Some(token) = Token::decode(data) else { continue };
            let mut word = [0; 8];
            match token {
                Token::Wake => drop(rustix::io::read(&*self.wake, &mut word)),
                Token::Timer => {
                    self.armed = None;
                    let _ = rustix::io::read(&self.timer, &mut word);
                }
                _ => {}
            }
            ready.tokens.push(token);
        }
        Ok(())
    }
}

/// See [`Reactor::waker`].
pub(super) fn wake(waker: &OwnedFd) {
    // Full only if it has been woken 2^64 times.
    let _ = rustix::io::write(waker, &1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::clock::monotonic_ns;

    #[test]
    fn every_token_is_told_from_every_other() {
        let tokens = [
            Token::Wake,
            Token::Timer,
            Token::Listener(u32::MAX),
            Token::Peer(0, PEER_NUMBERS - 1),
            Token::Peer(u32::MAX, 0),
            Token::Death(7, 9),
        ];
        for token in tokens {
            assert_eq!(Token::decode(token.encode()), Some(token));
        }
    }

    #[test]
    fn the_timer_fires_in_time_and_the_waker_at_once() {
        let mut reactor = Reactor::new().unwrap();
        let mut ready = Ready::new();
        let due = monotonic_ns() + 3_000_000;
        reactor.arm(Some(due));
        reactor.wait(&mut ready).unwrap();
        assert_eq!(ready.tokens, [Token::Timer]);
        assert!(monotonic_ns() >= due);
        reactor.arm(Some(1));
        reactor.wait(&mut ready).unwrap();
        assert_eq!(ready.tokens, [Token::Timer], "what has passed is due");
        wake(&reactor.waker());
        reactor.wait(&mut ready).unwrap();
        assert_eq!(ready.tokens, [Token::Wake]);
    }
}
