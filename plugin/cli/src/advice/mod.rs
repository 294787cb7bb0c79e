//! `tessera recommend` and `tessera waste`: what could be asked for instead, and what is held and not used.

#[cfg(test)]
mod documented;
mod recommend;
mod since;
#[cfg(test)]
mod tests;
mod text;
pub(crate) mod waste;

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tessera_api::admin::Unreachable;
use tessera_api::print::Paper;
use tessera_config::Config;
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_system::terminal;
use tessera_view::advice::{Recommendations, Waste};
use tessera_web::client::{Client, query};

pub use since::Since;

/// How far back waste looks where the question does not say, hours: a day and a night.
const WASTE_HOURS: u64 = 24;

/// `tessera recommend`.
#[derive(Debug, Args)]
pub struct RecommendArgs {
    /// The pod whose workload is judged, as NAME or NAMESPACE/NAME; all workloads where none is given
    #[arg(value_name = "POD", conflicts_with = "all")]
    pod: Option<String>,
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE", conflicts_with = "all")]
    namespace: Option<String>,
    /// Every workload of the node; the same as neither a pod nor a namespace
    #[arg(long)]
    all: bool,
    /// How far back, such as 12h or 7d [default: `advice.window`]
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: RecommendFormat,
}

/// `tessera waste`.
#[derive(Debug, Args)]
pub struct WasteArgs {
    /// Only this namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// How far back, such as 12h or 7d [default: 24h]
    #[arg(long, value_name = "TIME")]
    since: Option<Since>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: WasteFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RecommendFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum WasteFormat {
    /// For people
    Text,
    /// For programs
    Json,
    /// For spreadsheets: a line for each container
    Csv,
}

impl RecommendArgs {
    /// What is asked, as a path of the API.
    pub fn path(&self, now_unix_ms: i64) -> String {
        let since =
            self.since.map_or_else(String::new, |since| since.before(now_unix_ms).to_string());
        let namespace = self.namespace.as_deref().unwrap_or_default();
        let pod = self.pod.as_deref().unwrap_or_default();
        let parameters = [("namespace", namespace), ("pod", pod), ("since_unix_ms", &since)];
        format!("/api/v1/recommend{}", query(&parameters))
    }

    /// The answer, as it is to be printed.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn print(&self, advice: &Recommendations) -> anyhow::Result<String> {
        match self.output {
            RecommendFormat::Text => Ok(recommendations_text(advice)),
            RecommendFormat::Json => json(advice),
        }
    }
}

impl WasteArgs {
    /// What is asked, as a path of the API.
    pub fn path(&self, now_unix_ms: i64) -> String {
        let since = self.since.unwrap_or(Since::hours(WASTE_HOURS)).before(now_unix_ms).to_string();
        let namespace = self.namespace.as_deref().unwrap_or_default();
        format!("/api/v1/waste{}", query(&[("namespace", namespace), ("since_unix_ms", &since)]))
    }

    /// The answer, as it is to be printed.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn print(&self, waste: &Waste) -> anyhow::Result<String> {
        match self.output {
            WasteFormat::Text => Ok(waste_text(waste)),
            WasteFormat::Json => json(waste),
            WasteFormat::Csv => Ok(waste::csv(waste)),
        }
    }
}

/// Advice for people, as wide as standard output takes.
pub(crate) fn recommendations_text(advice: &Recommendations) -> String {
    recommend::text(advice, Paper::of_stdout(false))
}

/// Waste, likewise.
pub(crate) fn waste_text(waste: &Waste) -> String {
    waste::text(waste, Paper::of_stdout(false))
}

fn json(answer: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(answer)? + "\n")
}

/// Runs `tessera recommend`: asks the plugin of this node.
///
/// # Errors
/// The answer cannot be printed.
pub fn recommend(args: &RecommendArgs, config: &Config) -> anyhow::Result<ExitCode> {
    ask(config, &args.path(unix_ms()), |advice| args.print(advice))
}

/// Runs `tessera waste`: asks the plugin of this node.
///
/// # Errors
/// The answer cannot be printed.
pub fn waste(args: &WasteArgs, config: &Config) -> anyhow::Result<ExitCode> {
    ask(config, &args.path(unix_ms()), |waste| args.print(waste))
}

fn ask<T: DeserializeOwned>(
    config: &Config,
    path: &str,
    print: impl FnOnce(&T) -> anyhow::Result<String>,
) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(Client::at(&config.paths.admin).get(path)) {
        Ok(answer) => {
            let text = print(&answer)?;
            terminal::print(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            let (text, exit) = match Unreachable::of(&error, &config.paths.admin) {
                Some(silent) => (silent.sentence(config), silent.exit_status()),
                None => (error.to_string(), error.exit()),
            };
            eprintln!("tessera: {}", printable::line(&text));
            Ok(ExitCode::from(exit))
        }
    }
}
