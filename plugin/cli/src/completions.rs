//! Completions: the shell or kubectl calls this program, which knows its own arguments and asks for names.
//!
//! Where nobody answers at once, names are left out and nothing is said: somebody is typing.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory, Parser};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate, complete};
use clap_complete::env::{CompleteEnv, Shells};
use tessera_config::ConfigFile;
use tessera_fleet::Fleet as Cluster;
use tessera_model::printable;
use tessera_system::terminal;
use tessera_view::fleet::Fleet;

use crate::kubectl::{self, Common};
use crate::source::{Failure, Source};
use crate::wait;

/// Set by the shell's function when it wants completions.
const ASKED: &str = "TESSERA_COMPLETE";
/// How long this node's plugin may take: a key was pressed.
const WAIT: Duration = Duration::from_millis(500);
/// How long a cluster may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// cobra's directive: these words alone, no names of files.
const NO_FILES: &str = ":4";

/// What a name is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pod,
    /// A pod without a node.
    Pending,
    Namespace,
    Container,
    Allocation,
    Gpu,
    Share,
    Node,
    NodeOrGpu,
    Context,
}

impl Kind {
    /// What an argument takes, by what its help calls its value: `POD|ALLOCATION`.
    fn of(arg: &Arg) -> Vec<Kind> {
        let names = arg.get_value_names().unwrap_or_default();
        let words = names.iter().flat_map(|name| name.split('|'));
        let kind = |word: &str| match word {
            "POD" => Some(Kind::Pod),
            "PENDING" => Some(Kind::Pending),
            "NAMESPACE" => Some(Kind::Namespace),
            "CONTAINER" => Some(Kind::Container),
            "ALLOCATION" => Some(Kind::Allocation),
            "GPU" | "UUID" => Some(Kind::Gpu),
            "SHARE" | "RESOURCE" => Some(Kind::Share),
            "NODE" => Some(Kind::Node),
            "NODE/GPU" => Some(Kind::NodeOrGpu),
            "CONTEXT" => Some(Kind::Context),
            _ => None,
        };
        words.filter_map(kind).collect()
    }
}

/// Names, and what is said of them.
type Names = BTreeMap<String, String>;
/// Who knows names.
type Ask = Arc<dyn Fn(&[Kind]) -> Names + Send + Sync>;

/// Answers the shell, if it is the shell that asks.
pub(super) fn answer(args: &[OsString]) -> bool {
    if std::env::var_os(ASKED).is_none_or(|asked| asked.is_empty()) {
        return false;
    }
    let asked = config_file(args);
    let ask: Ask = Arc::new(move |kinds| {
        let config = ConfigFile { asked: asked.clone() }.judge().config;
        now(&Source::node(config), WAIT, kinds)
    });
    let command = || with_names(super::Cli::command(), &ask);
    let here = std::env::current_dir().ok();
    // What cannot be completed is not completed; an error would stand in what somebody types.
    let _ = CompleteEnv::with_factory(command)
        .bin("tessera")
        .var(ASKED)
        .try_complete(args.iter().cloned(), here.as_deref());
    true
}

/// Answers kubectl, which runs `kubectl_complete-tessera` with the words so far, and takes what could stand in place of
/// the last one, a line each, and a directive.
pub(super) fn of_kubectl(mut args: Vec<OsString>) -> ExitCode {
    #[derive(Parser)]
    #[command(ignore_errors = true, disable_help_flag = true, disable_version_flag = true)]
    struct Given {
        #[command(flatten)]
        common: Common,
        _rest: Vec<String>,
    }
    if args.len() < 2 {
        args.push(OsString::new());
    }
    let given = Given::try_parse_from(&args[..args.len() - 1]);
    let common = given.map(|given| given.common).unwrap_or_default();
    let ask: Ask = Arc::new(move |kinds| {
        let mut options = common.options();
        options.limit = PATIENCE / 2;
        // A node that is being typed is none to ask yet.
        options.nodes = BTreeSet::new();
        let Ok(fleet) = Cluster::new(options) else { return Names::new() };
        now(&Source::Cluster(fleet, common.clone()), PATIENCE, kinds)
    });
    let mut out = String::new();
    for word in proposals(with_names(kubectl::Cli::command(), &ask), args) {
        out.push_str(&printable::line(&word));
        out.push('\n');
    }
    // The shell has gone.
    let _ = terminal::print(&format!("{out}{NO_FILES}\n"));
    ExitCode::SUCCESS
}

