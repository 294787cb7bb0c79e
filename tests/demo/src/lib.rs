//! `tessera demo`: the real plugin, real gRPC and real enforcement on a simulated GPU, in a few
//! seconds and without root.
//!
//! It plays on one node of a sandbox (`tessera_sandbox`): a child process runs `tessera serve` with a
//! configuration of its own in a temporary directory; the stand-in for kubelet admits four tenants
//! through GetPreferredAllocation, Allocate and PreStartContainer; each tenant runs in the surroundings
//! that Allocate's answer describes. One serves requests, alone first; one asks for more than its quota by every API
//! and from several processes; one is killed and comes back; one has two replicas. What each held is
//! judged by NVML's own account ([`account`], [`verdict`]), never by the shim's. Then two share the time
//! of one GPU, 75 to 25, and the same load runs without Tessera ([`division`]).

// `terminal::print`: a reader that goes away, like `head`, must not end a process by a panic.
#![cfg_attr(not(test), deny(clippy::print_stdout))]
#![forbid(unsafe_code)]

mod account;
mod calm;
mod clock;
mod division;
mod latency;
mod play;
mod progress;
mod report;
mod stage;
mod table;
mod tenant;
mod verdict;
mod view;

use std::process::ExitCode;

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
}

/// Runs the demonstration. Fails if any quota was exceeded or a neighbour was harmed.
///
/// # Errors
/// What kept it from starting or from being judged.
pub fn main(args: Args, config: &Config) -> anyhow::Result<ExitCode> {
    let scratch = stage::enter(!args.real, args.keep)?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(play::run(&args, config, scratch))
}
