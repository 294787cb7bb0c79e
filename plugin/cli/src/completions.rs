//! Completions: the shell calls this program, which knows its own arguments and asks the plugin for names.
//!
//! Where there is no plugin, or none that answers at once, names are left out and nothing is said: somebody is
//! typing.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use tessera_api::admin;
use tessera_config::ConfigFile;
use tessera_system::terminal;
use tessera_view::status::Status;

/// Set by the shell's function when it wants completions.
const ASKED: &str = "TESSERA_COMPLETE";
/// How long the plugin may take: a key was pressed.
const WAIT: Duration = Duration::from_millis(500);

/// What a name is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pod,
    Namespace,
    Container,
    Allocation,
    Gpu,
    Share,
}

impl Kind {
    /// What an argument takes, by what its help calls its value: `POD|ALLOCATION`.
    fn of(arg: &Arg) -> Vec<Kind> {
        let names = arg.get_value_names().unwrap_or_default();
        let words = names.iter().flat_map(|name| name.split('|'));
        let kind = |word: &str| match word {
            "POD" => Some(Kind::Pod),
            "NAMESPACE" => Some(Kind::Namespace),
            "CONTAINER" => Some(Kind::Container),
            "ALLOCATION" => Some(Kind::Allocation),
            "GPU" | "UUID" => Some(Kind::Gpu),
            "SHARE" | "RESOURCE" => Some(Kind::Share),
            _ => None,
        };
        words.filter_map(kind).collect()
    }
}

/// Answers the shell, if it is the shell that asks.
pub(super) fn answer(args: &[OsString]) -> bool {
    if std::env::var_os(ASKED).is_none_or(|asked| asked.is_empty()) {
        return false;
    }
    let config = config_file(args);
    let command = || with_names(super::Cli::command(), config.as_deref());
    let here = std::env::current_dir().ok();
    // What cannot be completed is not completed; an error would stand in what somebody types.
    let _ = CompleteEnv::with_factory(command)
        .bin("tessera")
        .var(ASKED)
        .try_complete(args.iter().cloned(), here.as_deref());
    true
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
fn with_names(command: Command, config: Option<&Path>) -> Command {
    if command.get_name() == "sandbox" {
        return tessera_sandbox::completions::with_names(command);
    }
    let config = config.map(Path::to_owned);
    let name = |arg: Arg| {
        let kinds = Kind::of(&arg);
        if kinds.is_empty() {
            return arg;
        }
        let config = config.clone();
        arg.add(ArgValueCandidates::new(move || {
            let Some(status) = ask(config.clone()) else { return Vec::new() };
            let names = names(&status, &kinds).into_iter();
            names
                .map(|(name, help)| CompletionCandidate::new(name).help(Some(help.into())))
                .collect()
        }))
    };
    let below = config.clone();
    command.mut_args(name).mut_subcommands(move |command| with_names(command, below.as_deref()))
}

/// The plugin's answer, if it comes at once.
fn ask(asked: Option<PathBuf>) -> Option<Status> {
    let config = ConfigFile { asked }.judge().config;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = async { tokio::time::timeout(WAIT, admin::ask(&config.paths.admin)).await };
    runtime.block_on(answer).ok()?.ok()
}

/// Names, and what is said of them.
fn names(status: &Status, kinds: &[Kind]) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    // What a shell would take for something else completes nothing.
    let mut add = |name: &str, help: String| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
        if !name.is_empty() && !name.starts_with('-') && name.chars().all(is_plain) {
            names.insert(name.to_owned(), help);
        }
    };
    for allocation in &status.allocations {
        let holder = allocation.holder.clone().unwrap_or_default();
        let pod = format!("{}/{}", holder.namespace, holder.pod);
        for kind in kinds {
            match kind {
                Kind::Pod => add(&pod, format!("container {}", holder.container)),
                Kind::Namespace => add(&holder.namespace, "namespace".to_owned()),
                Kind::Container => add(&holder.container, format!("of {pod}")),
                Kind::Allocation => add(&allocation.id, format!("allocation of {pod}")),
                Kind::Gpu | Kind::Share => {}
            }
        }
    }
    if kinds.contains(&Kind::Gpu) {
        for gpu in &status.gpus {
            add(&gpu.index.to_string(), gpu.name.clone());
            add(&gpu.uuid, format!("GPU {}, {}", gpu.index, gpu.name));
        }
    }
    if kinds.contains(&Kind::Share) {
        let replicas = status.gpus.iter().flat_map(|gpu| &gpu.replicas);
        replicas.for_each(|replica| add(&replica.resource_name, "resource".to_owned()));
    }
    names
}

#[cfg(test)]
mod tests {
    use tessera_view::status::{Allocation, Gpu, Holder, Replica};

    use super::*;

    fn has(command: &Command, path: &[&str], kind: Kind) -> bool {
        let mut at = command;
        for name in path {
            let Some(below) = at.find_subcommand(name) else { return false };
            at = below;
        }
        at.get_arguments().any(|arg| Kind::of(arg).contains(&kind))
    }

    #[test]
    fn commands_that_take_names_know_which() {
        let command = super::super::Cli::command();
        assert!(has(&command, &["explain"], Kind::Pod) && has(&command, &["explain"], Kind::Gpu));
        for verb in ["set", "show", "reset"] {
            assert!(has(&command, &["quota", verb], Kind::Pod), "{verb}");
            assert!(has(&command, &["quota", verb], Kind::Allocation), "{verb}");
        }
        for verb in ["cordon", "uncordon"] {
            assert!(
                has(&command, &[verb], Kind::Gpu) && !has(&command, &[verb], Kind::Pod),
                "{verb}"
            );
        }
    }

    #[test]
    fn names_that_a_shell_might_take_for_more_are_left_out() {
        let holder = |pod: &str| {
            let (namespace, container) = ("ns".to_owned(), "main".to_owned());
            Some(Holder { namespace, pod: pod.into(), container })
        };
        let of =
            |pod: &str| Allocation { id: pod.into(), holder: holder(pod), ..Allocation::default() };
        let status = Status {
            allocations: ["llm-0", "$(reboot)", "a b", "-x", "`id`", "a;b", "é"].map(of).into(),
            gpus: vec![Gpu {
                uuid: "GPU-a".into(),
                replicas: vec![Replica { resource_name: "x.dev/gpu".into(), ..Replica::default() }],
                ..Gpu::default()
            }],
            ..Status::default()
        };
        let listed = |kinds: &[Kind]| names(&status, kinds).into_keys().collect::<Vec<_>>();
        assert_eq!(listed(&[Kind::Pod]), ["ns/-x", "ns/llm-0"]);
        assert_eq!(listed(&[Kind::Allocation]), ["llm-0"]);
        assert_eq!(listed(&[Kind::Gpu, Kind::Share]), ["0", "GPU-a", "x.dev/gpu"]);
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
