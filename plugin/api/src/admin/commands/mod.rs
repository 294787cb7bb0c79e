//! `tessera quota`, `tessera cordon` and `tessera uncordon`: ask the plugin and print its answer.

mod cordon;
mod quota;

use std::process::ExitCode;

use serde_json::Value;
use tessera_kubelet_api::admin::admin_client::AdminClient;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::client::{Format, unreachable};
use super::reach::{CallError, Cause, Unreachable, call_now};
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

fn ask<T, F: Future<Output = Result<Response<T>, Status>>>(
    config: &Config,
    call: impl FnOnce(AdminClient<Channel>) -> F,
) -> anyhow::Result<Result<T, Failed>> {
    Ok(call_now(&config.paths.admin, call)?.map_err(|error| {
        match error {
        CallError::Unreachable(error) => Failed::Unreachable(error),
        CallError::Refused(status) if status.code() == Code::Unimplemented => Failed::Said(
            "the plugin that runs here is of an older version and cannot do that; `tessera status` \
             says which"
                .to_owned(),
        ),
        CallError::Refused(status) => Failed::Said(status.message().to_owned()),
    }
    }))
}

fn show<T>(
    answer: Result<T, Failed>,
    output: Format,
    config: &Config,
    text: impl FnOnce(&T) -> String,
    json: impl FnOnce(&T) -> Value,
) -> anyhow::Result<ExitCode> {
    let answer = match answer {
        Ok(answer) => answer,
        Err(Failed::Said(text)) => {
            eprintln!("tessera: {}", printable::line(&text));
            return Ok(ExitCode::FAILURE);
        }
        Err(Failed::Unreachable(error)) => {
            let code = unreachable(&error, config);
            if error.cause == Cause::Late {
                eprintln!("what was asked may still be done");
            }
            return Ok(code);
        }
    };
    let text = match output {
        Format::Text => text(&answer),
        Format::Json => format!("{:#}\n", json(&answer)),
    };
    terminal::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
