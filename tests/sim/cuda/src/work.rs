//! A process's queue to one GPU.

use crate::driver::{Device, Driver, driver, lock};
use crate::errors::Result;
use crate::event::Event;
use crate::stream_memory::PendingWrites;
use simgpu::engine::Op;
use simgpu::layout::RING;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tessera_cuda::types::{CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_OUT_OF_MEMORY};

const CLOSED: u32 = u32::MAX;

/// The queue: a channel of the shared state, opened with the first context.
pub(crate) struct Lane {
    channel: AtomicU32,
    /// One more than the last host function; 0: none.
    last_host: AtomicU64,
    submitter: Mutex<Submitter>,
    /// Memory writes that the queue has not reached.
    pub writes: PendingWrites,
}

#[derive(Default)]
struct Submitter {
    /// Recorded events whose time has not been fetched, oldest first.
    recorded: VecDeque<(u64, &'static Event)>,
    next: u64,
    /// The process is ending: the channel is about to be another's.
    stopped: bool,
}

impl Default for Lane {
    fn default() -> Self {
        Lane {
            channel: AtomicU32::new(CLOSED),
            last_host: AtomicU64::new(0),
            submitter: Mutex::default(),
            writes: PendingWrites::default(),
        }
    }
}

impl Lane {
    /// The channel's number.
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

    /// Notes that operation `seq` is a host function.
    pub(crate) fn host_function(&self, seq: u64) {
        self.last_host.store(seq + 1, Ordering::Release);
    }

    /// The last host function, if there ever was one.
    pub(crate) fn last_host_function(&self) -> Option<u64> {
        self.last_host.load(Ordering::Acquire).checked_sub(1)
    }

    /// Opens the channel; idempotent.
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
    /// Submits one operation, and remembers the event that records it.
    pub(crate) fn submit_with(&self, op: Op, event: Option<&'static Event>) -> Result<u64> {
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
        let seq = session.submit(channel, op);
        s.next = seq + 1;
        if let Some(event) = event {
            s.recorded.push_back((seq, event));
        }
        Ok(seq)
    }

    /// Whether an operation is complete.
    pub(crate) fn is_complete(&self, seq: u64) -> Result<bool> {
        let complete = driver()?.session.is_complete(self.lane.channel(), seq);
        if complete {
            self.settle_writes();
        }
        Ok(complete)
    }

    /// Waits for an operation.
    pub(crate) fn wait(&self, seq: u64) -> Result<()> {
        driver()?.session.wait(self.lane.channel(), seq);
        self.settle_writes();
        self.check()
    }
}
