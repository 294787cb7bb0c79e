//! The streams that have been launched into, and the order that keeps their marking apart from
//! captures and from the end of streams and contexts.
//!
//! A stream is *dirty* from the first launch into it until a drain takes it up. The drain marks every dirty
//! stream and waits for the markers. Default streams, legacy and per thread, are marked in the legacy stream
//! of every known context: the per-thread ones are blocking streams, and synchronise with it ("Stream
//! synchronization behavior").
//!
//! Hooks of calls that end a stream, or put it into a capture, make their call while they hold an [`Order`];
//! a marker is recorded under the same lock. So a marker never meets a stream that has ended, and never
//! becomes a node of the application's graph.

use super::elsewhere::Pause;
use super::events::{self, Capturing};
use super::lanes::{Lanes, Signal};
use super::local::Local;
use super::solo::Room;
use super::{Stream, flight};
use crate::pages::List;
use crate::pages::Zeroed;
use crate::place::Pushed;
use crate::pools::ask::Uncaptured;
use crate::records::Unmarked;
use crate::spin::{Held, Spin};
use crate::state::{self, Process};
use crate::thread::Deferred;
use core::ptr;
use core::sync::atomic::Ordering;
use tessera_cuda::types::CUcontext;

/// What is put into a stream, or still to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marker {
    pub(super) stream: usize,
    pub(super) ctx: usize,
    pub(super) signal: Signal,
    /// Operations that are complete with it.
    pub(super) operations: u32,
    /// Those of them that are graphs.
    pub(super) graphs: u32,
    /// When the first of them was handed to the driver at the earliest, microseconds.
    pub(super) since_us: u32,
    /// 1 where they waited for the gate or the window: how long they took tells nothing.
    pub(super) is_tainted: u32,
}

// SAFETY: integers, and a signal.
unsafe impl Zeroed for Marker {}

impl Marker {
    pub(super) const fn of(stream: Stream, ctx: usize, signal: Signal) -> Self {
        Self { stream: stream.0, ctx, signal, operations: 0, graphs: 0, since_us: 0, is_tainted: 0 }
    }

    /// One that is still to be put.
    pub(super) const fn due(stream: Stream, ctx: usize) -> Self {
        Self::of(stream, ctx, Signal::NONE)
    }
}

/// The dirty streams; markers that are not put. Under a lock of their own, which nobody holds over a call
/// that may wait: launching threads need it.
#[derive(Debug, Default)]
pub(crate) struct Noted(List<Marker>);

impl Noted {
    fn add(&mut self, stream: Stream, ctx: usize) {
        if !self.0.iter().any(|dirty| (dirty.stream, dirty.ctx) == (stream.0, ctx)) {
            let _ = self.0.push(Marker::due(stream, ctx));
        }
    }
}

/// The calling thread is about to launch into `stream`; `then` is done under the same lock.
pub(super) fn note(noted: &Spin<Noted>, stream: Stream, then: impl FnOnce()) {
    let _deferred = Deferred::new();
    // The driver is asked outside the lock.
    let ctx = events::context_of(stream);
    let mut noted = noted.lock();
    noted.add(stream, ctx);
    then();
}

/// Whether all dirty streams are so.
pub(super) fn are_noted(noted: &Spin<Noted>, so: impl Fn(usize) -> bool) -> bool {
    noted.lock().0.iter().all(|dirty| so(dirty.stream))
}

/// What is known of the process's streams. Where a table gets no memory from the kernel, a stream is
/// drained no more: quality of service, no more than that.
///
/// Its lock is held over calls of the driver that may wait, for a full queue say, and what is in the
/// queue may wait for another thread's launch. So who launches takes it for a moment only, or not at all
/// ([`Spin::lock_soon`]).
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(super) draining: List<Marker>,
    /// What is in flight of an open lease, oldest first; see [`super::window`].
    pub(super) flying: List<Marker>,
    /// Events that are in no stream.
    spares: List<Marker>,
    /// What is to be drained of contexts that are being released, should they live on.
    leaving: List<Marker>,
    /// Where live captures began; without events.
    origins: List<Marker>,
    /// What is in streams and is no work of the GPU.
    pub(super) pauses: List<Pause>,
    /// Markers of launches at a gate that says SOLO, and how many there may be.
    pub(super) alone: List<Marker>,
    pub(super) room: Room,
    pub(super) lanes: Lanes,
}

