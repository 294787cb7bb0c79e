//! The arbiter's event loop: epoll(7) over sockets, a timer and a wake-up.
//!
//! The timer is a timerfd, because epoll's own time-out is rounded (to milliseconds before Linux 5.11) and
//! delayed by the thread's timer slack.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// A ready event source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// An order waits.
    Wake,
    /// The timer expired.
    Timer,
    /// A process connects to this tenant.
    Listener(u32),
    /// A connection of this tenant is readable.
    Peer(u32, u32),
    /// The process of that connection is dead.
    Death(u32, u32),
}

/// Bits of a token for its kind and for a connection's number.
const KIND_BITS: u32 = 3;
const PEER_BITS: u32 = 29;
/// Connections of a tenant are numbered below this, and then from the start.
pub(super) const PEER_NUMBERS: u32 = 1 << PEER_BITS;

impl Token {
    fn encode(self) -> u64 {
        let (kind, tenant, peer) = match self {
            Token::Wake => (0, 0, 0),
            Token::Timer => (1, 0, 0),
            Token::Listener(tenant) => (2, tenant, 0),
            Token::Peer(tenant, peer) => (3, tenant, peer),
            Token::Death(tenant, peer) => (4, tenant, peer),
        };
        let peer = u64::from(peer % PEER_NUMBERS) << KIND_BITS;
        u64::from(tenant) << (KIND_BITS + PEER_BITS) | peer | kind
    }

    #[expect(clippy::cast_possible_truncation, reason = "as it was encoded")]
    fn decode(word: u64) -> Option<Self> {
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

/// Most events taken at once; the rest follows in turn.
const BATCH: usize = 64;

#[derive(Debug)]
pub(super) struct Reactor {
    epoll: Epoll,
    timer: TimerFd,
    wake: Arc<EventFd>,
    /// What the timer is set to, `CLOCK_MONOTONIC` nanoseconds.
    armed: Option<u64>,
}

/// The ready event sources, and the buffer for them.
pub(super) struct Ready {
    events: [EpollEvent; BATCH],
    pub tokens: Vec<Token>,
}

impl Ready {
    pub fn new() -> Self {
        Ready { events: [EpollEvent::empty(); BATCH], tokens: Vec::with_capacity(BATCH) }
    }
}

impl Reactor {
    pub fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let reactor = Reactor { epoll, timer, wake: Arc::new(wake), armed: None };
        reactor.watch(&*reactor.wake, Token::Wake)?;
        reactor.watch(&reactor.timer, Token::Timer)?;
        Ok(reactor)
    }

    /// What [`wake`] takes.
    pub fn waker(&self) -> Arc<EventFd> {
        Arc::clone(&self.wake)
    }

    pub fn watch(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        Ok(self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token.encode()))?)
    }

    /// Must be called before the descriptor is closed: a child process that is just being started may still
    /// share it.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = self.epoll.delete(fd);
    }

    /// Sets the timer to this time, or stops it.
    pub fn arm(&mut self, at_ns: Option<u64>) {
        if self.armed == at_ns {
            return;
        }
        self.armed = at_ns;
        // Zero would stop the timer; any time that has passed fires at once.
        let time = |ns: u64| TimeSpec::nanoseconds(i64::try_from(ns.max(1)).unwrap_or(i64::MAX));
        let _ = match at_ns.map(time) {
            Some(at) => {
                self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)
            }
            None => self.timer.unset(),
        };
    }

    /// Waits until a source is ready.
    pub fn wait(&mut self, ready: &mut Ready) -> io::Result<()> {
        ready.tokens.clear();
        let count = match self.epoll.wait(&mut ready.events, EpollTimeout::NONE) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &ready.events[..count] {
            let Some(token) = Token::decode(event.data()) else { continue };
            match token {
                Token::Wake => drop(self.wake.read()),
                Token::Timer => {
                    self.armed = None;
                    let _ = self.timer.wait();
                }
                _ => {}
            }
            ready.tokens.push(token);
        }
        Ok(())
    }
}

/// See [`Reactor::waker`].
pub(super) fn wake(waker: &EventFd) {
    // Fails only after 2^64 wake-ups.
    let _ = waker.write(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::clock::monotonic_ns;

    #[test]
    fn every_token_is_distinguished_from_every_other() {
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
