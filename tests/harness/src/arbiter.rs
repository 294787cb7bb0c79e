//! An arbiter that does as the test says: the page's gate, `gate.sock`, and signs of life.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{self, AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr};
use nix::time::{ClockId, clock_gettime};
use tessera_region::layout::{ARBITER_GONE, GATE_CLOSED, GATE_OPEN, GATE_SOCKET, GATE_SOLO};
use tessera_region::quota::{Policy, QuotaWriter};
use tessera_region::session::{MESSAGE_BYTES, Message};

use crate::{PATIENCE, Pages};

/// Something that a tenant's process did on `gate.sock`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    Said(Message),
    /// It is gone, or has closed the connection.
    Left,
}

/// The arbiter of one page. Its gate is CLOSED until the test opens it. Dropping it is an orderly end.
#[derive(Debug)]
pub struct Arbiter {
    pub quota: QuotaWriter,
    /// By the peer's pid as the kernel gives it.
    heard: mpsc::Receiver<(u32, Heard)>,
    kept: Vec<(u32, Heard)>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    says_goodbye: bool,
}

impl Arbiter {
    /// Takes the tenant of `pages` on, with half of GPU 0 and a window of 16 operations or 500 µs;
    /// its gate is closed.
    pub fn take_on(pages: &Pages) -> Self {
        pages.quota.set_cores(0, 500, Policy::Burst);
        pages.quota.set_window(0, 16, 500);
        Self::again(&pages.dir)
    }

    /// The same, with the whole GPU and a window that is in nobody's way: share and phase of the whole GPU, policy burst, gate CLOSED.
    pub fn start(pages: &Pages) -> Self {
        pages.quota.set_cores(0, 1000, Policy::Burst);
        pages.quota.set_phase(0, 0);
        pages.quota.set_window(0, 64, 100_000);
        Self::again(&pages.dir)
    }

    /// As an arbiter that comes back, with the page as it is.
    pub fn again(dir: &Path) -> Self {
        let quota = QuotaWriter::open(dir).expect("a quota page");
        quota.set_gate(0, GATE_CLOSED);
        quota.set_arbiter(monotonic_ns());
        let signs = QuotaWriter::open(dir).expect("a quota page");
        let listener = listen(&dir.join(GATE_SOCKET));
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, heard) = mpsc::channel();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&listener, &signs, &tell, &stopped));
        Self { quota, heard, kept: Vec::new(), stop, thread: Some(thread), says_goodbye: true }
    }

    /// Lets launches pass while the window has room.
    pub fn open(&self) -> u32 {
        self.quota.set_gate(0, GATE_OPEN)
    }

    /// Lets everything pass.
    pub fn solo(&self) -> u32 {
        self.quota.set_gate(0, GATE_SOLO)
    }

    /// Closes; the epoch.
    pub fn shut(&self) -> u32 {
        self.quota.set_gate(0, GATE_CLOSED)
    }

    /// Sets the gate in a new epoch, which is returned.
    pub fn set(&self, state: u32) -> u32 {
        self.quota.set_gate(0, state)
    }

    /// What is said next, by whomever; fails when nothing is.
    pub fn hears(&self) -> Message {
        match self.next_said(PATIENCE) {
            Some(message) => message,
            None => panic!("nothing was said"),
        }
    }

    fn next_said(&self, within: Duration) -> Option<Message> {
        let until = Instant::now() + within;
        loop {
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                // How a drain goes on is said as often as it takes.
                Ok((_, Heard::Said(Message::Late { .. }) | Heard::Left)) => {}
                Ok((_, Heard::Said(message))) => return Some(message),
                Err(_) => return None,
            }
        }
    }

    /// Skips what is said until `wanted`.
    pub fn hears_in_time(&self, wanted: impl Fn(&Message) -> bool) -> Message {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let message = self.hears();
            if wanted(&message) {
                return message;
            }
            assert!(Instant::now() < deadline, "never said; last was {message:?}");
        }
    }

    /// Closes the gate and waits until somebody has drained.
    pub fn close(&self) -> u32 {
        let closed = self.shut();
        self.hears_in_time(|m| matches!(m, Message::Drained { epoch, .. } if *epoch == closed));
        closed
    }

    /// Whether nothing is said for so long.
    pub fn hears_nothing_for(&self, time: Duration) -> bool {
        self.next_said(time).is_none()
    }

    /// Closes, and waits until these processes have drained.
    pub fn close_and_drain(&mut self, pids: &[u32]) -> u32 {
        let epoch = self.shut();
        for pid in pids {
            self.await_drained(*pid, epoch);
        }
        epoch
    }

    /// Waits until a process has said drained for this epoch.
    pub fn await_drained(&mut self, pid: u32, epoch: u32) {
        self.await_heard(pid, |heard| {
            matches!(heard, Heard::Said(Message::Drained { epoch: of, .. }) if *of == epoch)
        });
    }

    /// Waits until a process has said that it wants the GPU.
    pub fn await_want(&mut self, pid: u32) {
        self.await_heard(pid, |heard| matches!(heard, Heard::Said(Message::Want { .. })));
    }

    /// Waits until a process has introduced itself.
    pub fn await_hello(&mut self, pid: u32) {
        self.await_heard(pid, |heard| matches!(heard, Heard::Said(Message::Hello { .. })));
    }

    /// Waits until a process's connection has ended.
    pub fn await_left(&mut self, pid: u32) {
        self.await_heard(pid, |heard| *heard == Heard::Left);
    }

    /// Waits for something that a process does. What others do is kept.
    pub fn await_heard(&mut self, pid: u32, is_it: impl Fn(&Heard) -> bool) -> Heard {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.kept.iter().position(|(by, heard)| *by == pid && is_it(heard));
            if let Some(found) = found {
                return self.kept.remove(found).1;
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.heard.recv_timeout(left) {
                Ok(news) => self.kept.push(news),
                Err(_) => panic!("process {pid} did not say it; heard: {:?}", self.kept),
            }
        }
    }

    /// Whether a process has done that by now; nothing is waited for.
    pub fn has_heard(&mut self, pid: u32, is_it: impl Fn(&Heard) -> bool) -> bool {
        self.kept.extend(self.heard.try_iter());
        self.kept.iter().any(|(by, heard)| *by == pid && is_it(heard))
    }

    /// Whether a process has said drained for this epoch by now.
    pub fn has_drained(&mut self, pid: u32, epoch: u32) -> bool {
        self.has_heard(pid, |heard| {
            matches!(heard, Heard::Said(Message::Drained { epoch: of, .. }) if *of == epoch)
        })
    }

    /// Ends without a word, as a killed plugin does; its last sign of life stays.
    pub fn dies(mut self) {
        self.end();
        self.says_goodbye = false;
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only serves");
        }
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.end();
        if self.says_goodbye {
            self.quota.set_arbiter(ARBITER_GONE);
        }
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every kernel has it");
    u64::try_from(Duration::from(now).as_nanos()).expect("centuries")
}