/// What became of an attempt to mark.
#[derive(Clone, Copy)]
enum Mark {
    Put(Signal),
    /// A capture forbids it.
    Later,
    /// There is nothing to wait for: the stream is being captured, or its context is broken.
    Nothing,
}

/// Markers of streams that ended, after which the complete ones are looked for.
const MANY: usize = 64;

impl Streams {
    /// Takes up what is dirty: from now on it is drained. The notes of it go under the same lock.
    pub(super) fn take_up(&mut self, process: &Process) {
        let mut noted = process.gate.noted.lock();
        self.draw_noted(process, &noted);
        while noted.0.take(|_| true).is_some() {}
        process.records.forget_streams();
    }

    /// Has what is dirty drained. It stays dirty: who noted it goes on launching.
    pub(super) fn draw_all(&mut self, process: &Process) {
        let noted = process.gate.noted.lock();
        self.draw_noted(process, &noted);
    }

    fn draw_noted(&mut self, process: &Process, noted: &Noted) {
        for &Marker { stream, ctx, .. } in noted.0.iter() {
            if Stream(stream).is_default() {
                self.draw(Stream::LEGACY.0, ctx);
                process.contexts.each(|ctx| self.draw(Stream::LEGACY.0, ctx));
            } else {
                self.draw(stream, ctx);
            }
        }
    }

    fn draw(&mut self, stream: usize, ctx: usize) {
        let same = |marker: &Marker| {
            (marker.stream, marker.ctx) == (stream, ctx) && !marker.signal.is_put()
        };
        if ctx != 0 && !self.draining.iter().any(same) {
            let _ = self.draining.push(Marker::due(Stream(stream), ctx));
        }
    }

    /// What is in flight has waited for a launch that was held back.
    pub(super) fn taint(&mut self) {
        self.flying.iter_mut().for_each(|marker| marker.is_tainted = 1);
    }

    /// How much is being drained.
    pub(super) fn left(&self) -> usize {
        self.draining.len()
    }

    /// Drops what is over of what has been marked.
    pub(super) fn drop_over(&mut self, gate: &Local) {
        let mut at = 0;
        while let Some(&marker) = self.draining.get(at) {
            match marker.signal.is_put() && marker.signal.is_over() {
                true => self.drop_drained(gate, at),
                false => at += 1,
            }
        }
    }

    fn drop_drained(&mut self, gate: &Local, at: usize) {
        let Marker { ctx, signal, operations, graphs, .. } = self.draining.remove(at);
        gate.graphs_completed.fetch_add(graphs, Ordering::Relaxed);
        gate.complete(operations, if signal.is_word() { 0 } else { operations });
        self.spare(ctx, signal);
    }

    fn in_flight(&self) -> impl Iterator<Item = &Marker> {
        self.draining.iter().chain(self.flying.iter())
    }

    /// How much of what is in flight a launch into `stream` of `ctx` would queue up behind: 1 where the context has
    /// something in flight, and 1 for each operation of the stream.
    pub(super) fn rank(&self, stream: usize, ctx: usize) -> u32 {
        let all = || self.in_flight().filter(|marker| marker.ctx == ctx);
        let stream = if Stream(stream).is_default() { Stream::LEGACY.0 } else { stream };
        let own = all().filter(|marker| marker.stream == stream);
        u32::from(all().next().is_some()) + own.map(|marker| marker.operations.max(1)).sum::<u32>()
    }

    /// Of the stream that has most in flight.
    pub(super) fn highest_rank(&self) -> u32 {
        self.in_flight().map(|marker| self.rank(marker.stream, marker.ctx)).max().unwrap_or(0)
    }

