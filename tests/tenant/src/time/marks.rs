//! What marks the end of work, an event or a memory write by the stream: what each costs the host and
//! the GPU, and how soon the host sees it.
//!
//! A figure that the driver refuses is printed with the reason instead.

use std::hint::spin_loop;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::json;

use super::kernel::{Amount, Kernels};
use super::page::Words;
use super::talk::percentile_us;
use crate::cuda::{Cuda, Event, Stream};
use crate::driver::call;
use crate::exit::{CudaError, Exit};
use crate::report;

/// Host costs are means of so many calls; the driver has room for them without waiting.
const BATCH: u32 = 64;
/// A kernel that is shorter than its launch would hide what a marker costs the GPU.
const KERNEL_US: f64 = 30.0;
/// The GPU's cost of a marker is of so many kernels with one each.
const RUN: u32 = 400;
/// Nothing is waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(clap::Args, Debug)]
pub struct Options {
    #[arg(long, default_value_t = 300)]
    trials: usize,
    /// Only what calls cost the host
    #[arg(long)]
    only_host: bool,
}

struct Bench {
    kernels: Kernels,
    cuda: Cuda,
    stream: Stream,
    words: Words,
    /// Values written so far: each is new.
    written: u64,
    trials: usize,
    amount: Amount,
}

pub(super) fn run(cuda: Cuda, options: &Options) -> Result<(), Exit> {
    let (kernels, stream) = (Kernels::load(cuda)?, cuda.stream()?);
    let words = Words::allocate(cuda, 64)?;
    let trials = options.trials.max(10);
    let amount = Amount::micros(KERNEL_US, 0.0);
    let mut bench = Bench { kernels, cuda, stream, words, written: 0, trials, amount };
    bench.adjust()?;
    bench.host()?;
    if options.only_host {
        return Ok(());
    }
    bench.gpu()?;
    bench.seen()?;
    Ok(())
}

fn say(name: &str, what: Result<serde_json::Value, CudaError>) {
    let value = what.unwrap_or_else(
        |error| json!({ "failed": format!("{} returned {}", error.call, error.code) }),
    );
    report::line("figure", json!({ "name": name, "value": value }));
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl Bench {
    /// Finds how many rounds are [`KERNEL_US`].
    fn adjust(&mut self) -> Result<(), CudaError> {
        let mut rounds_per_us = 100.0;
        for _ in 0..3 {
            self.amount = Amount::micros(KERNEL_US, rounds_per_us);
            let us = self.timed_run(|_| Ok(()))?;
            rounds_per_us *= KERNEL_US / us.max(0.1);
        }
        self.amount = Amount::micros(KERNEL_US, rounds_per_us);
        Ok(())
    }

    fn write(&mut self) -> Result<u64, CudaError> {
        self.written += 1;
        // SAFETY: an aligned word of pinned memory, which lives as long as the process.
        unsafe {
            call!(self.cuda.driver, write_value(self.stream.0, self.words.at(0), self.written, 0))
        }?;
        Ok(self.written)
    }

    fn word(&self) -> u64 {
        self.words.host[0].load(Ordering::Acquire)
    }

    /// Nanoseconds of the host for one call, the median of batches after each of which the GPU is waited for.
    fn host_ns(
        &mut self,
        mut call: impl FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let mut values = Vec::new();
        for _ in 0..self.trials.min(200) {
            let start = Instant::now();
            for _ in 0..BATCH {
                call(self)?;
            }
            values.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH));
            self.cuda.synchronise(self.stream)?;
        }
        Ok(median(values))
    }

    /// What calls cost the host.
    fn host(&mut self) -> Result<(), CudaError> {
        let tiny = Amount::micros(0.0, 0.0);
        let launch = self.host_ns(|b| b.kernels.launch(tiny, 0, b.stream));
        say("launch_host_ns", launch.map(|ns| json!(ns)));
        let event = Event::new(self.cuda)?;
        let record = self.host_ns(|b| event.record(b.stream));
        say("event_record_host_ns", record.map(|ns| json!(ns)));
        let query = self.host_ns(|_| event.is_done().map(|_| ()));
        say("event_query_done_host_ns", query.map(|ns| json!(ns)));
        let write = self.host_ns(|b| b.write().map(|_| ()));
        say("write_value_host_ns", write.map(|ns| json!(ns)));
        Ok(())
    }

    /// Microseconds from the first launch to the end of the run, for each of its kernels.
    fn timed_run(
        &mut self,
        mut mark: impl FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        self.kernels.launch(self.amount, 0, self.stream)?;
        self.cuda.synchronise(self.stream)?;
        let start = Instant::now();
        for _ in 0..RUN {
            self.kernels.launch(self.amount, 0, self.stream)?;
            mark(self)?;
        }
        self.cuda.synchronise(self.stream)?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(RUN))
    }

    /// What a marker after each kernel costs the GPU: the run is longer by it. Rounds alternate.
    fn gpu(&mut self) -> Result<(), CudaError> {
        let event = Event::new(self.cuda)?;
        let rounds = (self.trials / 30).clamp(3, 11);
        let (mut plain, mut events, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        let mut refused = None;
        for _ in 0..rounds {
            let alone = self.timed_run(|_| Ok(()))?;
            plain.push(alone);
            events.push(self.timed_run(|b| event.record(b.stream))? - alone);
            match self.timed_run(|b| b.write().map(|_| ())) {
                Ok(us) => writes.push(us - alone),
                Err(error) => refused = Some(error),
            }
        }
        say("kernel_us", Ok(json!(median(plain))));
        let [event, write] = [events, writes].map(|us| json!(median(us) * 1000.0));
        say("event_gpu_ns", Ok(event));
        say("write_value_gpu_ns", refused.map_or(Ok(write), Err));
        Ok(())
    }

    /// From a launch until the host knows that the kernel is over, by each way of looking. The kernel
    /// is the same, so the ways differ by how soon they see it.
    fn seen(&mut self) -> Result<(), CudaError> {
        let event = Event::new(self.cuda)?;
        let by_word = self.trial(|b| {
            let value = b.write()?;
            spin_until(|| Ok(b.word() >= value))
        });
        say("seen_by_word_us", by_word);
        let by_query = self.trial(|b| {
            event.record(b.stream)?;
            spin_until(|| event.is_done())
        });
        say("seen_by_event_query_us", by_query);
        Ok(())
    }

    fn trial(
        &mut self,
        mut until_seen: impl FnMut(&mut Self) -> Result<(), CudaError>,
    ) -> Result<serde_json::Value, CudaError> {
        let mut took = Vec::new();
        for _ in 0..self.trials {
            let start = Instant::now();
            self.kernels.launch(self.amount, 0, self.stream)?;
            until_seen(self)?;
            took.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
            self.cuda.synchronise(self.stream)?;
        }
        took.sort_unstable();
        Ok(json!({ "p50": percentile_us(&took, 500), "p99": percentile_us(&took, 990) }))
    }
}

/// Looks without a pause; gives up after [`PATIENCE`] with a time-out's code.
fn spin_until(mut seen: impl FnMut() -> Result<bool, CudaError>) -> Result<(), CudaError> {
    /// `CUDA_ERROR_LAUNCH_TIMEOUT`.
    const TIMEOUT: i32 = 702;
    let start = Instant::now();
    while !seen()? {
        for _ in 0..8 {
            spin_loop();
        }
        if start.elapsed() > PATIENCE {
            return Err(CudaError { call: "waiting for a marker", code: TIMEOUT });
        }
    }
    Ok(())
}
