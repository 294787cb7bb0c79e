//! `tessera explain`: asks the plugin; without one, reads the ledger and the pages themselves.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use tessera_kubelet_api::admin::ExplainResponse;

use super::{answer, offline, report};
use crate::admin;
use crate::admin::{EXIT_UNAVAILABLE, Format};
use tessera_config::Config;
use tessera_model::printable;

/// Arguments of `tessera explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A pod (NAME or NAMESPACE/NAME), a container, an allocation id, a GPU's UUID or index; of ids the
    /// first four characters are enough
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: String,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

/// Prints the explanation.
///
/// # Errors
/// Nothing is called so, or standard output.
pub fn main(args: &Args, config: &Config) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (told, code) = match runtime.block_on(admin::explain(&config.paths.admin, &args.subject)) {
        Ok(told) => (told, ExitCode::SUCCESS),
        Err(admin::Failure::Refused(message)) => anyhow::bail!(message),
        Err(admin::Failure::Silent(error)) => {
            let facts = offline::facts(config, &format!("{error:#}"));
            (answer(&facts, &args.subject)?, ExitCode::from(EXIT_UNAVAILABLE))
        }
    };
    print(&told, args.output)?;
    Ok(code)
}

fn print(told: &ExplainResponse, format: Format) -> anyhow::Result<()> {
    let text = match format {
        Format::Text => report::text(told),
        Format::Json => format!("{:#}\n", report::json(told)),
    };
    std::io::stdout().write_all(printable::lines(&text).as_bytes()).context("standard output")
}
