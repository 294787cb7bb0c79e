//! `churn`: many threads that allocate, verify and free at random.
//!
//! Out of memory is no failure here: threads and processes race for what there is. Data that came
//! back changed is. The last report says what was free before and is free after; in a quiet
//! container the two are equal.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::json;

use crate::Device;
use crate::args;
use crate::cuda::{Cuda, Stream};
use crate::exit::{self, CudaError, Exit};
use crate::memory::{Api, Block};
use crate::processes;
use crate::report;
use crate::stop::{self, Asked};

/// Bytes of the pattern at the start of every block.
const PATTERN: usize = 64;

#[derive(clap::Args, Debug)]
pub struct Options {
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    threads: u64,
    /// Least bytes of a request; smaller ones share pages, which nobody counts by the request
    #[arg(long, value_parser = args::bytes, default_value = "64")]
    min: u64,
    /// Most bytes one thread holds
    #[arg(long, value_parser = args::bytes, default_value = "32Mi")]
    max: u64,
    /// Seconds; 0: until SIGTERM
    #[arg(long = "for", value_parser = args::limit, default_value = "0")]
    limit: Duration,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, value_delimiter = ',')]
    apis: Vec<Api>,
}

#[derive(Default)]
struct Counters {
    allocations: AtomicU64,
    frees: AtomicU64,
    refused: AtomicU64,
    corrupted: AtomicU64,
    held: AtomicU64,
}

impl Counters {
    fn report(&self, event: &str) {
        report::line(
            event,
            json!({
                "allocations": self.allocations.load(Relaxed),
                "frees": self.frees.load(Relaxed),
                "refused": self.refused.load(Relaxed),
                "corrupted": self.corrupted.load(Relaxed),
                "held": self.held.load(Relaxed),
            }),
        );
    }
}

pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    if options.max < 4096 || !(PATTERN as u64..=options.max).contains(&options.min) {
        let usage = format!("--max must be at least 4096, and --min from {PATTERN} to --max");
        return Err(Exit::usage(usage));
    }
    let cuda = Cuda::open(device)?;
    // The others' memory must leave each process room for its context.
    processes::muster();
    let (free_before, _) = cuda.mem_info()?;
    let counters = Counters::default();
    let stop_now = AtomicBool::new(false);
    report::line("ready", json!({ "threads": options.threads }));
    let outcome = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads)
            .map(|index| {
                let seed = options.seed
                    ^ index.rotate_left(20)
                    ^ u64::from(std::process::id()).rotate_left(40);
                let (counters, stop_now) = (&counters, &stop_now);
                scope.spawn(move || worker(&cuda, options, seed, counters, stop_now))
            })
            .collect();
        let start = Instant::now();
        loop {
            let left = options.limit.saturating_sub(start.elapsed());
            if left.is_zero() || threads.iter().any(|t| t.is_finished()) {
                break;
            }
            if stop::wait(left.min(Duration::from_secs(1))) == Some(Asked::Stop) {
                break;
            }
            counters.report("progress");
        }
        stop_now.store(true, Relaxed);
        threads.into_iter().map(|t| t.join()).collect::<Vec<_>>()
    });
    for result in outcome {
        match result {
            Ok(result) => result?,
            Err(_) => return Err(Exit::new(exit::DRIVER, "a thread panicked")),
        }
    }
    cuda.trim()?;
    let (free_after, _) = cuda.mem_info()?;
    report::line("view", json!({ "free_before": free_before, "free_after": free_after }));
    counters.report("done");
    cuda.close()?;
    if counters.corrupted.load(Relaxed) > 0 {
        return Err(Exit::new(exit::CORRUPTED, "blocks came back changed"));
    }
    Ok(())
}

struct Held {
    block: Block,
    pattern: [u8; PATTERN],
}

fn worker(
    cuda: &Cuda,
    options: &Options,
    seed: u64,
    counters: &Counters,
    stop_now: &AtomicBool,
) -> Result<(), CudaError> {
    cuda.bind()?;
    let stream = cuda.stream()?;
    let (max, apis) = (options.max, args::or_all(&options.apis));
    let mut rng = Rng::with_seed(seed);
    let mut held: Vec<Held> = Vec::new();
    let mut bytes = 0;
    while !stop_now.load(Relaxed) {
        let grow = held.is_empty() || bytes < max && rng.u64(..2) == 0;
        if grow {
            let want = (rng.u64(..max - bytes.min(max - 4096)) + 1).max(options.min);
            // The dispersion of APIs is by draw, so that their accounting meets in one limit.
            let api = apis[rng.usize(..apis.len())];
            match cuda.allocate(api, want, stream) {
                Ok(block) => {
                    let mut pattern = [0; PATTERN];
                    rng.fill(&mut pattern);
                    cuda.write(&block, 0, &pattern)?;
                    bytes += block.bytes;
                    counters.held.fetch_add(block.bytes, Relaxed);
                    counters.allocations.fetch_add(1, Relaxed);
                    held.push(Held { block, pattern });
                }
                Err(error) if error.is_out_of_memory() => {
                    counters.refused.fetch_add(1, Relaxed);
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        } else {
            let index = rng.usize(..held.len());
            bytes -= release(cuda, held.swap_remove(index), stream, counters)?;
        }
    }
    for one in held {
        release(cuda, one, stream, counters)?;
    }
    Ok(())
}

fn release(cuda: &Cuda, held: Held, stream: Stream, counters: &Counters) -> Result<u64, CudaError> {
    let mut back = [0; PATTERN];
    cuda.read(&held.block, 0, &mut back)?;
    if back != held.pattern {
        counters.corrupted.fetch_add(1, Relaxed);
    }
    cuda.free(&held.block, stream)?;
    counters.held.fetch_sub(held.block.bytes, Relaxed);
    counters.frees.fetch_add(1, Relaxed);
    Ok(held.block.bytes)
}
