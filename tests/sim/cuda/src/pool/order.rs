//! Which stream's work comes after which: for memory that was freed in one stream and is wanted in
//! another (CUDA C++ Programming Guide, "Stream Ordered Memory Allocator", "Physical Page Caching
//! Behavior": `cudaMemPoolReuseFollowEventDependencies`).
//!
//! Nothing is followed before the first free in stream order: an event recorded earlier can't have
//! captured it.

use crate::driver::{Device, lock};
use crate::stream::Stream;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Streams and events beyond this many are forgotten: reuse is lost, nothing else.
const MOST: usize = 8192;

/// A place in a stream: what was freed there is free once its GPU's queue has completed `seq`.
#[derive(Clone, Copy)]
pub(crate) struct After {
    pub device: &'static Device,
    /// The last operation submitted before.
    pub seq: u64,
    stream: u64,
    context: usize,
    legacy: bool,
    blocking: bool,
}

/// Streams' numbers, and up to which operation another's work comes before.
type Known = BTreeMap<u64, u64>;

#[derive(Default)]
struct Order {
    streams: BTreeMap<u64, Known>,
    /// By the event's address: what its last record captured.
    events: BTreeMap<usize, Known>,
}

static FOLLOWING: AtomicBool = AtomicBool::new(false);
static ORDER: Mutex<Option<Order>> = Mutex::new(None);

impl After {
    /// The place that `stream` has reached with its submissions; `None`: nothing to wait for.
    pub(crate) fn now_in(stream: &'static Stream) -> Option<After> {
        FOLLOWING.store(true, Ordering::Relaxed);
        stream.place().map(|seq| After {
            device: stream.device(),
            seq,
            stream: stream.number(),
            context: std::ptr::from_ref(stream.context()).addr(),
            legacy: stream.is_legacy(),
            blocking: stream.is_blocking(),
        })
    }

    /// One place for two of the same stream.
    pub(crate) fn joined(a: &After, b: &After) -> Option<After> {
        (a.stream == b.stream).then_some(if a.seq >= b.seq { *a } else { *b })
    }

    pub(crate) fn is_reached(&self) -> bool {
        // A lost GPU's work is over.
        self.device.is_complete(self.seq).unwrap_or(true)
    }

    pub(crate) fn is_in(&self, stream: &Stream) -> bool {
        self.stream == stream.number()
    }

    /// Whether the work of `stream` comes after it, by events or by the legacy default stream.
    pub(crate) fn is_before(&self, stream: &'static Stream) -> bool {
        let same_context = self.context == std::ptr::from_ref(stream.context()).addr();
        if same_context
            && (self.legacy && stream.is_blocking() || self.blocking && stream.is_legacy())
        {
            return true;
        }
        let order = lock(&ORDER);
        let known = order.as_ref().and_then(|o| o.streams.get(&stream.number()));
        known.and_then(|k| k.get(&self.stream)).is_some_and(|&seq| seq >= self.seq)
    }
}

pub(crate) fn recorded(event: usize, stream: &Stream, seq: u64) {
    if !FOLLOWING.load(Ordering::Relaxed) {
        return;
    }
    let mut order = lock(&ORDER);
    let order = order.get_or_insert_default();
    let mut known = order.streams.get(&stream.number()).cloned().unwrap_or_default();
    known.insert(stream.number(), seq);
    if order.events.len() >= MOST {
        order.events.clear();
    }
    order.events.insert(event, known);
}

pub(crate) fn waited(event: usize, stream: &Stream) {
    if !FOLLOWING.load(Ordering::Relaxed) {
        return;
    }
    let mut order = lock(&ORDER);
    let order = order.get_or_insert_default();
    let Some(captured) = order.events.get(&event).cloned() else { return };
    if order.streams.len() >= MOST {
        order.streams.clear();
    }
    let known = order.streams.entry(stream.number()).or_default();
    for (other, seq) in captured {
        let latest = known.entry(other).or_default();
        *latest = seq.max(*latest);
    }
}
