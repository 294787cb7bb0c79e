//! `tessera quota`, `tessera cordon` and `tessera uncordon`: ask the plugin and print its answer.

mod cordon;
mod quota;

use std::process::ExitCode;

use serde::Serialize;
use tessera_view::change::Call;
use tessera_web::client::ClientError;

use super::client::{Format, unreachable};
use super::reach::{Cause, Unreachable, call, now};
use crate::print;
pub use cordon::{CordonArgs, UncordonArgs, cordon, uncordon};
pub use quota::{QuotaCommand, quota};
use tessera_config::Config;
use tessera_model::printable;
use tessera_system::terminal;

/// Why there is no answer.
#[derive(Debug)]
enum Failed {
    /// The plugin cannot be asked.
    Unreachable(Unreachable),
    /// The plugin, or this program, says why.
    Said(String),
}

fn failed(error: &ClientError, config: &Config) -> Failed {
    match Unreachable::of(error, &config.paths.admin) {
        Some(error) => Failed::Unreachable(error),
        None => Failed::Said(error.to_string()),
    }
}

fn ask<C: Call>(config: &Config, request: &C) -> anyhow::Result<Result<C::Answer, Failed>> {
    let answer = now(call(&config.paths.admin, request))?;
    Ok(answer.map_err(|error| failed(&error, config)))
}

fn show<T: Serialize>(
    answer: Result<T, Failed>,
    output: Format,
    config: &Config,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<ExitCode> {
    let answer = match answer {
        Ok(answer) => answer,
        Err(Failed::Said(text)) => {
            eprintln!("tessera: {}", printable::line(&text));
            return Ok(ExitCode::FAILURE);
        }
        Err(Failed::Unreachable(error)) => {
            let code = unreachable(&error, config);
            if matches!(error.cause, Cause::Late(_)) {
                eprintln!("what was asked may still be done");
            }
            return Ok(code);
        }
    };
    let text = match output {
        Format::Text => text(&answer),
        Format::Json => print::json(&answer)?,
    };
    terminal::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
