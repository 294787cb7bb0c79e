//! `trace`: what the arbiter does, for some seconds, as a file for Perfetto.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tessera_model::printable;
use tessera_system::terminal;
use tessera_view::trace::Trace;

use crate::source::{Failure, Source};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How long to trace, 1 to 30
    #[arg(long, value_name = "SECONDS", default_value_t = tessera_view::trace::USUAL,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(tessera_view::trace::LONGEST)))]
    seconds: u32,
    /// The file to write; - is standard output
    #[arg(long, short, value_name = "FILE", default_value = "trace.json")]
    output: PathBuf,
}

fn summary(trace: &Trace, path: &Path) -> String {
    let names = |kind: &str| trace.events.iter().filter(|event| event.name == kind).count();
    let (gpus, tracks) = (names("process_name"), names("thread_name"));
    let lost = match trace.about.lost_events {
        0 => String::new(),
        lost => format!(
            "the first {lost} events had no room, so the trace begins after them; a shorter one has all\n"
        ),
    };
    format!(
        "{}: {:.1} s, GPUs: {gpus}, tenants: {}, events: {}; open it at https://ui.perfetto.dev or chrome://tracing\n{lost}",
        path.display(),
        trace.about.duration_us / 1e6,
        tracks.saturating_sub(gpus),
        trace.events.len() - gpus - tracks,
    )
}

/// Writes the traces of all nodes that were asked as one.
pub(crate) async fn main(args: &Args, source: &Source) -> Result<ExitCode, Failure> {
    let (traces, silent) = source.traces(args.seconds).await?;
    let (trace, path) = (Trace::joined(traces), &args.output);
    let text = serde_json::to_string(&trace)?;
    if path == Path::new("-") {
        terminal::print(&(text + "\n"))?;
    } else {
        let written = std::fs::write(path, text);
        written.map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        terminal::print(&printable::lines(&summary(&trace, path)))?;
    }
    for line in silent {
        eprintln!("{}", printable::line(&line));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_had_no_room_says_so() {
        let mut trace = Trace::begun(5);
        assert!(!summary(&trace, Path::new("t")).contains("no room"));
        trace.about.lost_events = 7;
        let text = summary(&trace, Path::new("t"));
        assert!(text.contains("the first 7 events had no room"), "{text}");
    }
}
