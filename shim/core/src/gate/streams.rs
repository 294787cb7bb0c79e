//! The streams that have been launched into, and the order that keeps their marking apart from
//! captures and from the end of streams and contexts.
//!
//! A stream is *dirty* from the first launch into it until a drain takes it up. The drain marks every dirty
//! stream with an event and waits for the events. Default streams, legacy and per thread, are marked by an
//! event in the legacy stream of every known context: the per-thread ones are blocking streams, and
//! synchronise with it ("Stream synchronization behavior").
//!
//! Hooks of calls that end a stream, or put it into a capture, make their call while they hold an [`Order`];
//! a marker is recorded under the same lock. So a marker never meets a stream that has ended, and never
//! becomes a node of the application's graph.

use super::elsewhere::Pause;
use super::events::{self, Capturing, Pushed};
use super::solo::Room;
use super::{Stream, local};
use crate::cancel::Deferred;
use crate::list::List;
use crate::pages::Zeroed;
use crate::pools::ask::Uncaptured;
use crate::records::Unmarked;
use crate::spin::{Held, Spin};
use crate::state::{self, Process};
use core::sync::atomic::Ordering;
use tessera_cuda::types::CUcontext;

/// An event of ours: recorded in a stream, or (0) still to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marker {
    pub(super) stream: usize,
    pub(super) ctx: usize,
    pub(super) event: usize,
    /// Operations that are complete with it.
    pub(super) operations: u32,
    /// Those of them that are graphs.
    pub(super) graphs: u32,
    /// When the first of them was handed to the driver at the earliest, microseconds.
    pub(super) since_us: u32,
    /// 1 where they waited for the gate or the window: how long they took tells nothing.
    pub(super) is_tainted: u32,
}

// SAFETY: integers.
unsafe impl Zeroed for Marker {}

impl Marker {
    pub(super) const fn of(stream: Stream, ctx: usize, event: usize) -> Self {
        Self { stream: stream.0, ctx, event, operations: 0, graphs: 0, since_us: 0, is_tainted: 0 }
    }
}

/// The dirty streams; markers without events. Under a lock of their own, which nobody holds over a call
/// that may wait: launching threads need it.
#[derive(Debug)]
pub(crate) struct Noted(List<Marker>);

impl Noted {
    pub(super) const fn new() -> Self {
        Self(List::new())
    }

    /// The context of a stream that is there.
    fn context_of(&self, stream: Stream) -> Option<usize> {
        self.0.iter().rfind(|dirty| dirty.stream == stream.0).map(|dirty| dirty.ctx)
    }

    fn add(&mut self, stream: Stream, ctx: usize) {
        if !self.0.iter().any(|dirty| (dirty.stream, dirty.ctx) == (stream.0, ctx)) {
            let _ = self.0.push(Marker::of(stream, ctx, 0));
        }
    }
}

/// The context of a stream that the calling thread launches into.
pub(super) fn context_of(noted: &Spin<Noted>, stream: Stream) -> usize {
    let known = match stream.is_default() {
        true => None,
        false => noted.lock().context_of(stream),
    };
    // The driver is asked outside the lock.
    known.unwrap_or_else(|| match stream.is_default() {
        true => events::current(),
        false => events::context_of(stream),
    })
}

/// The calling thread is about to launch into `stream`; `then` is done under the same lock.
pub(super) fn note(noted: &Spin<Noted>, stream: Stream, then: impl FnOnce()) {
    let _deferred = Deferred::new();
    let ctx = context_of(noted, stream);
    let mut noted = noted.lock();
    noted.add(stream, ctx);
    then();
}

/// What is known of the process's streams. Where a table gets no memory from the kernel, a stream is
/// drained no more: quality of service, no more than that.
///
/// Its lock is held over calls of the driver that may wait, for a full queue say, and what is in the
/// queue may wait for another thread's launch. So who launches takes it for a moment only, or not at all
/// ([`Spin::lock_soon`]).
#[derive(Debug)]
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
}

/// What became of an attempt to mark.
enum Mark {
    Event(usize),
    /// A capture forbids it.
    Later,
    /// There is nothing to wait for: the stream is being captured, or its context is broken.
    Nothing,
}

