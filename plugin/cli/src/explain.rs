//! `explain`.

use std::process::ExitCode;

use serde_json::json;
use tessera_api::print::{Page, Paper};
use tessera_fleet::merge::Answered;
use tessera_view::explain::Explanation;

use crate::output::{Format, show};
use crate::source::{Failure, Source, by_node};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A pod (NAME or NAMESPACE/NAME), a container, an allocation id, a GPU's UUID or (on the node) index; of ids the
    /// first four characters are enough
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: String,
    /// The pod's namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

/// Where the text of an explanation's labelled lines begins.
const TEXT: usize = 13;

pub(crate) async fn main(args: &Args, source: &Source) -> Result<ExitCode, Failure> {
    let namespace = source.namespace(args.namespace.as_deref());
    let answers = source.explanations(&args.subject, &namespace).await?;
    let json = by_node(
        source,
        &answers,
        |node, explanation| json!({ "node": node, "explanation": explanation }),
    )?;
    show(&json, args.output, |paper| text(&answers, paper))?;
    Ok(ExitCode::SUCCESS)
}

/// Long lines are broken.
fn text((answers, silent): &Answered<Explanation>, paper: Paper) -> String {
    let mut page = Page::new(paper);
    for (at, (node, explanation)) in answers.iter().enumerate() {
        if at > 0 {
            page.gap();
        }
        if !node.is_empty() {
            page.lines(TEXT, &format!("On node {node}:"));
        }
        page.lines(TEXT, &explanation.text());
    }
    page.notes(silent);
    page.finish()
}
