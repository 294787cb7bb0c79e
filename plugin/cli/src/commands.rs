//! Commands that this node's plugin and those of a cluster answer alike: `tessera X` and `kubectl tessera X`.

use std::process::ExitCode;

use clap::Subcommand;

use crate::source::{Failure, Source};
use crate::{advice, explain, history, status, steer, top, trace};

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
