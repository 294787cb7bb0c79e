//! Work in flight of an open lease: counted when it is admitted, marked by the launching thread, and landed
//! by the thread that finds the markers complete.

use super::local::Local;
use super::streams::{Marker, Streams};
use super::window::Sighting;
use super::{Stream, events, streams};
use crate::log::now_ns;
use crate::pools::ask::Uncaptured;
use crate::records::Record;
use crate::spin::sleep_us;
use crate::state::Process;
use core::sync::atomic::Ordering;

/// A marker is due so long after the last, microseconds.
const MARK_AFTER_US: u32 = 200;
/// Launches between two looks at the clock.
const CLOCK_EVERY: u32 = 4;
/// A process that would queue up behind work that stands still waits so many times longer than others: it is
/// hardly what that work waits for.
pub(super) const BEHIND: u32 = 4;

/// Microseconds that wrap, for short distances.
#[allow(clippy::cast_possible_truncation, reason = "wraps")]
pub(super) fn now_us() -> u32 {
    (now_ns() / 1_000) as u32
}

/// Takes room for one operation, if there is any, or if it is `given` room.
pub(super) fn take_room(gate: &Local, is_graph: bool, given: bool) -> bool {
    // A graph counts as one before it counts as an operation: others see too little room, if anything.
    let graphs = match is_graph {
        true => gate.graphs_issued.fetch_add(1, Ordering::Relaxed),
        false => gate.graphs_issued.load(Ordering::Relaxed),
    };
    let graphs = graphs.wrapping_sub(gate.graphs_completed.load(Ordering::Relaxed));
    let issued = gate.issued.fetch_add(1, Ordering::Relaxed);
    let flying = issued.wrapping_sub(gate.completed.load(Ordering::Relaxed));
    // More landed than were issued: only while somebody counts.
    let is_counting = |count: u32| count > u32::MAX / 2;
    let graphs = if is_counting(graphs) { 0 } else { graphs };
    let singles = flying.saturating_sub(graphs);
    if given || is_counting(flying) || gate.limits().have_room(singles, graphs, is_graph) {
        return true;
    }
    returned(gate, is_graph);
    false
}

/// Gives room back that was taken for an operation that nobody will count.
pub(super) fn returned(gate: &Local, is_graph: bool) {
    gate.issued.fetch_sub(1, Ordering::Relaxed);
    gate.graphs_issued.fetch_sub(u32::from(is_graph), Ordering::Relaxed);
}

