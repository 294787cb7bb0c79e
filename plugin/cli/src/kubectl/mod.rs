//! `kubectl tessera`: all nodes at once, with the user's own kubeconfig and rights. The same program under the name
//! `kubectl-tessera`, which is how kubectl finds it.

mod advice;
mod columns;
mod complete;
mod console;
mod explain;
mod failure;
mod history;
mod options;
mod pending;
mod scope;
mod status;
mod steer;
mod top;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;

pub(crate) use console::{Args as ConsoleArgs, main as console};
pub(crate) use failure::Failure;
pub(crate) use failure::exit;
pub(crate) use options::Common;
use options::Format;
use tessera_model::printable;
use tessera_system::terminal;

/// The names of the program that mean this.
const NAME: &str = "kubectl-tessera";
/// The name that kubectl calls for completions (kubectl 1.26).
const COMPLETE: &str = "kubectl_complete-tessera";

const AFTER_HELP: &str = "\
Exit statuses: 0 done; 1 failed, or nothing is called so; 64 the command line or the kubeconfig is wrong; 69 the API \
server or every plugin does not answer; 77 you may not. `quota`, `cordon` and `uncordon` exit as the plugin's own command does.

What you see is what your rights on pods allow: see docs/views.md.";

/// Shows and steers shared GPUs on all nodes of a cluster.
#[derive(Debug, Parser)]
#[command(name = "kubectl tessera", bin_name = "kubectl tessera", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show nodes and GPUs: what is amiss first, then what is used and what still fits
    Status {
        /// Output format
        #[arg(long, short, value_enum, default_value = "text")]
        output: Format,
    },
    /// Watch pods live: memory against quota, share asked and got, refusals
    Top(top::Args),
    /// Say why a pod, an allocation or a GPU is as it is, what it was refused, and who changed what
    Explain(explain::Args),
    /// Show what pods and GPUs used over time
    History(history::Args),
    /// Record what arbiters do for some seconds, to be drawn by Perfetto
    Trace(crate::trace::Args),
    /// Say what workloads could ask for instead
    Recommend(advice::RecommendArgs),
    /// Show what is asked and not used, by namespace
    Waste(advice::WasteArgs),
    /// Say why a pod waits: what each node has left, and what is in the way
    WhyPending(pending::Args),
    /// Change what a running pod may use, or show it
    Quota {
        #[command(subcommand)]
        command: steer::QuotaCommand,
    },
    /// Give out nothing more of a GPU or of a node; what runs there goes on
    Cordon(steer::CordonArgs),
    /// Give out a GPU or a node again
    Uncordon(steer::UncordonArgs),
    /// Serve the page for all nodes
    Console(ConsoleArgs),
}

/// Whether the program was called by a name that means this.
pub(crate) fn is_called(program: Option<&OsString>) -> bool {
    let name = program.map(Path::new).and_then(Path::file_stem).and_then(OsStr::to_str);
    name.is_some_and(|name| name == NAME || name == COMPLETE)
}

/// Runs `kubectl tessera` with these arguments.
pub(crate) fn main(args: Vec<OsString>) -> ExitCode {
    let called = args.first().map(Path::new).and_then(Path::file_stem).and_then(OsStr::to_str);
    let words = || args.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    if called == Some(COMPLETE) {
        return complete::main(words());
    }
    // Older kubectl know no other name.
    if args.get(1).is_some_and(|word| word == "__complete") {
        return complete::main(words().split_off(1));
    }
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing can be done about a closed standard output.
            let _ = error.print();
            return if error.use_stderr() { crate::EXIT_USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    exit("kubectl tessera", run(cli))
}

fn run(Cli { common, command }: Cli) -> Result<ExitCode, Failure> {
    if let Command::Console(args) = command {
        return console::main(&args, &common);
    }
    let fleet = common.fleet()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(error.to_string()))?;
    let done = runtime.block_on(async {
        match command {
            Command::Status { output } => status::main(&fleet, output).await,
            Command::Top(args) => top::main(&fleet, &common, &args).await,
            Command::Explain(args) => explain::main(&fleet, &common, &args).await,
            Command::History(args) => history::main(&fleet, &common, &args).await,
            Command::Trace(args) => crate::trace::of_fleet(&fleet, &common, &args).await,
            Command::Recommend(args) => advice::recommend(&fleet, &common, &args).await,
            Command::Waste(args) => advice::waste(&fleet, &common, &args).await,
            Command::WhyPending(args) => pending::main(&fleet, &common, &args).await,
            Command::Quota { command } => steer::quota(&fleet, &common, command).await,
            Command::Cordon(args) => steer::cordon(&fleet, &common, &args).await,
            Command::Uncordon(args) => steer::uncordon(&fleet, &common, &args).await,
            Command::Console(_) => Ok(ExitCode::SUCCESS),
        }
    });
    // A connection that does not end is not waited for.
    runtime.shutdown_background();
    done
}

/// Prints text of our own, in which others' words may stand.
fn print(text: &str) -> Result<(), Failure> {
    let text = printable::lines(text);
    terminal::print(&text).map_err(|error| Failure::failed(error.to_string()))
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Failure::failed(error.to_string()))?;
    print(&format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound_and_the_name_decides() {
        Cli::command().debug_assert();
        for (program, is) in [
            ("kubectl-tessera", true),
            ("/usr/local/bin/kubectl-tessera", true),
            ("kubectl-tessera.exe", true),
            ("kubectl_complete-tessera", true),
            ("tessera", false),
            ("/opt/kubectl-tessera/tessera", false),
        ] {
            assert_eq!(is_called(Some(&program.into())), is, "{program}");
        }
        assert!(!is_called(None));
    }
}
