//! Limits how much a lone tenant lets pile up. A newcomer waits for all of it, so it is some 50 ms of work;
//! launches hardly notice.
//!
//! Every so many launches of a thread the next takes the long way: it puts a marker behind those before it,
//! and waits while three markers in its stream are not complete. The number of launches for each marker
//! follows from how many completed between two markers.
//!
//! Work in flight may wait for the very launch that is held back. So a stream with a host function or a wait
//! in it is not waited for, and a wait in vain widens the room.

use super::Stream;
use super::events;
use super::flight::{CHAIN, now_us};
use super::streams::{Marker, Streams};
use crate::pools::ask::Uncaptured;
use crate::records::Record;
use crate::spin::sleep_us;
use crate::state::Process;
use core::sync::atomic::Ordering;
use tessera_region::layout::{GATE_SOLO, gate_state};

/// The time between two markers of a thread, about, microseconds.
const MARKED_US: u32 = 16_000;
/// Most launches under one marker, less one.
const MOST: u16 = 1023;
/// Markers of a stream that may be in flight.
const MARKERS: usize = 3;
/// With so many there is no bound.
const UNBOUND: usize = MARKERS << 8;
/// How long it is waited for one, at first.
const PATIENCE_US: u32 = 25_000;

/// How waiting has gone lately. Under the lock of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    markers: usize,
    patience_us: u32,
}

impl Default for Room {
    fn default() -> Self {
        Self { markers: MARKERS, patience_us: PATIENCE_US }
    }
}

impl Room {
    /// Waited in vain.
    fn widen(&mut self) {
        self.markers = (self.markers * 2).min(UNBOUND);
        self.patience_us = self.patience_us.saturating_mul(2).min(PATIENCE_US << 8);
    }

    /// A marker was complete after so long.
    fn worked(&mut self, waited_us: u32) {
        self.markers = (self.markers / 2).max(MARKERS);
        let enough = waited_us.saturating_mul(4).max(PATIENCE_US);
        self.patience_us = self.patience_us.min(enough);
    }
}

/// The next mask of a thread: in the time since its last marker so many of its launches proved complete.
fn follow(mask: u16, between_us: u32, landed: u32) -> u16 {
    let most = (mask * 2 + 1).min(MOST);
    if landed == 0 {
        // Nothing is known yet, or it takes long.
        return if between_us < MARKED_US { most } else { mask / 2 };
    }
    let fit = u64::from(MARKED_US) * u64::from(landed) / u64::from(between_us.max(1));
    let fit = u16::try_from(fit.max(1)).unwrap_or(u16::MAX);
    ((1_u16 << fit.ilog2()) - 1).min(most)
}

/// Whether this thread's launch number `count` goes the long way.
#[inline(always)]
pub(super) fn is_due(record: &Record, count: u64) -> bool {
    count & u64::from(record.solo_mask.load(Ordering::Relaxed)) == 0
}

