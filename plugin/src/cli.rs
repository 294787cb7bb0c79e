//! The command line: parse, build, run, drain.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{Config, ConfigError};
use crate::{demo, run};

/// `EX_USAGE`: the configuration or the command line is wrong; starting again will not help.
pub const EXIT_USAGE: u8 = 64;

/// Shares NVIDIA GPUs among inference containers, each held to its quota.
#[derive(Debug, Parser)]
#[command(name = "tessera", version, propagate_version = true)]
struct Cli {
    /// Configuration file [default: /etc/tessera/config.toml where it exists]
    #[arg(long, short, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Hold one command tree to a quota, without Kubernetes
    Run(run::Args),
    /// Show the whole of Tessera on a simulated GPU
    Demo(demo::Args),
}

/// Runs `tessera` with these arguments.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing can be done about a closed standard output.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = Config::find(cli.config.as_deref()).map_err(anyhow::Error::from).and_then(
        |config| match cli.command {
            Command::Run(args) => run::main(args, &config),
            Command::Demo(args) => demo::main(args, &config),
        },
    );
    outcome.unwrap_or_else(|error| {
        eprintln!("tessera: {error:#}");
        match error.downcast_ref::<ConfigError>() {
            Some(_) => ExitCode::from(EXIT_USAGE),
            None => ExitCode::FAILURE,
        }
    })
}
