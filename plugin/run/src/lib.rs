//! `tessera run`: a quota for one command tree, with neither Kubernetes nor plugin.
//!
//! The command gets a pages directory of its own through `TESSERA_DIR` and the shim through
//! `LD_PRELOAD`; both are set for the command alone. The directory goes when the command has ended,
//! also by a signal. What a `tessera run` that was itself killed left behind, the next one removes.

// `terminal::print`: a reader that goes away, like `head`, must not end a process by a panic.
#![cfg_attr(not(test), deny(clippy::print_stdout))]
#![forbid(unsafe_code)]

mod gpus;
mod keeper;
mod overhead;
mod pages;
mod root;
mod shim;
mod supervise;

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use strum::VariantArray;
use tessera_config::Config;
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::monotonic_ns;
use tessera_model::gpu::Gpu;
use tessera_model::origin::Origin;
use tessera_model::percent::parse_cores;
use tessera_model::quantity::{format_bytes, parse_bytes};
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_region::layout::PAGES_DIR_ENV;
use tessera_region::quota::QuotaSpec;
use tessera_rules::allocate::{Catalogue, plan_share};
use tessera_tenant::regions;

pub use shim::{Artefact, find as find_artefact};

/// Context overhead of the simulated GPU's default configuration, bytes.
pub const SIM_CONTEXT_OVERHEAD: u64 = 128 << 20;

/// Arguments of `tessera run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Memory that all processes of the command together may hold on each GPU: 4GiB, 512Mi, 2G
    #[arg(long, short, value_name = "QUANTITY", value_parser = parse_bytes)]
    memory: u64,
    /// GPUs the command may use, by UUID or NVML index; CUDA shows it no others [default: all]
    #[arg(long, value_name = "UUID|INDEX", value_delimiter = ',')]
    gpu: Vec<String>,
    /// GPU time of each GPU, in percent: a weight beside other `tessera run`s, or a cap (--policy)
    #[arg(long, value_name = "PERCENT", default_value = "100", value_parser = parse_cores)]
    cores: u32,
    /// What --cores means: burst (a weight; idle time is anybody's), strict (also a cap) or none
    /// (GPU time is not divided)
    #[arg(long, value_name = "POLICY", value_parser = policy(), default_value = "burst")]
    policy: Compute,
    /// Charge for each CUDA context, memory that no allocation call shows [default: the
    /// configuration's gpus.context_overhead]
    #[arg(long, value_name = "QUANTITY", value_parser = parse_bytes)]
    context_overhead: Option<u64>,
    /// The shim to preload [default: libtessera.so beside tessera, or as installed]
    #[arg(long, value_name = "FILE")]
    shim: Option<PathBuf>,
    /// Use the simulated GPU beside this program instead of the machine's
    #[arg(long)]
    sim: bool,
    /// At the end, print peak use and refusals to standard error
    #[arg(long, short)]
    verbose: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// What `--cores` means, in a word.
pub fn policy() -> impl TypedValueParser<Value = Compute> {
    PossibleValuesParser::new(Compute::VARIANTS.iter().map(|policy| policy.into_str()))
        .map(|name| name.parse().unwrap_or_default())
}

/// Which GPUs CUDA shows a process.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// `tessera run` itself failed, before or beside the command; `env` and `timeout` use the same.
const OWN_FAILURE: u8 = 125;

/// Runs the command to its end; the exit code is its own, or 128 + the signal that ended it. As for
/// `env` and `timeout`, 127 and 126 mean that it could not be found or started, 125 that `tessera
/// run` could not do its part; then nothing is left behind.
///
/// # Errors
/// None: they are printed on standard error, so that they have a code of their own.
pub fn main(args: Args, config: &Config) -> anyhow::Result<ExitCode> {
    Ok(hold(args, config).unwrap_or_else(|error| {
        eprintln!("tessera: {}", tessera_model::printable::line(&format!("{error:#}")));
        ExitCode::from(OWN_FAILURE)
    }))
}

