//! Submitting work to a GPU and waiting for it; and words that the GPU writes, or waits for, when a queue gets there.
//!
//! On hardware nobody's thread writes those (CUDA Driver API, "Stream memory operations"), so a process
//! that is throttled, stopped or asleep finds its words written, and its queue goes on when another process has
//! written what it waits for. Here a machine's *GPU thread* does it for all processes ([`Session::serve`]), from outside
//! of them (process_vm_readv(2)). Where none serves, each process writes its own when it calls the driver, and threads of
//! its own watch the memory.

use crate::engine::{NONE, Op, QUEUES};
use crate::layout::{MAX_CHANNELS, RING, WRITES, WriteWord, Writes, kind};
use crate::session::{Locked, Session, entry};
use crate::{clock, lock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Without a prediction (a wait on another GPU, a host function) look again after this long …
pub(crate) const POLL_NS: u64 = 200_000;
/// … and with one after this long at most: another process's death may let us finish early.
const LOOK_AGAIN_NS: u64 = 10_000_000;

impl Session {
    /// Opens this process's channel on a GPU; none is free: `None`.
    pub fn open_channel(&self, gpu: u32) -> Option<u32> {
        let slot = u32::try_from(self.slot()?).ok()?;
        let mut locked = self.lock();
        locked.advance();
        let state = locked.state();
        let at = match state.free_channel() {
            Some(at) => at,
            None => {
                locked.recover_dead(true);
                locked.state().free_channel()?
            }
        };
        let ring = &self.shared().rings[at];
        let submitted = ring.submitted.load(Ordering::Acquire);
        let waits = ring.waits.load(Ordering::Acquire);
        ring.completed.store(submitted, Ordering::Release);
        ring.writes.forget();
        let channel = locked.state().open_channel(gpu, slot, submitted, waits, at)?;
        locked.commit();
        Some(channel)
    }

    /// Submits one operation to a queue of the channel; its number. Waits while [`RING`] are in flight, as a launch on a
    /// full hardware queue does. One thread at a time for each channel.
    pub fn submit(&self, channel: u32, queue: usize, op: Op) -> u64 {
        let ring = &self.shared().rings[channel as usize];
        let seq = ring.submitted.load(Ordering::Relaxed);
        if seq - ring.completed.load(Ordering::Acquire) >= RING as u64 {
            self.wait(channel, seq - RING as u64);
        }
        let (tag, value) = match op {
            Op::Compute(ns) => (kind::COMPUTE, ns),
            Op::Part { ns, width } => (kind::PART | u64::from(width) << 32, ns),
            Op::Mark(ns) => (kind::MARK, ns),
            Op::Delay(ns) => (kind::DELAY, ns),
            Op::Wait { channel, seq } => (kind::WAIT | u64::from(channel) << 32, seq),
            Op::Host => (kind::HOST, 0),
            Op::Until => (kind::UNTIL, 0),
        };
        let e = entry(self.shared(), channel, seq);
        e.arrival_ns.store(clock::now_ns(), Ordering::Relaxed);
        e.kind.store(tag | ((queue % QUEUES) as u64 * kind::QUEUE), Ordering::Relaxed);
        e.value.store(value, Ordering::Relaxed);
        if matches!(op, Op::Wait { channel: other, .. } if other != channel) {
            ring.waits.fetch_add(1, Ordering::Release);
        }
        // Release: pairs with Acquire in `Queues::submitted`.
        ring.submitted.store(seq + 1, Ordering::Release);
        seq
    }

    /// Whether an operation and all before it are known to be complete, without looking further.
    pub fn is_settled(&self, channel: u32, seq: u64) -> bool {
        // Acquire: pairs with Release in `Locked::commit`.
        self.shared().rings[channel as usize].completed.load(Ordering::Acquire) > seq
    }

    pub fn is_complete(&self, channel: u32, seq: u64) -> bool {
        let ring = &self.shared().rings[channel as usize];
        // Acquire: pairs with Release in `Locked::commit`.
        if ring.completed.load(Ordering::Acquire) > seq {
            return true;
        }
        let mut locked = self.lock();
        locked.advance();
        locked.is_complete(channel, seq)
    }

    pub fn wait(&self, channel: u32, seq: u64) {
        loop {
            if self.shared().rings[channel as usize].completed.load(Ordering::Acquire) > seq {
                return;
            }
            // Acquire: whoever goes on after this wakes this thread.
            let went_on = self.shared().went_on.load(Ordering::Acquire);
            let until = {
                let mut locked = self.lock();
                locked.recover_dead(false);
                let now = locked.advance();
                if locked.is_complete(channel, seq) {
                    return;
                }
                locked.predict(channel, seq, now + LOOK_AGAIN_NS)
            };
            match until {
                Some(at) => clock::sleep_until(at),
                None => lock::wait(&self.shared().went_on, went_on, Duration::from_nanos(POLL_NS)),
            }
        }
    }

    /// When a completed operation finished; too long ago to be remembered: `None`.
    pub fn finish_ns(&self, channel: u32, seq: u64) -> Option<u64> {
        let ring = &self.shared().rings[channel as usize];
        let known = ring.submitted.load(Ordering::Relaxed) <= seq + RING as u64;
        known.then(|| entry(self.shared(), channel, seq).finish_ns.load(Ordering::Relaxed))
    }

    /// Declares operation `seq`, a host function or a kernel that the host ends, finished.
    pub fn host_done(&self, channel: u32, seq: u64) {
        entry(self.shared(), channel, seq).value.store(1, Ordering::Release);
        self.goes_on();
    }

    /// A queue goes on that waited for a host: whoever waits for its end can reckon with it now.
    fn goes_on(&self) {
        self.shared().went_on.fetch_add(1, Ordering::Release);
        lock::wake_all(&self.shared().went_on);
    }
}

/// The GPU thread has ended if it gave no sign for so long.
const SILENT_NS: u64 = 100_000_000;
/// How often it looks at a word that a queue of an idle GPU waits for and a host may write, nanoseconds: less often the
/// longer it is idle, because this thread takes a CPU from everybody else, and else each [`POLL_NS`].
const LOOK_NS: (u64, u64) = (20_000, POLL_NS);
/// How long it sleeps at most.
const NAP: Duration = Duration::from_millis(20);

/// A word of 4 bytes; else of 8.
const SHORT: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Of 4 bytes, aligned.
    Short(u32),
    /// Of 8 bytes, aligned.
    Long(u64),
}

