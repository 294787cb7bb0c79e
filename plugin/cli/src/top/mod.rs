//! `tessera top`: live use of the node's GPUs. It polls the plugin and computes rates from
//! one answer to the next.
//!
//! [`model`], [`keys`], [`rates`], [`view`], [`picture`] and [`report`] are pure; [`feed`] asks, [`screen`] owns the
//! terminal.

mod feed;
mod keys;
mod model;
mod picture;
mod rates;
mod report;
mod screen;
mod text;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use feed::{Feed, FeedEvent};
use model::Model;
pub use model::Sort;
use tessera_api::admin;
use tessera_api::admin::Format;
use tessera_config::Config;
use tessera_model::clock::unix_ms;
use tessera_model::duration;
use tessera_system::terminal::{self, Look, is_dumb};
use view::Moment;

/// Shortest interval: an answer takes the plugin some hundred microseconds for each allocation.
const LEAST: Duration = Duration::from_millis(100);

/// Arguments of `tessera top`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How often to ask the plugin, at least 100ms
    #[arg(long, short, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
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
    /// Show only pods, containers, GPUs and allocations whose names contain this
    #[arg(long, short, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
}

fn interval(text: &str) -> Result<Duration, String> {
    at_least(LEAST, text)
}

/// A time that is not shorter than this.
pub(crate) fn at_least(least: Duration, text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        short if short < least => Err(format!("must be {} or more", duration::format(least))),
        interval => Ok(interval),
    }
}

/// Shows the view until it is left, or prints it.
///
/// # Errors
/// The terminal or standard output.
pub fn main(args: &Args, config: &Config) -> anyhow::Result<ExitCode> {
    let mut model = Model::new(args.sort, args.reverse);
    model.filter.clone_from(&args.filter);
    model.namespace.clone_from(&args.namespace);
    if args.once {
        return once(model, args, config);
    }
    let drawn = args.output == Format::Text && io::stdout().is_terminal() && !is_dumb();
    let feed = Feed::start(config.clone(), args.interval, drawn)?;
    if drawn { screen::run(model, &feed, args.interval) } else { print(model, &feed, args) }
}

/// One frame.
fn once(mut model: Model, args: &Args, config: &Config) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let began = Instant::now();
    let answer: Result<_, admin::Unreachable> = runtime.block_on(async {
        let first = admin::ask(&config.paths.admin).await?;
        let at = began.elapsed();
        tokio::time::sleep(args.interval).await;
        Ok((first, at, admin::ask(&config.paths.admin).await?))
    });
    let code = match answer {
        Ok((first, at, second)) => {
            model.take(first, at);
            model.take(second, began.elapsed());
            ExitCode::SUCCESS
        }
        Err(error) => {
            model.miss(error.sentence(config), unix_ms());
            ExitCode::from(error.exit_status())
        }
    };
    say(&model, args)?;
    Ok(code)
}

/// Frame after frame, for a pipe or a terminal that can do no more.
fn print(mut model: Model, feed: &Feed, args: &Args) -> anyhow::Result<ExitCode> {
    loop {
        match feed.next(Duration::MAX) {
            Some(FeedEvent::End) => return Ok(ExitCode::SUCCESS),
            Some(news) => feed::apply(&mut model, news),
            None => continue,
        }
        if !say(&model, args)? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Whether there is still a reader.
fn say(model: &Model, args: &Args) -> io::Result<bool> {
    let text = match args.output {
        Format::Json => format!("{}\n", report::json(model)),
        Format::Text => {
            let width = terminal::size().map(|(width, _)| width).or_else(columns);
            let moment = Moment { now_unix_ms: unix_ms(), every: args.interval, live: false };
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
