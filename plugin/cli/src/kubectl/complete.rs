//! Completions for kubectl: it runs `kubectl_complete-tessera` with the words so far, and takes what could stand in
//! place of the last one, a line each, and a directive. Names come from the cluster, with a short patience; whatever
//! fails, nothing is proposed and nothing is said.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use tessera_fleet::Fleet;
use tessera_model::printable;

use super::options::Common;
use super::{Cli, print};

/// cobra's directive: these words alone, no names of files.
const NO_FILES: &str = ":4";
/// How long names may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// What may stand in a place.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    /// One of these words.
    Words(Vec<String>),
    Pods,
    Pending,
    Subjects,
    Nodes,
    NodesAndGpus,
    Namespaces,
    Contexts,
    Nothing,
}

#[derive(Parser)]
#[command(ignore_errors = true, disable_help_flag = true, disable_version_flag = true)]
struct Given {
    #[command(flatten)]
    common: Common,
    #[arg(trailing_var_arg = false)]
    _rest: Vec<String>,
}

pub(super) fn main(words: Vec<String>) -> ExitCode {
    let (last, before) = match words.split_last() {
        Some((last, before)) => (last.clone(), before.to_vec()),
        None => (String::new(), Vec::new()),
    };
    let mut proposals = match wanted(&before, &last) {
        Wanted::Words(words) => words,
        Wanted::Nothing => Vec::new(),
        wanted => {
            let given = Given::try_parse_from([String::new()].into_iter().chain(before));
            names(&given.map(|given| given.common).unwrap_or_default(), &wanted)
        }
    };
    let value = last.split_once('=').map_or(last.as_str(), |(_, value)| value);
    let value = if last.starts_with('-') && !last.contains('=') { last.as_str() } else { value };
    proposals.retain(|word| word.starts_with(value));
    proposals.sort();
    proposals.dedup();
    let mut out: String =
        proposals.iter().map(|word| format!("{}\n", printable::line(word))).collect();
    out.push_str(NO_FILES);
    out.push('\n');
    // The shell has gone.
    let _ = print(&out);
    ExitCode::SUCCESS
}

/// What may stand in place of the last word.
fn wanted(before: &[String], last: &str) -> Wanted {
    let root = Cli::command();
    let mut command = &root;
    let mut places = 0;
    let mut value_of: Option<String> = None;
    for word in before {
        if value_of.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            value_of = (!word.contains('=')).then(|| option(&root, command, word)).flatten();
            continue;
        }
        match command.find_subcommand(word) {
            Some(found) => command = found,
            None => places += 1,
        }
    }
    if let Some(kind) = value_of {
        return of_value(&kind);
    }
    if last.starts_with('-') {
        if let Some((name, _)) = last.split_once('=') {
            return option(&root, command, name).map_or(Wanted::Nothing, |kind| of_value(&kind));
        }
        let all =
            command.get_arguments().chain(root.get_arguments().filter(|arg| arg.is_global_set()));
        let names = all.filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long());
        return Wanted::Words(names.map(|name| format!("--{name}")).collect());
    }
    if command.has_subcommands() {
        let names = command.get_subcommands().map(|command| command.get_name().to_owned());
        return Wanted::Words(names.collect());
    }
    let place = command.get_positionals().nth(places);
    let kind = place.and_then(|arg| arg.get_value_names()).and_then(|names| names.first());
    kind.map_or(Wanted::Nothing, |kind| of_value(kind))
}

/// What an option's value is called; `None` for one without.
fn option(root: &clap::Command, command: &clap::Command, word: &str) -> Option<String> {
    let name = word.trim_start_matches('-');
    let is = |arg: &&clap::Arg| match word.starts_with("--") {
        true => arg.get_long() == Some(name),
        false => arg.get_short().is_some_and(|short| name.ends_with(short)),
    };
    let mut all = command.get_arguments().chain(root.get_arguments());
    let arg = all.find(is).filter(|arg| arg.get_action().takes_values())?;
    let values = arg.get_possible_values();
    if !values.is_empty() {
        let words: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
        return Some(format!("={}", words.join("|")));
    }
    Some(arg.get_value_names()?.first()?.to_string())
}

fn of_value(kind: &str) -> Wanted {
    match kind {
        // Ids are copied, not typed.
        "POD" | "POD|ALLOCATION" => Wanted::Pods,
        "PENDING" => Wanted::Pending,
        "POD|ALLOCATION|GPU" => Wanted::Subjects,
        "NODE" => Wanted::Nodes,
        "NODE/GPU" => Wanted::NodesAndGpus,
        "NAMESPACE" => Wanted::Namespaces,
        "CONTEXT" => Wanted::Contexts,
        words => match words.strip_prefix('=') {
            Some(words) => Wanted::Words(words.split('|').map(str::to_owned).collect()),
            None => Wanted::Nothing,
        },
    }
}

fn names(common: &Common, wanted: &Wanted) -> Vec<String> {
    let mut options = common.options();
    options.limit = PATIENCE / 2;
    // A node that is being typed is none to ask yet.
    options.nodes = BTreeSet::new();
    let Ok(fleet) = Fleet::new(options) else { return Vec::new() };
    if *wanted == Wanted::Contexts {
        return fleet.user().contexts().unwrap_or_default();
    }
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let namespace = common.namespace(&fleet);
    let found = runtime.block_on(async {
        tokio::time::timeout(PATIENCE, ask(&fleet, &namespace, wanted)).await.unwrap_or_default()
    });
    runtime.shutdown_background();
    found
}

