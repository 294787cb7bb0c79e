//! Live captures. What goes into a capturing stream is recorded, not executed, so it passes the
//! gate; and a marker in such a stream would be a node of the application's graph.

use super::streams::Order;
use super::{Stream, elsewhere, is_capturing};
use crate::state;
use crate::thread::{Answer, Call};
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
        self.any() && is_capturing(stream)
    }
}

/// Whether any capture is live in this process.
#[inline]
pub fn any() -> bool {
    state::armed().is_some_and(|process| process.gate.captures.any())
}

// Hooks, each over all versions of its function. The order lasts until the driver has answered.

pub fn beginning(call: Call<'_>, stream: Stream) -> Answer {
    let mut order = Order::take();
    if let Some(order) = &mut order {
        order.leave(stream);
        order.leave_defaults();
    }
    call()?;
    if let Some(mut order) = order {
        order.streams.is_origin(stream);
        order.process.gate.captures.0.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Whether it ended is the driver's to say: an error may mean that it goes on (another thread asked,
/// or another stream of it), or that it came to nothing.
pub fn ending(call: Call<'_>, stream: Stream) -> Answer {
    let order = Order::take();
    let before = any() && is_capturing(stream);
    let answer = call();
    if let Some(mut order) = order.filter(|_| before && !is_capturing(stream)) {
        order.streams.was_origin(stream);
        order.process.gate.captures.ended();
    }
    answer
}

/// A stream that ends is marked before, so that what is in flight in it is still awaited. Where a capture began in it,
/// nobody can end that any more: "capture must be ended on the same stream in which it was initiated"
/// (`cuStreamBeginCapture`).
pub fn destroying(call: Call<'_>, stream: Stream) -> Answer {
    let mut order = Order::take();
    if let Some(order) = &mut order {
        order.leave(stream);
    }
    call()?;
    if let Some(mut order) = order {
        order.streams.lanes.stream_ended(stream);
        if order.streams.was_origin(stream) {
            order.process.gate.captures.ended();
        }
    }
    Ok(())
}

/// A wait for a captured event puts the stream into the capture. For the price of a load while there is none.
pub fn joining(call: Call<'_>, stream: Stream) -> Answer {
    let mut order = any().then(Order::take).flatten();
    if let Some(order) = &mut order {
        order.leave(stream);
    }
    call()
}

/// What the GPU has no part in: a host function, a wait for a word, or for what others signal, the host or another
/// process say.
pub fn at_host(call: Call<'_>, stream: Stream) -> Answer {
    let begun = elsewhere::begin(stream);
    let answer = call();
    if let Some(begun) = begun {
        begun.end();
    }
    answer
}

/// The same by the names of the table.
pub mod hooks {
    pub use super::at_host as cuLaunchHostFunc;
    pub use super::at_host as cuLaunchHostFunc_v2;
    pub use super::at_host as cuStreamAddCallback;
    pub use super::at_host as cuStreamBatchMemOp;
    pub use super::at_host as cuStreamWaitValue32;
    pub use super::at_host as cuStreamWaitValue64;
    pub use super::at_host as cuWaitExternalSemaphoresAsync;
    pub use super::beginning as cuStreamBeginCapture;
    pub use super::beginning as cuStreamBeginCaptureToCig;
    pub use super::beginning as cuStreamBeginCaptureToGraph;
    pub use super::beginning as cuStreamBeginCapture_v2;
    pub use super::beginning as cuStreamBeginRecaptureToGraph;
    pub use super::destroying as cuStreamDestroy;
    pub use super::ending as cuStreamEndCapture;
    pub use super::ending as cuStreamEndCaptureToCig;
    pub use super::joining as cuStreamWaitEvent;
}
