//! Work in flight of an open lease: counted when it is admitted, marked by the launching thread, and landed
//! by the thread that finds the markers complete.

use super::ahead;
use super::local::Local;
use super::streams::{Marker, Streams};
use super::window::Sighting;
use super::{Kind, Stream, Waited, events, streams};
use crate::log::now_ns;
use crate::own;
use crate::pools::ask::Uncaptured;
use crate::records::{Flown, Record, STREAMS, Unmarked};
use crate::state::Process;
use core::ptr;
use core::sync::atomic::Ordering;
use tessera_region::layout::{GATE_CLOSED, gate_state};

/// A marker is due so long after the last, microseconds.
const MARK_AFTER_US: u32 = 200;
/// After a kernel that may begin before the one before it has ended, so many launches may be followed by one.
pub(super) const CHAIN: u32 = 16;
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

/// Takes room for one operation, if there is any, or if it is `given` room. The operation counts as in flight, and
/// the gate is to be looked at once more.
pub(super) fn take_room(gate: &Local, is_graph: bool, given: bool) -> bool {
    // A graph counts as one before it counts as an operation: others see too little room, if anything.
    let graphs = match is_graph {
        true => gate.graphs_issued.fetch_add(1, Ordering::Relaxed),
        false => gate.graphs_issued.load(Ordering::Relaxed),
    };
    let graphs = graphs.wrapping_sub(gate.graphs_completed.load(Ordering::Relaxed));
    // SeqCst: before the gate is looked at; who closes it looks at this afterwards.
    let admitted = gate.flight().admitted.fetch_add(1, Ordering::SeqCst);
    let flying = admitted.wrapping_sub(gate.completed.load(Ordering::Relaxed));
    // More landed than were admitted: only while somebody counts.
    let flying = u32::try_from(flying).unwrap_or(0);
    let graphs = if graphs > u32::MAX / 2 { 0 } else { graphs };
    let singles = flying.saturating_sub(graphs);
    if given || gate.limits().have_room(singles, graphs, is_graph) {
        return true;
    }
    returned(gate, is_graph);
    false
}

/// Gives room back that was taken for an operation that there will not be.
pub(super) fn returned(gate: &Local, is_graph: bool) {
    gate.flight().admitted.fetch_sub(1, Ordering::Relaxed);
    gate.graphs_issued.fetch_sub(u32::from(is_graph), Ordering::Relaxed);
}

/// Where the calling thread's launches into `stream` are counted. `None` where that is not to be found out now: the
/// streams' lock is needed, and its holder may wait for this very launch.
#[inline]
pub(super) fn flown(
    process: &Process,
    record: &'static Record,
    stream: Stream,
    kind: Kind,
) -> Option<&'static Flown> {
    // A default stream is each context's own.
    let ctx = if stream.is_default() { events::current() } else { 0 };
    if stream != Stream::LEGACY {
        // Later it would be a barrier for what is launched now.
        passing(process, Stream::LEGACY);
    }
    let is_it = |flown: &&Flown| {
        flown.stream.load(Ordering::Relaxed) == stream.0
            && (ctx == 0 || flown.ctx.load(Ordering::Relaxed) == ctx)
    };
    match record.flown.iter().find(is_it) {
        Some(flown) => {
            // A graph's marker is to tell the graph's duration.
            let is_due = kind == Kind::Graph && flown.unmarked() != 0
                || kind != Kind::Chained && flown.is_overdue.load(Ordering::Relaxed) != 0;
            if is_due {
                mark(process, flown);
            }
            Some(flown)
        }
        None => begin_flown(process, record, stream),
    }
}

#[cold]
#[inline(never)]
fn begin_flown(
    process: &Process,
    record: &'static Record,
    stream: Stream,
) -> Option<&'static Flown> {
    let unused = record.flown.iter().find(|flown| flown.unmarked() == 0);
    let flown = unused.unwrap_or_else(|| {
        let oldest = record.oldest.load(Ordering::Relaxed);
        record.oldest.store(oldest.wrapping_add(1), Ordering::Relaxed);
        let oldest = &record.flown[oldest as usize % STREAMS];
        mark(process, oldest);
        oldest
    });
    if flown.unmarked() != 0 {
        return None;
    }
    flown.ctx.store(events::context_of(stream), Ordering::Relaxed);
    flown.stream.store(stream.0, Ordering::Relaxed);
    Some(flown)
}

