//! A record per launching thread: its busy flag, and what the hot path needs beside it, in one cache line;
//! in others what the thread launched at an open gate.
//!
//! The closer of the gate must wait until no thread is between "looked at the gate" and "the
//! driver has the launch". So every launching thread owns a record with a flag that it alone writes
//! and that the closer can scan. Records live in memory that reads as zero in a forked child: there
//! `process` is null, and the child's thread takes a record of the child's own state.
//!
//! Nothing runs when a thread ends. Its record is recognised by its dead thread id, and taken back
//! when a new thread needs one.

use crate::pages::{CHUNK, Chunks, Zeroed};
use crate::spin::Spin;
use crate::state::Process;
use core::mem::offset_of;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use tessera_region::layout::LAUNCH_SHARDS;

#[repr(C, align(64))]
#[derive(Debug)]
pub struct Record {
    /// 1 while the thread is past the gate and inside a launch.
    pub(crate) busy: AtomicU32,
    /// The owner's thread id; 0 is free.
    tid: AtomicU32,
    /// The gate, for the hot path; null where the thread is to take the other one: after a fork,
    /// when it shares its counter, and without membarrier.
    pub(crate) gate: AtomicPtr<AtomicU32>,
    /// The launch counter's shard in the usage page.
    pub(crate) launches: AtomicPtr<AtomicU64>,
    /// The state this record belongs to; null after a fork.
    pub(crate) process: AtomicPtr<Process>,
    /// Which shard, to give it back.
    shard: AtomicU16,
    /// At a gate that says SOLO a launch whose number has none of these bits goes the long way.
    pub(crate) solo_mask: AtomicU16,
    /// When such a one was last, microseconds.
    pub(crate) solo_us: AtomicU32,
    /// The stream that was launched into last without being counted, which is among the dirty ones; 0 is none.
    pub(crate) stream: AtomicUsize,
    /// Streams that were launched into at an open gate lately.
    pub(crate) flown: [Flown; STREAMS],
    /// Which of them is given to another stream next.
    pub(crate) oldest: AtomicU32,
    /// Launches in a row that were due for the long way and left it to the next, and the mask until then.
    pub(crate) solo_put_off: AtomicU16,
    pub(crate) solo_kept: AtomicU16,
}
const _: () = assert!(offset_of!(Record, flown) <= 64);
// SAFETY: atomic numbers and pointers.
unsafe impl Zeroed for Record {}

/// Streams of a thread whose launches are counted apart, so that one that takes turns need not mark each.
pub(crate) const STREAMS: usize = 4;

/// Launches of a thread into one stream at an open gate.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Flown {
    /// 0: none. The owner writes it and `ctx` while nothing is unmarked.
    pub(crate) stream: AtomicUsize,
    pub(crate) ctx: AtomicUsize,
    /// Launches that the driver has; only the owner writes it. Wraps.
    pub(crate) sent: AtomicU32,
    /// Those of them that a marker covers; written under the streams' lock.
    marked: AtomicU32,
    /// When the first of the others was, microseconds.
    pub(crate) since_us: AtomicU32,
    /// The graphs among either.
    pub(crate) graphs_sent: AtomicU32,
    graphs_marked: AtomicU32,
    /// Launches that may yet be followed by one that begins before its predecessor's end; and whether a marker is due
    /// all the same. The owner's.
    pub(crate) chained: AtomicU32,
    pub(crate) is_overdue: AtomicU32,
    /// The closed gate word at which the stream was made to wait for the next turn. The owner's.
    pub(crate) held: AtomicU32,
}

impl Flown {
    /// Launches that no marker covers yet.
    pub(crate) fn unmarked(&self) -> u32 {
        self.sent.load(Ordering::Acquire).wrapping_sub(self.marked.load(Ordering::Relaxed))
    }

    /// The same, which the caller is to mark. It holds the streams' lock.
    pub(crate) fn take_unmarked(&self) -> Unmarked {
        let operations = self.unmarked();
        if operations == 0 {
            return Unmarked { operations, graphs: 0 };
        }
        let marked = self.marked.load(Ordering::Relaxed);
        self.marked.store(marked.wrapping_add(operations), Ordering::Relaxed);
        // A graph may be counted here a moment before it is among the operations.
        let sent = self.graphs_sent.load(Ordering::Relaxed);
        let graphs = sent.wrapping_sub(self.graphs_marked.load(Ordering::Relaxed));
        self.graphs_marked.store(sent, Ordering::Relaxed);
        Unmarked { operations, graphs }
    }
}

impl Record {
    pub(crate) fn tid(&self) -> u32 {
        self.tid.load(Ordering::Relaxed)
    }

    /// Whether the owner is its launch counter's only writer, and its flag needs no locked
    /// instruction.
    pub(crate) fn is_hot(&self) -> bool {
        !self.gate.load(Ordering::Relaxed).is_null()
    }
}

/// Launches that no marker covers yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unmarked {
    pub(crate) operations: u32,
    /// Those of them that are graphs.
    pub(crate) graphs: u32,
}

