//! `recommend` and `waste`: what could be asked for instead, and what is held and not used.

#[cfg(test)]
mod documented;
mod recommend;
mod since;
#[cfg(test)]
mod tests;
mod waste;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tessera_model::clock::unix_ms;
use tessera_model::time_format;
use tessera_web::source::Scope;

pub use since::Since;

use crate::output::{Format, TableFormat, show, show_table};
use crate::source::{Failure, Source};

#[derive(Debug, Args)]
pub(crate) struct RecommendArgs {
    /// The pod whose workload is judged, as NAME or NAMESPACE/NAME; all workloads where none is given
    #[arg(value_name = "POD", conflicts_with = "all")]
    pod: Option<String>,
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE", conflicts_with = "all")]
    namespace: Option<String>,
    /// Every workload; the same as neither a pod nor a namespace
    #[arg(long)]
    all: bool,
    /// How far back, such as 12h or 7d [default: `advice.window`]
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Debug, Args)]
pub(crate) struct WasteArgs {
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// How far back, such as 12h or 7d: a day and a night
    #[arg(long, value_name = "TIME", default_value = "24h")]
    since: Since,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: TableFormat,
}

pub(crate) async fn recommend(args: &RecommendArgs, source: &Source) -> Result<ExitCode, Failure> {
    let namespace = source.namespace(args.namespace.as_deref());
    let (namespace, pod) = match args.pod.as_deref() {
        Some(pod) => pod.split_once('/').unwrap_or((&namespace, pod)),
        None => (namespace.as_str(), ""),
    };
    let scope = Scope {
        namespace: if args.all { String::new() } else { namespace.to_owned() },
        pod: pod.to_owned(),
        since_unix_ms: args.since.map_or(0, |since| since.before(unix_ms())),
    };
    let advice = source.recommendations(&scope).await?;
    show(&advice, args.output, |paper| recommend::text(&advice, paper))?;
    Ok(known(advice.workloads.is_empty(), &advice.remarks))
}

pub(crate) async fn waste(args: &WasteArgs, source: &Source) -> Result<ExitCode, Failure> {
    let scope = Scope {
        namespace: source.namespace(args.namespace.as_deref()),
        pod: String::new(),
        since_unix_ms: args.since.before(unix_ms()),
    };
    let waste = source.waste(&scope).await?;
    let text = |paper| waste::text(&waste, paper);
    show_table(&waste, args.output, text, || waste::csv(&waste))?;
    Ok(known(waste.namespaces.is_empty(), &waste.remarks))
}

/// The exit status: 1 where the answer is empty and says why.
fn known(is_empty: bool, remarks: &[String]) -> ExitCode {
    ExitCode::from(u8::from(is_empty && !remarks.is_empty()))
}

/// A name; a dash for none.
fn name(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// A length of time.
fn length(seconds: f64) -> String {
    // Seconds beyond what an instant can have are nobody's.
    let ms = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_millis();
    time_format::ago(0, i64::try_from(ms).unwrap_or(i64::MAX))
}