/// A marker before a kernel that may begin before the one before it has ended would part the two: such a launch leaves
/// the long way to the next one, [`CHAIN`] times in a row.
#[cold]
#[inline(never)]
pub(super) fn put_off(record: &Record) -> bool {
    let so_far = record.solo_put_off.load(Ordering::Relaxed);
    if u32::from(so_far) >= CHAIN {
        return false;
    }
    if so_far == 0 {
        record.solo_kept.store(record.solo_mask.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    record.solo_put_off.store(so_far + 1, Ordering::Relaxed);
    record.solo_mask.store(0, Ordering::Relaxed);
    true
}

/// How many launches were put off, if any; the mask is what it was before them.
fn take_put_off(record: &Record) -> u16 {
    let put_off = record.solo_put_off.load(Ordering::Relaxed);
    if put_off != 0 {
        record.solo_put_off.store(0, Ordering::Relaxed);
        record.solo_mask.store(record.solo_kept.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    put_off
}

/// Before a launch at a gate that says SOLO, when [`is_due`]. The flag is down.
#[cold]
#[inline(never)]
pub(super) fn bound(process: &Process, record: &Record) {
    let gate = &process.gate;
    let begun_us = now_us();
    let put_off = take_put_off(record);
    let mask = record.solo_mask.load(Ordering::Relaxed);
    if !gate.is_bound() || gate.captures.any() || gate.parked.load(Ordering::Acquire) {
        // Nobody comes beside it, or it may not be marked now.
        record.solo_mask.store(MOST, Ordering::Relaxed);
        return;
    }
    let (mut is_marked, mut landed) = (false, 0);
    loop {
        {
            // Its holder may be inside a driver that waits for this very launch.
            let Some(mut streams) = gate.streams.lock_soon() else { return };
            let capturing = gate.captures.any();
            let _uncaptured = capturing.then(Uncaptured::enter);
            let stream = Stream(record.stream.load(Ordering::Relaxed));
            landed += streams.land_alone(stream);
            if !is_marked && stream.0 != 0 {
                streams.mark_alone(stream, u32::from(mask) + u32::from(put_off) + 1, capturing);
            }
            is_marked = true;
            let waited_us = now_us().wrapping_sub(begun_us);
            let room = streams.room;
            if streams.alone_in(stream) < room.markers || !streams.pauses.is_empty() {
                if waited_us > 1_000 {
                    streams.room.worked(waited_us);
                }
                break;
            }
            if waited_us > room.patience_us {
                streams.lanes.drop_broken();
                streams.room.widen();
                break;
            }
        }
        if gate_state(gate.gate().load(Ordering::Acquire)) != GATE_SOLO {
            break;
        }
        sleep_us(20);
    }
    let now_us = now_us();
    let between_us = now_us.wrapping_sub(record.solo_us.swap(now_us, Ordering::Relaxed));
    record.solo_mask.store(follow(mask, between_us, landed), Ordering::Relaxed);
}

impl Streams {
    /// A marker behind what is in `stream`.
    fn mark_alone(&mut self, stream: Stream, operations: u32, capturing: bool) {
        let ctx = events::context_of(stream);
        if let Some(signal) = self.signal_in(stream, ctx, capturing)
            && self.alone.push(Marker { operations, ..Marker::of(stream, ctx, signal) }).is_err()
        {
            self.spare(ctx, signal);
        }
    }

    /// Takes off those that are complete; the launches of those in `stream`.
    fn land_alone(&mut self, stream: Stream) -> u32 {
        let (mut at, mut landed) = (0, 0);
        while let Some(&Marker { ctx, signal, operations, .. }) = self.alone.get(at) {
            if signal.is_over() {
                landed += if self.alone.remove(at).stream == stream.0 { operations } else { 0 };
                self.spare(ctx, signal);
            } else {
                at += 1;
            }
        }
        landed
    }

    fn alone_in(&self, stream: Stream) -> usize {
        self.alone.iter().filter(|marker| marker.stream == stream.0).count()
    }

    /// Takes those of a context away that may end.
    pub(super) fn leave_alone(&mut self, ctx: usize) {
        while let Some(marker) = self.alone.take(|marker| marker.ctx == ctx) {
            marker.signal.destroy();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What lies in flight at most of a thread that launches operations of `each_us` as fast as it may,
    /// after so many markers, microseconds.
    fn piled_up(each_us: u64, rounds: u32) -> u64 {
        // When what is under each marker is complete; when the thread went on last.
        let mut flying = std::collections::VecDeque::<(u64, u32)>::new();
        let (mut end, mut now, mut mask, mut last, mut most) = (0_u64, 0_u64, 0_u16, 0_u64, 0);
        for round in 0..rounds {
            let launches = u32::from(mask) + 1;
            now += u64::from(launches) / 8;
            end = end.max(now) + u64::from(launches) * each_us;
            flying.push_back((end, launches));
            // Until it is known how long they take, somewhat more.
            assert!(each_us > 100_000 || end - now <= 100_000, "{each_us} µs: {} µs", end - now);
            if round > 40 {
                most = most.max(end - now);
            }
            let mut landed = 0;
            while flying.front().is_some_and(|(end, _)| *end <= now) || flying.len() >= MARKERS {
                let (end, launches) = flying.pop_front().unwrap();
                now = now.max(end);
                landed += launches;
            }
            mask = follow(mask, u32::try_from(now - last).unwrap_or(u32::MAX), landed);
            last = now;
        }
        most
    }

    #[test]
    fn what_piles_up_is_some_fifty_milliseconds_whatever_an_operation_takes() {
        for each_us in [1, 5, 20, 200, 1_000, 5_000] {
            let most = piled_up(each_us, 200);
            assert!(most <= 80_000, "{each_us} µs: {most} µs");
        }
        // Three operations may always be.
        assert!(piled_up(3_000_000, 80) <= 9_000_000);
    }

    #[test]
    fn short_operations_are_marked_seldom() {
        let mut mask = 0;
        for _ in 0..12 {
            // A launch takes 100 ns.
            mask = follow(mask, u32::from(mask) / 10, u32::from(mask) + 1);
        }
        assert_eq!(mask, MOST);
        // One of 200 µs.
        for _ in 0..12 {
            let launches = u32::from(mask) + 1;
            mask = follow(mask, launches * 200, launches);
        }
        assert_eq!(mask, 63);
    }

    #[test]
    fn a_chained_launch_leaves_its_marker_to_the_next_but_not_for_ever() {
        // SAFETY: of atomic integers and pointers, for all of which zero is a value.
        let record: Record = unsafe { core::mem::zeroed() };
        record.solo_mask.store(63, Ordering::Relaxed);
        assert!(put_off(&record) && is_due(&record, 65), "the next one is due");
        assert_eq!((take_put_off(&record), record.solo_mask.load(Ordering::Relaxed)), (1, 63));
        assert_eq!(take_put_off(&record), 0);
        assert!((0..CHAIN).all(|_| put_off(&record)) && !put_off(&record));
        assert_eq!((take_put_off(&record), record.solo_mask.load(Ordering::Relaxed)), (16, 63));
    }

    #[test]
    fn who_waits_in_vain_gets_room_and_loses_it_when_waiting_helps() {
        let mut room = Room::default();
        for _ in 0..20 {
            room.widen();
        }
        assert_eq!(room.markers, UNBOUND);
        for _ in 0..20 {
            room.worked(300_000);
        }
        assert_eq!(room, Room { markers: MARKERS, patience_us: 1_200_000 });
        room.worked(2_000);
        assert_eq!(room, Room::default());
    }
}
