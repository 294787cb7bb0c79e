//! A process's queue to one GPU, and host functions in it: `cuLaunchHostFunc` (CUDA Driver API, "Execution Control").
//!
//! A thread for each queue of a GPU waits for it to reach the function, calls it, and lets the queue go
//! on. Copies submitted behind a host function wait for it, because it may write what they read.

use crate::abi::{Result, exports_both};
use crate::capture;
use crate::driver::{Device, Driver, driver, lock};
use crate::event::Event;
use crate::graph::{HostNode, Kind};
use crate::stream::Stream;
use simgpu::engine::{Op, QUEUES};
use simgpu::layout::RING;
use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use tessera_cuda::types::{
    CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUstream,
};

const CLOSED: u32 = u32::MAX;

/// The queue: a channel of the shared state, opened with the first context.
pub(crate) struct Lane {
    channel: AtomicU32,
    /// One more than each queue's last host function; 0: none.
    last_host: [AtomicU64; QUEUES],
    submitter: Mutex<Submitter>,
    /// Who adds a word to be written.
    pub writer: Mutex<()>,
}

#[derive(Default)]
struct Submitter {
    /// Recorded events whose time has not been fetched, oldest first.
    recorded: VecDeque<(u64, &'static Event)>,
    next: u64,
    /// One more than each queue's last operation; 0: none.
    tails: [u64; QUEUES],
    /// The process is ending: the channel is about to be another's.
    stopped: bool,
}

/// One more than the last operation, of each queue; 0: none.
pub(crate) type Last = [AtomicU64; QUEUES];

#[derive(Default)]
pub(crate) struct Tails {
    /// In any stream.
    pub all: Last,
    /// In streams that the legacy default stream waits for, and that for them: itself included.
    pub blocking: Last,
    pub legacy: AtomicU64,
    /// Up to where the legacy default stream waits already.
    pub joined: Last,
}

pub(crate) fn each(last: &Last) -> impl Iterator<Item = u64> {
    last.iter().filter_map(|last| last.load(Ordering::Relaxed).checked_sub(1))
}

impl Default for Lane {
    fn default() -> Self {
        Lane {
            channel: AtomicU32::new(CLOSED),
            last_host: Default::default(),
            submitter: Mutex::default(),
            writer: Mutex::default(),
        }
    }
}

impl Lane {
    pub(crate) fn channel(&self) -> u32 {
        self.channel.load(Ordering::Acquire)
    }

