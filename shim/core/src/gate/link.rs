//! The connection to the arbiter on `gate.sock`; docs/internals/compute.md has the messages. No thread waits for it;
//! what could not be sent is sent again later.

use crate::log::now_ns;
use crate::session::{Kept, Socket};
use crate::spin::Spin;
use crate::state::Process;
use crate::thread::Deferred;
use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, Ordering};
use tessera_region::quota::Policy;
use tessera_region::session::Message;
use tessera_region::share::MAX_SHARES;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Link(Spin<Option<Socket>>);

impl Link {
    /// Sends if there is a connection. False where it is to be said again.
    pub(super) fn say(&self, message: &Message) -> bool {
        let _deferred = Deferred::new();
        self.0.lock().is_some_and(|socket| socket.is_ours() && socket.put(message))
    }

    /// Whether there is a connection, after an attempt to make one if there was none.
    /// With the first message goes a descriptor of `file`.
    pub(super) fn connect(&self, path: &CStr, hello: &Message, file: Option<Kept>) -> Connection {
        let _deferred = Deferred::new();
        let mut socket = self.0.lock();
        Socket::check(&mut socket);
        if socket.is_some() {
            return Connection::Old;
        }
        *socket = Socket::connect(path);
        if socket.is_some_and(|socket| !socket.put_with(hello, file)) {
            Socket::close(&mut socket);
        }
        if socket.is_some() { Connection::New } else { Connection::None }
    }
}

/// What [`Link::connect`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connection {
    None,
    New,
    Old,
}

// A process with several shares keeps to the gate of one, and joins the others at their sockets: so the
// arbiter counts their GPU time, and their GPUs, as the first one's. Being there is all that is said; who
// can connect has the share.

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Joined {
    links: [Link; MAX_SHARES],
    /// What this process is called at all of its gates; 0: nothing yet.
    token: AtomicU64,
}

impl Joined {
    /// A number that nobody guesses.
    fn token(&self) -> u64 {
        let known = self.token.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        let mut random = 0u64;
        // SAFETY: a place for as many bytes. Where the kernel has no such call (before 3.17) or no entropy
        // yet, the time and where this is must do.
        unsafe { libc::syscall(libc::SYS_getrandom, &raw mut random, size_of::<u64>(), 1) };
        let here = core::ptr::from_ref(self).addr() as u64;
        let new = (random ^ now_ns().rotate_left(32) ^ here).max(1);
        match self.token.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => new,
            Err(others) => others,
        }
    }
}

/// Connects to the gate that the process keeps to, and joins those of its other shares that have one.
pub(super) fn connect(process: &Process) -> Connection {
    let (gate, shares) = (&process.gate, process.account.shares());
    let lead = shares.lead_index();
    let flight = *gate.flight_file.lock();
    let flight = flight.filter(|_| process.gate_quota().takes_flight());
    let connection = gate.link.connect(&process.sockets[lead].gate, &process.hello(lead), flight);
    if shares.shares().len() > 1 {
        let token = gate.joined.token();
        if connection == Connection::New {
            // One that is lost breaks the connection, which is then made again.
            let _ = gate.link.say(&Message::Joins { token, leads: true });
        }
        for (at, share) in shares.shares().iter().enumerate() {
            if at != lead && share.quota.policy(0) != Policy::None {
                let joins = Message::Joins { token, leads: false };
                let _ = gate.joined.links[at].connect(&process.sockets[at].gate, &joins, None);
            }
        }
    }
    connection
}