/// Markers of streams that ended, after which the complete ones are looked for.
const MANY: usize = 64;

impl Streams {
    pub(super) const fn new() -> Self {
        Self {
            draining: List::new(),
            flying: List::new(),
            spares: List::new(),
            leaving: List::new(),
            origins: List::new(),
            pauses: List::new(),
            alone: List::new(),
            room: Room::new(),
        }
    }

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
        let same = |marker: &Marker| (marker.stream, marker.ctx, marker.event) == (stream, ctx, 0);
        if ctx != 0 && !self.draining.iter().any(same) {
            let _ = self.draining.push(Marker::of(Stream(stream), ctx, 0));
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
    pub(super) fn drop_over(&mut self) {
        let mut at = 0;
        while let Some(&Marker { ctx, event, .. }) = self.draining.get(at) {
            if event != 0 && events::is_over(event) {
                self.draining.remove(at);
                self.spare(ctx, event);
            } else {
                at += 1;
            }
        }
    }

    /// How much of what is in flight a launch into `stream` of `ctx` would queue up behind: 2 where the
    /// stream has something in flight, 1 where the context has.
    pub(super) fn rank(&self, stream: usize, ctx: usize) -> u32 {
        let all = || self.draining.iter().chain(self.flying.iter()).filter(|m| m.ctx == ctx);
        let stream = if Stream(stream).is_default() { Stream::LEGACY.0 } else { stream };
        u32::from(all().next().is_some()) + u32::from(all().any(|m| m.stream == stream))
    }

    /// Marks what can be marked and drops what is over; true when nothing is left.
    pub(super) fn drain(&mut self, capturing: bool) -> bool {
        let mut at = 0;
        while let Some(&marker) = self.draining.get(at) {
            let Marker { stream, ctx, event, .. } = marker;
            let over = match event {
                0 => match self.mark_from_elsewhere(Stream(stream), ctx, capturing) {
                    Mark::Event(event) => {
                        self.draining[at].event = event;
                        false
                    }
                    Mark::Later => false,
                    Mark::Nothing => true,
                },
                event => events::is_over(event),
            };
            if over {
                self.draining.remove(at);
                self.spare(ctx, event);
            } else {
                at += 1;
            }
        }
        self.draining.is_empty()
    }

    /// A new event in `stream`, where it can have one.
    pub(super) fn event_in(
        &mut self,
        stream: Stream,
        ctx: usize,
        capturing: bool,
    ) -> Option<usize> {
        match self.mark_from_elsewhere(stream, ctx, capturing) {
            Mark::Event(event) => Some(event),
            Mark::Later | Mark::Nothing => None,
        }
    }

    /// As [`Self::mark`], whatever the thread's context is.
    fn mark_from_elsewhere(&mut self, stream: Stream, ctx: usize, capturing: bool) -> Mark {
        match Pushed::new(ctx) {
            Some(_pushed) => self.mark(stream, ctx, capturing),
            None => Mark::Nothing,
        }
    }

    /// Records an event in `stream`, of the current context.
    fn mark(&mut self, stream: Stream, ctx: usize, capturing: bool) -> Mark {
        if capturing {
            match events::capturing(stream) {
                Capturing::No => {}
                Capturing::Itself => return Mark::Nothing,
                Capturing::Another => return Mark::Later,
            }
        }
        let spare = self.spares.take(|spare| spare.ctx == ctx).map(|spare| spare.event);
        let Some(event) = spare.or_else(events::create) else { return Mark::Nothing };
        if events::record(event, stream) {
            return Mark::Event(event);
        }
        events::destroy(event);
        Mark::Nothing
    }

    /// A marker of the calling thread's own launches into `stream`, or of another's.
    pub(super) fn fly(
        &mut self,
        noted: &Spin<Noted>,
        stream: Stream,
        covers: Unmarked,
        since_us: u32,
        capturing: bool,
    ) {
        let Unmarked { operations, graphs } = covers;
        // A launch has just noted it, unless a drain has taken it up since.
        let known = noted.lock().context_of(stream);
        let ctx = known.unwrap_or_else(events::current);
        if let Mark::Event(event) = self.mark_from_elsewhere(stream, ctx, capturing) {
            // What is behind a pause is complete some time after it: that is no operation's duration.
            let is_tainted = u32::from(self.has_pause(stream));
            let of = Marker::of(stream, ctx, event);
            let marker = Marker { operations, graphs, since_us, is_tainted, ..of };
            if self.flying.push(marker).is_ok() {
                return;
            }
            self.spare(ctx, event);
        }
        // Its end is unknown from now on.
        let lost = Marker { operations, graphs, since_us, ..Marker::of(stream, 0, 0) };
        let _ = self.flying.push(lost);
    }

    pub(super) fn spare(&mut self, ctx: usize, event: usize) {
        if event != 0 && self.spares.push(Marker::of(Stream(0), ctx, event)).is_err() {
            events::destroy(event);
        }
    }

    /// Before `stream` ends or is captured: marks it, while that is possible.
    fn leave(&mut self, noted: &Spin<Noted>, stream: Stream, capturing: bool, watched: bool) {
        if self.draining.len() > MANY {
            self.drain(capturing);
        }
        // One that ends together with its context's release is not awaited any more.
        let ends = |marker: &Marker| (marker.stream, marker.event) == (stream.0, 0);
        while !stream.is_default() && self.leaving.take(ends).is_some() {}
        let was_dirty = {
            let mut noted = noted.lock();
            match stream.is_default() {
                // Other threads' streams of their own stay dirty.
                true => noted.0.iter().find(|dirty| dirty.stream == stream.0).copied(),
                false => noted.0.take(|dirty| dirty.stream == stream.0),
            }
        };
        let was_drawn = self.draining.take(|m| m.stream == stream.0 && m.event == 0);
        let Some(ctx) = was_dirty.map(|dirty| dirty.ctx).or(was_drawn.map(|marker| marker.ctx))
        else {
            return;
        };
        if !watched {
            return; // nobody drains
        }
        if let Mark::Event(event) = self.mark_from_elsewhere(stream, ctx, capturing)
            && self.draining.push(Marker::of(stream, ctx, event)).is_err()
        {
            self.spare(ctx, event);
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
        let mut at = 0;
        while let Some(&Marker { stream, ctx, event, .. }) = self.draining.get(at) {
            if event == 0 && Stream(stream).is_default() {
                match self.mark_from_elsewhere(Stream(stream), ctx, capturing) {
                    Mark::Event(event) => self.draining[at].event = event,
                    Mark::Later => {}
                    Mark::Nothing => {
                        self.draining.remove(at);
                        continue;
                    }
                }
            }
            at += 1;
        }
    }

    /// The calling thread has launched into its own default stream beside a live capture: marks that,
    /// because nobody else can.
    fn leave_own(&mut self, capturing: bool) {
        if self.draining.len() > MANY {
            self.drop_over();
        }
        let (own, ctx) = (Stream::PER_THREAD, events::current());
        if let Mark::Event(event) = self.mark(own, ctx, capturing)
            && self.draining.push(Marker::of(own, ctx, event)).is_err()
        {
            self.spare(ctx, event);
        }
    }

    /// A capture began in `stream`.
    fn is_origin(&mut self, stream: Stream) {
        let _ = self.origins.push(Marker::of(stream, 0, 0));
    }

    /// Whether a live capture began in `stream`; it is forgotten.
    fn was_origin(&mut self, stream: Stream) -> bool {
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
            let _ = self.leaving.push(Marker::of(stream, ctx, 0));
        }
        drop(noted);
        while let Some(marker) = self.draining.take(|marker| marker.ctx == ctx) {
            let _ = self.leaving.push(marker);
        }
        for marker in self.flying.iter_mut().filter(|marker| marker.ctx == ctx) {
            Self::destroy(marker.event);
            marker.event = 0;
        }
        while let Some(spare) = self.spares.take(|spare| spare.ctx == ctx) {
            Self::destroy(spare.event);
        }
    }

    /// What became of a context that might have ended. If it has not, it is drained as before; if it
    /// has, its events are no more.
    fn came_back(&mut self, ctx: usize, is_gone: bool) {
        while let Some(marker) = self.leaving.take(|marker| marker.ctx == ctx) {
            if is_gone {
                continue;
            }
            match marker.event {
                0 => self.draw(marker.stream, ctx),
                _ => _ = self.draining.push(marker),
            }
        }
    }

    fn destroy(event: usize) {
        if event != 0 {
            events::destroy(event);
        }
    }
}

/// While it lives no stream is marked by anybody else, and no capture begins or ends. Not to be held
/// over calls that wait for the GPU.
#[derive(Debug)]
pub struct Order {
    streams: Held<'static, Streams>,
    process: &'static Process,
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
        self.streams.leave(&gate.noted, stream, capturing, gate.is_watched());
        self.process.records.forget_stream(stream.0);
    }
}

