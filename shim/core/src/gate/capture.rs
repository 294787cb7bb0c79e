//! Live captures. What goes into a capturing stream is recorded, not executed, so it passes the
//! gate; and a marker in such a stream would be a node of the application's graph.

use super::events::{self, Capturing};
use super::{Order, Stream};
use crate::state;
use core::sync::atomic::{AtomicU32, Ordering};

/// How many captures are live in this process.
#[derive(Debug, Default)]
pub(crate) struct Captures(AtomicU32);

impl Captures {
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    fn ended(&self) {
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }

    /// Whether what is put into `stream` is recorded, not executed.
    #[inline]
    pub(super) fn is_of(&self, stream: Stream) -> bool {
        self.any() && stream != Stream::LEGACY && events::capturing(stream) == Capturing::Itself
    }
}

/// Before `cuStreamBeginCapture` of any version; for [`began`] after it.
#[must_use = "the order is to last until the driver has begun"]
pub fn beginning(stream: Stream) -> Option<Order> {
    let mut order = Order::take()?;
    order.leave(stream);
    order.leave_defaults();
    Some(order)
}

/// A capture of `stream` began, says the driver.
pub fn began(order: Option<Order>, stream: Stream) {
    if let Some(mut order) = order {
        order.is_origin(stream);
        order.gate().captures.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Before `cuStreamEndCapture`; for [`ended`] after it.
#[must_use = "the order is to last until the driver has ended it"]
pub fn ending() -> Option<Order> {
    Order::take()
}

/// A capture ended, whatever came of it: `stream` was capturing before the call and is not now.
pub fn ended(order: Option<Order>, stream: Stream) {
    if let Some(mut order) = order {
        order.was_origin(stream);
        order.gate().captures.ended();
    }
}

/// `stream` is no more. Where a capture began in it, nobody can end that any more: "capture must be
/// ended on the same stream in which it was initiated" (`cuStreamBeginCapture`).
pub fn destroyed(order: Option<Order>, stream: Stream) {
    let Some(mut order) = order else { return };
    order.stream_ended(stream);
    if order.was_origin(stream) {
        order.gate().captures.ended();
    }
}

/// Whether any capture is live in this process.
#[inline]
pub fn any() -> bool {
    state::armed().is_some_and(|process| process.gate.captures.any())
}

/// Before `cuStreamWaitEvent`, which may put `stream` into a live capture; to be dropped after it.
/// `None`, for the price of a load, while there is none.
#[must_use = "the order is to last until the driver has been asked"]
pub fn joining(stream: Stream) -> Option<Order> {
    if !any() {
        return None;
    }
    let mut order = Order::take()?;
    order.leave(stream);
    Some(order)
}
