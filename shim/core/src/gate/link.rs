//! The connection to the arbiter on `gate.sock`; docs/internals/compute.md has the messages. No thread waits for it;
//! what could not be sent is sent again later.

use crate::session::{Kept, Socket};
use crate::spin::Spin;
use crate::thread::Deferred;
use core::ffi::CStr;
use tessera_region::session::Message;

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
