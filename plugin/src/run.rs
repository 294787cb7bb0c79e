//! `tessera run`: a quota for one command tree, with neither Kubernetes nor plugin.

use std::ffi::OsString;
use std::process::ExitCode;

use crate::config::Config;

/// Arguments of `tessera run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// Runs the command.
///
/// # Errors
/// What kept the command from starting.
pub fn main(_args: Args, _config: &Config) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`tessera run` is not in this build")
}