/// The calling thread has launched into its per-thread default stream beside a live capture.
pub(super) fn launched_beside_a_capture(process: &Process) {
    let gate = &process.gate;
    let _deferred = Deferred::new();
    let Some(mut streams) = gate.streams.lock_soon() else {
        // It is drained when the capture has ended.
        return note(&gate.noted, Stream::PER_THREAD, || {});
    };
    if gate.is_watched() {
        let _uncaptured = Uncaptured::enter();
        streams.leave_own(true);
    }
}

/// Where captures began; see [`super::capture`].
impl Order {
    /// A capture is about to begin.
    pub(super) fn leave_defaults(&mut self) {
        let gate = &self.process.gate;
        if gate.is_watched() {
            let capturing = gate.captures.any();
            let _uncaptured = capturing.then(Uncaptured::enter);
            self.streams.leave_defaults(self.process, capturing);
        }
    }

    pub(super) fn gate(&self) -> &local::Local {
        &self.process.gate
    }

    pub(super) fn is_origin(&mut self, stream: Stream) {
        self.streams.is_origin(stream);
    }

    pub(super) fn was_origin(&mut self, stream: Stream) -> bool {
        self.streams.was_origin(stream)
    }
}

/// Before `cuStreamDestroy`; for [`super::capture::destroyed`] after it.
#[must_use = "the order is to last until the driver has destroyed the stream"]
pub fn destroying(stream: Stream) -> Option<Order> {
    let mut order = Order::take()?;
    order.leave(stream);
    Some(order)
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
        gate.streams.lock().came_back(self.ctx, self.is_gone);
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
    order.streams.leave_context(&process.gate.noted, ctx);
    process.records.forget_streams();
    Some(Going { process, ctx, is_gone: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_ends_with_the_stream_it_began_in_and_with_no_other() {
        let mut streams = Streams::new();
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

    #[test]
    fn what_is_in_flight_in_a_context_that_lives_on_is_drained_as_before() {
        let (own, other, ctx) = (0x1000, 0x2000, 0x10);
        let left = |is_gone: bool, ended: Option<usize>| {
            let (mut streams, noted) = (Streams::new(), Spin::new(Noted::new()));
            for stream in [own, Stream::PER_THREAD.0] {
                noted.lock().add(Stream(stream), ctx);
            }
            noted.lock().add(Stream(other), 0x20);
            streams.draining.push(Marker::of(Stream(own), ctx, 0)).unwrap();
            streams.draining.push(Marker::of(Stream(0x3000), ctx, 77)).unwrap();
            streams.leave_context(&noted, ctx);
            assert!(streams.draining.is_empty(), "nothing is asked of it meanwhile");
            if let Some(ended) = ended {
                streams.leave(&noted, Stream(ended), false, false);
            }
            streams.came_back(ctx, is_gone);
            assert!(streams.leaving.is_empty());
            assert!(noted.lock().0.iter().map(|dirty| dirty.stream).eq([other]));
            let mut left: Vec<_> = streams.draining.iter().map(|m| (m.stream, m.event)).collect();
            left.sort_unstable();
            left
        };
        assert_eq!(left(false, None), [(Stream::LEGACY.0, 0), (own, 0), (0x3000, 77)]);
        assert_eq!(left(true, None), []);
        // One of its streams is destroyed by another thread during the release.
        assert_eq!(left(false, Some(own)), [(Stream::LEGACY.0, 0), (0x3000, 77)]);
    }
}
