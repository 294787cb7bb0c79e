//! `tessera sandbox`: a place to try Tessera without a GPU or a cluster.
//!
//! Each node is a kubelet that runs no containers (`tests/fake_kubelet`), a simulated machine (`tests/sim`) and a
//! plugin, `tessera serve`, as a process of its own. Pods are placed by command; the container of each is a real
//! process under the shim, in the surroundings that Allocate's answer describes ([`container`]). Everything lives in
//! one directory, and nothing outlives the sandbox ([`scratch`]). `tessera demo` is a script in one
//! ([`demo`]).
//!
//! **May use**: what an operator's program may: `tessera_api`'s clients, the fake kubelet. **Must not**: know the
//! agent, or start a cluster.

// `terminal::print`: a reader that goes away, like `head`, must not end a process by a panic.
#![cfg_attr(not(test), deny(clippy::print_stdout))]
#![forbid(unsafe_code)]

mod command;
mod console;
mod container;
mod control;
pub mod demo;
mod dra;
mod judge;
mod machine;
mod node;
mod pod;
mod print;
mod sandbox;
mod scratch;
mod start;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tessera_system::terminal;

use command::Command;
use machine::Mig;
use start::Layout;

/// `EX_USAGE`.
const USAGE: u8 = 64;
/// `EX_UNAVAILABLE`: no sandbox answers.
const UNAVAILABLE: u8 = 69;

/// Arguments of `tessera sandbox`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  tessera sandbox\n  tessera sandbox --layout 4x8 --memory 80Gi\n  \
    tessera sandbox -c my-config.toml --gpu-name 'NVIDIA H100 80GB HBM3' --memory 80Gi\n  \
    tessera sandbox -- sh try.sh\n  tessera sandbox run chat --load serve     (in its shell, or another terminal)\n\n\
    A configuration (-c) is tried as it is, but for what describes a host: paths, driver, addresses."
)]
pub struct Args {
    /// Nodes and GPUs of each
    #[arg(long, value_name = "NODESxGPUS", default_value = "1x2")]
    layout: Layout,
    /// Memory of each GPU; without, 16Gi, or 80Gi with --mig
    #[arg(long, value_name = "Q", value_parser = command::memory)]
    memory: Option<u64>,
    /// Product name of the GPUs, which a configuration's `gpus.include` and layouts go by
    #[arg(long, value_name = "NAME", default_value = "Simulated GPU")]
    gpu_name: String,
    /// MIG instances of each GPU, or of one: 1g.10gb,2g.20gb or 0=1g.10gb; may be repeated
    #[arg(long, value_name = "[GPU=]PROFILES")]
    mig: Vec<Mig>,
    /// Sell all GPUs by claims (dra.enabled), which `run --claim` asks for; a configuration may divide them
    #[arg(long)]
    dra: bool,
    /// Directory for everything, which stays at the end; or where the sandbox is that is asked
    #[arg(long, value_name = "DIR", global = true)]
    dir: Option<PathBuf>,
    /// What runs in it; the sandbox ends with it, and has its exit status. Without, and at a terminal, your shell
    #[arg(last = true, value_name = "PROGRAM")]
    run: Vec<OsString>,
    #[command(subcommand)]
    command: Option<Command>,
}

impl Args {
    /// An option that was given and means nothing to a sandbox that runs already.
    fn of_a_start(&self) -> Option<&'static str> {
        let default = Layout { nodes: 1, gpus: 2 };
        let given = [
            ("layout", self.layout != default),
            ("memory", self.memory.is_some()),
            ("gpu-name", self.gpu_name != "Simulated GPU"),
            ("mig", !self.mig.is_empty()),
            ("dra", self.dra),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }
}

/// What this program does for itself, started again by a sandbox.
#[derive(Debug, clap::Subcommand)]
pub enum Again {
    /// Enter the surroundings of a container, and become its command
    EnterContainer {
        /// As JSON
        surroundings: String,
        /// What to become
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// Print what NVML says of these GPUs, again and again
    Account {
        /// NVML's library
        library: PathBuf,
        /// Their UUIDs
        gpus: Vec<String>,
    },
    /// Clean up after a sandbox, when it ends
    Keep {
        /// Its directory
        directory: PathBuf,
        /// It goes at the end
        #[arg(long)]
        temporary: bool,
    },
}

/// Does it.
pub fn again(again: Again) -> anyhow::Result<ExitCode> {
    match again {
        Again::EnterContainer { surroundings, command } => {
            container::enter(&surroundings, &command)?;
        }
        Again::Account { library, gpus } => judge::account(&library, &gpus)?,
        Again::Keep { directory, temporary } => scratch::keep(&directory, temporary),
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts a sandbox and stays up, or asks one that runs. `config` is the file that the user named.
pub fn main(args: Args, config: Option<&Path>) -> anyhow::Result<ExitCode> {
    if let Some(command) = &args.command {
        if let Some(option) = args.of_a_start() {
            eprintln!(
                "--{option} is for a sandbox that starts, and a command is for one that runs: leave out one of them"
            );
            return Ok(ExitCode::from(USAGE));
        }
        let text = match asked(args.dir.as_deref(), command) {
            Ok(text) => text,
            Err(code) => return Ok(code),
        };
        if let Command::Tessera(_) = command {
            return control::relay(&text);
        }
        if !text.is_empty() {
            let _ = terminal::print(&format!("{text}\n"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Err(text) = args.layout.check(&args.mig) {
        eprintln!("{text}");
        return Ok(ExitCode::from(USAGE));
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(async {
        let ends = control::Ends::listen()?;
        let sandbox = tokio::select! {
            started = start::start(&args, config) => started?,
            () = ends.wait() => return Ok(ExitCode::from(control::INTERRUPTED)),
        };
        control::live(sandbox, &args.run, &ends).await
    });
    match outcome {
        Err(error) if error.is::<node::BadConfiguration>() => {
            eprintln!("{error}");
            Ok(ExitCode::from(USAGE))
        }
        outcome => outcome,
    }
}

/// What the sandbox answers, or how to end where it does not, or says no.
fn asked(dir: Option<&Path>, command: &Command) -> Result<String, ExitCode> {
    match control::ask(dir, command) {
        Ok(reply) if reply.code == 0 => Ok(reply.text),
        Ok(reply) => {
            eprintln!("{}", reply.text);
            Err(ExitCode::from(reply.code))
        }
        Err(error) => {
            eprintln!("tessera: {error:#}");
            Err(ExitCode::from(UNAVAILABLE))
        }
    }
}