    /// Marks what can be marked and drops what is over; true when nothing is left.
    pub(super) fn drain(&mut self, process: &Process, capturing: bool) -> bool {
        let gate = &process.gate;
        self.drop_over(gate);
        self.put_due(gate, |stream| !stream.is_default(), capturing);
        if !self.is_marked() && flight::may_mark_defaults(process, self) {
            self.put_due(gate, Stream::is_default, capturing);
        }
        self.draining.is_empty()
    }

    /// Whether all that is to be drained is marked.
    pub(super) fn is_marked(&self) -> bool {
        self.draining.iter().all(|marker| marker.signal.is_put())
    }

    /// Puts markers that are due into streams that are `wanted`.
    fn put_due(&mut self, gate: &Local, wanted: impl Fn(Stream) -> bool, capturing: bool) {
        let mut at = 0;
        while let Some(&Marker { stream, signal, .. }) = self.draining.get(at) {
            at += 1;
            if signal.is_put() || !wanted(Stream(stream)) {
                continue;
            }
            if let Mark::Nothing = self.put_one(gate, at - 1, capturing) {
                at -= 1;
                self.drop_drained(gate, at);
            }
        }
    }

    /// Puts a marker that is due. One that covers nothing that was counted is an operation by itself.
    fn put_one(&mut self, gate: &Local, at: usize, capturing: bool) -> Mark {
        let Marker { stream, ctx, operations, .. } = self.draining[at];
        let (admitted, stream) = (u32::from(operations == 0), Stream(stream));
        let flight = gate.flight();
        // First: what is complete is read before.
        flight.admitted.fetch_add(admitted.into(), Ordering::SeqCst);
        let mark = self.mark_from_elsewhere(stream, ctx, operations + admitted, capturing);
        match mark {
            Mark::Put(signal) => {
                let marker = &mut self.draining[at];
                (marker.signal, marker.operations) = (signal, operations + admitted);
            }
            Mark::Later | Mark::Nothing => {
                _ = flight.admitted.fetch_sub(admitted.into(), Ordering::Relaxed)
            }
        }
        mark
    }

    /// A signal behind what is in `stream`, where it can have one.
    pub(super) fn signal_in(
        &mut self,
        stream: Stream,
        ctx: usize,
        capturing: bool,
    ) -> Option<Signal> {
        match self.mark_from_elsewhere(stream, ctx, 0, capturing) {
            Mark::Put(signal) => Some(signal),
            Mark::Later | Mark::Nothing => None,
        }
    }

    /// As [`Self::mark`], whatever the thread's context is.
    fn mark_from_elsewhere(
        &mut self,
        stream: Stream,
        ctx: usize,
        operations: u32,
        capturing: bool,
    ) -> Mark {
        match Pushed::new(ptr::with_exposed_provenance_mut(ctx)) {
            Some(_pushed) => self.mark(stream, ctx, operations, capturing),
            None => Mark::Nothing,
        }
    }

    /// Puts a marker into `stream`, of the current context, behind so many operations that are counted.
    fn mark(&mut self, stream: Stream, ctx: usize, operations: u32, capturing: bool) -> Mark {
        if capturing {
            match events::capturing(stream) {
                Capturing::No => {}
                Capturing::Itself => return Mark::Nothing,
                Capturing::Another => return Mark::Later,
            }
        }
        if let Some(signal) = self.lanes.put(stream, ctx, operations) {
            return Mark::Put(signal);
        }
        let spare = self.spares.take(|spare| spare.ctx == ctx).map(|spare| spare.signal.as_event());
        let Some(event) = spare.or_else(events::create) else { return Mark::Nothing };
        if events::record(event, stream) {
            return Mark::Put(Signal::event(event));
        }
        events::destroy(event);
        Mark::Nothing
    }

