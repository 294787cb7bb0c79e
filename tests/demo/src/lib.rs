//! `tessera demo`: the real plugin, real gRPC and real enforcement on a simulated GPU, in a few
//! seconds and without root.
//!
//! A child process runs `tessera serve` with a configuration of its own in a temporary directory; the
//! stand-in for kubelet admits four tenants through GetPreferredAllocation, Allocate and
//! PreStartContainer; each tenant runs in the surroundings that Allocate's answer describes
//! ([`container`]). One serves requests, alone first; one asks for more than its quota by every API
//! and from several processes; one is killed and comes back; one has two replicas. What each held is
//! judged by NVML's own account ([`account`], [`verdict`]), never by the shim's. Then two share the time
//! of one GPU, 75 to 25, and the same load runs without Tessera ([`division`]).
#![forbid(unsafe_code)]

mod account;
mod container;
mod division;
mod play;
mod progress;
mod report;
mod stage;
mod table;
mod tenant;
mod verdict;
mod view;

use std::ffi::OsString;
use std::process::ExitCode;

use stage::Scratch;

use tessera_config::Config;

/// Arguments of `tessera demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Use this machine's GPU instead of the simulated one
    #[arg(long)]
    real: bool,
    /// How long the tenants run, at least 6
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(6..))]
    seconds: u32,
    /// A line per second instead of the live view
    #[arg(long)]
    plain: bool,
    /// Leave the temporary directory, with the plugin's log and configuration, and say where it is
    #[arg(long)]
    keep: bool,
    /// Enter a tenant's surroundings, given as JSON, and become the command
    #[arg(long, hide = true, value_name = "JSON", requires = "command")]
    enter: Option<String>,
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true, requires = "enter")]
    command: Vec<OsString>,
}

/// Runs the demonstration. Fails if any quota was exceeded or a neighbour was harmed.
///
/// # Errors
/// What kept it from starting or from being judged.
pub fn main(args: Args, config: &Config) -> anyhow::Result<ExitCode> {
    if let Some(surroundings) = &args.enter {
        container::enter(surroundings, &args.command)?;
    }
    let scratch = Scratch::open(args.keep)?;
    if !args.real {
        scratch.simulate()?;
    }
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(play::run(&args, config, scratch))
}
