//! `top`: live use of GPUs, of this node or of a cluster's. It asks again and again and computes rates from one answer to
//! the next.
//!
//! [`model`] and [`view`] are pure; [`feed`] asks, [`screen`] owns the terminal.

mod feed;
mod model;
mod screen;
mod view;

use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use model::{Model, Sort};
use serde_json::{Value, json};
use tessera_model::clock::unix_ms;
use tessera_model::duration;
use tessera_system::terminal::{self, is_dumb};
use tessera_view::API_VERSION;
use view::Moment;

use crate::output::Format;
use crate::source::{Failure, Source};
use crate::wait;

/// Shortest interval: an answer takes the plugin some hundred microseconds for each allocation.
const LEAST: Duration = Duration::from_millis(100);
/// The same where the API server is between.
const LEAST_OF_CLUSTER: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How often to ask, at least 100ms [default: 1s]; of a cluster, at least 1s [default: 2s]
    #[arg(long, short, value_name = "TIME", value_parser = interval)]
    interval: Option<Duration>,
    /// Print one frame as plain text and end; rates are those of one interval
    #[arg(long)]
    once: bool,
    /// Output format; json is one frame
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
    /// What to sort by
    #[arg(long, short, value_enum, default_value = "memory")]
    sort: Sort,
    /// Sort the other way round
    #[arg(long)]
    reverse: bool,
    /// Show only pods of this namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Show only pods, containers, nodes, GPUs and allocations whose names contain this
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
}

fn interval(text: &str) -> Result<Duration, String> {
    at_least(LEAST, duration::parse(text)?)
}

fn at_least(least: Duration, interval: Duration) -> Result<Duration, String> {
    match interval < least {
        true => Err(format!("must be {} or more", duration::format(least))),
        false => Ok(interval),
    }
}

/// Shows the view until it is left, or prints it.
pub(crate) fn main(args: &Args, source: &Source) -> Result<ExitCode, Failure> {
    let every = match (source, args.interval) {
        (Source::Node(_), every) => every.unwrap_or(Duration::from_secs(1)),
        (Source::Cluster(..), None) => Duration::from_secs(2),
        (Source::Cluster(..), Some(every)) => at_least(LEAST_OF_CLUSTER, every)
            .map_err(|error| Failure::usage(format!("--interval {error}")))?,
    };
    let mut model = Model::new(args.sort, args.reverse);
    model.filter.clone_from(&args.filter);
    model.namespace = source.namespace(args.namespace.as_deref());
    model.wide = args.output == Format::Wide;
    let drawn = args.output != Format::Json && io::stdout().is_terminal() && !is_dumb();
    // A pipe takes one frame, as of `kubectl get`.
    if args.once || !drawn {
        return once(model, args, every, source);
    }
    let news = feed::start(source.clone(), every)?;
    screen::run(model, &news, every).map_err(|error| Failure::failed(format!("{error:#}")))
}

/// One frame.
fn once(
    mut model: Model,
    args: &Args,
    every: Duration,
    source: &Source,
) -> Result<ExitCode, Failure> {
    let began = Instant::now();
    wait(async {
        model.take(source.fleet().await?, began.elapsed());
        tokio::time::sleep(every).await;
        model.take(source.fleet().await?, began.elapsed());
        Ok(())
    })?;
    let text = match args.output {
        Format::Json => format!("{}\n", json(&model)),
        Format::Text | Format::Wide => {
            let width = terminal::size().map(|(width, _)| width).or_else(columns);
            let width = if model.wide { Some(WIDEST) } else { width };
            let moment = Moment { now_unix_ms: unix_ms(), every, live: false };
            plain(&model, moment, width)
        }
    };
    terminal::print(&text)?;
    Ok(source.exit(&model.fleet))
}

fn columns() -> Option<u16> {
    std::env::var("COLUMNS").ok()?.parse().ok()
}

/// What a pipe gets: wide enough for every column; of a cluster, with nodes.
const WIDTH: u16 = 140;
const WIDTH_OF_CLUSTER: u16 = 170;
/// As wide as it gets.
const WIDEST: u16 = 500;

/// All of it without escape sequences, as high as it has to be.
fn plain(model: &Model, moment: Moment, width: Option<u16>) -> String {
    let usual = if model.is_own() { WIDTH } else { WIDTH_OF_CLUSTER };
    let width = width.unwrap_or(usual).clamp(20, WIDEST);
    let lines = view::draw(model, false, moment, (width, u16::MAX));
    format!("{}\n", lines.join("\n").trim_end())
}

/// The fleet as the API has it, with the rates of each tenant that is shown, in the view's order.
fn json(model: &Model) -> Value {
    let mut whole = serde_json::to_value(&model.fleet).unwrap_or_default();
    let shown = model.shown();
    let places: HashMap<(&str, &str), usize> = (shown.iter().enumerate())
        .filter(|(_, row)| row.is_first)
        .map(|(at, row)| ((row.node, row.tenant.id.as_str()), at))
        .collect();
    for entry in whole["nodes"].as_array_mut().into_iter().flatten() {
        let node = entry["node"].as_str().unwrap_or_default().to_owned();
        let Some(tenants) = entry["view"]["tenants"].as_array_mut() else { continue };
        let place = |one: &Value| places.get(&(node.as_str(), one["id"].as_str()?)).copied();
        tenants.retain(|one| place(one).is_some());
        tenants.sort_by_key(place);
        for one in tenants {
            let rates = place(one).map(|at| shown[at].rates).unwrap_or_default();
            one["rates"] = json!({
                "waited": rates.waited,
                "refusals_per_second": rates.refusals,
                "driver_refusals_per_second": rates.driver_refusals,
                "launches_per_second": rates.launches,
            });
        }
    }
    whole["api_version"] = API_VERSION.into();
    whole["interval_seconds"] = model.interval.map(|interval| interval.as_secs_f64()).into();
    whole
}
