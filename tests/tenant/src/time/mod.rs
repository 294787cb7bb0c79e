//! `time`: measurements of a GPU's time, for `tests/gpu/run share`. They run bare and held, on
//! NVIDIA's driver and on the simulated one.
//!
//! - [`marks`]: what an event and a memory write cost as markers, and how soon each is seen;
//! - [`turns`]: a backlog of equal units of work, counted between two moments;
//! - [`turns::run_steps`]: a loop like a decoder's, its steps timed between two moments;
//! - [`exchange`]: two processes whose steps wait for one another, as ranks of a collective do.
//!
//! What is done when comes as JSON lines on standard input ([`talk`]), so that several processes
//! measure at the same moments. The end of the input is the end of the process.

mod exchange;
mod kernel;
mod marks;
mod page;
mod talk;
mod turns;

use crate::Device;
use crate::args::Args;
use crate::cuda::Cuda;
use crate::exit::Exit;
use crate::stop;

#[derive(Debug)]
pub enum Options {
    Calibrate,
    Marks(marks::Options),
    Turns(turns::Options),
    Steps(f64),
    Exchange(exchange::Options),
}

impl Options {
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

pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    // Nothing here needs to be said at the end, so a signal may end it anywhere.
    stop::unblock_signals();
    match options {
        Options::Calibrate => kernel::calibrate(Cuda::open(device)?),
        Options::Marks(options) => marks::run(Cuda::open(device)?, options),
        Options::Turns(options) => turns::run(Cuda::open(device)?, options),
        Options::Steps(rounds) => turns::run_steps(Cuda::open(device)?, *rounds),
        // Forks before the driver is touched.
        Options::Exchange(options) => exchange::run(device, options),
    }
}