/// How a wait compares: `CUstreamWaitValue_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Comparison {
    Geq = 0,
    Eq = 1,
    And = 2,
    Nor = 3,
}

impl Comparison {
    pub fn of(flags: u32) -> Option<Self> {
        [Self::Geq, Self::Eq, Self::And, Self::Nor].into_iter().find(|how| *how as u32 == flags)
    }
}

impl Word {
    pub fn bytes(self) -> u64 {
        match self {
            Self::Short(_) => 4,
            Self::Long(_) => 8,
        }
    }

    /// Whether a wait for it is over when memory says `now`. Comparisons are cyclic.
    fn is_met_by(self, how: Comparison, now: u64) -> bool {
        #[allow(clippy::cast_possible_truncation, reason = "the word is that short")]
        let (wanted, all, negative) = match self {
            Self::Short(v) => {
                (v.into(), u32::MAX.into(), (now as u32).wrapping_sub(v).cast_signed() < 0)
            }
            Self::Long(v) => (v, u64::MAX, now.wrapping_sub(v).cast_signed() < 0),
        };
        match how {
            Comparison::Geq => !negative,
            Comparison::Eq => now == wanted,
            Comparison::And => now & wanted != 0,
            Comparison::Nor => !(now | wanted) & all != 0,
        }
    }

