//! The command line of `tessera-tenant`; see the library.

use clap::{Parser, Subcommand};
use tessera_tenant_program::exit::{self, Exit};
use tessera_tenant_program::{
    Device, churn, greedy, hold, infer, info, load, processes, stop, time,
};

const VALUES_AND_CODES: &str = "\
APIs are plain, pitched, managed, async, pool, vmm, array, mipmap, graph. Bytes are a number or a quantity: 512Mi,
4GiB, 129M, 1.5Gi.
Exit: 0 ok, 2 out of memory where none was expected, 3 another driver error, 4 data corrupted,
5 no driver library, 6 more memory was granted than --at-most, 64 usage; 128+n: a copy died of
signal n.";

/// A small CUDA client that behaves like a tenant of a shared GPU; what it reports is JSON, a line each
#[derive(Parser)]
#[command(name = "tessera-tenant", after_help = VALUES_AND_CODES)]
struct Cli {
    /// CUDA device by ordinal or UUID
    #[arg(long, global = true, default_value = "0")]
    device: Device,
    /// Fork so many copies before the driver is touched
    #[arg(long, global = true, default_value_t = 1)]
    processes: u32,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// What this process sees of its GPUs, as JSON
    Info,
    /// Allocate, say so, hold it until SIGTERM or for some seconds
    Hold(hold::Options),
    /// Allocate until out of memory, by each API in turn; without --for exit at once, else keep trying
    Greedy(greedy::Options),
    /// Serve inference-like requests; a JSON line each second and at the end; SIGUSR1 closes a phase and starts the next
    Infer(infer::Options),
    /// Kernels without end, or as requests that arrive (--rate), or follow each other (--closed)
    Load(load::Options),
    /// Measurements of tests/gpu/run share; see the source
    Time(time::Options),
    /// Allocate, verify and free at random from many threads
    Churn(churn::Options),
}

impl Task {
    fn run(&self, device: Device) -> Result<(), Exit> {
        match self {
            Self::Info => info::run(),
            Self::Hold(options) => hold::run(device, options),
            Self::Greedy(options) => greedy::run(device, options),
            Self::Infer(options) => infer::run(device, options),
            Self::Load(options) => load::run(device, options),
            Self::Time(options) => time::run(device, options),
            Self::Churn(options) => churn::run(device, options),
        }
    }
}

fn main() {
    stop::block_signals();
    let Cli { device, processes, task } = Cli::try_parse().unwrap_or_else(|error| {
        let _ = error.print();
        std::process::exit(if error.use_stderr() { exit::USAGE } else { exit::OK });
    });
    let outcome = match processes {
        0 | 1 => task.run(device),
        copies => processes::run(copies, || task.run(device)),
    };
    let code = match outcome {
        Ok(()) => exit::OK,
        Err(exit) => {
            if !exit.message.is_empty() {
                eprintln!("tessera-tenant: {}", exit.message);
            }
            exit.code
        }
    };
    std::process::exit(code);
}
