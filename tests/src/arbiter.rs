//! An arbiter that does what its test says: the plugin's side of a gate (docs/compute.md).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tessera_region::layout::{ARBITER_GONE, GATE_CLOSED, GATE_SOCKET};
use tessera_region::quota::{Policy, QuotaWriter};
use tessera_region::session::{MESSAGE_BYTES, Message};

use crate::Pages;

/// Longer than anything takes that works.
const SOON: Duration = Duration::from_secs(10);

/// See the module. Dropping it is an orderly end.
#[derive(Debug)]
pub struct Arbiter {
    quota: QuotaWriter,
    said: Receiver<Message>,
    lives: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// `CLOCK_MONOTONIC`, nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}

impl Arbiter {
    /// Takes the tenant of `pages` on, with half of GPU 0 and a window of 16 operations or 500 µs;
    /// its gate is closed.
    pub fn take_on(pages: &Pages) -> Self {
        let open = || QuotaWriter::open(pages.dir()).expect("a quota page");
        let quota = open();
        quota.set_cores(0, 500, Policy::Burst);
        quota.set_window(0, 16, 500);
        quota.set_gate(0, GATE_CLOSED);
        let lives = Arc::new(AtomicBool::new(true));
        let (say, said) = channel();
        let path = pages.dir().join(GATE_SOCKET);
        let _ = std::fs::remove_file(&path);
        let listener = listen(&path);
        quota.set_arbiter(monotonic_ns());
        let (heart, served) = (Arc::clone(&lives), Arc::clone(&lives));
        let page = open();
        let threads = vec![
            std::thread::spawn(move || {
                while heart.load(Ordering::Relaxed) {
                    page.set_arbiter(monotonic_ns());
                    std::thread::sleep(Duration::from_millis(10));
                }
            }),
            std::thread::spawn(move || serve(&listener, &say, &served)),
        ];
        Self { quota, said, lives, threads }
    }

    /// The page.
    pub fn quota(&self) -> &QuotaWriter {
        &self.quota
    }

    /// Sets the gate in a new epoch, which is returned.
    pub fn set(&self, state: u32) -> u32 {
        self.quota.set_gate(0, state)
    }

    /// What is said next; fails when nothing is.
    pub fn hears(&self) -> Message {
        match self.said.recv_timeout(SOON) {
            Ok(message) => message,
            Err(error) => panic!("nothing was said: {error}"),
        }
    }

    /// Skips what is said until `wanted`.
    pub fn hears_in_time(&self, wanted: impl Fn(&Message) -> bool) -> Message {
        let deadline = Instant::now() + SOON;
        loop {
            let message = self.hears();
            if wanted(&message) {
                return message;
            }
            assert!(Instant::now() < deadline, "never said; last was {message:?}");
        }
    }

    /// Closes the gate and waits until the tenant has drained.
    pub fn close(&self) -> u32 {
        let closed = self.set(GATE_CLOSED);
        self.hears_in_time(|m| matches!(m, Message::Drained { epoch, .. } if *epoch == closed));
        closed
    }

    /// Whether nothing is said for so long.
    pub fn hears_nothing_for(&self, time: Duration) -> bool {
        matches!(self.said.recv_timeout(time), Err(RecvTimeoutError::Timeout))
    }

    /// Ends without a word, as a killed plugin does; its last sign of life stays.
    pub fn dies(mut self) {
        self.end();
        std::mem::forget(self);
    }

    fn end(&mut self) {
        self.lives.store(false, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("an arbiter's thread");
        }
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.end();
        self.quota.set_arbiter(ARBITER_GONE);
    }
}

fn listen(path: &Path) -> OwnedFd {
    // SAFETY: all-zero is a valid sockaddr_un; the path fits, as asserted; a descriptor of our own.
    unsafe {
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        let bytes = path.as_os_str().as_bytes();
        assert!(bytes.len() < address.sun_path.len(), "a short path");
        address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).unwrap();
        for (to, from) in address.sun_path.iter_mut().zip(bytes) {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, kind, 0));
        let length = libc::socklen_t::try_from(size_of_val(&address)).unwrap();
        let bound = libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length);
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        assert_eq!(libc::listen(fd.as_raw_fd(), 64), 0);
        fd
    }
}

/// Forwards what all connections say, until the arbiter ends.
fn serve(listener: &OwnedFd, say: &Sender<Message>, lives: &AtomicBool) {
    let mut peers: Vec<OwnedFd> = Vec::new();
    while lives.load(Ordering::Relaxed) {
        let all = std::iter::once(listener).chain(&peers);
        let mut polled: Vec<libc::pollfd> = all
            .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        let count = libc::nfds_t::try_from(polled.len()).unwrap();
        // SAFETY: so many entries.
        unsafe { libc::poll(polled.as_mut_ptr(), count, 20) };
        let mut kept = Vec::new();
        for (peer, polled) in peers.into_iter().zip(&polled[1..]) {
            if polled.revents == 0 || receive(&peer, say) {
                kept.push(peer);
            }
        }
        peers = kept;
        // SAFETY: our own listener, and a descriptor that only we know.
        let fd = unsafe {
            libc::accept(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut())
        };
        if fd >= 0 {
            // SAFETY: just accepted.
            peers.push(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

/// Forwards one message; false at the end of the connection.
fn receive(peer: &OwnedFd, say: &Sender<Message>) -> bool {
    let mut packet = [0u8; MESSAGE_BYTES];
    // SAFETY: a buffer of that length.
    let got = unsafe {
        libc::recv(peer.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), libc::MSG_DONTWAIT)
    };
    if got > 0 {
        let got = usize::try_from(got).unwrap();
        let message = Message::decode(&packet[..got]).expect("a message");
        let _ = say.send(message);
    }
    got > 0
}
