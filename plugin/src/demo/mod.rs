//! `tessera demo`: the real plugin on the simulated GPU, with a stand-in for kubelet.

use std::process::ExitCode;

use crate::config::Config;

/// Arguments of `tessera demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Use this machine's GPU instead of the simulated one.
    #[arg(long)]
    pub real: bool,
}

/// Runs the demonstration.
///
/// # Errors
/// What kept it from starting.
pub fn main(_args: Args, _config: &Config) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`tessera demo` is not in this build")
}
