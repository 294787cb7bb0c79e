//! `kubectl tessera`: all nodes at once, with the user's own kubeconfig and rights. The same program under the name
//! `kubectl-tessera`, which is how kubectl finds it.

mod console;
mod pending;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tessera_fleet::{Fleet, Options};

pub(crate) use console::{Args as ConsoleArgs, main as console};

use crate::Both;
use crate::completions;
use crate::source::{Failure, Source};

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
pub(crate) struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Both(Both),
    /// Say why a pod waits: what each node has left, and what is in the way
    WhyPending(pending::Args),
    /// Serve the page for all nodes
    Console(ConsoleArgs),
}

/// Which cluster, which nodes, which namespace.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Common {
    /// The kubeconfig, as kubectl takes it [default: KUBECONFIG, ~/.kube/config, the pod's service account]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context
    #[arg(long, global = true, value_name = "CONTEXT")]
    pub context: Option<String>,
    /// The namespace of pods [default: the context's]
    #[arg(long, short, global = true, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Pods of all namespaces
    #[arg(long, short = 'A', global = true)]
    pub all_namespaces: bool,
    /// Only this node; may be given several times
    #[arg(long, global = true, value_name = "NODE")]
    pub node: Vec<String>,
    /// The namespace of the plugin's pods
    #[arg(long, global = true, value_name = "NAMESPACE", default_value = "tessera")]
    pub plugin_namespace: String,
    /// Labels of the plugin's pods
    #[arg(
        long,
        global = true,
        value_name = "SELECTOR",
        hide = true,
        default_value = "app.kubernetes.io/name=tessera"
    )]
    pub plugin_selector: String,
}

impl Common {
    pub fn options(&self) -> Options {
        Options {
            kubeconfig: self.kubeconfig.clone(),
            context: self.context.clone(),
            plugin_namespace: self.plugin_namespace.clone(),
            labels: self.plugin_selector.clone(),
            namespace: self.namespace.clone(),
            nodes: self.node.iter().cloned().collect(),
            ..Options::default()
        }
    }

    pub fn fleet(&self) -> Result<Fleet, Failure> {
        self.check()?;
        Ok(Fleet::new(self.options())?)
    }

    /// clap sees no conflict between one before and one behind the command.
    fn check(&self) -> Result<(), Failure> {
        match self.namespace.is_some() && self.all_namespaces {
            true => {
                Err(Failure::usage("-n names one namespace and -A means all: give one of them"))
            }
            false => Ok(()),
        }
    }

    /// The namespace whose pods are asked about; empty for all.
    pub fn namespace(&self, fleet: &Fleet) -> String {
        match (&self.namespace, self.all_namespaces) {
            (_, true) => String::new(),
            (Some(namespace), false) => namespace.clone(),
            (None, false) => fleet.context().namespace.clone(),
        }
    }

    /// The node that is asked, where it is one.
    pub fn one_node(&self) -> Result<&str, Failure> {
        match self.node.as_slice() {
            [] => Ok(""),
            [node] => Ok(node),
            _ => Err(Failure::usage("this asks one node: give --node once")),
        }
    }

    /// A pod's namespace and name.
    pub fn pod(&self, fleet: &Fleet, written: &str) -> Result<(String, String), Failure> {
        let namespace = self.namespace(fleet);
        let (namespace, name) = written.split_once('/').unwrap_or((&namespace, written));
        if namespace.is_empty() {
            return Err(Failure::usage("say the pod's namespace: NAMESPACE/NAME, or -n NAMESPACE"));
        }
        Ok((namespace.to_owned(), name.to_owned()))
    }
}

/// Whether the program was called by a name that means this.
pub(crate) fn is_called(program: Option<&OsString>) -> bool {
    let name = program.map(Path::new).and_then(Path::file_stem).and_then(OsStr::to_str);
    name.is_some_and(|name| name == NAME || name == COMPLETE)
}

/// Runs `kubectl tessera` with these arguments.
pub(crate) fn main(args: Vec<OsString>) -> ExitCode {
    let called = args.first().map(Path::new).and_then(Path::file_stem).and_then(OsStr::to_str);
    if called == Some(COMPLETE) {
        return completions::of_kubectl(args);
    }
    // Older kubectl know no other name.
    if args.get(1).is_some_and(|word| word == "__complete") {
        return completions::of_kubectl(args.into_iter().skip(1).collect());
    }
    let Cli { common, command } = match crate::parsed(args) {
        Ok(cli) => cli,
        Err(ended) => return ended,
    };
    let done = match command {
        Command::Both(command) => {
            common.fleet().and_then(|fleet| command.run(&Source::Cluster(fleet, common)))
        }
        Command::WhyPending(args) => {
            common.fleet().and_then(|fleet| crate::wait(pending::main(&fleet, &common, &args)))
        }
        Command::Console(args) => console(&args, &common),
    };
    done.unwrap_or_else(|failure| failure.exit("kubectl tessera"))
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

    /// Commands that a node has as well know a namespace of their own.
    #[test]
    fn a_namespace_may_stand_before_and_behind_the_command() {
        let of = |line: &str| {
            let words = ["kubectl-tessera"].into_iter().chain(line.split(' '));
            let common = Cli::try_parse_from(words).unwrap().common;
            common.check().map(|()| common.namespace)
        };
        for line in ["-n team explain a", "explain a -n team", "quota set a --cores 4 -n team"] {
            assert_eq!(of(line).unwrap().as_deref(), Some("team"), "{line}");
        }
        for line in ["explain a -n team -A", "-A explain a -n team", "waste -n team -A"] {
            assert!(of(line).is_err(), "{line}");
        }
    }
}