/// The driver has the operation that room was taken for. The record's flag is still up.
#[inline(never)]
pub(super) fn launched(process: &Process, record: &Record, is_graph: bool) {
    if is_graph {
        let graphs = record.graphs_sent.load(Ordering::Relaxed).wrapping_add(1);
        record.graphs_sent.store(graphs, Ordering::Relaxed);
    }
    // Release: what the driver has is marked with what was in its stream before.
    record.sent.store(record.sent.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    let unmarked = record.unmarked();
    let batch = process.gate.batch.load(Ordering::Relaxed);
    let is_due = is_graph || unmarked >= batch || {
        let looks = unmarked == 1 || unmarked.is_multiple_of(CLOCK_EVERY);
        looks && {
            let now_us = now_us();
            if unmarked == 1 {
                record.since_us.store(now_us, Ordering::Relaxed);
            }
            now_us.wrapping_sub(record.since_us.load(Ordering::Relaxed)) >= MARK_AFTER_US
        }
    };
    if is_due {
        mark(process, record);
    }
}

/// Marks the calling thread's launches.
#[cold]
#[inline(never)]
pub(super) fn mark(process: &Process, record: &Record) {
    // Somebody in the driver may have it who waits for another thread's launch: the next marker covers
    // these launches, too.
    let Some(mut streams) = process.gate.streams.lock_soon() else { return };
    let stream = record.stream.load(Ordering::Relaxed);
    if stream == 0 {
        return; // a drain has taken it up; what is counted is for the next marker
    }
    let taken = record.take_unmarked();
    if taken.operations == 0 {
        return; // somebody else has marked it
    }
    // A batch of one has not looked at the clock.
    let since_us =
        if taken.operations == 1 { now_us() } else { record.since_us.load(Ordering::Relaxed) };
    let capturing = process.gate.captures.any();
    let _uncaptured = capturing.then(Uncaptured::enter);
    process.gate.begin_use(since_us);
    streams.fly(&process.gate.noted, Stream(stream), taken, since_us, capturing);
    land(process, &mut streams, false);
}

/// Marks what other threads have launched and not marked.
pub(super) fn mark_all(process: &Process, streams: &mut Streams) {
    if process.gate.parked.load(Ordering::Acquire) {
        return;
    }
    let capturing = process.gate.captures.any();
    process.records.take_unmarked(|stream, taken, since_us| {
        process.gate.begin_use(since_us);
        streams.fly(&process.gate.noted, Stream(stream.max(1)), taken, since_us, capturing);
    });
}

/// Counts what is complete, and learns how long it took. `awaited`: somebody looked just before.
pub(super) fn land(process: &Process, streams: &mut Streams, awaited: bool) -> bool {
    let gate = &process.gate;
    let (mut operations, mut graphs, mut first_us, mut is_tainted) = (0, 0, None, false);
    let mut at = 0;
    while let Some(&marker) = streams.flying.get(at) {
        // What is behind an incomplete one in its stream is incomplete.
        let is_behind =
            |before: &Marker| (before.stream, before.ctx) == (marker.stream, marker.ctx);
        if streams.flying[..at].iter().any(is_behind)
            || marker.event != 0 && !events::is_over(marker.event)
        {
            at += 1;
            continue;
        }
        streams.flying.remove(at);
        streams.spare(marker.ctx, marker.event);
        operations += marker.operations;
        graphs += marker.graphs;
        is_tainted |= marker.is_tainted != 0;
        first_us = first_us.or(Some(marker.since_us));
    }
    let Some(since_us) = first_us else { return false };
    gate.graphs_completed.fetch_add(graphs, Ordering::Relaxed);
    gate.completed.fetch_add(operations, Ordering::Relaxed);
    let mut estimate = gate.estimate.lock();
    let now_us = now_us();
    gate.end_use(now_us);
    gate.progress.made(now_us, estimate.usual_us());
    match is_tainted {
        true => estimate.skip(now_us),
        false => estimate.learn(Sighting { operations, graphs, since_us, now_us, awaited }),
    }
    let quota = process.gate_quota();
    let mut contexts = 0;
    process.contexts.each(|_| contexts += 1);
    let gpus = contexts.min(u32::try_from(process.account.shares().gpu_count()).unwrap_or(1));
    let (window, window_us) = (quota.window(0), quota.window_us(0));
    gate.set_limits(estimate.limits(window, window_us, gpus, gate.progress.proofs()));
    true
}

/// How long what is in flight is expected to take, microseconds. `None` where that is unknown.
pub(super) fn left_us(gate: &Local, streams: &Streams) -> Option<u32> {
    let first = streams.flying.first()?;
    if streams.flying.iter().any(|marker| marker.is_tainted != 0) {
        return None;
    }
    let sum = |of: fn(&Marker) -> u32| streams.flying.iter().map(of).sum();
    let (operations, graphs) = (sum(|marker| marker.operations), sum(|marker| marker.graphs));
    gate.estimate.lock().left_us(operations, graphs, first.since_us, now_us())
}

/// Operations in flight up to which streams that have none get room.
const MOST_TIED: u32 = 32;

/// What came of waiting for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// There may be some.
    Look,
    /// There is none, and the launch is to go all the same: what is in flight may wait for it
    /// (`cuStreamWaitValue`), or be without end.
    Given,
}