    /// A marker of the calling thread's own launches into `stream` of `ctx`, or of another's.
    pub(super) fn fly(
        &mut self,
        stream: Stream,
        ctx: usize,
        covers: Unmarked,
        since_us: u32,
        capturing: bool,
    ) {
        let Unmarked { operations, graphs } = covers;
        let marker = Marker { operations, graphs, since_us, ..Marker::due(stream, ctx) };
        match self.mark_from_elsewhere(stream, ctx, operations, capturing) {
            Mark::Put(signal) => {
                // What is behind a pause is complete some time after it: that is no operation's duration.
                let is_tainted = u32::from(self.has_pause(stream));
                if self.flying.push(Marker { signal, is_tainted, ..marker }).is_err() {
                    self.spare(ctx, signal);
                }
            }
            Mark::Later => _ = self.draining.push(marker),
            // Its end is unknown from now on.
            Mark::Nothing => _ = self.flying.push(marker),
        }
    }

    /// Whether all that is in flight, as far as it is known, is in default streams.
    pub(super) fn only_defaults_left(&self) -> bool {
        let is_over = |marker: &Marker| marker.signal.is_put() && marker.signal.is_over();
        let mut all = self.draining.iter().chain(self.flying.iter());
        all.all(|marker| Stream(marker.stream).is_default() || is_over(marker))
    }

    /// Keeps a signal's event for another one.
    pub(super) fn spare(&mut self, ctx: usize, signal: Signal) {
        let signal = Signal::event(signal.as_event());
        if signal.is_put() && self.spares.push(Marker::of(Stream(0), ctx, signal)).is_err() {
            signal.destroy();
        }
    }

    /// Before `stream` ends or is captured: marks it, while that is possible.
    fn leave(&mut self, gate: &Local, stream: Stream, capturing: bool) {
        if self.draining.len() > MANY {
            self.drop_over(gate);
        }
        let is_due = |marker: &Marker| marker.stream == stream.0 && !marker.signal.is_put();
        // One that ends together with its context's release is not awaited any more.
        while !stream.is_default() && self.leaving.take(is_due).is_some() {}
        let was_dirty = {
            let mut noted = gate.noted.lock();
            match stream.is_default() {
                // Other threads' streams of their own stay dirty.
                true => noted.0.iter().find(|dirty| dirty.stream == stream.0).copied(),
                false => noted.0.take(|dirty| dirty.stream == stream.0),
            }
        };
        if let Some(dirty) = was_dirty {
            self.draw(dirty.stream, dirty.ctx);
        }
        if gate.is_watched() {
            self.put_due(gate, |due| due == stream, capturing);
        } else {
            // Nobody drains.
            while self.draining.take(is_due).is_some() {}
        }
    }

    /// Before a capture begins, beside which the legacy stream may not be touched: marks what is in flight
    /// in default streams, while that is possible.
    fn leave_defaults(&mut self, process: &Process, capturing: bool) {
        let is_default = |marker: &Marker| Stream(marker.stream).is_default();
        {
            let mut noted = process.gate.noted.lock();
            if noted.0.iter().any(is_default) {
                self.draw_noted(process, &noted);
                while noted.0.take(is_default).is_some() {}
                process.records.forget_stream(Stream::LEGACY.0);
                process.records.forget_stream(Stream::PER_THREAD.0);
            }
        }
        self.put_due(&process.gate, Stream::is_default, capturing);
    }

    /// The calling thread has launched into its own default stream beside a live capture: marks that,
    /// because nobody else can.
    fn leave_own(&mut self, gate: &Local, operations: u32, capturing: bool) {
        if self.draining.len() > MANY {
            self.drop_over(gate);
        }
        let due = Marker::due(Stream::PER_THREAD, events::current());
        let at = self.draining.len();
        if self.draining.push(Marker { operations, ..due }).is_ok()
            && !matches!(self.put_one(gate, at, capturing), Mark::Put(_))
        {
            self.drop_drained(gate, at);
        }
    }

    /// A capture began in `stream`.
    pub(super) fn is_origin(&mut self, stream: Stream) {
        let _ = self.origins.push(Marker::due(stream, 0));
    }