/// What records point to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) process: NonNull<Process>,
    /// The gate that counts now; null where none may be passed by the hot path.
    pub(crate) gate: &'static AtomicPtr<AtomicU32>,
    pub(crate) launches: &'static [AtomicU64; LAUNCH_SHARDS],
    /// Whether the hot path may do without a locked instruction.
    pub(crate) has_membarrier: bool,
}

#[derive(Debug)]
pub struct Records {
    pool: Spin<Pool>,
}

#[derive(Debug)]
struct Pool {
    /// 16384 launching threads at the same time.
    chunks: Chunks<Record, 256>,
    /// Records ever handed out; those below may be free again.
    used: usize,
    /// Records below `used` that were given back.
    free: usize,
    /// When `used` reaches this, look for dead threads before growing.
    sweep_at: usize,
    /// Bit n: shard n of the launch counter has an owner. The last shard is everybody's.
    shards: u32,
}

impl Records {
    pub const fn new() -> Self {
        Self {
            pool: Spin::new(Pool {
                chunks: Chunks::new(),
                used: 0,
                free: 0,
                sweep_at: CHUNK,
                shards: 0,
            }),
        }
    }

    /// A record for the calling thread. `None` when 16384 live threads have one, or the kernel has
    /// no memory.
    pub(crate) fn claim(&self, owner: Owner) -> Option<&'static Record> {
        let Owner { process, gate, launches: shards, has_membarrier } = owner;
        let mut pool = self.pool.lock();
        if pool.free == 0 && pool.used >= pool.sweep_at {
            pool.sweep();
            pool.sweep_at = ((pool.used - pool.free) * 2).max(CHUNK);
        }
        let record = if pool.free > 0 { pool.reuse() } else { pool.grow() }?;
        let last = shards.len() - 1;
        let shard = (pool.shards.trailing_ones() as usize).min(last);
        let exclusive = shard < last;
        if exclusive {
            pool.shards |= 1 << shard;
        }
        let hot = exclusive && has_membarrier;
        let gate = if hot { gate.load(Ordering::Relaxed) } else { ptr::null_mut() };
        record.busy.store(0, Ordering::Relaxed);
        record.stream.store(0, Ordering::Relaxed);
        record.shard.store(u16::try_from(shard).unwrap_or(0), Ordering::Relaxed);
        record.solo_mask.store(0, Ordering::Relaxed);
        record.solo_put_off.store(0, Ordering::Relaxed);
        record.launches.store(ptr::from_ref(&shards[shard]).cast_mut(), Ordering::Relaxed);
        record.process.store(process.as_ptr(), Ordering::Relaxed);
        record.gate.store(gate, Ordering::Relaxed);
        record.tid.store(own_tid(), Ordering::Release);
        Some(record)
    }

    /// Has all threads that may look at the gate without a call look at `gate`, those that come later
    /// too. `current` is what [`Owner::gate`] is.
    pub(crate) fn redirect(
        &self,
        current: &AtomicPtr<AtomicU32>,
        gate: *mut AtomicU32,
        has_membarrier: bool,
    ) {
        let pool = self.pool.lock();
        current.store(gate, Ordering::Relaxed);
        let last = u16::try_from(LAUNCH_SHARDS - 1).unwrap_or(u16::MAX);
        for record in pool.each().filter(|record| record.tid() != 0) {
            if has_membarrier && record.shard.load(Ordering::Relaxed) < last {
                record.gate.store(gate, Ordering::Relaxed);
            }
        }
    }

    /// Has all records looked at for launches that no marker covers yet. The caller holds the streams' lock. `look`
    /// may call the driver, so it is called without the pool's.
    pub(crate) fn each_unmarked(&self, mut look: impl FnMut(&'static Record, &'static Flown)) {
        for index in 0.. {
            let record = {
                let pool = self.pool.lock();
                if index >= pool.used {
                    return;
                }
                pool.chunks.at(index)
            };
            let Some(record) = record else { continue };
            for flown in record.flown.iter().filter(|flown| flown.unmarked() != 0) {
                look(record, flown);
            }
        }
    }

    /// Whether all streams are so that threads have launched into lately.
    pub(crate) fn all_streams(&self, so: impl Fn(usize) -> bool) -> bool {
        self.pool.lock().each().all(|record| {
            let flown = record.flown.iter().map(|flown| &flown.stream);
            flown.chain([&record.stream]).all(|stream| so(stream.load(Ordering::Relaxed)))
        })
    }

    /// The next launch of every thread notes its stream again. The caller holds the streams' lock.
    pub(crate) fn forget_streams(&self) {
        for record in self.pool.lock().each() {
            record.stream.store(0, Ordering::Relaxed);
        }
    }

    /// As [`Self::forget_streams`], for threads that launched into `stream`.
    pub(crate) fn forget_stream(&self, stream: usize) {
        let forget = |known: &AtomicUsize| {
            if known.load(Ordering::Relaxed) == stream {
                known.store(0, Ordering::Relaxed);
            }
        };
        self.pool.lock().each().for_each(|record| {
            forget(&record.stream);
            record.flown.iter().for_each(|flown| forget(&flown.stream));
        });
    }

    /// As [`Self::forget_stream`], for the streams of a context.
    pub(crate) fn forget_context(&self, ctx: usize) {
        for flown in self.pool.lock().each().flat_map(|record| &record.flown) {
            if flown.ctx.load(Ordering::Relaxed) == ctx {
                flown.stream.store(0, Ordering::Relaxed);
            }
        }
    }

    /// The first record from `from` on whose flag is up.
    pub(crate) fn busy_from(&self, from: usize) -> Option<usize> {
        let pool = self.pool.lock();
        let is_busy = |record: &Record| record.busy.load(Ordering::Acquire) != 0;
        (from..pool.used).find(|&index| pool.chunks.at(index).is_some_and(is_busy))
    }

    /// Lowers the flags that ended threads have left up.
    pub(crate) fn bury(&self) {
        self.pool.lock().sweep();
    }
}

