//! `infer`: what an inference server does to a GPU, request by request.
//!
//! Load weights once; per request allocate activations, copy the input to the device, launch, copy
//! the result back, compare, free.

use std::time::Duration;

use fastrand::Rng;
use serde_json::json;

use crate::Device;
use crate::args;
use crate::cuda::{Cuda, Kernel, Stream};
use crate::exit::{self, Exit};
use crate::memory::{Api, Block};
use crate::report;
use crate::serve::{self, Pace, Window};

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

    let Options { rate, limit, .. } = *options;
    let pace = match rate > 0.0 {
        true => Pace::Arriving { rate, poisson: false },
        false => Pace::Following { pause: Duration::ZERO },
    };
    let whole = serve::serve(pace, limit, held, |number, window| {
        server.serve(number, window);
        Ok(())
    })?;
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