    /// Whether a live capture began in `stream`; it is forgotten.
    pub(super) fn was_origin(&mut self, stream: Stream) -> bool {
        self.origins.take(|origin| origin.stream == stream.0).is_some()
    }

    /// Takes away what there is of a context that may end, but for what is to be drained if it does
    /// not: see [`Self::came_back`].
    fn leave_context(&mut self, noted: &Spin<Noted>, ctx: usize) {
        self.leave_pauses(ctx);
        self.leave_alone(ctx);
        let mut noted = noted.lock();
        while let Some(dirty) = noted.0.take(|dirty| dirty.ctx == ctx) {
            let stream = Stream(dirty.stream);
            let stream = if stream.is_default() { Stream::LEGACY } else { stream };
            let _ = self.leaving.push(Marker::due(stream, ctx));
        }
        drop(noted);
        while let Some(marker) = self.draining.take(|marker| marker.ctx == ctx) {
            let _ = self.leaving.push(marker);
        }
        let is_event = |marker: &&mut Marker| marker.ctx == ctx && marker.signal.as_event() != 0;
        for marker in self.flying.iter_mut().filter(is_event) {
            marker.signal.destroy();
            marker.signal = Signal::NONE;
        }
        while let Some(spare) = self.spares.take(|spare| spare.ctx == ctx) {
            spare.signal.destroy();
        }
    }

    /// What became of a context that might have ended. If it has not, it is drained as before; if it
    /// has, its events are no more.
    fn came_back(&mut self, gate: &Local, ctx: usize, is_gone: bool) {
        while let Some(marker) = self.leaving.take(|marker| marker.ctx == ctx) {
            let Marker { operations, signal, .. } = marker;
            if is_gone {
                gate.complete(operations, if signal.is_word() { 0 } else { operations });
                continue;
            }
            match signal.is_put() || operations != 0 {
                false => self.draw(marker.stream, ctx),
                true => _ = self.draining.push(marker),
            }
        }
        if is_gone {
            let ended = self.flying.iter_mut().filter(|marker| marker.ctx == ctx);
            ended.for_each(|marker| marker.signal = marker.signal.ended());
            self.lanes.context_ended(ctx);
        }
    }
}

/// While it lives no stream is marked by anybody else, and no capture begins or ends. Not to be held
/// over calls that wait for the GPU.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) streams: Held<'static, Streams>,
    pub(super) process: &'static Process,
    _deferred: Deferred,
}

impl Order {
    /// `None` in a process that is no tenant (yet).
    pub(super) fn take() -> Option<Self> {
        let process = state::armed()?;
        let deferred = Deferred::new();
        Some(Self { streams: process.gate.streams.lock(), process, _deferred: deferred })
    }

    /// `stream` is about to end or to be captured: what is in flight in it is marked now.
    pub(super) fn leave(&mut self, stream: Stream) {
        let gate = &self.process.gate;
        let capturing = gate.captures.any();
        let _uncaptured = capturing.then(Uncaptured::enter);
        flight::mark_those(self.process, &mut self.streams, |flown| flown == stream);
        self.streams.leave(gate, stream, capturing);
        self.process.records.forget_stream(stream.0);
    }
}

/// The calling thread has launched into its per-thread default stream beside a live capture.
pub(super) fn launched_beside_a_capture(process: &Process, is_counted: bool) {
    let gate = &process.gate;
    let _deferred = Deferred::new();
    let Some(mut streams) = gate.streams.lock_soon() else {
        // It is drained when the capture has ended.
        return note(&gate.noted, Stream::PER_THREAD, || {});
    };
    if gate.is_watched() {
        let _uncaptured = Uncaptured::enter();
        streams.leave_own(gate, is_counted.into(), true);
    }
}

impl Order {
    /// A capture is about to begin.
    pub(super) fn leave_defaults(&mut self) {
        let gate = &self.process.gate;
        if gate.is_watched() {
            let capturing = gate.captures.any();
            let _uncaptured = capturing.then(Uncaptured::enter);
            flight::mark_defaults(self.process, &mut self.streams);
            self.streams.leave_defaults(self.process, capturing);
        }
    }
}