impl Pool {
    fn each(&self) -> impl Iterator<Item = &'static Record> {
        (0..self.used).filter_map(|index| self.chunks.at(index))
    }

    fn reuse(&mut self) -> Option<&'static Record> {
        let found = self.each().find(|record| record.tid() == 0)?;
        self.free -= 1;
        Some(found)
    }

    fn grow(&mut self) -> Option<&'static Record> {
        let record = self.chunks.grow(self.used)?;
        self.used += 1;
        Some(record)
    }

    /// Frees the records of threads that ended.
    fn sweep(&mut self) {
        for index in 0..self.used {
            let Some(record) = self.chunks.at(index) else { continue };
            let tid = record.tid();
            if tid != 0 && !alive(tid) {
                // The last shard is everybody's; its bit is never set.
                self.shards &= !(1 << record.shard.load(Ordering::Relaxed));
                record.gate.store(ptr::null_mut(), Ordering::Relaxed);
                record.process.store(ptr::null_mut(), Ordering::Relaxed);
                // A thread that was cancelled inside a launch leaves its flag up.
                record.busy.store(0, Ordering::Relaxed);
                record.tid.store(0, Ordering::Relaxed);
                self.free += 1;
            }
        }
    }
}

fn own_tid() -> u32 {
    // SAFETY: gettid has no preconditions.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(tid).unwrap_or(u32::MAX)
}

/// Whether a thread of this process has that id.
fn alive(tid: u32) -> bool {
    // SAFETY: signal 0 is sent to nobody; it only asks whether the thread exists.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_tgkill,
            libc::c_long::from(libc::getpid()),
            libc::c_long::from(tid),
            0,
        )
    };
    sent == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Barrier;

    static WORD: AtomicU32 = AtomicU32::new(0);
    static GATE: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const WORD).cast_mut());
    static LAUNCHES: [AtomicU64; LAUNCH_SHARDS] = [const { AtomicU64::new(0) }; LAUNCH_SHARDS];

    fn claim(records: &Records) -> &'static Record {
        let owner = Owner {
            process: NonNull::dangling(),
            gate: &GATE,
            launches: &LAUNCHES,
            has_membarrier: true,
        };
        records.claim(owner).expect("a record")
    }

    #[test]
    fn living_threads_share_no_record_and_only_the_last_counter() {
        const THREADS: usize = 3 * CHUNK;
        let records = Records::new();
        let (all_claimed, claimed) = (Barrier::new(THREADS), Spin::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let record = claim(&records);
                    let launches = record.launches.load(Ordering::Relaxed).addr();
                    let address = ptr::from_ref(record).addr();
                    claimed.lock().push((address, launches, record.is_hot()));
                    all_claimed.wait();
                });
            }
        });
        let claimed = claimed.lock();
        let distinct: HashSet<_> = claimed.iter().map(|c| c.0).collect();
        assert_eq!(distinct.len(), THREADS);
        let exclusive: HashSet<_> = claimed.iter().filter(|c| c.2).map(|c| c.1).collect();
        assert_eq!(exclusive.len(), LAUNCH_SHARDS - 1);
        assert_eq!(claimed.iter().filter(|c| c.2).count(), LAUNCH_SHARDS - 1);
        let last = ptr::from_ref(&LAUNCHES[LAUNCH_SHARDS - 1]).addr();
        assert!(claimed.iter().all(|c| c.2 || c.1 == last));
    }

    #[test]
    fn records_and_counters_of_ended_threads_are_used_again() {
        let records = Records::new();
        for round in 0..20 * CHUNK {
            let own = std::thread::scope(|scope| {
                scope.spawn(|| claim(&records).is_hot()).join().expect("it ended")
            });
            if round % CHUNK == 0 {
                assert!(own, "a counter of its own again in round {round}");
            }
        }
        assert!(records.pool.lock().used <= 2 * CHUNK);
    }
}