/// What may stand in place of the last word. Of an option with its value in one word, the value.
fn proposals(mut command: Command, args: Vec<OsString>) -> BTreeSet<String> {
    let last = args.last().map(|last| last.to_string_lossy().into_owned()).unwrap_or_default();
    let at = args.len() - 1;
    let all = complete(&mut command, args, at, None).unwrap_or_default();
    let words = all.iter().map(|one| one.get_value().to_string_lossy().into_owned());
    let is_option = last.starts_with('-');
    let before = match last.split_once('=') {
        Some((option, _)) if is_option => option.len() + 1,
        _ => 0,
    };
    let fits = |word: &String| word.starts_with(if is_option { "--" } else { "" });
    let words = words.filter(|word| fits(word) && is_option == word.starts_with('-'));
    words.filter_map(|word| Some(word.get(before..)?.to_owned())).collect()
}

/// Prints what a shell has to read once.
pub(super) fn print(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let shells = Shells::builtins();
    let name = shell.to_string();
    let Some(shell) = shells.completer(&name) else { anyhow::bail!("no completions for {name}") };
    // As it was called: by the path's name, or where it lies.
    let called = std::env::args_os().next().unwrap_or_default();
    let is_path = Path::new(&called).components().count() > 1;
    let program = if is_path { std::env::current_exe()? } else { PathBuf::from("tessera") };
    let mut script = Vec::new();
    shell.write_registration(
        ASKED,
        "tessera",
        "tessera",
        &program.to_string_lossy(),
        &mut script,
    )?;
    terminal::print(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}

/// `--config` of the line that is being typed.
fn config_file(args: &[OsString]) -> Option<PathBuf> {
    let mut args = args.iter().filter_map(|arg| arg.to_str());
    while let Some(arg) = args.next() {
        let value = match arg {
            "-c" | "--config" => args.next(),
            _ => arg.strip_prefix("--config=").or_else(|| arg.strip_prefix("-c")),
        };
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            return Some(PathBuf::from(value));
        }
    }
    None
}

/// The command line, whose arguments know the names that they take.
fn with_names(command: Command, ask: &Ask) -> Command {
    if command.get_name() == "sandbox" {
        // What it names is in a sandbox, and not on this node.
        return command;
    }
    let name = |arg: Arg| {
        let kinds = Kind::of(&arg);
        if kinds.is_empty() {
            return arg;
        }
        let ask = Arc::clone(ask);
        arg.add(ArgValueCandidates::new(move || {
            let names = ask(&kinds).into_iter();
            names
                .map(|(name, help)| CompletionCandidate::new(name).help(Some(help.into())))
                .collect()
        }))
    };
    command.mut_args(name).mut_subcommands(|command| with_names(command, ask))
}

/// Names, if they come at once.
fn now(source: &Source, limit: Duration, kinds: &[Kind]) -> Names {
    let late = |_| Failure::failed("no answer");
    wait(async { tokio::time::timeout(limit, known(source, kinds)).await.map_err(late)? })
        .unwrap_or_default()
}