    /// Ends submission, for good; false if a thread is submitting and does not finish soon.
    pub(crate) fn stop(&self) -> bool {
        const PATIENCE: std::time::Duration = std::time::Duration::from_millis(50);
        let since = std::time::Instant::now();
        loop {
            match self.submitter.try_lock() {
                Ok(mut s) => {
                    s.stopped = true;
                    return true;
                }
                Err(_) if since.elapsed() > PATIENCE => return false,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    pub(crate) fn host_function(&self, queue: usize, seq: u64) {
        self.last_host[queue].fetch_max(seq + 1, Ordering::Release);
    }

    pub(crate) fn open(&self, driver: &Driver, gpu: usize) -> Result<()> {
        let _one = lock(&self.submitter);
        if self.channel() == CLOSED {
            let gpu = u32::try_from(gpu).unwrap_or(CLOSED);
            let channel = driver.session.open_channel(gpu).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            self.channel.store(channel, Ordering::Release);
        }
        Ok(())
    }
}

impl Device {
    /// Submits one operation to a queue, and remembers the event that records it: its number, and that of
    /// the one before it in the queue.
    pub(crate) fn submit_with(
        &self,
        queue: usize,
        op: Op,
        event: Option<&'static Event>,
    ) -> Result<(u64, Option<u64>)> {
        let session = &driver()?.session;
        let channel = self.lane.channel();
        let mut s = lock(&self.lane.submitter);
        if s.stopped {
            return Err(CUDA_ERROR_DEINITIALIZED);
        }
        // The ring forgets an operation RING later: fetch its event's time before.
        while let Some(&(seq, old)) = s.recorded.front() {
            if seq + RING as u64 > s.next {
                break;
            }
            session.wait(channel, seq);
            old.fetch(seq);
            s.recorded.pop_front();
        }
        let seq = session.submit(channel, queue, op);
        let before = std::mem::replace(&mut s.tails[queue], seq + 1).checked_sub(1);
        s.next = seq + 1;
        if let Some(event) = event {
            s.recorded.push_back((seq, event));
        }
        Ok((seq, before))
    }

    /// Whether host functions of any queue are outstanding: what they write may be copied.
    pub(crate) fn has_host_functions(&self) -> Result<bool> {
        for last in &self.lane.last_host {
            if let Some(seq) = last.load(Ordering::Acquire).checked_sub(1)
                && !self.is_complete(seq)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn is_complete(&self, seq: u64) -> Result<bool> {
        let complete = driver()?.session.is_complete(self.lane.channel(), seq);
        if complete {
            self.settle_writes();
        }
        Ok(complete)
    }

    pub(crate) fn wait(&self, seq: u64) -> Result<()> {
        driver()?.session.wait(self.lane.channel(), seq);
        self.settle_writes();
        self.check()
    }
}

// Host functions.

pub(crate) type HostFn = unsafe extern "C" fn(data: *mut c_void);

struct Job {
    seq: u64,
    /// The operation before it in its queue.
    before: Option<u64>,
    /// What to do between the two; `None`: the memory writes up to this operation are due.
    work: Option<Box<dyn FnOnce() + Send>>,
}

/// The way to a queue's host function thread, once there is one.
#[derive(Default)]
pub(crate) struct Caller(Mutex<Option<Sender<Job>>>);

/// Calls on behalf of one of a GPU's queues until the process ends.
fn spawn(device: &'static Device) -> Result<Sender<Job>> {
    let (sender, jobs) = channel::<Job>();
    let run = move || {
        for job in jobs {
            let Ok(driver) = driver() else { return };
            let channel = device.lane.channel();
            let Some(work) = job.work else {
                driver.session.wait(channel, job.seq);
                device.settle_writes();
                continue;
            };
            if let Some(before) = job.before {
                driver.session.wait(channel, before);
            }
            work();
            // Brings the model to now, which is when a kernel ends that had the GPU so long.
            driver.session.is_complete(channel, job.seq);
            driver.session.host_done(channel, job.seq);
        }
    };
    // Signals are the application's threads' business.
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises `all`; pthread_sigmask reads it and fills `before`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
    }
    let spawned = std::thread::Builder::new().name("simgpu-host".into()).spawn(run);
    // SAFETY: `before` was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    spawned.map(|_| sender).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

/// Submits memory writes, and has them done when the queue gets there.
pub(crate) fn after(s: &'static Stream, writes: impl FnOnce() -> Result<u64>) -> Result<()> {
    if driver()?.session.is_served() {
        return writes().map(drop);
    }
    submit(s, || Ok((writes()?, None)), None)
}

pub(crate) fn run(f: HostFn, data: usize, s: &'static Stream) -> Result<()> {
    if s.is_capturing() {
        let host = HostNode { function: f, data };
        return capture::add(s, |_| Ok(Kind::Host(host))).map(|_| ());
    }
    // SAFETY: the caller of cuLaunchHostFunc promises a function that may be called once with this
    // argument, from any thread.
    later(s, Op::Host, Box::new(move || unsafe { f(data as *mut c_void) }))
}

/// Has `work` done when the queue gets there, which then waits for its end ([`Op::Host`]), or runs a kernel until then
/// ([`Op::Until`]).
pub(crate) fn later(s: &'static Stream, op: Op, work: Box<dyn FnOnce() + Send>) -> Result<()> {
    submit(s, || s.submit_behind(op), Some(work))
}

fn submit(
    s: &'static Stream,
    submit: impl FnOnce() -> Result<(u64, Option<u64>)>,
    work: Option<Box<dyn FnOnce() + Send>>,
) -> Result<()> {
    let (device, queue) = (s.device(), s.queue());
    let mut sender = lock(&device.callers[queue].0);
    let sender = match &mut *sender {
        Some(sender) => sender,
        none => none.insert(spawn(device)?),
    };
    let (seq, before) = submit()?;
    device.lane.host_function(queue, seq);
    sender.send(Job { seq, before, work }).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

exports_both! {
    fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(s: CUstream, f: Option<HostFn>, data: *mut c_void) |s| {
        run(f.ok_or(CUDA_ERROR_INVALID_VALUE)?, data as usize, s)
    }

    // How the host thread waits for the stream, which is nothing to see here.
    fn cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(s: CUstream, f: Option<HostFn>, data: *mut c_void, _mode: c_uint) |s| {
        run(f.ok_or(CUDA_ERROR_INVALID_VALUE)?, data as usize, s)
    }
}
