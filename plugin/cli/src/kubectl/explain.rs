//! `kubectl tessera explain`.

use std::process::ExitCode;

use serde_json::{Value, json};
use tessera_api::print::Paper;
use tessera_fleet::{AskError, Fleet, FleetError, answered};
use tessera_view::API_VERSION;
use tessera_view::explain::Explanation;

use super::advice::remarks;
use super::failure::Failure;
use super::options::{Common, Format};
use super::scope;

/// Arguments of `kubectl tessera explain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A pod (NAME or NAMESPACE/NAME), an allocation's id or a GPU's UUID
    #[arg(value_name = "POD|ALLOCATION|GPU")]
    subject: String,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

type Answers = Vec<(String, Result<Explanation, AskError>)>;

pub(super) async fn main(fleet: &Fleet, common: &Common, args: &Args) -> Result<ExitCode, Failure> {
    let namespace = common.namespace(fleet);
    let node = common.one_node()?;
    let subject = scope::subject(&args.subject, &namespace);
    let ask = async |subject: &str| -> Result<Answers, FleetError> {
        fleet.explanations(node, subject).await
    };
    let mut answers = ask(&subject).await?;
    let knows_none = |answers: &Answers| answers.iter().all(|(_, answer)| answer.is_err());
    if subject != args.subject && knows_none(&answers) {
        // It may be an allocation's id.
        let others = ask(&args.subject).await?;
        if !knows_none(&others) {
            answers = others;
        }
    }
    let (answered, silent) = answered(answers)?;
    if args.output == Format::Json {
        let nodes: Vec<Value> = answered
            .iter()
            .map(|(node, explanation)| json!({ "node": node, "explanation": explanation }))
            .collect();
        super::print_json(
            &json!({ "api_version": API_VERSION, "nodes": nodes, "remarks": silent }),
        )?;
    } else {
        for (at, (node, explanation)) in answered.iter().enumerate() {
            let gap = if at > 0 { "\n" } else { "" };
            let text = tessera_api::explain::on_paper(&explanation.text(), Paper::of_stdout(false));
            super::print(&format!("{gap}On node {node}:\n{text}"))?;
        }
        let mut out = String::new();
        remarks(&mut out, &silent);
        super::print(&out)?;
    }
    Ok(ExitCode::SUCCESS)
}
