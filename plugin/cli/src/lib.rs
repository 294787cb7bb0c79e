//! The command line: parse, build, run, drain.

// `terminal::print`: a reader that goes away, like `head`, must not end a process by a panic.
#![cfg_attr(not(test), deny(clippy::print_stdout))]
#![forbid(unsafe_code)]

mod advice;
mod completions;
mod configuration;
mod ending;
mod explain;
mod history;
mod kubectl;
mod output;
mod source;
mod status;
mod steer;
mod top;
mod trace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use configuration::ConfigCommand;
use ending::Ending;
use source::{Failure, Source};
use tessera_agent::labels;
use tessera_agent::reload::SetFilter;
use tessera_config::{
    Config, ConfigError, ConfigFile, LoadedConfig, Log, LogFormat, log_filter, state_dir,
};
use tessera_daemon::node_config::NodeConfig;
use tessera_gpu::Discovery;
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_model::printable;
use tessera_model::printable::LogLines;
use tessera_system::{panics, terminal};
use tessera_tenant::delivery::driver::nvml as nvml_library;

use tessera_api::admin::EXIT_FORBIDDEN;
pub use tessera_api::admin::EXIT_USAGE;

/// Most threads for what blocks; they start when needed. One may wait for the ledger's disk while the
/// others read pages, and a hostile tenant can hold up one that looks at its pages, for a moment.
const BLOCKING_THREADS: usize = 8;
/// How long work that blocks may go on after the plugin has drained.
const LAST_WORK: Duration = Duration::from_secs(1);

const EXIT_STATUSES: &str = "\
Exit statuses: 0 done; 1 failed; 64 the configuration or the command line is wrong, and trying again \
will not help; 69 the plugin does not answer, or has no GPUs; 77 the caller may not ask it, or not read the file of --config. `tessera run` exits as its command does, and with 125 if it \
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
    Serve {
        /// The node's label whose value VALUE chooses the configuration VALUE.toml beside --config
        ///
        /// A node without the label has --config itself. A changed label takes effect at once. Needs the node's name
        /// in NODE_NAME, and the right to get and watch nodes.
        #[arg(long, value_name = "LABEL")]
        config_label: Option<String>,
    },
    #[command(flatten)]
    Both(Both),
    /// Hold one command tree to a quota, without Kubernetes
    Run(tessera_run::Args),
    /// Try Tessera on simulated GPUs: place pods, break things, look at everything
    Sandbox(tessera_sandbox::Args),
    #[command(hide = true)]
    InSandbox {
        #[command(subcommand)]
        again: tessera_sandbox::Again,
    },
    /// Show the whole of Tessera on a simulated GPU
    Demo(tessera_sandbox::demo::Args),
    /// Serve the page for all nodes of a cluster, with a kubeconfig or in a pod
    Console(ConsoleCommand),
    /// Check a configuration, show what it would change, have it read again
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
    /// Print completions for a shell, which also know the names of pods, allocations and GPUs
    ///
    /// bash: `source <(tessera completions bash)`; zsh: `source <(tessera completions zsh)`; fish:
    /// `tessera completions fish | source`.
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

/// Commands that this node's plugin and those of a cluster answer alike: `tessera X` and `kubectl tessera X`.
#[derive(Debug, Subcommand)]
pub(crate) enum Both {
    /// Show what is wrong, then GPUs, and of one node pods with their quotas and use (-o wide: all of it)
    Status(status::Args),
    /// Say why a pod, an allocation or a GPU is as it is, what it was refused, and who changed what
    Explain(explain::Args),
    /// Watch GPUs and pods live: memory against quota, share asked and got, waiting, refusals
    Top(top::Args),
    /// Change what a running container may use, or show it
    Quota {
        #[command(subcommand)]
        command: steer::QuotaCommand,
    },
    /// Give out nothing more of a GPU, or of the whole node; what runs there goes on
    Cordon(steer::CordonArgs),
    /// Give out a GPU again, or the whole node
    Uncordon(steer::UncordonArgs),
    /// Show what was: memory against quota, GPU time against share, waits, refusals, events
    History(history::Args),
    /// Record what the arbiter does for some seconds, to be drawn by Perfetto
    Trace(trace::Args),
    /// Say what workloads could ask for instead, by what they used
    Recommend(advice::RecommendArgs),
    /// Show what is held and not used, by namespace and pod
    Waste(advice::WasteArgs),
}

impl Both {
    /// Asks, and prints the answer.
    pub fn run(self, source: &Source) -> Result<ExitCode, Failure> {
        match self {
            // It has threads of its own.
            Both::Top(args) => top::main(&args, source),
            Both::Status(args) => wait(status::main(&args, source)),
            Both::Explain(args) => wait(explain::main(&args, source)),
            Both::Quota { command } => wait(steer::quota(command, source)),
            Both::Cordon(args) => wait(steer::cordon(args, source)),
            Both::Uncordon(args) => wait(steer::uncordon(args, source)),
            Both::History(args) => wait(history::main(&args, source)),
            Both::Trace(args) => wait(trace::main(&args, source)),
            Both::Recommend(args) => wait(advice::recommend(&args, source)),
            Both::Waste(args) => wait(advice::waste(&args, source)),
        }
    }
}

/// Waits for an answer. A connection that does not end is not waited for.
pub(crate) fn wait<T>(answer: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(answer);
    runtime.shutdown_background();
    done
}

