//! `kubectl tessera recommend` and `waste`.

use std::fmt::Write;
use std::process::ExitCode;

use tessera_fleet::Fleet;
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_web::source::Scope;

use super::failure::Failure;
use super::options::{Common, Format};
use crate::advice::{Since, recommendations_text, waste_text};

/// Arguments of `kubectl tessera recommend`.
#[derive(Debug, clap::Args)]
pub(crate) struct RecommendArgs {
    /// Only the workload of this pod: NAME or NAMESPACE/NAME
    #[arg(value_name = "POD")]
    pod: Option<String>,
    /// How far back, such as 12h or 7d [default: the node's `advice.window`]
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

/// Arguments of `kubectl tessera waste`.
#[derive(Debug, clap::Args)]
pub(crate) struct WasteArgs {
    /// How far back, such as 12h or 7d
    #[arg(long, value_name = "TIME", default_value = "24h")]
    since: Since,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

pub(super) async fn recommend(
    fleet: &Fleet,
    common: &Common,
    args: &RecommendArgs,
) -> Result<ExitCode, Failure> {
    let namespace = common.namespace(fleet);
    let (namespace, pod) =
        match args.pod.as_deref().map(|pod| pod.split_once('/').unwrap_or((&namespace, pod))) {
            Some((namespace, pod)) => (namespace.to_owned(), pod.to_owned()),
            None => (namespace, String::new()),
        };
    let scope = Scope {
        namespace,
        pod,
        since_unix_ms: args.since.map_or(0, |since| since.before(unix_ms())),
    };
    let advice = fleet.recommendations(&scope).await?;
    match args.output {
        Format::Json => super::print_json(&advice)?,
        _ => super::print(&recommendations_text(&advice))?,
    }
    let is_known = !advice.workloads.is_empty() || advice.remarks.is_empty();
    Ok(if is_known { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

pub(super) async fn waste(
    fleet: &Fleet,
    common: &Common,
    args: &WasteArgs,
) -> Result<ExitCode, Failure> {
    let scope = Scope {
        namespace: common.namespace(fleet),
        pod: String::new(),
        since_unix_ms: args.since.before(unix_ms()),
    };
    let waste = fleet.waste(&scope).await?;
    match args.output {
        Format::Json => super::print_json(&waste)?,
        _ => super::print(&waste_text(&waste))?,
    }
    let is_known = !waste.namespaces.is_empty() || waste.remarks.is_empty();
    Ok(if is_known { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

pub(super) fn remarks(out: &mut String, remarks: &[String]) {
    for remark in remarks {
        let _ = writeln!(out, "! {}", printable::line(&printable::brief(remark, 400)));
    }
}
