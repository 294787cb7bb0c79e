//! `tessera status`: asks the plugin.

use std::process::ExitCode;

use super::reach::{self, EXIT_UNAVAILABLE, Unreachable, ask, now};
use super::text;
use crate::print::{self, Paper};
use tessera_config::Config;
use tessera_model::printable;
use tessera_system::terminal;
use tessera_view::status::{Gpu, LIVE, Registration, Status};

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// How to print a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum StatusFormat {
    /// For people, in 120 columns and fewer.
    Text,
    /// For people: every column, whole ids and names, in lines as long as that takes.
    Wide,
    /// For programs.
    Json,
}

/// Pods while there is no plugin.
const WHAT_HOLDS: &str = "running pods keep their limits, and new ones wait for the plugin";

/// Prints the status. With `ready`, prints problems only, and the exit status says
/// whether the node offers the resource: a readiness probe.
///
/// # Errors
/// The answer cannot be printed.
pub fn main(config: &Config, format: StatusFormat, ready: bool) -> anyhow::Result<ExitCode> {
    let answer = now(ask(&config.paths.admin))?;
    if ready {
        return Ok(match answer {
            Ok(status) => readiness(&status),
            Err(error) => unreachable(&error, config),
        });
    }
    let status = match answer {
        Ok(status) => status,
        Err(error) => {
            let code = unreachable(&error, config);
            eprintln!("tessera: {WHAT_HOLDS}");
            return Ok(code);
        }
    };
    // Somebody who waits for GPUs waits for this, too.
    let is_left_out = |gpu: &Gpu| gpu.memory_total_bytes == 0;
    let code = if status.gpus.iter().all(is_left_out) { EXIT_UNAVAILABLE } else { 0 };
    let paper = Paper::of_stdout(format == StatusFormat::Wide);
    let text = match format {
        StatusFormat::Text | StatusFormat::Wide => text::text(&status, paper),
        StatusFormat::Json => print::json(&status)?,
    };
    terminal::print(&text)?;
    Ok(ExitCode::from(code))
}

fn readiness(status: &Status) -> ExitCode {
    let plugin = &status.plugin;
    if plugin.registration == Registration::Live {
        return ExitCode::SUCCESS;
    }
    let why = match plugin.registration_error.as_str() {
        "" => "kubelet has not taken the registration yet, or has not been asked",
        error => error,
    };
    eprintln!("not registered: {}", printable::line(why));
    for warning in &status.warnings {
        eprintln!("{}", printable::line(warning));
    }
    ExitCode::FAILURE
}

/// Says why the plugin cannot be asked, and what to do.
pub fn unreachable(error: &Unreachable, config: &Config) -> ExitCode {
    eprintln!("tessera: {}", printable::line(&error.sentence(config)));
    ExitCode::from(error.exit_status())
}

/// Whether the plugin answers at all: a liveness probe. Says nothing of kubelet, GPUs or pages, for none
/// of which a restart would be of use.
///
/// # Errors
/// No runtime.
pub fn live(config: &Config) -> anyhow::Result<ExitCode> {
    let answer = now(reach::get::<serde_json::Value>(&config.paths.admin, LIVE))?;
    Ok(match answer {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => match Unreachable::of(&error, &config.paths.admin) {
            Some(error) => unreachable(&error, config),
            None => {
                eprintln!("tessera: {}", printable::line(&error.to_string()));
                ExitCode::from(EXIT_UNAVAILABLE)
            }
        },
    })
}
