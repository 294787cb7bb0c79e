//! The streams that have been launched into, and the order that keeps their marking apart from
//! captures and from the end of streams and contexts.
//!
//! Hooks of calls that end a stream, or put it into a capture, make their call while they hold an
//! [`Order`]; a marker is recorded under the same lock. So a marker never meets a stream that is no
//! more, and never becomes a node of the application's graph.

use super::Stream;
use crate::cancel::Deferred;
use crate::spin::Held;
use crate::state;
use core::sync::atomic::{AtomicU32, Ordering};
use tessera_cuda::types::CUcontext;

/// What is known of the process's streams.
#[derive(Debug, Default)]
pub(crate) struct Streams {}

/// While it lives no stream is marked by anybody else, and no capture begins or ends. Not to be held
/// over calls that wait for the GPU.
#[derive(Debug)]
pub struct Order {
    _held: Held<'static, Streams>,
    _deferred: Deferred,
}

impl Order {
    /// `None` in a process that is no tenant (yet).
    pub(super) fn take() -> Option<Self> {
        let process = state::armed()?;
        let deferred = Deferred::new();
        Some(Self { _held: process.gate.streams.lock(), _deferred: deferred })
    }

    /// `stream` is about to end or to be captured: what is in flight in it is marked now.
    pub(super) fn leave(&mut self, _stream: Stream) {}
}

/// Before `cuStreamDestroy`; to be dropped after it.
#[must_use = "the order is to last until the driver has destroyed the stream"]
pub fn destroying(stream: Stream) -> Option<Order> {
    let mut order = Order::take()?;
    order.leave(stream);
    Some(order)
}

/// While it lives a context is being destroyed or reset: nobody drains it, and nothing is called
/// drained.
#[derive(Debug)]
pub struct Going(&'static AtomicU32);

impl Drop for Going {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Before whatever destroys or resets `ctx` (which waits for its work); to be dropped after it. Its
/// streams and events are forgotten.
#[must_use = "to be dropped once the driver has destroyed the context"]
pub fn context_going(_ctx: CUcontext) -> Option<Going> {
    let process = state::armed()?;
    process.gate.going.fetch_add(1, Ordering::Acquire);
    Some(Going(&process.gate.going))
}
