//! `tessera explain`: asks the plugin.

use std::process::ExitCode;

use tessera_kubelet_api::admin::ExplainResponse;

use super::report;
use crate::admin;
use crate::admin::{CallError, EXIT_USAGE, StatusFormat};
use crate::print::{Page, Paper};
use tessera_config::Config;
use tessera_model::printable;
use tessera_system::terminal;

/// Arguments of `tessera explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A pod (NAME or NAMESPACE/NAME), a container, an allocation id, a GPU's UUID or index; of ids the
    /// first four characters are enough
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: String,
    #[arg(long, short, value_enum, default_value = "text")]
    output: StatusFormat,
}

/// Where the text of an explanation's labelled lines begins.
const TEXT: usize = 13;

/// An explanation's text as standard output takes it: long lines are broken.
pub fn on_paper(text: &str, paper: Paper) -> String {
    let mut page = Page::new(paper);
    page.lines(TEXT, text);
    page.finish()
}

/// Prints the explanation.
///
/// # Errors
/// Nothing is called so, or standard output.
pub fn main(args: &Args, config: &Config) -> anyhow::Result<ExitCode> {
    if args.subject.trim().is_empty() {
        eprintln!("tessera: name a pod, an allocation or a GPU");
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(admin::explain(&config.paths.admin, &args.subject));
    let explained = match answer {
        Ok(explained) => explained,
        Err(CallError::Refused(status)) => anyhow::bail!(status.message().to_owned()),
        Err(CallError::Unreachable(error)) => return Ok(admin::unreachable(&error, config)),
    };
    print(&explained, args.output)?;
    Ok(ExitCode::SUCCESS)
}

fn print(explained: &ExplainResponse, format: StatusFormat) -> anyhow::Result<()> {
    let shown = report::view(explained)?;
    let text = match format {
        StatusFormat::Text | StatusFormat::Wide => {
            on_paper(&shown.text(), Paper::of_stdout(format == StatusFormat::Wide))
        }
        StatusFormat::Json => format!("{:#}\n", serde_json::to_value(&shown)?),
    };
    Ok(terminal::print(&printable::lines(&text))?)
}