/// While it lives a context is being destroyed, reset or released: nothing is called drained.
#[derive(Debug)]
pub struct Going {
    process: &'static Process,
    ctx: usize,
    is_gone: bool,
}

impl Going {
    /// Whether the driver has destroyed or reset it, and with it its streams and events. Unless that
    /// is said, they are awaited as before.
    pub fn is_gone(&mut self, is_gone: bool) {
        self.is_gone = is_gone;
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let gate = &self.process.gate;
        let _deferred = Deferred::new();
        gate.streams.lock().came_back(gate, self.ctx, self.is_gone);
        gate.going.fetch_sub(1, Ordering::Release);
    }
}

/// Before whatever destroys or resets `ctx`, or gives up a reference to it; to be dropped after it.
#[must_use = "to be dropped once the driver has destroyed the context"]
pub fn context_going(ctx: CUcontext) -> Option<Going> {
    let mut order = Order::take()?;
    let process = order.process;
    process.gate.going.fetch_add(1, Ordering::Acquire);
    let ctx = ctx.expose_provenance();
    let _uncaptured = process.gate.captures.any().then(Uncaptured::enter);
    flight::mark_context(process, &mut order.streams, ctx);
    order.streams.leave_context(&process.gate.noted, ctx);
    process.records.forget_streams();
    process.records.forget_context(ctx);
    Some(Going { process, ctx, is_gone: false })
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;

    #[test]
    fn a_capture_ends_with_the_stream_it_began_in_and_with_no_other() {
        let mut streams = Streams::default();
        let (origin, joined) = (Stream(0x1000), Stream(0x2000));
        streams.is_origin(origin);
        // Two threads, each in its own default stream.
        streams.is_origin(Stream::PER_THREAD);
        streams.is_origin(Stream::PER_THREAD);
        assert!(!streams.was_origin(joined), "destroyed, it leaves the capture live");
        assert!(streams.was_origin(origin), "destroyed, it takes the capture along");
        assert!(!streams.was_origin(origin), "once");
        assert!(streams.was_origin(Stream::PER_THREAD) && streams.was_origin(Stream::PER_THREAD));
        assert!(streams.origins.is_empty());
    }

    static WORD: AtomicU32 = AtomicU32::new(0);

    #[test]
    fn what_is_in_flight_in_a_context_that_lives_on_is_drained_as_before() {
        let (own, other, ctx) = (0x1000, 0x2000, 0x10);
        let left = |is_gone: bool, ended: Option<usize>| {
            let (mut streams, gate) = (Streams::default(), Local::new(&raw const WORD));
            let noted = &gate.noted;
            for stream in [own, Stream::PER_THREAD.0] {
                noted.lock().add(Stream(stream), ctx);
            }
            noted.lock().add(Stream(other), 0x20);
            streams.draining.push(Marker::due(Stream(own), ctx)).unwrap();
            streams.draining.push(Marker::of(Stream(0x3000), ctx, Signal::event(77))).unwrap();
            streams.leave_context(noted, ctx);
            assert!(streams.draining.is_empty(), "nothing is asked of it meanwhile");
            if let Some(ended) = ended {
                streams.leave(&gate, Stream(ended), false);
            }
            streams.came_back(&gate, ctx, is_gone);
            assert!(streams.leaving.is_empty());
            assert!(noted.lock().0.iter().map(|dirty| dirty.stream).eq([other]));
            let mut left: Vec<_> =
                streams.draining.iter().map(|m| (m.stream, m.signal.as_event())).collect();
            left.sort_unstable();
            left
        };
        assert_eq!(left(false, None), [(Stream::LEGACY.0, 0), (own, 0), (0x3000, 77)]);
        assert_eq!(left(true, None), []);
        // One of its streams is destroyed by another thread during the release.
        assert_eq!(left(false, Some(own)), [(Stream::LEGACY.0, 0), (0x3000, 77)]);
    }
}