    /// Whether a wait for it, at `address` of this process, is over.
    ///
    /// # Safety
    /// `address` is mapped and aligned for the word.
    pub unsafe fn is_met(self, how: Comparison, address: u64) -> bool {
        // SAFETY: the caller's word.
        let now = unsafe {
            match self {
                Self::Short(_) => (*(address as *const AtomicU32)).load(Ordering::Acquire).into(),
                Self::Long(_) => (*(address as *const AtomicU64)).load(Ordering::Acquire),
            }
        };
        self.is_met_by(how, now)
    }

    /// The same in another process; never, where nothing is mapped any more.
    fn is_met_in(self, how: Comparison, pid: i32, address: u64) -> bool {
        let mut bytes = [0; 8];
        let length = if self.bytes() == 4 { 4 } else { 8 };
        let to = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length };
        let from = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: length };
        // SAFETY: one range of this process that is written, and one of another.
        let read = unsafe { libc::process_vm_readv(pid, &raw const to, 1, &raw const from, 1, 0) };
        usize::try_from(read) == Ok(length) && self.is_met_by(how, u64::from_le_bytes(bytes))
    }

    /// Writes it in this process.
    ///
    /// # Safety
    /// `address` is mapped, writable and aligned for the word.
    pub unsafe fn store(self, address: u64) {
        // SAFETY: the caller's word.
        unsafe {
            match self {
                Self::Short(v) => (*(address as *const AtomicU32)).store(v, Ordering::Release),
                Self::Long(v) => (*(address as *const AtomicU64)).store(v, Ordering::Release),
            }
        }
    }

    /// Writes it in another process. What is not mapped there any more is nobody's.
    fn store_in(self, pid: i32, address: u64) {
        let (value, length) = match self {
            Self::Short(v) => (u64::from(v), 4),
            Self::Long(v) => (v, 8),
        };
        let bytes = value.to_le_bytes();
        let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: length };
        let to = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: length };
        // SAFETY: one range of this process that is read, and one of another that its driver has
        // found to be mapped.
        unsafe { libc::process_vm_writev(pid, &raw const from, 1, &raw const to, 1, 0) };
    }
}

impl Writes {
    #[inline]
    pub fn wait(&self) -> bool {
        self.first.load(Ordering::Acquire) != self.next.load(Ordering::Acquire)
    }

    fn word(&self, number: u64) -> &WriteWord {
        &self.words[usize::try_from(number % WRITES as u64).unwrap_or(0)]
    }

    pub(crate) fn forget(&self) {
        let next = self.next.load(Ordering::Acquire);
        self.first.store(next, Ordering::Release);
    }
}