/// Two operations may always be in flight on a GPU, whatever fills the others; and where work has proved
/// to wait for what is held back, one in a stream that has none.
fn has_own_room(gate: &Local, streams: &Streams, stream: Stream) -> bool {
    /// Where that has been seen.
    const SURE: u32 = 2;
    let flying = |is_own: &dyn Fn(&Marker) -> bool| -> u32 {
        streams.flying.iter().filter(|marker| is_own(marker)).map(|marker| marker.operations).sum()
    };
    let ctx = streams::context_of(&gate.noted, stream);
    let (all, own) = (flying(&|_| true), flying(&|marker| marker.ctx == ctx));
    let in_stream = flying(&|marker| marker.stream == stream.0);
    let is_elsewhere = all > own && own < 2;
    is_elsewhere || in_stream == 0 && all < MOST_TIED && gate.progress.proofs() >= SURE
}

/// Where nothing completes for so long while a stream is at something which the GPU does not do, that is
/// what all wait for, microseconds.
pub(super) const PAUSED_US: u32 = 200;
/// Of what waits for the host so much may be in flight, by the time that it takes, microseconds: it all
/// runs as soon as the host has done its part, and nobody else meanwhile.
const AHEAD_US: u32 = 5_000;

/// Where all that is in flight waits for something that the GPU does not do, the window keeps nobody
/// else's work waiting, and may keep back the very launch after which the host goes on.
fn gives_itself_room(gate: &Local, streams: &mut Streams, is_still: bool) -> bool {
    let flying: u32 = streams.flying.iter().map(|marker| marker.operations).sum();
    let is_little = flying.saturating_mul(gate.expected_us()) <= AHEAD_US;
    // Other streams may be in the same queue of the hardware.
    let waits = |streams: &mut Streams| {
        streams.flight_waits_elsewhere() || is_still && streams.is_at_pause()
    };
    flying < MOST_TIED && (is_little || flying < 4) && waits(streams)
}

/// Waits, with the flag down, until there may be room, the gate's word is another, or nothing has
/// completed for too long.
#[cold]
#[inline(never)]
pub(super) fn wait_for_room(process: &Process, word: u32, stream: Stream) -> Room {
    process.account.count_window_wait();
    process.gate.roomless.fetch_add(1, Ordering::Relaxed);
    let room = await_room(process, word, stream);
    process.gate.roomless.fetch_sub(1, Ordering::Relaxed);
    room
}

fn await_room(process: &Process, word: u32, stream: Stream) -> Room {
    let gate = &process.gate;
    let begun_us = now_us();
    let (mut awaited, mut is_behind) = (false, true);
    while gate.gate().load(Ordering::Acquire) == word {
        if let Some(mut streams) = gate.streams.lock_soon() {
            let capturing = gate.captures.any();
            let _uncaptured = capturing.then(Uncaptured::enter);
            mark_all(process, &mut streams);
            let landed = land(process, &mut streams, awaited);
            if landed {
                return Room::Look;
            }
            if streams.flying.is_empty() && process.records.busy_from(0).is_none() {
                // What ended threads had been counted for.
                gate.all_landed();
                return Room::Look;
            }
            let still_us = gate.progress.still_for_us(now_us());
            if gives_itself_room(gate, &mut streams, still_us >= PAUSED_US) {
                streams.taint();
                return Room::Given;
            }
            is_behind = streams.flying.iter().any(|marker| marker.stream == stream.0);
            if has_own_room(gate, &streams, stream) {
                return Room::Given;
            }
        }
        let (now_us, expected_us) = (now_us(), gate.expected_us());
        let still_us = now_us.wrapping_sub(begun_us).min(gate.progress.still_for_us(now_us));
        let patience_us = gate.progress.patience_us(expected_us, 0);
        if still_us >= patience_us.saturating_mul(if is_behind { BEHIND } else { 1 }) {
            gate.progress.passed(now_us);
            if let Some(mut streams) = gate.streams.lock_soon() {
                streams.taint();
            }
            return Room::Given;
        }
        awaited = true;
        sleep_us(10);
    }
    Room::Look
}
