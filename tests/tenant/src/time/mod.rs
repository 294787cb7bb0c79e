//! `time`: measurements of a GPU's time, for `tests/gpu/run share`. They run bare and held, on
//! NVIDIA's driver and on the simulated one.
//!
//! - [`marks`]: what an event and a memory write cost as markers, and how soon each is seen;
//! - [`turns`]: a backlog of equal units of work, counted between two moments;
//! - [`steps`]: a loop like a decoder's, its steps timed between two moments;
//! - [`exchange`]: two processes whose steps wait for one another, as ranks of a collective do.
//!
//! What is done when comes as JSON lines on standard input ([`talk`]), so that several processes
//! measure at the same moments. The end of the input is the end of the process.

mod exchange;
mod kernel;
mod marks;
mod page;
mod stamps;
mod steps;
mod talk;
mod turns;

use tessera_cuda::types::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUresult};

use crate::Target;
use crate::args::Args;
use crate::cuda::Cuda;
use crate::exit::{CudaError, Exit};
use crate::stop;

/// What to measure.
#[derive(Debug)]
pub enum Options {
    /// How many rounds of the kernel are a microsecond.
    Calibrate,
    /// [`marks`]
    Marks(marks::Options),
    /// [`turns`]
    Turns(turns::Options),
    /// [`steps`], with the kernel's rounds in a microsecond.
    Steps(f64),
    /// [`exchange`]
    Exchange(exchange::Options),
}

impl Options {
    /// From the command line.
    pub fn parse(mut args: Args) -> Result<Self, Exit> {
        let rounds = args.number("--rounds-per-us", 100.0)?;
        let options = match args.subcommand().as_deref() {
            Some("calibrate") => Self::Calibrate,
            Some("marks") => Self::Marks(marks::Options::parse(&mut args)?),
            Some("turns") => Self::Turns(turns::Options::parse(&mut args, rounds)?),
            Some("steps") => Self::Steps(rounds),
            Some("exchange") => Self::Exchange(exchange::Options::parse(&mut args, rounds)?),
            _ => return Err(Exit::usage("time: calibrate, marks, turns, steps or exchange")),
        };
        args.finish()?;
        Ok(options)
    }
}

/// Measures until the input ends.
pub fn run(target: Target, options: &Options) -> Result<(), Exit> {
    // Nothing here needs to be said at the end, so a signal may end it anywhere.
    stop::unblock_signals();
    match options {
        Options::Calibrate => kernel::calibrate(Cuda::open(target)?),
        Options::Marks(options) => marks::run(Cuda::open(target)?, options),
        Options::Turns(options) => turns::run(Cuda::open(target)?, options),
        Options::Steps(rounds) => steps::run(Cuda::open(target)?, *rounds),
        // Forks before the driver is touched.
        Options::Exchange(options) => exchange::run(target, options),
    }
}

/// What a query answers.
fn is_ready(call: &'static str, code: CUresult) -> Result<bool, CudaError> {
    match code {
        CUDA_SUCCESS => Ok(true),
        CUDA_ERROR_NOT_READY => Ok(false),
        code => Err(CudaError { call, code }),
    }
}
