//! What is in flight of an open lease: counted when it is admitted, marked by the thread that
//! launches, and landed by whoever finds the markers complete.

use super::local::Local;
use super::streams::Streams;
use super::window::Sighting;
use super::{Stream, events};
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
/// Without progress for so long a launch is let out nevertheless: what is in flight may wait for it
/// (`cuStreamWaitValue`), or be without end.
const PATIENCE_NS: u64 = 100_000_000;

/// Microseconds that wrap, for short distances.
#[allow(clippy::cast_possible_truncation, reason = "wraps")]
pub(super) fn now_us() -> u32 {
    (now_ns() / 1_000) as u32
}

/// Takes room for one operation, if there is any.
pub(super) fn take_room(gate: &Local, is_graph: bool) -> bool {
    // A graph counts as one before it counts as an operation: others see too little room, if anything.
    let own = u32::from(is_graph);
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
    if is_counting(flying) || gate.limits().have_room(singles, graphs, is_graph) {
        return true;
    }
    gate.issued.fetch_sub(1, Ordering::Relaxed);
    gate.graphs_issued.fetch_sub(own, Ordering::Relaxed);
    false
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
    let mut streams = process.gate.streams.lock();
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
    streams.fly(Stream(stream), taken, since_us, capturing);
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
        streams.fly(Stream(stream.max(1)), taken, since_us, capturing);
    });
}

/// Counts what is complete, and learns how long it took. `awaited`: somebody looked just before.
pub(super) fn land(process: &Process, streams: &mut Streams, awaited: bool) -> bool {
    let gate = &process.gate;
    let (mut operations, mut graphs, mut first_us) = (0, 0, None);
    while let Some(&marker) = streams.flying.first() {
        if marker.event != 0 && !events::is_over(marker.event) {
            break;
        }
        streams.flying.remove(0);
        streams.spare(marker.ctx, marker.event);
        operations += marker.operations;
        graphs += marker.graphs;
        first_us = first_us.or(Some(marker.since_us));
    }
    let Some(since_us) = first_us else { return false };
    gate.graphs_completed.fetch_add(graphs, Ordering::Relaxed);
    gate.completed.fetch_add(operations, Ordering::Relaxed);
    let mut estimate = gate.estimate.lock();
    let now_us = now_us();
    gate.end_use(now_us);
    estimate.learn(Sighting { operations, graphs, since_us, now_us, awaited });
    let quota = process.account.quota();
    gate.set_limits(estimate.limits(quota.window(0), quota.window_us(0)));
    true
}

/// Waits, with the flag down, until there may be room, or the gate's word is another.
#[cold]
#[inline(never)]
pub(super) fn wait_for_room(process: &Process, word: u32) {
    let gate = &process.gate;
    process.account.count_window_wait();
    let begun_ns = now_ns();
    let mut awaited = false;
    while gate.gate().load(Ordering::Acquire) == word {
        {
            let mut streams = gate.streams.lock();
            let capturing = gate.captures.any();
            let _uncaptured = capturing.then(Uncaptured::enter);
            mark_all(process, &mut streams);
            let landed = land(process, &mut streams, awaited);
            if landed {
                return;
            }
            if streams.flying.is_empty() && process.records.busy_from(0).is_none() {
                // What ended threads had been counted for.
                gate.all_landed();
                return;
            }
        }
        if now_ns().saturating_sub(begun_ns) > PATIENCE_NS {
            gate.completed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        awaited = true;
        sleep_us(10);
    }
}
