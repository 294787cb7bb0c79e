//! `infer`: what an inference server does to a GPU, request by request.
//!
//! Load weights once; per request allocate activations, copy the input to the device, launch, copy
//! the result back, compare, free. Requests arrive at a fixed rate whether or not the last one is
//! done (an open loop), and latency counts from the arrival, so that a stalled neighbour's harm is
//! not hidden by requests that were never sent.

use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::json;

use crate::Device;
use crate::args;
use crate::cuda::{Cuda, Kernel, Stream};
use crate::exit::{self, Exit};
use crate::histogram::Histogram;
use crate::memory::{Api, Block};
use crate::report;
use crate::stop::{self, Asked};

/// Bytes written to and read from the device per request.
const PAYLOAD: usize = 64 << 10;
/// Weights are one allocation per this many bytes, as layers are.
const LAYER: u64 = 64 << 20;
/// Bytes checked at the start of every layer.
const PROBE: usize = 4096;

#[derive(clap::Args, Debug)]
pub struct Options {
    #[arg(long, value_parser = args::bytes, default_value = "256Mi")]
    weights: u64,
    #[arg(long, value_parser = args::bytes, default_value = "16Mi")]
    activations: u64,
    /// Per second; 0: the next request follows the last at once
    #[arg(long, value_parser = args::rate, default_value = "50")]
    rate: f64,
    #[arg(long, default_value_t = 2000)]
    kernel_us: u64,
    /// Seconds; 0: until SIGTERM
    #[arg(long = "for", value_parser = args::limit, default_value = "0")]
    limit: Duration,
}

/// What happened in one stretch of time.
#[derive(Default)]
struct Window {
    latency: Histogram,
    out_of_memory: u64,
    errors: u64,
    corrupted: u64,
    verified_bytes: u64,
}

impl Window {
    fn absorb(&mut self, other: &Self) {
        self.latency.merge(&other.latency);
        self.out_of_memory += other.out_of_memory;
        self.errors += other.errors;
        self.corrupted += other.corrupted;
        self.verified_bytes += other.verified_bytes;
    }

    fn report(&self, event: &str, seconds: f64, held: u64) {
        let us = |permille| self.latency.permille(permille) / 1000;
        report::line(
            event,
            json!({
                "seconds": (seconds * 1000.0).round() / 1000.0,
                "requests": self.latency.count(),
                "p50_us": us(500), "p90_us": us(900), "p99_us": us(990),
                "p99_at_least_us": self.latency.p99_at_least() / 1000,
                "max_us": self.latency.max() / 1000,
                "out_of_memory": self.out_of_memory,
                "errors": self.errors,
                "corrupted": self.corrupted,
                "verified_bytes": self.verified_bytes,
                "held": held,
            }),
        );
    }
}

struct Server<'a> {
    cuda: Cuda,
    options: &'a Options,
    stream: Stream,
    kernel: Kernel,
    layers: Vec<Block>,
    seed: u64,
    sent: Vec<u8>,
    back: Vec<u8>,
}

impl<'a> Server<'a> {
    fn start(device: Device, options: &'a Options) -> Result<Self, Exit> {
        let cuda = Cuda::open(device)?;
        let mut server = Self {
            cuda,
            options,
            stream: cuda.stream()?,
            kernel: cuda.kernel()?,
            layers: Vec::new(),
            seed: u64::from(std::process::id()) << 32,
            sent: vec![0; PAYLOAD],
            back: vec![0; PAYLOAD],
        };
        let mut left = options.weights;
        while left > 0 {
            let bytes = left.min(LAYER).max(PROBE as u64);
            let block = cuda.allocate(Api::Plain, bytes, Stream::LEGACY)?;
            cuda.write(&block, 0, &server.probe(server.layers.len()))?;
            server.layers.push(block);
            left = left.saturating_sub(bytes);
        }
        Ok(server)
    }

    fn held(&self) -> u64 {
        self.layers.iter().map(|l| l.bytes).sum()
    }

    fn probe(&self, index: usize) -> [u8; PROBE] {
        let mut probe = [0; PROBE];
        Rng::with_seed(self.seed ^ index as u64).fill(&mut probe);
        probe
    }

