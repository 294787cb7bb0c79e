//! `history`: what was, as lines of bars in the terminal, or for programs.

mod chart;
mod text;

use std::process::ExitCode;

use tessera_api::print::{Page, Paper};
use tessera_model::clock::unix_ms;
use tessera_system::terminal;
use tessera_view::history::Query;

use crate::advice::Since;
use crate::output::{Format, show};
use crate::source::{Failure, Source, by_node, subject};

/// Columns where standard output is no terminal.
const COLUMNS: usize = 100;
/// Tenants with bars of their own.
const CHARTS: usize = 4;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
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
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

impl Args {
    fn query(&self, source: &Source, now_unix_ms: i64) -> Query {
        let namespace = source.namespace(self.namespace.as_deref());
        let asked = self.subject.clone().unwrap_or_default();
        let subject = match source {
            // It knows indexes and containers, too.
            Source::Node(_) => asked.clone(),
            Source::Cluster(..) => subject(&asked, &namespace),
        };
        // A subject that says its namespace, and a GPU, which has none, are of no other.
        let is_whole =
            asked.contains('/') || matches!(source, Source::Cluster(..)) && subject == asked;
        Query {
            namespace: if is_whole && !asked.is_empty() { String::new() } else { namespace },
            subject,
            since_unix_ms: self.since.before(now_unix_ms),
            until_unix_ms: self.until.map_or(0, |until| until.before(now_unix_ms)),
            // The finest that is known for all of that time.
            step_seconds: 0,
        }
    }
}

pub(crate) async fn main(args: &Args, source: &Source) -> Result<ExitCode, Failure> {
    let asked = args.query(source, unix_ms());
    let answers = source.histories(&asked).await?;
    let json = by_node(source, &answers, |_, answer| serde_json::json!(answer))?;
    let width = terminal::size().map_or(COLUMNS, |(columns, _)| usize::from(columns));
    // Of a whole namespace on many nodes, a line for each.
    let charts = match source {
        Source::Cluster(..) if asked.subject.is_empty() => 0,
        _ => CHARTS,
    };
    let (answers, silent) = answers;
    let text = |paper: Paper| {
        let mut page = Page::new(paper);
        for (node, answer) in &answers {
            if !node.is_empty() {
                page.labelled("", &format!("On node {node}:"));
            }
            page.push(&text::text(answer, &asked, width, charts));
        }
        page.notes(&silent);
        page.finish()
    };
    show(&json, args.output, text)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
