//! The discrete-event model of GPUs shared by processes.
//!
//! Pure: time and the processes' queues are arguments. [`State`] is plain data, so a process that
//! dies in the middle of advancing a private copy leaves nothing torn.
//!
//! - A **channel** is one process's work on one GPU, submitted in one order to several **queues**, which
//!   its streams share. A queue is a FIFO; queues wait for each other only where an operation says so.
//! - A process's kernels run at once as far as the GPU has room for them, in the order of their submission; events
//!   and markers go before, and kernels that the host ends run beside them, taking nothing from them.
//! - A MIG instance is a GPU of its own: instances do not take each other's time.
//! - A GPU runs one channel at a time. While others have work, a channel runs for a time slice;
//!   a switch to another process costs time. A kernel is preempted at the end of a slice and
//!   resumes where it was (compute preemption, as on Pascal and later).
//! - Copies between host and device occupy their queue, not the GPU (a copy engine's work).

mod step;
#[cfg(test)]
mod tests;

use crate::layout::{MAX_CHANNELS, MAX_UNITS};

/// No channel, no GPU.
pub const NONE: u32 = u32::MAX;
/// Utilisation is remembered in buckets of this length …
pub const BUCKET_NS: u64 = 100_000_000;
/// … and this many of them.
pub const BUCKETS: usize = 16;

/// Queues of a channel: a process has 8 connections to a GPU, which its streams share (CUDA Programming
/// Guide, `CUDA_DEVICE_MAX_CONNECTIONS`).
pub const QUEUES: usize = 8;

/// A whole GPU, in thousandths.
pub const WHOLE: u16 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Needs the GPU for this many nanoseconds.
    Compute(u64),
    /// The same, and leaves room for other kernels.
    Part {
        ns: u64,
        /// What it takes of the GPU, in thousandths.
        width: u16,
    },
    /// The same as [`Op::Compute`] for an event or a marker: accounted apart from work.
    Mark(u64),
    /// Occupies its queue only.
    Delay(u64),
    /// Waits until operation `seq` of a channel is complete: an earlier one, if it is the same.
    Wait { channel: u32, seq: u64 },
    /// Waits until the process says that its host function returned.
    Host,
    /// Needs the GPU until the process says that it is over, as it says of a host function.
    Until,
}

/// The processes' queues, as the engine reads them.
pub trait Queues {
    /// How many operations were ever submitted to the channel.
    fn submitted(&self, channel: u32) -> u64;
    /// Operation number `seq` and its time of arrival; `seq < submitted`.
    fn op(&self, channel: u32, seq: u64) -> (u64, Op);
    fn queue(&self, channel: u32, seq: u64) -> usize;
    /// Whether the process declared operation `seq`, which it ends, finished.
    fn host_done(&self, channel: u32, seq: u64) -> bool;
    /// How many `Wait` operations for other channels were ever submitted to the channel.
    fn waits(&self, channel: u32) -> u64;
    /// Called once per completed operation.
    fn completed(&mut self, channel: u32, seq: u64, at: u64);
    /// Called for every switch of a GPU to another channel; again with the same number when an advance
    /// is repeated whose state was not kept.
    fn switched(&mut self, gpu: u32, number: u32, handover: Handover);
}

#[derive(Clone, Copy, Debug)]
pub struct Params {
    pub slice_ns: u64,
    /// Lost at a switch between processes.
    pub switch_ns: u64,
    /// For so long after it what needs the GPU runs at half its speed: caches and TLB are cold.
    pub cold_ns: u64,
}

/// A GPU goes from one process's channel to another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The process slot whose work ran before.
    pub from: u32,
    /// The one whose work runs next.
    pub to: u32,
    /// When the former's work last ran.
    pub idle_from_ns: u64,
    /// When the switch began.
    pub at_ns: u64,
}

