//! The command line of `tessera-tenant`; see the library.

use tessera_tenant_program::args::Args;
use tessera_tenant_program::exit::{self, Exit};
use tessera_tenant_program::{
    Device, churn, greedy, hold, infer, info, load, processes, stop, time,
};

const USAGE: &str = "\
tessera-tenant [OPTIONS] SUBCOMMAND [OPTIONS]

Subcommands
  info                      what this process sees of its GPUs, as JSON
  hold    --bytes Q [--for S]
                            allocate Q, say so, hold it until SIGTERM or for S seconds
  greedy  [--chunk Q] [--min-chunk Q] [--apis LIST] [--at-most Q]
          [--for S] [--retry-ms N]
                            allocate until out of memory, by each API in turn; without --for exit
                            at once, else hold S seconds (0: until SIGTERM) and keep trying
  infer   [--weights Q] [--activations Q] [--rate R] [--kernel-us K] [--for S]
                            serve inference-like requests; a JSON line each second and at the end;
                            SIGUSR1 closes a phase and starts the next
  load    [--kernel-us LIST] [--kernels N] [--graph] [--for S]
          [--sync-every N] [--shallow-ms N] [--rate R [--poisson] | --closed]
                            kernels of these durations in turn, N times each round, or all as one
                            graph: without end, or as requests that arrive, or follow each other
  time    calibrate | marks | turns | steps | exchange [OPTIONS]
                            measurements of tests/gpu/run share; see the source
  churn   [--threads N] [--min Q] [--max Q] [--for S] [--seed N] [--apis LIST]
                            allocate, verify and free at random from many threads

Options
  --device N|UUID           CUDA device by ordinal or UUID (0)
  --processes N             fork N copies before the driver is touched

LIST is of plain, pitched, managed, async, pool, vmm, array, mipmap, graph (all). Q is bytes or a quantity: 512Mi, 4GiB, 129M, 1.5Gi.
Exit: 0 ok, 2 out of memory where none was expected, 3 another driver error, 4 data corrupted,
5 no driver library, 6 more memory was granted than --at-most, 64 usage; 128+n: a copy died of
signal n.";

fn main() {
    stop::block_signals();
    let code = match run() {
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

type Work = Box<dyn FnOnce() -> Result<(), Exit>>;

fn prepared<O: 'static>(
    device: Device,
    options: O,
    run: fn(Device, &O) -> Result<(), Exit>,
) -> Work {
    Box::new(move || run(device, &options))
}

fn run() -> Result<(), Exit> {
    let mut args = Args::from_env();
    if args.flag("--help") || args.flag("-h") {
        println!("{USAGE}");
        return Ok(());
    }
    let device: Device = args.number("--device", Device::Ordinal(0))?;
    let copies: u32 = args.number("--processes", 1)?;
    let Some(subcommand) = args.subcommand() else {
        return Err(Exit::usage(format!("no subcommand\n\n{USAGE}")));
    };
    // Parsed before any fork, so that a mistake is reported once.
    let work: Work = match subcommand.as_str() {
        "info" => {
            args.finish()?;
            Box::new(info::run)
        }
        "hold" => prepared(device, hold::Options::parse(args)?, hold::run),
        "greedy" => prepared(device, greedy::Options::parse(args)?, greedy::run),
        "infer" => prepared(device, infer::Options::parse(args)?, infer::run),
        "load" => prepared(device, load::Options::parse(args)?, load::run),
        "time" => prepared(device, time::Options::parse(args)?, time::run),
        "churn" => prepared(device, churn::Options::parse(args)?, churn::run),
        other => return Err(Exit::usage(format!("unknown subcommand {other}\n\n{USAGE}"))),
    };
    if copies <= 1 { work() } else { processes::run(copies, work) }
}