async fn known(source: &Source, kinds: &[Kind]) -> Result<Names, Failure> {
    let namespace = source.namespace(None);
    let called_so =
        |names: Vec<String>| names.into_iter().map(|name| (name, String::new())).collect();
    let is_cluster = match (source, kinds) {
        (Source::Cluster(cluster, _), [Kind::Context]) => {
            return Ok(called_so(cluster.user().contexts().unwrap_or_default()));
        }
        (Source::Cluster(cluster, _), [Kind::Node]) => {
            let places = cluster.places().await?.into_iter();
            return Ok(called_so(places.map(|place| place.node).collect()));
        }
        (Source::Cluster(cluster, _), [Kind::Pending]) => {
            let pods = cluster.user().pods(&namespace, "").await.unwrap_or_default().into_iter();
            let waiting = pods.filter(|pod| {
                pod.spec.node_name.is_empty() && matches!(pod.status.phase.as_str(), "" | "Pending")
            });
            let name = |of: &str, name: &str| called(&namespace, of, name);
            let waiting = waiting.map(|pod| name(&pod.metadata.namespace, &pod.metadata.name));
            return Ok(called_so(waiting.collect()));
        }
        (source, _) => matches!(source, Source::Cluster(..)),
    };
    Ok(names(&source.fleet().await?, kinds, &namespace, is_cluster))
}

/// A pod as it is written where `namespace` is meant.
fn called(namespace: &str, of: &str, pod: &str) -> String {
    if namespace.is_empty() { format!("{of}/{pod}") } else { pod.to_owned() }
}

/// Whether a node's word can be the name of something: the shell puts what is proposed into the command line, and a
/// node may say anything.
fn is_name(word: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
    !word.is_empty() && !word.starts_with('-') && word.bytes().all(is_plain)
}