/// The GPU thread of a machine; it ends when this is dropped.
#[derive(Debug)]
pub struct GpuThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GpuThread {
    /// Starts it, with a session that nobody else uses.
    pub fn start(session: Session) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        // Before anybody asks whether it serves.
        session.shared().served_ns.store(clock::now_ns(), Ordering::Release);
        let serve = move || session.serve(&stopped);
        let thread = std::thread::Builder::new().name("simgpu".into()).spawn(serve)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for GpuThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Session {
    /// Has `word` written at `address` of this process once operation `seq`, its channel's last, is
    /// complete. One thread at a time for each channel.
    pub fn write_after(&self, channel: u32, seq: u64, address: u64, word: Word) {
        self.add_word(channel, seq, address, word, 0);
    }

    /// Has operation `seq`, an [`Op::Host`] and its channel's last, end when the word at `address` of this process is as
    /// wanted, from when its queue gets there on. One thread at a time for each channel; the machine has a GPU thread.
    pub fn wait_for(&self, channel: u32, seq: u64, address: u64, word: Word, how: Comparison) {
        self.add_word(channel, seq, address, word, 1 + how as u64);
    }

    fn add_word(&self, channel: u32, seq: u64, address: u64, word: Word, wait: u64) {
        let writes = &self.shared().rings[channel as usize].writes;
        let next = writes.next.load(Ordering::Relaxed);
        while next - writes.first.load(Ordering::Acquire) >= WRITES as u64 {
            let oldest = writes.word(next);
            self.wait(channel, oldest.seq.load(Ordering::Relaxed));
            self.land_writes(channel);
        }
        let (value, short) = match word {
            Word::Short(v) => (u64::from(v), SHORT),
            Word::Long(v) => (v, 0),
        };
        let entry = writes.word(next);
        entry.seq.store(seq, Ordering::Relaxed);
        entry.value.store(value, Ordering::Relaxed);
        entry.wait.store(wait, Ordering::Relaxed);
        entry.address.store(address | short, Ordering::Relaxed);
        // Release: pairs with Acquire in `land`.
        writes.next.store(next + 1, Ordering::Release);
        let bell = &self.shared().gpu_bell;
        if bell.swap(1, Ordering::AcqRel) == 0 && self.is_served() {
            lock::wake_all(bell);
        }
    }

    /// Whether a GPU thread writes the words of all processes.
    pub fn is_served(&self) -> bool {
        let served_ns = self.shared().served_ns.load(Ordering::Acquire);
        clock::now_ns().saturating_sub(served_ns) < SILENT_NS
    }

    /// Writes what is due of a channel of this process.
    pub fn land_writes(&self, channel: u32) {
        let mut locked = self.lock();
        locked.advance();
        locked.land(channel);
    }

    /// Is the machine's GPU thread until `stop`.
    pub fn serve(&self, stop: &AtomicBool) {
        // SAFETY: these change how the calling thread is scheduled, and fail where that is not allowed.
        unsafe {
            libc::prctl(libc::PR_SET_TIMERSLACK, 1);
            let first = libc::sched_param { sched_priority: 1 };
            libc::sched_setscheduler(
                0,
                libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK,
                &raw const first,
            );
        }
        let shared = self.shared();
        while !stop.load(Ordering::Relaxed) {
            shared.served_ns.store(clock::now_ns(), Ordering::Release);
            shared.gpu_bell.store(0, Ordering::Release);
            match self.land_all() {
                Some(Next { at, is_exact }) => {
                    // What is added meanwhile may be due before.
                    let left = at.saturating_sub(clock::now_ns());
                    let nap = left.saturating_sub(if is_exact { clock::YIELD_BELOW_NS } else { 0 });
                    if nap > 0 {
                        lock::wait(&shared.gpu_bell, 0, Duration::from_nanos(nap));
                    }
                    if is_exact && shared.gpu_bell.load(Ordering::Acquire) == 0 {
                        clock::sleep_until(at);
                    }
                }
                None => lock::wait(&shared.gpu_bell, 0, NAP),
            }
        }
        shared.served_ns.store(0, Ordering::Release);
    }

    /// Writes what is due of all, and ends waits that are over; when the next will be, where some wait.
    fn land_all(&self) -> Option<Next> {
        let mut locked = self.lock();
        locked.recover_dead(false);
        loop {
            let now = locked.advance();
            let (mut next, mut waits) = (None::<Next>, false);
            let (mut is_over, mut is_written) = (false, false);
            for channel in 0..MAX_CHANNELS {
                let writes = &self.shared().rings[channel].writes;
                if !writes.wait() {
                    continue;
                }
                let channel = u32::try_from(channel).unwrap_or(NONE);
                let landed = locked.land(channel);
                is_over |= landed.is_over;
                is_written |= landed.is_written;
                let found = match landed.left {
                    Left::Nothing => continue,
                    Left::Write(seq) => locked.predict(channel, seq, now + POLL_NS),
                    Left::Wait => None,
                };
                waits |= landed.left == Left::Wait;
                let mut after = || locked.look_after(channel, now);
                let found = match found {
                    Some(at) => Next { at, is_exact: true },
                    None => Next { at: now + after(), is_exact: false },
                };
                next = Some(next.map_or(found, |next| next.min(found)));
            }
            if is_over {
                self.goes_on();
            }
            // What went on is to be predicted, and a queue of any GPU may wait for a word that was just written.
            if !(is_over || is_written && waits) {
                return next;
            }
        }
    }
}

/// When the GPU thread is to look again, and whether something is due then.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Next {
    at: u64,
    is_exact: bool,
}

