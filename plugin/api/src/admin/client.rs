//! `tessera status`: asks the plugin; without one, reads the ledger and the pages.

use std::process::ExitCode;

use tessera_kubelet_api::admin::{Gpu, LiveRequest, Registration, StatusResponse};

use super::reach::{EXIT_UNAVAILABLE, Unreachable, again_if_broken, ask, call};
use super::{json, text};
use crate::offline;
use crate::print::Paper;
use tessera_config::Config;
use tessera_model::printable;
use tessera_system::terminal;

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

/// Why there is no plugin's answer, and what is shown instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Silence {
    /// What is wrong and what to do.
    pub sentence: String,
    /// When the plugin last wrote its ledger, if it ever did.
    pub wrote_unix_ms: Option<i64>,
}

/// Prints the status. With `ready`, prints problems only, and the exit status says
/// whether the node offers the resource: a readiness probe.
///
/// # Errors
/// The answer cannot be printed.
pub fn main(config: &Config, format: StatusFormat, ready: bool) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(ask(&config.paths.admin));
    if ready {
        return Ok(match answer {
            Ok(status) => readiness(&status),
            Err(error) => unreachable(&error, config),
        });
    }
    let (status, silence, code) = match answer {
        Ok(status) => {
            // Somebody who waits for GPUs waits for this, too.
            let is_left_out = |gpu: &Gpu| gpu.memory_total_bytes == 0;
            let code = if status.gpus.iter().all(is_left_out) { EXIT_UNAVAILABLE } else { 0 };
            (status, None, code)
        }
        Err(error) => {
            let sentence = error.sentence(config);
            let wrote_unix_ms = offline::last_write(config);
            (
                offline::status(config),
                Some(Silence { sentence, wrote_unix_ms }),
                error.exit_status(),
            )
        }
    };
    let paper = Paper::of_stdout(format == StatusFormat::Wide);
    let text = match format {
        StatusFormat::Text | StatusFormat::Wide => text::text(&status, silence.as_ref(), paper),
        StatusFormat::Json => format!("{:#}\n", with_silence(&status, silence.as_ref())),
    };
    terminal::print(&text)?;
    Ok(ExitCode::from(code))
}

/// The status for programs, and why it is not the plugin's.
fn with_silence(status: &StatusResponse, silence: Option<&Silence>) -> serde_json::Value {
    let mut value = json::json(status);
    value["plugin_silent"] = silence.map_or(serde_json::Value::Null, |silence| {
        serde_json::json!({
            "reason": silence.sentence,
            "last_write_unix_ms": silence.wrote_unix_ms,
        })
    });
    if let (Some(silence), Some(warnings)) = (silence, value["warnings"].as_array_mut()) {
        warnings.insert(0, format!("{}; {}", silence.sentence, offline::WHAT_HOLDS).into());
    }
    value
}

fn readiness(status: &StatusResponse) -> ExitCode {
    let plugin = status.plugin.clone().unwrap_or_default();
    if plugin.registration() == Registration::Live {
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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let live = async || {
        call(&config.paths.admin, async |mut client| client.live(LiveRequest {}).await).await
    };
    Ok(match runtime.block_on(again_if_broken(live)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(super::reach::CallError::Unreachable(error)) => unreachable(&error, config),
        Err(super::reach::CallError::Refused(status)) => {
            eprintln!("tessera: {}", printable::line(status.message()));
            ExitCode::from(EXIT_UNAVAILABLE)
        }
    })
}
