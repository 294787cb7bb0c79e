//! `tessera history`: what was, as a chart in the terminal, or for programs.

mod chart;
mod columns;
mod csv;
mod text;

use std::process::ExitCode;

use tessera_api::admin::Unreachable;
use tessera_config::Config;
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_system::terminal;
use tessera_view::history::{Answer, Query};
use tessera_web::client::{Client, query};

use crate::advice::Since;
use chart::Style;

/// Columns where standard output is no terminal.
const COLUMNS: usize = 100;

/// `tessera history`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A pod (NAME or NAMESPACE/NAME), a container, an allocation id, a GPU's UUID or index; of ids the first
    /// four characters are enough. All GPUs where it is left out
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: Option<String>,
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// From how long ago, such as 90m, 12h or 7d
    #[arg(long, value_name = "TIME", default_value = "6h")]
    since: Since,
    /// Until how long ago [default: now]
    #[arg(long, value_name = "TIME")]
    until: Option<Since>,
    /// Length of a bucket; the finest that is known for all of that time where it is left out
    #[arg(long, value_enum, value_name = "TIME")]
    step: Option<Step>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people
    Text,
    /// For spreadsheets: a line for each bucket
    Csv,
    /// For programs
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Step {
    /// Ten seconds
    #[value(name = "10s")]
    Fine,
    /// Five minutes
    #[value(name = "5m")]
    Middle,
    /// One hour
    #[value(name = "1h")]
    Coarse,
}

impl Args {
    fn query(&self, now_unix_ms: i64) -> Query {
        Query {
            subject: self.subject.clone().unwrap_or_default(),
            namespace: self.namespace.clone().unwrap_or_default(),
            since_unix_ms: self.since.before(now_unix_ms),
            until_unix_ms: self.until.map_or(0, |until| until.before(now_unix_ms)),
            step_seconds: match self.step {
                None => 0,
                Some(Step::Fine) => 10,
                Some(Step::Middle) => 300,
                Some(Step::Coarse) => 3600,
            },
        }
    }

    fn print(&self, answer: &Answer, asked: &Query) -> anyhow::Result<()> {
        let text = match self.output {
            Format::Json => serde_json::to_string_pretty(answer)? + "\n",
            Format::Csv => csv::csv(answer),
            Format::Text => {
                let size = terminal::size();
                let look = terminal::Look::from_env();
                let style = Style {
                    width: size.map_or(COLUMNS, |(columns, _)| usize::from(columns)),
                    unicode: look.unicode,
                    colour: look.colour && size.is_some(),
                };
                text::text(answer, asked, style)
            }
        };
        Ok(terminal::print(&text)?)
    }
}

/// An answer for people, without colour.
pub(crate) fn plain(answer: &Answer, asked: &Query) -> String {
    let width = terminal::size().map_or(COLUMNS, |(columns, _)| usize::from(columns));
    let unicode = terminal::Look::from_env().unicode;
    text::text(answer, asked, Style { width, unicode, colour: false })
}

/// A question as a path of the API.
fn path(query_: &Query) -> String {
    let number = |number: i64| if number == 0 { String::new() } else { number.to_string() };
    let (since, until) = (number(query_.since_unix_ms), number(query_.until_unix_ms));
    let step = number(query_.step_seconds.into());
    let parameters = [
        ("subject", query_.subject.as_str()),
        ("namespace", &query_.namespace),
        ("since_unix_ms", &since),
        ("until_unix_ms", &until),
        ("step_seconds", &step),
    ];
    format!("/api/v1/history{}", query(&parameters))
}

/// Runs `tessera history`: asks the plugin of this node, and without one reads a copy of its file.
///
/// # Errors
/// Standard output.
pub fn main(args: &Args, config: &Config) -> anyhow::Result<ExitCode> {
    let asked = args.query(unix_ms());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = Client::at(&config.paths.admin);
    let failed = |text: &str, code: u8| {
        eprintln!("tessera: {}", printable::line(text));
        Ok(ExitCode::from(code))
    };
    match runtime.block_on(client.get::<Answer>(&path(&asked))) {
        Ok(answer) => {
            args.print(&answer, &asked)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            let Some(silent) = Unreachable::of(&error, &config.paths.admin) else {
                return failed(&error.to_string(), error.exit());
            };
            failed(&silent.sentence(config), silent.exit_status())
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