async fn ask(fleet: &Fleet, namespace: &str, wanted: &Wanted) -> Vec<String> {
    if *wanted == Wanted::Nodes {
        let places = fleet.places().await.unwrap_or_default();
        return places.into_iter().map(|place| place.node).collect();
    }
    if *wanted == Wanted::Pending {
        let pods = fleet.user().pods(namespace, "").await.unwrap_or_default();
        let waits = pods.into_iter().filter(|pod| {
            pod.spec.node_name.is_empty() && matches!(pod.status.phase.as_str(), "" | "Pending")
        });
        return waits
            .map(|pod| called(namespace, &pod.metadata.namespace, &pod.metadata.name))
            .collect();
    }
    let Ok(known) = fleet.gather().await else { return Vec::new() };
    let mut names = Vec::new();
    for entry in &known.nodes {
        let Some(view) = &entry.view else { continue };
        let tenants = view
            .tenants
            .iter()
            .filter(|tenant| namespace.is_empty() || tenant.namespace == namespace);
        let pods = tenants.filter(|tenant| !tenant.pod.is_empty());
        let pods = pods.map(|tenant| called(namespace, &tenant.namespace, &tenant.pod));
        match wanted {
            Wanted::Pods => names.extend(pods),
            Wanted::Subjects => {
                names.extend(pods);
                names.extend(view.gpus.iter().map(|gpu| gpu.uuid.clone()));
            }
            Wanted::Namespaces => {
                names.extend(view.tenants.iter().map(|tenant| tenant.namespace.clone()));
            }
            Wanted::NodesAndGpus => {
                names.push(entry.node.clone());
                names.extend(view.gpus.iter().map(|gpu| format!("{}/{}", entry.node, gpu.index)));
            }
            _ => {}
        }
    }
    names.retain(|name| is_name(name));
    names
}

/// Whether a node's word can be the name of something: the shell puts what is proposed into the command line, and a node
/// may say anything.
fn is_name(word: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
    !word.is_empty() && !word.starts_with('-') && word.bytes().all(is_plain)
}

/// A pod as it is written where `namespace` is meant.
fn called(namespace: &str, of: &str, pod: &str) -> String {
    if namespace.is_empty() { format!("{of}/{pod}") } else { pod.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Wanted {
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        let (last, before) = words.split_last().unwrap();
        wanted(before, last)
    }

    #[test]
    fn only_what_can_be_a_name_is_proposed() {
        for name in ["chat", "ann/chat-0", "GPU-5e55e4a0-0000", "MIG-a/1/0", "n1.example/0"] {
            assert!(is_name(name), "{name}");
        }
        for word in ["", "$(id)", "a;b", "a b", "`a`", "-n", "a\nb", "a'b", "ä", "a>b", "~", "a*"]
        {
            assert!(!is_name(word), "{word}");
        }
    }

    /// A value that is called after something of the cluster completes to its names.
    #[test]
    fn every_value_that_names_something_of_the_cluster_completes() {
        fn values(command: &clap::Command, all: &mut BTreeSet<String>) {
            let names = command.get_arguments().filter_map(|arg| arg.get_value_names()?.first());
            all.extend(names.map(ToString::to_string));
            command.get_subcommands().for_each(|below| values(below, all));
        }
        let mut all = BTreeSet::new();
        values(&Cli::command(), &mut all);
        for name in all {
            let parts: Vec<&str> = name.split(['|', '/']).collect();
            let of_the_cluster = ["POD", "PENDING", "ALLOCATION", "NODE", "NAMESPACE", "CONTEXT"];
            if parts.iter().any(|part| of_the_cluster.contains(part)) {
                assert_ne!(of_value(&name), Wanted::Nothing, "{name}");
            }
        }
    }

    #[test]
    fn each_place_is_known_by_what_may_stand_there() {
        let Wanted::Words(commands) = at("") else { panic!() };
        assert!(commands.contains(&"why-pending".to_owned()), "{commands:?}");
        assert_eq!(at("quota s"), Wanted::Words(vec!["set".into(), "reset".into(), "show".into()]));
        assert_eq!(at("quota set "), Wanted::Pods);
        assert_eq!(at("quota set --memory 4Gi "), Wanted::Pods);
        assert_eq!(at("explain -n team ch"), Wanted::Subjects);
        assert_eq!(at("explain chat x"), Wanted::Nothing);
        assert_eq!(at("why-pending "), Wanted::Pending);
        assert_eq!(at("--node "), Wanted::Nodes);
        assert_eq!(at("top --node="), Wanted::Nodes);
        assert_eq!(at("top -n "), Wanted::Namespaces);
        assert_eq!(at("--context "), Wanted::Contexts);
        assert_eq!(at("cordon "), Wanted::NodesAndGpus);
        assert_eq!(
            at("status -o "),
            Wanted::Words(vec!["text".into(), "wide".into(), "json".into()])
        );
        assert_eq!(at("quota set --reason "), Wanted::Nothing);
        assert_eq!((at("quota reset "), at("quota show ")), (Wanted::Pods, Wanted::Pods));
        let Wanted::Words(options) = at("top --o") else { panic!() };
        assert!(options.contains(&"--once".to_owned()) && options.contains(&"--node".to_owned()));
    }
}