fn serve(
    listener: &OwnedFd,
    signs: &QuotaWriter,
    tell: &mpsc::Sender<(u32, Heard)>,
    stop: &AtomicBool,
) {
    let mut peers: Vec<(OwnedFd, u32)> = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        signs.set_arbiter(monotonic_ns());
        let all = std::iter::once(listener).chain(peers.iter().map(|(peer, _)| peer));
        let mut polled: Vec<_> =
            all.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
        let _ = poll(&mut polled, 10_u8);
        let ready: Vec<bool> = polled.iter().map(|poll| poll.any() == Some(true)).collect();
        let mut at = 0;
        peers.retain(|(peer, pid)| {
            at += 1;
            let stays = !ready[at] || hear(peer, *pid, tell);
            if !stays {
                let _ = tell.send((*pid, Heard::Left));
            }
            stays
        });
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        if ready[0]
            && let Ok(fd) = socket::accept4(listener.as_raw_fd(), flags)
        {
            // SAFETY: a descriptor that nobody else has.
            let peer = unsafe { OwnedFd::from_raw_fd(fd) };
            let who = socket::getsockopt(&peer, PeerCredentials).expect("a Unix socket");
            peers.push((peer, u32::try_from(who.pid()).expect("visible from here")));
        }
    }
}

/// Reads what is there; false at the end.
fn hear(peer: &OwnedFd, pid: u32, tell: &mpsc::Sender<(u32, Heard)>) -> bool {
    loop {
        let mut packet = [0u8; MESSAGE_BYTES];
        match socket::recv(peer.as_raw_fd(), &mut packet, MsgFlags::empty()) {
            Ok(0) => return false,
            Ok(_) => {
                let message = Message::decode(&packet).expect("the shim's own message");
                let _ = tell.send((pid, Heard::Said(message)));
            }
            Err(error) => return error == Errno::EAGAIN,
        }
    }
}

fn listen(path: &Path) -> OwnedFd {
    let _ = std::fs::remove_file(path);
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let listener = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None);
    let listener = listener.expect("a socket");
    let address = UnixAddr::new(path).expect("a short path");
    socket::bind(listener.as_raw_fd(), &address).expect("a directory of the test's");
    socket::listen(&listener, Backlog::new(128).expect("few")).expect("it is bound");
    listener
}