impl Handover {
    /// For how long the GPU was idle, the switch itself left out.
    pub fn idle_ns(&self) -> u64 {
        self.at_ns.saturating_sub(self.idle_from_ns)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Head {
    /// Nothing loaded: idle, or the next operation has not arrived.
    Empty = 0,
    /// `left` ns of GPU time remain.
    Compute = 1,
    /// Complete at time `left`.
    Delay = 2,
    /// Waiting for `dependency` and `left` (channel, seq).
    Wait = 3,
    /// Waiting for a host function.
    Host = 4,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Queue {
    pub head: Head,
    /// For [`Head::Wait`]: the channel waited for.
    pub dependency: u32,
    /// See [`Head`].
    pub left: u64,
    pub seq: u64,
    /// The next operation of the channel to look at.
    pub read: u64,
    /// Whether the operation at the head is an event or a marker.
    pub marking: bool,
    /// What of the GPU the operation at the head takes, in thousandths.
    pub width: u16,
    /// Whether the operation at the head, which needs the GPU, is over when the process says so.
    pub until: bool,
}

impl Queue {
    const EMPTY: Queue = Queue {
        head: Head::Empty,
        dependency: NONE,
        left: 0,
        seq: 0,
        read: 0,
        marking: false,
        width: WHOLE,
        until: false,
    };

    /// All its operations with lower numbers are complete.
    fn pending(&self) -> u64 {
        if self.head == Head::Empty { self.read } else { self.seq }
    }

    /// Whether it takes the GPU's time until it ends by itself.
    fn is_timed(&self) -> bool {
        self.head == Head::Compute && !self.until
    }
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Channel {
    pub gpu: u32,
    pub slot: u32,
    pub queues: [Queue; QUEUES],
    /// The queues whose kernels, or the one whose event or marker, runs when the channel does: a bit for each.
    pub running: u32,
    /// Operations completed: all with a lower number, and some others.
    pub completed: u64,
    /// `Wait` operations for other channels completed.
    pub waits_done: u64,
    pub busy: Usage,
    /// Operations completed that needed the GPU, events and markers left out.
    pub kernels: u64,
    pub marks: u64,
    /// GPU time of events and markers, part of `busy`.
    pub mark_ns: u64,
}

/// GPU time used: in total, and lately.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Usage {
    pub ns: u64,
    /// Newest bucket: its number is time ÷ [`BUCKET_NS`].
    bucket: u64,
    /// Busy nanoseconds in the newest [`BUCKETS`] buckets, by number modulo `BUCKETS`.
    buckets: [u32; BUCKETS],
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Gpu {
    /// The model's time on this GPU.
    pub now: u64,
    /// The channel that ran last, or [`NONE`].
    pub current: u32,
    pub switches: u32,
    /// `current` runs from here (the end of a switch).
    pub run_from: u64,
    /// The end of the last switch: work runs at half its speed from here on, for `cold_ns`.
    pub cold_from: u64,
    /// `current` may be replaced from here.
    pub slice_end: u64,
    /// When work last ran.
    pub ran_until: u64,
    pub busy: Usage,
}

#[derive(Clone, Debug)]
#[repr(C)]
pub struct State {
    /// Channels at and above this index were never used.
    pub channels_used: u32,
    /// Units configured: a MIG instance is a GPU here.
    pub gpu_count: u32,
    pub gpus: [Gpu; MAX_UNITS],
    pub channels: [Channel; MAX_CHANNELS],
}

impl Channel {
    /// The queues that run when it does.
    fn running(&self) -> impl Iterator<Item = usize> + use<> {
        let running = self.running;
        (0..QUEUES).filter(move |k| running >> k & 1 == 1)
    }

    /// Whether anything in it needs the GPU.
    pub(crate) fn is_runnable(&self) -> bool {
        self.queues.iter().any(|q| q.head == Head::Compute)
    }

    pub const FREE: Channel = Channel {
        gpu: NONE,
        slot: NONE,
        queues: [Queue::EMPTY; QUEUES],
        running: 0,
        completed: 0,
        waits_done: 0,
        busy: Usage::NONE,
        kernels: 0,
        marks: 0,
        mark_ns: 0,
    };
}

impl State {
    /// Idle GPUs at time `now`.
    pub fn new(gpu_count: u32, now: u64) -> Box<State> {
        let gpu = Gpu {
            now,
            current: NONE,
            switches: 0,
            run_from: 0,
            cold_from: 0,
            slice_end: 0,
            ran_until: now,
            busy: Usage::NONE,
        };
        Box::new(State {
            channels_used: 0,
            gpu_count,
            gpus: [gpu; MAX_UNITS],
            channels: [Channel::FREE; MAX_CHANNELS],
        })
    }

    /// Gives a process a channel on a GPU whose queue is at `submitted` operations; none is free:
    /// `None`.
    pub fn open_channel(
        &mut self,
        gpu: u32,
        slot: u32,
        submitted: u64,
        waits: u64,
        at: usize,
    ) -> Option<u32> {
        let channel = self.channels.get_mut(at).filter(|c| c.gpu == NONE)?;
        *channel = Channel {
            gpu,
            slot,
            queues: [Queue { read: submitted, ..Queue::EMPTY }; QUEUES],
            completed: submitted,
            waits_done: waits,
            ..Channel::FREE
        };
        let index = u32::try_from(at).ok()?;
        self.channels_used = self.channels_used.max(index + 1);
        Some(index)
    }

    pub fn free_channel(&self) -> Option<usize> {
        self.channels.iter().position(|c| c.gpu == NONE)
    }

    pub fn close_channel(&mut self, channel: u32) {
        for gpu in &mut self.gpus {
            if gpu.current == channel {
                gpu.current = NONE;
            }
        }
        if let Some(c) = self.channels.get_mut(channel as usize) {
            *c = Channel::FREE;
        }
    }

    /// Whether operation `seq` of `channel` is complete. A channel that was closed has nothing left.
    pub fn is_complete<Q: Queues>(&self, queues: &Q, channel: u32, seq: u64) -> bool {
        self.channels.get(channel as usize).is_none_or(|c| {
            c.gpu == NONE
                || c.completed > seq
                || c.queues.get(queues.queue(channel, seq)).is_some_and(|q| q.pending() > seq)
        })
    }

    /// Whether a queue of `channel` is at operation `seq`, which the process ends.
    pub(crate) fn waits_for_host(&self, channel: u32, seq: u64) -> bool {
        let at_head = |q: &Queue| q.head == Head::Host && q.seq == seq;
        self.channels.get(channel as usize).is_some_and(|c| c.queues.iter().any(at_head))
    }

    /// `is_valid` of every invariant that does not depend on the queues.
    pub fn is_valid(&self) -> bool {
        self.channels.iter().enumerate().all(|(i, c)| {
            c.gpu == NONE
                || (c.gpu < self.gpu_count
                    && c.queues.iter().map(Queue::pending).min() == Some(c.completed)
                    && c.queues.iter().all(|q| q.head == Head::Empty || q.seq < q.read)
                    && i < self.channels_used as usize)
        })
    }
}

impl Gpu {
    /// Work that is done by time `t` since the last switch.
    fn done(&self, cold_ns: u64, t: u64) -> u64 {
        let ran = t.saturating_sub(self.cold_from);
        ran - ran.min(cold_ns).div_ceil(2)
    }

    /// When work that begins at `start` and takes `left` of a warm GPU is done.
    fn end(&self, cold_ns: u64, start: u64, left: u64) -> u64 {
        let work = self.done(cold_ns, start).saturating_add(left);
        let warm = self.cold_from.saturating_add(work).saturating_add(cold_ns.div_ceil(2));
        let cold = self.cold_from.saturating_add(work.saturating_mul(2));
        if left == 0 { start } else { warm.min(cold) }
    }
}

impl Usage {
    pub const NONE: Usage = Usage { ns: 0, bucket: 0, buckets: [0; BUCKETS] };

    /// Percent of the last `window` whole buckets before `now` that was used.
    pub fn percent(&self, now: u64, window: usize) -> u32 {
        let window = window.clamp(1, BUCKETS - 1) as u64;
        let newest = now / BUCKET_NS;
        let busy: u64 = (1..=window)
            .map(|back| newest.saturating_sub(back))
            .filter(|&number| number <= self.bucket && number + BUCKETS as u64 > self.bucket)
            .map(|number| u64::from(self.buckets[index(number)]))
            .sum();
        u32::try_from((busy * 100 / (BUCKET_NS * window)).min(100)).unwrap_or(100)
    }

    fn add(&mut self, from: u64, to: u64) {
        self.ns += to - from;
        let mut at = from;
        while at < to {
            let number = at / BUCKET_NS;
            if number > self.bucket {
                let gap = (number - self.bucket).min(BUCKETS as u64);
                for i in 0..gap {
                    self.buckets[index(number - i)] = 0;
                }
                self.bucket = number;
            }
            let end = to.min((number + 1) * BUCKET_NS);
            let bucket = &mut self.buckets[index(number)];
            *bucket = bucket.saturating_add(u32::try_from(end - at).unwrap_or(u32::MAX));
            at = end;
        }
    }
}

fn index(number: u64) -> usize {
    #[allow(clippy::cast_possible_truncation, reason = "a remainder below BUCKETS")]
    let index = (number % BUCKETS as u64) as usize;
    index
}
