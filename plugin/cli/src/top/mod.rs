//! `top`: live use of GPUs, of this node or of a cluster's. It asks again and again and computes rates from one answer to
//! the next.
//!
//! [`model`], [`keys`], [`rates`], [`view`] and [`report`] are pure; [`feed`] asks, [`screen`] owns the
//! terminal.

mod feed;
mod keys;
mod model;
mod rates;
mod report;
mod screen;
pub(crate) mod text;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use feed::{Feed, FeedEvent};
use model::{Model, Sort};
use tessera_model::clock::unix_ms;
use tessera_model::duration;
use tessera_system::terminal::{self, Look, is_dumb};
use view::Moment;

use crate::commands::wait;
use crate::output::Format;
use crate::source::{Failure, Source};

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
    /// Output format; json is an object per refresh, each in a line of its own
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
    // A pipe from a cluster takes one frame, as of `kubectl get`.
    if args.once || matches!(source, Source::Cluster(..)) && !drawn {
        return once(model, args, every, source);
    }
    let feed = Feed::start(source.clone(), every, drawn)?;
    match drawn {
        true => {
            screen::run(model, &feed, every).map_err(|error| Failure::failed(format!("{error:#}")))
        }
        false => Ok(print(model, &feed, args, every)?),
    }
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
    say(&model, args, every)?;
    Ok(source.exit(&model.fleet))
}

/// Frame after frame, for a pipe or a terminal that can do no more.
fn print(mut model: Model, feed: &Feed, args: &Args, every: Duration) -> io::Result<ExitCode> {
    loop {
        match feed.next(Duration::MAX) {
            Some(FeedEvent::End) => return Ok(ExitCode::SUCCESS),
            Some(news) => feed::apply(&mut model, news),
            None => continue,
        }
        if !say(&model, args, every)? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Whether there is still a reader.
fn say(model: &Model, args: &Args, every: Duration) -> io::Result<bool> {
    let text = match args.output {
        Format::Json => format!("{}\n", report::json(model)),
        Format::Text | Format::Wide => {
            let width = terminal::size().map(|(width, _)| width).or_else(columns);
            let width = if model.wide { Some(report::WIDEST) } else { width };
            let moment = Moment { now_unix_ms: unix_ms(), every, live: false };
            let frame = report::plain(model, Look::from_env(), moment, width);
            let end = if args.once { "" } else { "\n" };
            format!("{frame}{end}")
        }
    };
    terminal::print_while_read(&text)
}

fn columns() -> Option<u16> {
    std::env::var("COLUMNS").ok()?.parse().ok()
}