fn hold(args: Args, config: &Config) -> anyhow::Result<ExitCode> {
    if args.sim {
        enter_simulation()?;
    }
    let shim = shim::find(Artefact::SHIM, args.shim.as_deref())?;
    let mut of_gpus = config.gpus.clone();
    of_gpus.context_overhead_bytes = match args.context_overhead {
        None if args.sim => Some(SIM_CONTEXT_OVERHEAD),
        said => said.or(of_gpus.context_overhead_bytes),
    };
    let (all, silent) = gpus::list(config)?;
    let gpus = gpus::select((&all, &silent), &args.gpu)?;
    if args.gpu.is_empty() {
        for gpu in &silent {
            eprintln!("tessera: {}", tessera_model::printable::line(&gpu.unusable()));
        }
    }
    for gpu in &gpus {
        gpus::check(gpu, args.memory, gpu.context_overhead(of_gpus.context_overhead_bytes))?;
    }
    let grant = |gpu: &Gpu| Grant {
        uuid: gpu.uuid.clone(),
        memory_limit_bytes: args.memory,
        context_overhead_bytes: 0,
        cores_millis: args.cores,
        compute: args.policy,
    };
    let root = root::Root::open()?;
    root::refuse()?;
    // Pids come again, and what a killed run has left may still be served.
    let name = format!("run-{}-{:x}", std::process::id(), monotonic_ns());
    let id = AllocationId::of("run", [name.as_str()]);
    let asked = Record::new(id, 1, gpus.iter().map(grant).collect());
    let catalogue = Catalogue::new(&all, &Config { gpus: of_gpus, ..config.clone() });
    let record = plan_share(&catalogue, &Record { origin: Origin::Run, ..asked })?;
    pages::sweep(&root);
    let spec = QuotaSpec { allocation: name, ..regions::spec(&record) };
    let pages = pages::Pages::create(&root, &spec).context("cannot make the pages")?;
    let keeper = keeper::Keeper::start(root, &config.compute);
    if args.policy != Compute::None {
        keeper.wait_for(&pages.dir);
    }

    let mut command = Command::new(&args.command[0]);
    command
        .args(&args.command[1..])
        .env(PAGES_DIR_ENV, &pages.dir)
        .env("LD_PRELOAD", preload(shim.as_os_str(), std::env::var_os("LD_PRELOAD")));
    let named = gpus::are_named(&args.gpu, config, &silent);
    let has_own = std::env::var_os(VISIBLE_DEVICES).is_some();
    if let Some(list) = gpus::visible(&all, &gpus, named, has_own) {
        command.env(VISIBLE_DEVICES, list);
    }
    let mut observer = overhead::Observer::default();
    let discovery = NvmlDiscovery::new(config.paths.nvml.clone());
    // In the order of the pages.
    let mut paged = gpus.clone();
    paged.sort_by(|a, b| a.uuid.cmp(&b.uuid));
    let uuids = paged.iter().map(|gpu| gpu.uuid.clone());
    let mut overhead = overhead::Overhead::new(Box::new(discovery), &pages.dir, uuids)?;
    let outcome = supervise::run(command, || {
        if let Ok(snapshot) = pages.usage.snapshot() {
            observer.see(&snapshot, overhead.ended());
            return overhead.tick(&snapshot, &pages.quota, &pages.usage);
        }
        overhead::IDLE
    });
    if args.verbose {
        // The last look: the processes are gone, what they wrote is not, wherever it is by now.
        if let Ok(snapshot) = pages.usage.snapshot() {
            observer.see(&snapshot, overhead.ended());
        }
        for (gpu, line) in paged.iter().zip(observer.lines()) {
            eprintln!(
                "tessera: {} ({}): {line} of {}",
                gpu.uuid,
                gpu.name,
                format_bytes(args.memory)
            );
        }
        eprintln!("tessera: {} requests refused", observer.refusals());
    }
    drop(pages);
    // After the pages, whose directory is then gone.
    keeper.end();
    outcome.map(ExitCode::from)
}

/// `LD_PRELOAD` with the shim first: what the user preloads keeps working behind it.
fn preload(shim: &OsStr, inherited: Option<OsString>) -> OsString {
    let mut value = shim.to_owned();
    if let Some(inherited) = inherited.filter(|v| !v.is_empty()) {
        value.push(":");
        value.push(inherited);
    }
    value
}

/// Puts the simulated libraries first on the loader's path, which takes a fresh start of this
/// program: the loader reads `LD_LIBRARY_PATH` once. Returns where that has been done already.
fn enter_simulation() -> anyhow::Result<()> {
    let sim = shim::find(Artefact::SIMULATION, None)?;
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let first = std::env::split_paths(&path).next();
    if first.as_deref() == Some(sim.as_path()) {
        return Ok(());
    }
    let rest = std::env::split_paths(&path).filter(|p| !p.as_os_str().is_empty() && *p != sim);
    let with_sim = std::env::join_paths(std::iter::once(sim.clone()).chain(rest))
        .context("the simulator's path cannot stand in LD_LIBRARY_PATH")?;
    let mut arguments = std::env::args_os();
    let name = arguments.next();
    let exe = std::env::current_exe().context("/proc is not mounted")?;
    let mut again = Command::new(exe);
    if let Some(name) = name {
        again.arg0(name);
    }
    again.args(arguments).env("LD_LIBRARY_PATH", with_sim);
    Err(again.exec()).context("cannot start again with the simulated GPU")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_both_spellings() {
        assert_eq!(parse_bytes("4GiB"), Ok(4 << 30));
        assert_eq!(parse_bytes("4Gi"), Ok(4 << 30));
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        assert_eq!(parse_bytes("129e6"), Ok(129_000_000));
        assert_eq!(parse_bytes("1.5GiB"), Ok(3 << 29));
        for bad in ["4B", "B", "GiB", "-1Gi", "4 apples", ""] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cores_are_percent() {
        for (text, millis) in [("30", 300), ("30%", 300), ("12.5", 125), ("0.1", 1), ("100", 1000)]
        {
            assert_eq!(parse_cores(text), Ok(millis), "{text}");
        }
        for bad in ["", "0", "101", "100.1", "-1", "+5", "1.25", "5.", ".5", "half"] {
            assert!(parse_cores(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_shim_comes_before_what_was_preloaded() {
        assert_eq!(preload(OsStr::new("/s.so"), None), "/s.so");
        assert_eq!(preload(OsStr::new("/s.so"), Some("".into())), "/s.so");
        assert_eq!(preload(OsStr::new("/s.so"), Some("/a.so:/b.so".into())), "/s.so:/a.so:/b.so");
    }
}
