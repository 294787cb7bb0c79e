//! The command line: parse, build, run, drain.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::admin::Format;
use crate::config::{Config, ConfigError, Log, LogFormat, Problem};
use crate::device::Discovery;
use crate::device::nvml::NvmlDiscovery;
use crate::{admin, app, capacity, demo, explain, labels, run, top};

/// `EX_USAGE`: the configuration or the command line is wrong; starting again will not help.
pub const EXIT_USAGE: u8 = 64;

/// Most threads for what blocks; they start when needed. One may wait for the ledger's disk while the
/// others read pages, and a hostile tenant can hold up one that looks at its pages, for a moment.
const BLOCKING_THREADS: usize = 8;

/// Shares NVIDIA GPUs among inference containers, each held to its quota.
#[derive(Debug, Parser)]
#[command(name = "tessera", version, propagate_version = true)]
struct Cli {
    /// Configuration file [default: /etc/tessera/config.toml where it exists]
    #[arg(long, short, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve this node's GPUs to kubelet
    Serve,
    /// Show GPUs, replicas, allocations, pods, quota and use
    Status {
        /// Output format
        #[arg(long, short, value_enum, default_value = "text")]
        output: Format,
        /// Print only what is amiss; succeed if the node offers the resource (a readiness probe)
        #[arg(long)]
        ready: bool,
        /// Print only what is amiss; succeed if the plugin answers at all (a liveness probe)
        #[arg(long, conflicts_with = "ready")]
        live: bool,
    },
    /// Say why a pod, an allocation or a GPU is as it is, what it was refused, and who changed what
    Explain(explain::Args),
    /// Watch GPUs and pods live: memory against quota, share asked and got, waiting, refusals
    Top(top::Args),
    /// Change what a running container may use, or show it
    Quota {
        #[command(subcommand)]
        command: admin::QuotaCommand,
    },
    /// Give out nothing more of a GPU, or of the whole node; what runs there goes on
    Cordon(admin::CordonArgs),
    /// Give out a GPU again, or the whole node
    Uncordon(admin::CordonArgs),
    /// Hold one command tree to a quota, without Kubernetes
    Run(run::Args),
    /// Show the whole of Tessera on a simulated GPU
    Demo(demo::Args),
    /// Check or print configuration
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Print this node's labels, as `kubectl label node` takes them
    Labels,
    /// Mount the pages' tmpfs and install the shim, for a plugin that may not (root)
    PrepareHost {
        /// The libtessera.so to install
        #[arg(long, value_name = "FILE")]
        shim: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check the configuration, against this machine's GPUs where it has any
    Check,
    /// Print the commented defaults
    Default,
}

/// Runs `tessera` with these arguments.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing can be done about a closed standard output.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = Config::find(cli.config.as_deref())
        .map_err(anyhow::Error::from)
        .and_then(|config| execute(cli.command, config));
    outcome.unwrap_or_else(|error| match error.downcast_ref::<ConfigError>() {
        Some(error) => {
            // One problem per line, each with file, line and key.
            eprintln!("{error}");
            ExitCode::from(EXIT_USAGE)
        }
        None => {
            eprintln!("tessera: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn execute(command: Command, config: Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve => serve(config),
        Command::Status { live: true, .. } => admin::live(&config),
        Command::Status { output, ready, .. } => admin::main(&config, output, ready),
        Command::Explain(args) => explain::main(&args, &config),
        Command::Top(args) => top::main(&args, &config),
        Command::Quota { command } => admin::quota(command, &config),
        Command::Cordon(args) => admin::cordon(args, false, &config),
        Command::Uncordon(args) => admin::cordon(args, true, &config),
        Command::Run(args) => run::main(args, &config),
        Command::Demo(args) => demo::main(args, &config),
        Command::Config { command: ConfigCommand::Check } => check(&config),
        Command::Config { command: ConfigCommand::Default } => {
            print!("{}", include_str!("../../config.toml"));
            Ok(ExitCode::SUCCESS)
        }
        Command::Labels => {
            let discovery = NvmlDiscovery::new(config.nvml(), config.gpus.clone());
            let gpus = discovery.gpus()?;
            print!("{}", labels::lines(&labels::labels(&gpus, &discovery.facts(&gpus), &config)));
            Ok(ExitCode::SUCCESS)
        }
        Command::PrepareHost { shim } => {
            println!("{}", app::prepare_host(&config, shim.as_deref())?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn serve(config: Config) -> anyhow::Result<ExitCode> {
    start_log(&config)?;
    app::raise_file_limit();
    // One thread for everything that does not block, and a few for what does: a node agent should
    // not be noticed.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(512 << 10)
        .build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let discovery = NvmlDiscovery::new(config.nvml(), config.gpus.clone());
        let timing = app::Timing::configured(&config);
        let app = app::start(config, Arc::new(discovery), timing)?;
        app.run_until(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await
    })?;
    Ok(ExitCode::SUCCESS)
}

fn start_log(config: &Config) -> Result<(), ConfigError> {
    let Log { filter, format } = &config.log;
    let filter: EnvFilter = filter.parse().map_err(|error| ConfigError {
        file: config.source.file.clone(),
        problems: vec![config.source.problem("log.filter", format!("not a filter: {error}"))],
    })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}

fn check(config: &Config) -> anyhow::Result<ExitCode> {
    let discovery = NvmlDiscovery::new(config.nvml(), config.gpus.clone());
    let gpus = match discovery.gpus() {
        Ok(gpus) => gpus,
        Err(error) => {
            println!("ok, as far as it can be told without GPUs ({error})");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let problems: Vec<Problem> = capacity::check(&gpus, config);
    if !problems.is_empty() {
        return Err(ConfigError { file: config.source.file.clone(), problems }.into());
    }
    for text in discovery.unsold().into_iter().chain(capacity::remarks(&gpus, config)) {
        eprintln!("note: {text}");
    }
    print!("{}", admin::offers(&gpus, config));
    println!("ok");
    Ok(ExitCode::SUCCESS)
}