/// `tessera console`: what `kubectl tessera console` is.
#[derive(Debug, clap::Args)]
struct ConsoleCommand {
    #[command(flatten)]
    common: kubectl::Common,
    #[command(flatten)]
    args: kubectl::ConsoleArgs,
}

/// Runs `tessera`, or `kubectl tessera` where the first argument calls it so.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if completions::answer(&args) {
        return ExitCode::SUCCESS;
    }
    if kubectl::is_called(args.first()) {
        return kubectl::main(args);
    }
    let cli: Cli = match parsed(args) {
        Ok(cli) => cli,
        Err(ended) => return ended,
    };
    panics::end_the_process();
    let outcome = execute(cli.command, ConfigFile { asked: cli.config });
    outcome.unwrap_or_else(|error| {
        if let Some(error) = error.downcast_ref::<ConfigError>() {
            // One problem per line, each with file, line and key.
            eprintln!("{}", printable::lines(&error.to_string()));
            return ExitCode::from(if error.is_forbidden() { EXIT_FORBIDDEN } else { EXIT_USAGE });
        }
        let status = error.downcast_ref::<Failure>().map_or(1, |failure| failure.status);
        Failure { text: format!("{error:#}"), status }.exit("tessera")
    })
}

/// A command line, or how the process ends that has said what it should be.
pub(crate) fn parsed<T: Parser>(args: Vec<OsString>) -> Result<T, ExitCode> {
    T::try_parse_from(args).map_err(|error| {
        // Nothing can be done about a closed standard output.
        let _ = error.print();
        if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS }
    })
}

fn execute(command: Command, file: ConfigFile) -> anyhow::Result<ExitCode> {
    let strict = |file: &ConfigFile| Config::find(file.asked.as_deref());
    match command {
        Command::Serve { config_label } => serve(file, config_label.as_deref()),
        Command::Both(command) => Ok(command.run(&Source::node(file.for_asking()?))?),
        Command::Run(args) => tessera_run::main(args, &strict(&file)?),
        Command::Sandbox(args) => tessera_sandbox::main(args, file.asked.as_deref()),
        Command::InSandbox { again } => tessera_sandbox::again(again),
        Command::Demo(args) => tessera_sandbox::demo::main(&args, file.asked.as_deref()),
        Command::Console(ConsoleCommand { common, args }) => Ok(kubectl::console(&args, &common)?),
        Command::Config { command } => configuration::main(command, file),
        Command::PrepareHost { shim } => {
            let LoadedConfig { config, refused, .. } = file.start()?;
            if let Some(error) = refused {
                let error = error.to_string();
                let error = printable::lines(&error);
                eprintln!("{error}\nthe configuration is bad; the last good one holds");
            }
            tessera_daemon::set_umask();
            let prepared = tessera_daemon::prepare_host(&config, shim.as_deref())?;
            terminal::print(&format!("{prepared}\n"))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Labels => {
            let config = file.start()?.config;
            let discovery = NvmlDiscovery::new(nvml_library(&config));
            let gpus = discovery.gpus(&config.gpus)?;
            let lines = labels::lines(&labels::labels(&gpus, &discovery.facts(&gpus), &config));
            terminal::print(&printable::lines(&lines))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => completions::print(shell),
    }
}

fn serve(file: ConfigFile, config_label: Option<&str>) -> anyhow::Result<ExitCode> {
    let ending = Ending::listen()?;
    tessera_daemon::set_umask();
    // One thread for everything that does not block, and a few for what does: a node agent should
    // not be noticed.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(512 << 10)
        .build()?;
    let (file, node_config) = match config_label {
        Some(label) => runtime.block_on(chosen(&file, label))?,
        None => (file, None),
    };
    let given = file.start()?;
    let set_filter = Some(start_log(&given.config)?);
    tessera_daemon::raise_file_limit();
    let ended = runtime.block_on(async {
        let discovery: Arc<dyn Discovery> =
            Arc::new(NvmlDiscovery::new(nvml_library(&given.config)));
        tokio::select! {
            () = tessera_daemon::stand_by(&given.config, &discovery) => {}
            () = ending.asked() => return Ok(()),
        }
        let file = Some(file);
        let beginning = tessera_daemon::StartOptions { file, given, set_filter, node_config };
        let app =
            tessera_daemon::start_with(beginning, discovery, tessera_daemon::Timing::default())?;
        app.run_until(ending.asked()).await
    });
    // What is still being read or written is waited for no longer.
    runtime.shutdown_timeout(LAST_WORK);
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// The file that the node's label chooses, and what follows the label.
async fn chosen(
    default: &ConfigFile,
    label: &str,
) -> anyhow::Result<(ConfigFile, Option<NodeConfig>)> {
    let mut chosen = NodeConfig::of_environment(label, default.path(), &state_dir())?;
    if let Some(amiss) = chosen.first().await? {
        // The log begins with the configuration.
        eprintln!("tessera: {}", printable::line(&amiss));
    }
    Ok((chosen.file(), Some(chosen)))
}

fn start_log(config: &Config) -> Result<SetFilter, ConfigError> {
    let Log { filter, format } = &config.log;
    let targets = log_filter(filter).map_err(|error| ConfigError {
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
        let targets = log_filter(filter)?;
        handle.reload(targets).map_err(|error| error.to_string())
    }))
}