/// Of all that is on nodes: in a cluster, a GPU's index says nothing without its node.
fn names(fleet: &Fleet, kinds: &[Kind], namespace: &str, is_cluster: bool) -> Names {
    let mut names = Names::new();
    let mut add = |name: &str, help: String| {
        if is_name(name) {
            names.insert(name.to_owned(), help);
        }
    };
    for entry in &fleet.nodes {
        let Some(view) = &entry.view else { continue };
        for tenant in &view.tenants {
            let is_meant = namespace.is_empty() || tenant.namespace == namespace;
            let pod = called(namespace, &tenant.namespace, &tenant.pod);
            for kind in kinds {
                match kind {
                    Kind::Pod if is_meant && !tenant.pod.is_empty() => {
                        add(&pod, format!("container {}", tenant.container));
                    }
                    Kind::Namespace => add(&tenant.namespace, "namespace".to_owned()),
                    Kind::Container if is_meant => add(&tenant.container, format!("of {pod}")),
                    Kind::Allocation if is_meant => add(&tenant.id, format!("allocation of {pod}")),
                    _ => {}
                }
            }
        }
        let is_whole = kinds.contains(&Kind::NodeOrGpu) && is_cluster;
        if is_whole {
            add(&entry.node, "node".to_owned());
        }
        for gpu in &view.gpus {
            if is_whole {
                add(&format!("{}/{}", entry.node, gpu.index), gpu.name.clone());
            } else if kinds.contains(&Kind::Gpu) {
                if !is_cluster {
                    add(&gpu.index.to_string(), gpu.name.clone());
                }
                add(&gpu.uuid, format!("GPU {}, {}", gpu.index, gpu.name));
            }
            if kinds.contains(&Kind::Share) {
                let resources = gpu.replicas.iter().map(|replicas| &replicas.resource_name);
                resources.for_each(|name| add(name, "resource".to_owned()));
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use tessera_view::fleet::Entry;
    use tessera_view::gpu::{Gpu, Replicas};
    use tessera_view::node::Node;
    use tessera_view::tenant::Tenant;

    use super::*;

    fn fleet() -> Fleet {
        let of = |pod: &str| Tenant {
            id: pod.into(),
            namespace: "ns".into(),
            pod: pod.into(),
            container: "main".into(),
            ..Tenant::default()
        };
        let replicas = Replicas { resource_name: "x.dev/gpu".into(), ..Replicas::default() };
        let gpu = Gpu { uuid: "GPU-a".into(), replicas: vec![replicas], ..Gpu::default() };
        let view = Node {
            tenants: ["llm-0", "$(reboot)", "a b", "-x", "`id`", "a;b", "é"].map(of).into(),
            gpus: vec![gpu],
            ..Node::default()
        };
        let entry = Entry { node: "n1".into(), view: Some(view), ..Entry::default() };
        Fleet { nodes: vec![entry], ..Fleet::default() }
    }

    #[test]
    fn names_that_a_shell_might_take_for_more_are_left_out() {
        let listed =
            |kinds: &[Kind]| names(&fleet(), kinds, "", false).into_keys().collect::<Vec<_>>();
        assert_eq!(listed(&[Kind::Pod]), ["ns/-x", "ns/llm-0"]);
        assert_eq!(listed(&[Kind::Allocation]), ["llm-0"]);
        assert_eq!(listed(&[Kind::Gpu, Kind::Share]), ["0", "GPU-a", "x.dev/gpu"]);
        for name in ["chat", "ann/chat-0", "GPU-5e55e4a0-0000", "MIG-a/1/0", "n1.example/0"] {
            assert!(is_name(name), "{name}");
        }
        for word in ["", "$(id)", "a;b", "`a`", "-n", "a\nb", "a'b", "a>b", "~", "a*"] {
            assert!(!is_name(word), "{word}");
        }
    }

    #[test]
    fn kubectl_is_told_what_may_stand_in_each_place() {
        let at = |line: &str| {
            let ask: Ask = Arc::new(|kinds| match kinds {
                [Kind::Context] => [("prod@eu".to_owned(), String::new())].into(),
                [Kind::Node] => [("n1".to_owned(), String::new())].into(),
                [Kind::Pending] => [("wide".to_owned(), String::new())].into(),
                kinds => names(&fleet(), kinds, "ns", true),
            });
            let words = ["kubectl-tessera"].into_iter().chain(line.split(' '));
            let command = with_names(kubectl::Cli::command(), &ask);
            let all = proposals(command, words.map(OsString::from).collect());
            all.into_iter().collect::<Vec<_>>().join(" ")
        };
        let commands = at("");
        assert!(commands.contains("why-pending") && commands.contains("explain"), "{commands}");
        assert!(!commands.contains("--"), "{commands}");
        for (line, proposed) in [
            ("quota s", "set show"),
            ("quota set ", "llm-0"),
            ("quota set --memory 4Gi l", "llm-0"),
            ("quota reset l", "llm-0"),
            ("quota show l", "llm-0"),
            ("explain -n team l", "llm-0"),
            ("explain ", "GPU-a llm-0"),
            ("explain llm-0 x", ""),
            ("why-pending ", "wide"),
            ("--node ", "n1"),
            ("top --node=", "n1"),
            ("top -n ", "ns"),
            ("--context p", "prod@eu"),
            ("cordon ", "n1 n1/0"),
            ("uncordon ", "n1 n1/0"),
            ("status -o ", "json text wide"),
            ("quota set --reason ", ""),
            ("top --onc", "--once"),
            ("top --nod", "--node"),
        ] {
            assert_eq!(at(line), proposed, "{line}");
        }
    }

    #[test]
    fn the_configuration_that_is_being_typed_is_the_one_to_ask_by() {
        let of = |args: &[&str]| config_file(&args.iter().map(OsString::from).collect::<Vec<_>>());
        let want = Some(PathBuf::from("/x.toml"));
        for line in [
            &["-c", "/x.toml"][..],
            &["--config", "/x.toml"],
            &["--config=/x.toml"],
            &["-c/x.toml"],
        ] {
            let mut all = vec!["tessera", "--", "tessera"];
            all.extend(line);
            all.extend(["explain", ""]);
            assert_eq!(of(&all), want, "{all:?}");
        }
        assert_eq!(of(&["tessera", "explain", ""]), None);
    }
}
