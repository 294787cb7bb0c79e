//! Entries of a stream that are no work of the GPU: host functions, and waits for a word that is written
//! elsewhere. While a stream is at one of them the GPU does nothing for it, so no tenant should wait or pay
//! for that.
//!
//! The shim puts each between two signals of its own. When the first is complete and the second is not, the
//! stream is at it.

use super::Stream;
use super::lanes::Signal;
use super::streams::{Marker, Streams};
use super::{events, flight};
use crate::pages::Zeroed;
use crate::pools::ask::Uncaptured;
use crate::state::{self, Process};
use crate::thread::Deferred;

/// Two signals around what the GPU does not do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    stream: usize,
    ctx: usize,
    before: Signal,
    after: Signal,
}

// SAFETY: integers, and signals.
unsafe impl Zeroed for Pause {}

/// Of more than so many the rest is taken for work.
const MANY: usize = 256;

/// One that is being handed to the driver.
#[derive(Debug)]
pub(super) struct Begun {
    process: &'static Process,
    stream: Stream,
    ctx: usize,
    before: Signal,
}

/// Before the driver's call. `None` where nobody would ask.
pub(super) fn begin(stream: Stream) -> Option<Begun> {
    let process = state::armed().filter(|process| process.gate.is_bound())?;
    let _deferred = Deferred::new();
    // Its holder may be inside a driver that waits for this very thread.
    let mut streams = process.gate.streams.lock_soon()?;
    let capturing = process.gate.captures.any();
    let _uncaptured = capturing.then(Uncaptured::enter);
    let ctx = events::context_of(stream);
    // What the GPU is to do before it is not to be awaited together with it.
    flight::mark_before(process, &mut streams, stream);
    streams.forget_pauses();
    if streams.pauses.len() >= MANY {
        return None;
    }
    let before = streams.signal_in(stream, ctx, capturing)?;
    Some(Begun { process, stream, ctx, before })
}

impl Begun {
    /// After it.
    pub(super) fn end(self) {
        let Self { process, stream, ctx, before } = self;
        let _deferred = Deferred::new();
        let Some(mut streams) = process.gate.streams.lock_soon() else {
            return before.destroy();
        };
        let capturing = process.gate.captures.any();
        let _uncaptured = capturing.then(Uncaptured::enter);
        let Some(after) = streams.signal_in(stream, ctx, capturing) else {
            return streams.spare(ctx, before);
        };
        if streams.pauses.push(Pause { stream: stream.0, ctx, before, after }).is_err() {
            streams.spare(ctx, before);
            streams.spare(ctx, after);
        }
    }
}

impl Streams {
    /// Lets go of those that are over.
    fn forget_pauses(&mut self) {
        let mut at = 0;
        while let Some(&Pause { stream, ctx, before, after }) = self.pauses.get(at) {
            // Those behind one that is not over are not: only the oldest of a stream is asked about.
            let is_behind = |other: &Pause| (other.stream, other.ctx) == (stream, ctx);
            if !self.pauses[..at].iter().any(is_behind) && after.is_over() {
                self.pauses.remove(at);
                self.spare(ctx, before);
                self.spare(ctx, after);
            } else {
                at += 1;
            }
        }
    }

    /// Whether any stream is at something which the GPU does not do.
    pub(super) fn is_at_pause(&mut self) -> bool {
        self.forget_pauses();
        self.pauses.iter().any(|pause| pause.before.is_over())
    }

    /// Whether something is in the stream that the GPU does not do, and is not over.
    pub(super) fn has_pause(&mut self, stream: Stream) -> bool {
        self.forget_pauses();
        self.pauses.iter().any(|pause| pause.stream == stream.0)
    }

    /// Whether all that is in flight, as far as it is marked, is in streams that are at something which the GPU does
    /// not do. A default stream waits for the others.
    pub(super) fn waits_elsewhere(&mut self) -> bool {
        if self.pauses.is_empty() {
            return false;
        }
        self.forget_pauses();
        let is_at = |pause: &Pause| pause.before.is_over();
        if !self.pauses.iter().any(is_at) {
            return false;
        }
        let waits = |marker: &Marker| {
            let own = |pause: &Pause| pause.stream == marker.stream && is_at(pause);
            Stream(marker.stream).is_default() || self.pauses.iter().any(own)
        };
        let is_left = |marker: &&Marker| !marker.signal.is_put() || !marker.signal.is_over();
        self.draining.iter().chain(self.flying.iter()).filter(is_left).all(waits)
    }

    /// Takes those of a context away that may end.
    pub(super) fn leave_pauses(&mut self, ctx: usize) {
        while let Some(pause) = self.pauses.take(|pause| pause.ctx == ctx) {
            pause.before.destroy();
            pause.after.destroy();
        }
    }
}