    /// One request; counts what went wrong instead of ending.
    fn serve(&mut self, number: u64, window: &mut Window) {
        match self.request(number) {
            Ok((verified, intact)) => {
                window.verified_bytes += verified;
                window.corrupted += u64::from(!intact);
            }
            Err(error) if error.is_out_of_memory() => window.out_of_memory += 1,
            Err(error) => {
                if window.errors == 0 {
                    eprintln!("tessera-tenant: {} returned {}", error.call, error.code);
                }
                window.errors += 1;
            }
        }
    }

    fn request(&mut self, number: u64) -> Result<(u64, bool), exit::CudaError> {
        let cuda = self.cuda;
        let block = cuda.allocate(Api::Plain, self.options.activations, Stream::LEGACY)?;
        let outcome = self.compute(&block, number);
        let freed = cuda.free(&block, Stream::LEGACY);
        let result = outcome?;
        freed?;
        Ok(result)
    }

    fn compute(&mut self, block: &Block, number: u64) -> Result<(u64, bool), exit::CudaError> {
        let cuda = self.cuda;
        let last = self.options.activations - PAYLOAD as u64;
        Rng::with_seed(self.seed ^ number.rotate_left(17)).fill(&mut self.sent);
        cuda.write(block, 0, &self.sent)?;
        cuda.write(block, last, &self.sent)?;
        cuda.launch(&self.kernel, self.options.kernel_us.saturating_mul(1000), self.stream)?;
        cuda.wait(&self.kernel, self.stream)?;
        let mut intact = true;
        let mut verified = 0;
        for offset in [0, last] {
            cuda.read(block, offset, &mut self.back)?;
            intact &= self.back == self.sent;
            verified += PAYLOAD as u64;
        }
        if !self.layers.is_empty() {
            let index = usize::try_from(number % self.layers.len() as u64).unwrap_or(0);
            let mut probe = [0; PROBE];
            cuda.read(&self.layers[index], 0, &mut probe)?;
            intact &= probe == self.probe(index);
            verified += PROBE as u64;
        }
        Ok((verified, intact))
    }
}

pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    if options.activations < 2 * PAYLOAD as u64 {
        return Err(Exit::usage(format!("--activations must be at least {}", 2 * PAYLOAD)));
    }
    let mut server = Server::start(device, options)?;
    let (free, total) = server.cuda.mem_info()?;
    let held = server.held();
    report::line("ready", json!({ "held": held, "free": free, "total": total }));

    let start = Instant::now();
    let (mut second, mut phase, mut whole) =
        (Window::default(), Window::default(), Window::default());
    let (mut second_start, mut phase_start) = (start, start);
    let mut arrival = start;
    let mut number = 0;
    loop {
        let done = start.elapsed() >= options.limit;
        let wait = arrival.saturating_duration_since(Instant::now());
        let asked = if done { Some(Asked::Stop) } else { stop::wait(wait) };
        if asked.is_some() || second_start.elapsed() >= Duration::from_secs(1) {
            phase.absorb(&second);
            whole.absorb(&second);
            second.report("progress", second_start.elapsed().as_secs_f64(), held);
            second = Window::default();
            second_start = Instant::now();
        }
        match asked {
            Some(Asked::Stop) => break,
            Some(Asked::Phase) => {
                phase.report("phase", phase_start.elapsed().as_secs_f64(), held);
                phase = Window::default();
                phase_start = Instant::now();
                continue;
            }
            None => {}
        }
        let now = Instant::now();
        if now < arrival {
            continue;
        }
        server.serve(number, &mut second);
        let latency = arrival.elapsed();
        second.latency.record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        number += 1;
        arrival = if options.rate > 0.0 {
            arrival + Duration::from_secs_f64(1.0 / options.rate)
        } else {
            Instant::now()
        };
    }
    phase.report("phase", phase_start.elapsed().as_secs_f64(), held);
    whole.report("done", start.elapsed().as_secs_f64(), held);
    for layer in &server.layers {
        server.cuda.free(layer, Stream::LEGACY)?;
    }
    server.cuda.close()?;
    if whole.corrupted > 0 {
        Err(Exit::new(exit::CORRUPTED, format!("{} requests read wrong data", whole.corrupted)))
    } else if whole.errors > 0 {
        Err(Exit::new(exit::DRIVER, format!("{} requests failed", whole.errors)))
    } else if whole.out_of_memory > 0 {
        Err(Exit::new(
            exit::OUT_OF_MEMORY,
            format!("{} requests found no memory", whole.out_of_memory),
        ))
    } else {
        Ok(())
    }
}
