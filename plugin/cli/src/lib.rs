//! The command line: parse, build, run, drain.
#![forbid(unsafe_code)]

mod configuration;
mod ending;
mod plan_text;
mod top;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use configuration::ConfigCommand;
use ending::Ending;
use tessera_agent::labels;
use tessera_agent::reload::SetFilter;
use tessera_api::admin::Format;
use tessera_api::{admin, explain};
use tessera_config::{Config, ConfigError, ConfigFile, Given, Log, LogFormat, log_filter};
use tessera_gpu::Discovery;
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_model::printable;
use tessera_model::printable::LogLines;
use tessera_system::panics;
use tessera_tenant::delivery::driver::nvml as nvml_library;

/// `EX_USAGE`: the configuration or the command line is wrong; starting again will not help.
pub const EXIT_USAGE: u8 = 64;

/// Most threads for what blocks; they start when needed. One may wait for the ledger's disk while the
/// others read pages, and a hostile tenant can hold up one that looks at its pages, for a moment.
const BLOCKING_THREADS: usize = 8;
/// How long work that blocks may go on after the plugin has drained.
const LAST_WORK: Duration = Duration::from_secs(1);

const EXIT_STATUSES: &str = "\
Exit statuses: 0 done; 1 failed; 64 the configuration or the command line is wrong, and trying again \
will not help; 69 the plugin does not answer. `tessera run` exits as its command does, and with 125 if it \
fails itself.

Memory is written 12Gi, 12GiB or 12G, times 500ms, 10s, 5m or 1h. `tessera config reference` is the \
reference of the configuration.";

/// Shares NVIDIA GPUs among inference containers, each held to its quota.
#[derive(Debug, Parser)]
#[command(name = "tessera", version, propagate_version = true, after_help = EXIT_STATUSES)]
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
    Run(tessera_run::Args),
    /// Show the whole of Tessera on a simulated GPU
    Demo(tessera_demo::Args),
    /// Check a configuration, tell what it would change, have it read again
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
    /// Print completions for a shell
    ///
    /// bash: `source <(tessera completions bash)`; zsh: write them to a file named _tessera in a directory of
    /// $fpath; fish: `tessera completions fish | source`.
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
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
    panics::end_the_process();
    let outcome = execute(cli.command, ConfigFile { asked: cli.config });
    outcome.unwrap_or_else(|error| match error.downcast_ref::<ConfigError>() {
        Some(error) => {
            // One problem per line, each with file, line and key.
            eprintln!("{}", printable::lines(&error.to_string()));
            ExitCode::from(EXIT_USAGE)
        }
        None => {
            eprintln!("tessera: {}", printable::line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    })
}

fn execute(command: Command, file: ConfigFile) -> anyhow::Result<ExitCode> {
    let strict = |file: &ConfigFile| Config::find(file.asked.as_deref());
    match command {
        Command::Serve => serve(file),
        Command::Status { live: true, .. } => admin::live(&file.for_asking()),
        Command::Status { output, ready, .. } => admin::main(&file.for_asking(), output, ready),
        Command::Explain(args) => explain::main(&args, &file.for_asking()),
        Command::Top(args) => top::main(&args, &file.for_asking()),
        Command::Quota { command } => admin::quota(command, &file.for_asking()),
        Command::Cordon(args) => admin::cordon(args, false, &file.for_asking()),
        Command::Uncordon(args) => admin::cordon(args, true, &file.for_asking()),
        Command::Run(args) => tessera_run::main(args, &strict(&file)?),
        Command::Demo(args) => tessera_demo::main(args, &strict(&file)?),
        Command::Config { command } => configuration::main(command, file),
        Command::PrepareHost { shim } => {
            let Given { config, refused, .. } = file.start()?;
            if let Some(error) = refused {
                let error = error.to_string();
                let error = printable::lines(&error);
                eprintln!("{error}\nthe configuration is bad; the last good one holds");
            }
            println!("{}", tessera_daemon::prepare_host(&config, shim.as_deref())?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Labels => {
            let config = file.start()?.config;
            let discovery = NvmlDiscovery::new(nvml_library(&config));
            let gpus = discovery.gpus(&config.gpus)?;
            let lines = labels::lines(&labels::labels(&gpus, &discovery.facts(&gpus), &config));
            print!("{}", printable::lines(&lines));
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tessera", &mut script);
            std::io::Write::write_all(&mut std::io::stdout(), &script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn serve(file: ConfigFile) -> anyhow::Result<ExitCode> {
    let ending = Ending::listen()?;
    let given = file.start()?;
    let set_filter = Some(start_log(&given.config)?);
    tessera_daemon::raise_file_limit();
    // One thread for everything that does not block, and a few for what does: a node agent should
    // not be noticed.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(512 << 10)
        .build()?;
    let ended = runtime.block_on(async {
        let discovery = Arc::new(NvmlDiscovery::new(nvml_library(&given.config)));
        let beginning = tessera_daemon::Beginning { file: Some(file), given, set_filter };
        let app =
            tessera_daemon::start_with(beginning, discovery, tessera_daemon::Timing::default())?;
        app.run_until(ending.asked()).await
    });
    // What is still being read or written is waited for no longer.
    runtime.shutdown_timeout(LAST_WORK);
    ended?;
    Ok(ExitCode::SUCCESS)
}

fn start_log(config: &Config) -> Result<SetFilter, ConfigError> {
    let Log { filter, format } = &config.log;
    let targets = log_filter::parse(filter).map_err(|error| ConfigError {
        file: config.source.file.clone(),
        problems: vec![config.source.problem("log.filter", error)],
    })?;
    let lines =
        tracing_subscriber::fmt::layer::<Registry>().with_writer(|| LogLines(std::io::stderr()));
    let lines = match format {
        LogFormat::Text => lines.with_ansi(false).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let (targets, handle) = reload::Layer::new(targets);
    tracing_subscriber::registry().with(lines).with(targets).init();
    Ok(Box::new(move |filter: &str| {
        let targets = log_filter::parse(filter)?;
        handle.reload(targets).map_err(|error| error.to_string())
    }))
}
