//! `kubectl tessera why-pending`.

use std::process::ExitCode;

use tessera_fleet::{Fleet, pending};

use super::failure::Failure;
use super::options::{Common, Format};

/// Arguments of `kubectl tessera why-pending`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The pod: NAME or NAMESPACE/NAME
    #[arg(value_name = "PENDING")]
    pod: String,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

pub(super) async fn main(fleet: &Fleet, common: &Common, args: &Args) -> Result<ExitCode, Failure> {
    let context = common.namespace(fleet);
    let (namespace, name) = args.pod.split_once('/').unwrap_or((context.as_str(), &args.pod));
    if namespace.is_empty() {
        return Err(Failure::usage("say the pod's namespace: NAMESPACE/NAME, or -n NAMESPACE"));
    }
    let Some(facts) = pending::facts(fleet, namespace, name).await? else {
        return Err(Failure::failed(format!("there is no pod {name} in namespace {namespace}")));
    };
    let verdict = pending::judge(&facts);
    match args.output {
        Format::Json => super::print_json(&verdict)?,
        _ => super::print(&pending::text(&verdict))?,
    }
    Ok(ExitCode::SUCCESS)
}
