//! `tessera explain`: asks the plugin.

use std::process::ExitCode;

use crate::admin;
use crate::admin::reach::client;
use crate::admin::{EXIT_USAGE, StatusFormat, Unreachable, now};
use crate::print::{self, Page, Paper};
use tessera_config::Config;
use tessera_model::printable;
use tessera_system::terminal;
use tessera_view::explain::Explanation;
use tessera_web::client::query;

/// Arguments of `tessera explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A pod (NAME or NAMESPACE/NAME), a container, an allocation id, a GPU's UUID or index; of ids the
    /// first four characters are enough
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: String,
    /// The pod's namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
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
    let socket = &config.paths.admin;
    let subject = match &args.namespace {
        Some(namespace) if !args.subject.contains('/') => format!("{namespace}/{}", args.subject),
        _ => args.subject.clone(),
    };
    let path = format!("/api/v1/explain{}", query(&[("subject", &subject)]));
    let explained = match now(client(socket).get::<Explanation>(&path))? {
        Ok(explained) => explained,
        Err(error) => match Unreachable::of(&error, socket) {
            Some(error) => return Ok(admin::unreachable(&error, config)),
            None => anyhow::bail!(error.to_string()),
        },
    };
    print(&explained, args.output)?;
    Ok(ExitCode::SUCCESS)
}

fn print(explained: &Explanation, format: StatusFormat) -> anyhow::Result<()> {
    let text = match format {
        StatusFormat::Text | StatusFormat::Wide => {
            on_paper(&explained.text(), Paper::of_stdout(format == StatusFormat::Wide))
        }
        StatusFormat::Json => print::json(explained)?,
    };
    Ok(terminal::print(&printable::lines(&text))?)
}
