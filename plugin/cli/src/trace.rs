//! `trace`: what the arbiter does, for some seconds, as a file for Perfetto.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
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

/// Where a trace goes: opened before it begins, so that nobody waits for one that cannot be kept. A file that was
/// there stays as it is until the trace has come.
enum Target {
    Stdout,
    File { file: File, path: PathBuf, is_new: bool },
}

impl Target {
    fn open(path: &Path) -> Result<Self, Failure> {
        if path == Path::new("-") {
            return Ok(Target::Stdout);
        }
        let is_new = !path.exists();
        // Not truncated: see the type.
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| of_file(path, &error))?;
        Ok(Target::File { file, path: path.to_owned(), is_new })
    }

    /// There is no trace.
    fn give_up(self) {
        if let Target::File { path, is_new: true, .. } = self {
            // It is empty.
            let _ = std::fs::remove_file(path);
        }
    }

    fn write(self, trace: &Trace) -> Result<(), Failure> {
        let text = serde_json::to_string(trace)?;
        let Target::File { mut file, path, .. } = self else {
            return Ok(terminal::print(&(text + "\n"))?);
        };
        // A device has no length to set.
        let is_file = file.metadata().is_ok_and(|of| of.is_file());
        let emptied = if is_file { file.set_len(0) } else { Ok(()) };
        let written = emptied.and_then(|()| file.write_all(text.as_bytes()));
        written.map_err(|error| of_file(&path, &error))?;
        Ok(terminal::print(&printable::lines(&summary(trace, &path)))?)
    }
}

fn of_file(path: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!("{}: {error}", path.display()))
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
    let target = Target::open(&args.output)?;
    let (traces, silent) = match source.traces(args.seconds).await {
        Ok(answers) => answers,
        Err(failure) => {
            target.give_up();
            return Err(failure);
        }
    };
    target.write(&Trace::joined(traces))?;
    for line in silent {
        eprintln!("{}", printable::line(&line));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_refused_and_one_that_stays_empty_is_removed() {
        let dir = std::env::temp_dir().join(format!("tessera-trace-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let refused = Target::open(&dir.join("none/trace.json")).err().unwrap().text;
        assert!(refused.contains("none/trace.json: No such file"), "{refused}");
        let (new, old) = (dir.join("new"), dir.join("old"));
        Target::open(&new).unwrap().give_up();
        assert!(!new.exists());
        std::fs::write(&old, "x".repeat(4096)).unwrap();
        Target::open(&old).unwrap().give_up();
        assert_eq!(std::fs::read_to_string(&old).unwrap().len(), 4096);
        Target::open(&old).unwrap().write(&Trace::begun(5)).unwrap();
        let trace: Trace = serde_json::from_slice(&std::fs::read(&old).unwrap()).unwrap();
        assert_eq!(trace, Trace::begun(5));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_trace_that_had_no_room_says_so() {
        let mut trace = Trace::begun(5);
        assert!(!summary(&trace, Path::new("t")).contains("no room"));
        trace.about.lost_events = 7;
        let text = summary(&trace, Path::new("t"));
        assert!(text.contains("the first 7 events had no room"), "{text}");
    }
}