/// The driver has the operation that room was taken for. The record's flag is still up.
#[inline(never)]
pub(super) fn launched(process: &Process, flown: &'static Flown, kind: Kind) {
    let is_graph = kind == Kind::Graph;
    if is_graph {
        let graphs = flown.graphs_sent.load(Ordering::Relaxed).wrapping_add(1);
        flown.graphs_sent.store(graphs, Ordering::Relaxed);
    }
    // Release: what the driver has is marked with what was in its stream before.
    flown.sent.store(flown.sent.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    let unmarked = flown.unmarked();
    let batch = process.gate.batch.load(Ordering::Relaxed);
    let is_due = is_graph || unmarked >= batch || ahead::is_due(&process.gate, flown) || {
        let looks = unmarked == 1 || unmarked.is_multiple_of(CLOCK_EVERY);
        looks && {
            let now_us = now_us();
            if unmarked == 1 {
                flown.since_us.store(now_us, Ordering::Relaxed);
            }
            now_us.wrapping_sub(flown.since_us.load(Ordering::Relaxed)) >= MARK_AFTER_US
        }
    };
    let chained = flown.chained.load(Ordering::Relaxed);
    if kind == Kind::Chained {
        flown.chained.store(CHAIN, Ordering::Relaxed);
    } else if chained != 0 {
        flown.chained.store(chained - 1, Ordering::Relaxed);
    }
    if is_due && chained != 0 && unmarked < batch + CHAIN {
        // Between a kernel and one that may begin before its end a marker would part them: it is put before the next
        // that waits for its predecessor.
        flown.is_overdue.store(1, Ordering::Relaxed);
    } else if is_due {
        mark(process, flown);
    }
}

/// Marks launches of the calling thread.
#[cold]
#[inline(never)]
pub(super) fn mark(process: &Process, flown: &'static Flown) {
    // Somebody in the driver may have it who waits for another thread's launch: the next marker covers
    // these launches, too.
    let Some(mut streams) = process.gate.streams.lock_soon() else { return };
    flown.is_overdue.store(0, Ordering::Relaxed);
    let _uncaptured = process.gate.captures.any().then(Uncaptured::enter);
    let stream = Stream(flown.stream.load(Ordering::Relaxed));
    fly(process, &mut streams, flown, stream);
    land(process, &mut streams, false);
}

/// Marks launches that no marker covers, in `stream`. Captures do not mind what this thread calls.
fn fly(process: &Process, streams: &mut Streams, flown: &Flown, stream: Stream) {
    // One that was forgotten was a default stream.
    let stream = Stream(stream.0.max(Stream::LEGACY.0));
    let gate = &process.gate;
    let taken = flown.take_unmarked();
    if taken.operations == 0 {
        return; // somebody else has marked it
    }
    // A batch of one has not looked at the clock.
    let since_us = match taken.operations {
        1 => now_us(),
        _ => flown.since_us.load(Ordering::Relaxed),
    };
    gate.begin_use(since_us);
    let capturing = gate.captures.any();
    streams.fly(stream, flown.ctx.load(Ordering::Relaxed), taken, since_us, capturing);
}

/// Marks the calling thread's launches into `stream`, if they are not marked.
#[inline]
pub(super) fn passing(process: &Process, stream: Stream) {
    // SAFETY: records are never unmapped.
    let Some(record) = (unsafe { own::record().as_ref() }) else { return };
    for flown in &record.flown {
        if flown.stream.load(Ordering::Relaxed) == stream.0 && flown.unmarked() != 0 {
            mark(process, flown);
        }
    }
}

/// What the calling thread has launched there is complete, says the driver.
#[inline]
pub(super) fn waited(process: &Process, waited: Waited) {
    // SAFETY: records are never unmapped.
    let Some(record) = (unsafe { own::record().as_ref() }) else { return };
    if record.flown.iter().any(|flown| flown.unmarked() != 0) {
        settle(process, record, waited);
    }
}

#[cold]
#[inline(never)]
fn settle(process: &Process, record: &Record, waited: Waited) {
    let gate = &process.gate;
    let ctx = match waited {
        Waited::Context(ctx) if ctx != 0 => ctx,
        Waited::Stream(stream) if !stream.is_default() => 0,
        _ => events::current(),
    };
    let Some(_streams) = gate.streams.lock_soon() else { return };
    let (mut all, mut first_us) = (Unmarked { operations: 0, graphs: 0 }, None);
    for flown in &record.flown {
        let is_it = match waited {
            Waited::Stream(stream) => flown.stream.load(Ordering::Relaxed) == stream.0,
            _ => true,
        };
        if is_it && (ctx == 0 || flown.ctx.load(Ordering::Relaxed) == ctx) {
            let taken = flown.take_unmarked();
            if taken.operations != 0 {
                first_us = first_us.or(Some(flown.since_us.load(Ordering::Relaxed)));
            }
            all.operations += taken.operations;
            all.graphs += taken.graphs;
        }
    }
    let Some(first_us) = first_us else { return };
    let now_us = now_us();
    gate.begin_use(first_us);
    gate.end_use(now_us);
    gate.graphs_completed.fetch_add(all.graphs, Ordering::Relaxed);
    gate.complete(all.operations, all.operations);
    let mut estimate = gate.estimate.lock();
    gate.progress.made(now_us, estimate.usual_us());
    estimate.skip(now_us);
}

/// Marks what the calling thread has launched into `stream`, before something that no lease is needed for.
pub(super) fn mark_before(process: &Process, streams: &mut Streams, stream: Stream) {
    // SAFETY: records are never unmapped.
    let Some(record) = (unsafe { own::record().as_ref() }) else { return };
    for flown in &record.flown {
        if flown.stream.load(Ordering::Relaxed) == stream.0 {
            fly(process, streams, flown, stream);
        }
    }
}

/// Marks what goes into streams that are `wanted` and end, or are to be captured.
pub(super) fn mark_those(
    process: &Process,
    streams: &mut Streams,
    wanted: impl Fn(Stream) -> bool,
) {
    process.records.each_unmarked(|record, flown| {
        let stream = Stream(flown.stream.load(Ordering::Relaxed));
        if wanted(stream) && (stream != Stream::PER_THREAD || is_own(record)) {
            fly(process, streams, flown, stream);
        }
    });
}

/// Marks what goes into default streams: beside a capture that will not be possible.
pub(super) fn mark_defaults(process: &Process, streams: &mut Streams) {
    process.records.each_unmarked(|_, flown| {
        if Stream(flown.stream.load(Ordering::Relaxed)).is_default() {
            fly(process, streams, flown, Stream::LEGACY);
        }
    });
}

/// Marks what goes into a context that may end.
pub(super) fn mark_context(process: &Process, streams: &mut Streams, ctx: usize) {
    process.records.each_unmarked(|_, flown| {
        if flown.ctx.load(Ordering::Relaxed) == ctx {
            let stream = Stream(flown.stream.load(Ordering::Relaxed));
            let stream = if stream.is_default() { Stream::LEGACY } else { stream };
            fly(process, streams, flown, stream);
        }
    });
}

fn is_own(record: &Record) -> bool {
    ptr::eq(record, own::record())
}

/// Whether a marker in the legacy stream is a barrier to nothing: nothing else is in flight, and nobody launches; or,
/// while the gate is open, nobody ever launched into another stream.
pub(super) fn may_mark_defaults(process: &Process, streams: &Streams) -> bool {
    let gate = &process.gate;
    if !streams.only_defaults_left() {
        return false;
    }
    match gate_state(gate.gate().load(Ordering::Acquire)) {
        GATE_CLOSED => !gate.tickets.is_out() && process.records.busy_from(0).is_none(),
        _ => {
            let is_default = |stream| Stream(stream).is_default();
            process.records.all_streams(is_default) && streams::are_noted(&gate.noted, is_default)
        }
    }
}

/// Marks what was launched and is not marked. The legacy stream is left out unless nothing else is in flight: a marker
/// there is a barrier to all the others ("Stream synchronization behavior"). So are other threads' default streams,
/// which nobody else can mark. Whether all is marked.
pub(super) fn mark_all(process: &Process, streams: &mut Streams) -> bool {
    if process.gate.parked.load(Ordering::Acquire) {
        return true;
    }
    let mut is_left_out = false;
    process.records.each_unmarked(|record, flown| {
        let stream = Stream(flown.stream.load(Ordering::Relaxed));
        match is_own(record) && stream != Stream::LEGACY || !stream.is_default() {
            true => fly(process, streams, flown, stream),
            false => is_left_out = true,
        }
    });
    if is_left_out && may_mark_defaults(process, streams) {
        // The legacy stream waits for each thread's own.
        process.records.each_unmarked(|_, flown| fly(process, streams, flown, Stream::LEGACY));
        is_left_out = false;
    }
    !is_left_out
}

/// Counts what is complete, and learns how long it took. `awaited`: somebody looked just before.
pub(super) fn land(process: &Process, streams: &mut Streams, awaited: bool) -> bool {
    let gate = &process.gate;
    let (mut operations, mut graphs, mut first_us, mut is_tainted) = (0, 0, None, false);
    let mut settled = 0;
    let mut at = 0;
    while let Some(&marker) = streams.flying.get(at) {
        // What is behind an incomplete one in its stream is incomplete.
        let is_behind =
            |before: &Marker| (before.stream, before.ctx) == (marker.stream, marker.ctx);
        if streams.flying[..at].iter().any(is_behind) || !marker.signal.is_over() {
            at += 1;
            continue;
        }
        streams.flying.remove(at);
        streams.spare(marker.ctx, marker.signal);
        operations += marker.operations;
        settled += if marker.signal.is_word() { 0 } else { marker.operations };
        graphs += marker.graphs;
        is_tainted |= marker.is_tainted != 0;
        first_us = first_us.or(Some(marker.since_us));
    }
    let Some(since_us) = first_us.map(|us| gate.since_opened(us)) else { return false };
    gate.graphs_completed.fetch_add(graphs, Ordering::Relaxed);
    gate.complete(operations, settled);
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
    gate.flight().usual_us.store(estimate.usual_us(), Ordering::Relaxed);
    let all_gpus = u32::try_from(process.account.shares().gpu_count()).unwrap_or(1).max(1);
    let gpus = contexts.min(all_gpus);
    let (window, window_us) = (quota.window(0), quota.window_us(0));
    let lasts_us = gate.overslept.lasts_us(window_us);
    let window = window.saturating_mul(lasts_us.div_ceil(window_us.max(1)));
    // What the tenant has in flight is everybody's who launches. While one operation completes another is there for the
    // GPU: its successor, or another process's.
    let sharers = gate.flight().launching.load(Ordering::Relaxed).div_ceil(all_gpus).max(1);
    let spare = gate.progress.proofs() + if sharers == 1 { gpus } else { 0 };
    gate.set_limits(estimate.limits(window, lasts_us / sharers, gpus, spare));
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

/// Two operations may always be in flight on a GPU, whatever fills the others; and where work has proved
/// to wait for what is held back, one in a stream that has none.
fn has_own_room(gate: &Local, streams: &Streams, stream: Stream, ctx: usize) -> bool {
    /// Where that has been seen.
    const SURE: u32 = 2;
    let flying = |is_own: &dyn Fn(&Marker) -> bool| -> u32 {
        streams.flying.iter().filter(|marker| is_own(marker)).map(|marker| marker.operations).sum()
    };
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
    let waits =
        |streams: &mut Streams| streams.waits_elsewhere() || is_still && streams.is_at_pause();
    flying < MOST_TIED && (is_little || flying < 4) && waits(streams)
}

/// Waits, with the flag down, until there may be room, the gate's word is another, or nothing has
/// completed for too long. True where there is none, and the launch is to go all the same: what is in flight may wait
/// for it (`cuStreamWaitValue`), or be without end.
#[cold]
#[inline(never)]
pub(super) fn wait_for_room(process: &Process, word: u32, stream: Stream) -> bool {
    process.account.count_window_wait();
    let flight = process.gate.flight();
    flight.roomless.fetch_add(1, Ordering::Relaxed);
    let is_given = await_room(process, word, stream);
    flight.roomless.fetch_sub(1, Ordering::Relaxed);
    is_given
}

fn await_room(process: &Process, word: u32, stream: Stream) -> bool {
    let gate = &process.gate;
    let (begun_us, ctx) = (now_us(), events::context_of(stream));
    let (mut awaited, mut is_behind, mut left) = (false, true, None);
    while gate.gate().load(Ordering::Acquire) == word {
        if let Some(mut streams) = gate.streams.lock_soon() {
            let capturing = gate.captures.any();
            let _uncaptured = capturing.then(Uncaptured::enter);
            mark_all(process, &mut streams);
            let landed = land(process, &mut streams, awaited);
            if landed {
                return false;
            }
            if streams.flying.is_empty() && process.records.busy_from(0).is_none() {
                // What ended threads had been counted for.
                gate.make_room(gate.flight().admitted.load(Ordering::Relaxed));
                return false;
            }
            let still_us = gate.progress.still_for_us(now_us());
            if gives_itself_room(gate, &mut streams, still_us >= PAUSED_US) {
                streams.taint();
                return true;
            }
            is_behind = streams.flying.iter().any(|marker| marker.stream == stream.0);
            // What has proved to wait for launches may do so again.
            left = left_us(gate, &streams).filter(|_| gate.progress.proofs() == 0);
            if has_own_room(gate, &streams, stream, ctx) {
                return true;
            }
        }
        let (now_us, expected_us) = (now_us(), gate.expected_us());
        let still_us = now_us.wrapping_sub(begun_us).min(gate.progress.still_for_us(now_us));
        let patience_us = gate.progress.patience_us(expected_us, 0);
        if still_us >= patience_us.saturating_mul(if is_behind { BEHIND } else { 1 }) {
            gate.progress.passed(now_us);
            if let Some(mut streams) = gate.streams.lock_soon() {
                streams.lanes.drop_broken();
                streams.taint();
            }
            return true;
        }
        awaited = true;
        gate.overslept.nap(left);
    }
    false
}
