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
use crate::cuda::Cuda;
use crate::exit::Exit;
use crate::stop;

#[derive(clap::Args, Debug)]
pub struct Options {
    /// As `calibrate` says
    #[arg(long, global = true, default_value_t = 100.0)]
    rounds_per_us: f64,
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    Calibrate,
    Marks(marks::Options),
    Turns(turns::Options),
    Steps,
    Exchange(exchange::Options),
}

pub fn run(device: Device, options: &Options) -> Result<(), Exit> {
    // Nothing here needs to be said at the end, so a signal may end it anywhere.
    stop::unblock_signals();
    let rounds = options.rounds_per_us;
    match &options.what {
        What::Calibrate => kernel::calibrate(Cuda::open(device)?),
        What::Marks(options) => marks::run(Cuda::open(device)?, options),
        What::Turns(options) => turns::run(Cuda::open(device)?, options, rounds),
        What::Steps => turns::run_steps(Cuda::open(device)?, rounds),
        // Forks before the driver is touched.
        What::Exchange(options) => exchange::run(device, options, rounds),
    }
}