/// What a look at a channel's words has done.
struct Landed {
    left: Left,
    /// A wait is over: its queue goes on.
    is_over: bool,
    is_written: bool,
}

/// What is left of a channel's words.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    Nothing,
    /// The first operation that a word waits for.
    Write(u64),
    /// A queue waits for a word.
    Wait,
}

impl Locked<'_> {
    /// Writes what is due of a channel, and ends waits that are over.
    fn land(&mut self, channel: u32) -> Landed {
        let shared = self.shared();
        let writes = &shared.rings[channel as usize].writes;
        let mut landed = Landed { left: Left::Nothing, is_over: false, is_written: false };
        let slot = match self.state().channels.get(channel as usize) {
            Some(open) if open.gpu != NONE => open.slot as usize,
            _ => {
                writes.forget();
                return landed;
            }
        };
        // In this process; else in another.
        let pid = shared.slots[slot].pid.load(Ordering::Relaxed);
        let pid = (self.slot() != Some(slot)).then_some(pid);
        let mut is_first = true;
        // Acquire: pairs with Release in `add_word`.
        for at in writes.first.load(Ordering::Relaxed)..writes.next.load(Ordering::Acquire) {
            let place = writes.word(at);
            let address = place.address.load(Ordering::Relaxed);
            let seq = place.seq.load(Ordering::Relaxed);
            let value = place.value.load(Ordering::Relaxed);
            let word = match address & SHORT {
                SHORT => Word::Short(u32::try_from(value).unwrap_or(u32::MAX)),
                _ => Word::Long(value),
            };
            let how = place.wait.load(Ordering::Relaxed).checked_sub(1);
            let how = how.and_then(|how| Comparison::of(u32::try_from(how).unwrap_or(u32::MAX)));
            let is_done = address == 0
                || match how {
                    None if self.is_complete(channel, seq) => {
                        match pid {
                            // SAFETY: when it was submitted the address lay in memory that the driver knows, aligned;
                            // the caller promises to keep it until the operation is complete.
                            None => unsafe { word.store(address & !SHORT) },
                            Some(pid) => word.store_in(pid, address & !SHORT),
                        }
                        landed.is_written = true;
                        true
                    }
                    None => {
                        if landed.left == Left::Nothing {
                            landed.left = Left::Write(seq);
                        }
                        false
                    }
                    Some(how) if self.state().waits_for_host(channel, seq) => {
                        let is_met = match pid {
                            // SAFETY: as above.
                            None => unsafe { word.is_met(how, address & !SHORT) },
                            Some(pid) => word.is_met_in(how, pid, address & !SHORT),
                        };
                        if is_met {
                            entry(shared, channel, seq).value.store(1, Ordering::Release);
                            landed.is_over = true;
                        } else {
                            landed.left = Left::Wait;
                        }
                        is_met
                    }
                    Some(_) => self.is_complete(channel, seq),
                };
            if is_done {
                place.address.store(0, Ordering::Relaxed);
            }
            is_first &= is_done;
            if is_first {
                writes.first.store(at + 1, Ordering::Release);
            }
        }
        landed
    }

    /// After how long a word that a queue of the channel waits for is to be looked at again.
    fn look_after(&mut self, channel: u32, now: u64) -> u64 {
        let state = self.state();
        let Some(gpu) = state.channels.get(channel as usize).map(|c| c.gpu) else { return POLL_NS };
        if state.channels.iter().any(|c| c.gpu == gpu && c.is_runnable()) {
            return POLL_NS;
        }
        let ran_until = state.gpus.get(gpu as usize).map_or(now, |gpu| gpu.ran_until);
        (now.saturating_sub(ran_until) / 4).clamp(LOOK_NS.0, LOOK_NS.1)
    }
}
