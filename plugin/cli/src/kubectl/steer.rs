//! `kubectl tessera quota`, `cordon`, `uncordon`: the plugin's own command, run in its pod on the right node.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use tessera_fleet::{Fleet, FleetError, Place};
use tessera_model::printable;
use tessera_model::written_name::{BEGINNING, Several};

use super::failure::Failure;
use super::options::Common;

/// What of quotas.
#[derive(Debug, Subcommand)]
pub(crate) enum QuotaCommand {
    /// Change the limits of a running container, until its allocation ends
    Set(SetArgs),
    /// Give a container back the limits that it was allocated with
    Reset(ResetArgs),
    /// Show limits in force, and beside them those of the allocation where they were changed
    Show {
        /// The pod (NAME or NAMESPACE/NAME), or an allocation by its id or the beginning of it
        #[arg(value_name = "POD|ALLOCATION")]
        pod: String,
        /// Output format
        #[arg(long, short, value_enum, default_value = "text")]
        output: Output,
    },
}

/// The formats of the plugin's own command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Text,
    /// For programs
    Json,
}

impl Output {
    /// What the plugin's command is given: nothing for its default, which also older plugins have.
    fn word(self) -> Option<String> {
        (self == Output::Json).then(|| "json".to_owned())
    }
}

/// Arguments of `kubectl tessera quota set`.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    target: Target,
    /// Memory that all its processes may hold on each of its GPUs: 12GiB, 12Gi, 512Mi
    #[arg(long, value_name = "QUANTITY")]
    memory: Option<String>,
    /// GPU time, in percent of a GPU: 40
    #[arg(long, value_name = "PERCENT")]
    cores: Option<String>,
    /// What --cores means: burst (a weight; idle time is anybody's), strict (also a cap) or none
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Change the memory of this GPU alone, where it has several
    #[arg(long, value_name = "UUID|INDEX")]
    gpu: Option<String>,
    #[command(flatten)]
    how: How,
}

/// Arguments of `kubectl tessera quota reset`.
#[derive(Debug, Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, Args)]
struct Target {
    /// The pod (NAME or NAMESPACE/NAME), or an allocation by its id or the beginning of it
    #[arg(value_name = "POD|ALLOCATION")]
    pod: String,
    /// The container, where the pod has several with GPUs
    #[arg(long, value_name = "CONTAINER")]
    container: Option<String>,
}

#[derive(Debug, Args)]
struct How {
    /// Also below what is in use: it keeps what it has, and everything new is refused until it fits
    #[arg(long)]
    force: bool,
    /// Say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Output,
}

/// Arguments of `kubectl tessera cordon`.
#[derive(Debug, Args)]
pub(crate) struct CordonArgs {
    /// NODE, or NODE/GPU with the GPU's UUID or index
    #[arg(value_name = "NODE/GPU", required_unless_present = "all")]
    what: Option<String>,
    /// The whole node: NODE, or that of --node
    #[arg(long)]
    all: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Output,
}

/// Arguments of `kubectl tessera uncordon`.
#[derive(Debug, Args)]
pub(crate) struct UncordonArgs {
    #[command(flatten)]
    cordon: CordonArgs,
    /// With --all: also the cordon of each GPU
    #[arg(long, requires = "all")]
    each: bool,
}

/// The pod's namespace and name.
fn named(pod: &str, common: &Common, fleet: &Fleet) -> Result<(String, String), Failure> {
    let namespace = common.namespace(fleet);
    let (namespace, name) = pod.split_once('/').unwrap_or((&namespace, pod));
    if namespace.is_empty() {
        return Err(Failure::usage("say the pod's namespace: NAMESPACE/NAME, or -n NAMESPACE"));
    }
    Ok((namespace.to_owned(), name.to_owned()))
}

/// Words of a command after the first, with options before what strangers may have named.
fn words(
    first: &[&str],
    options: &[(&str, Option<&String>)],
    flags: &[(&str, bool)],
    last: Option<&str>,
) -> Vec<String> {
    let mut words: Vec<String> = first.iter().map(ToString::to_string).collect();
    let given =
        options.iter().filter_map(|(name, value)| value.map(|value| format!("--{name}={value}")));
    words.extend(given);
    words.extend(flags.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| format!("--{name}")));
    words.extend(last.into_iter().flat_map(|last| ["--".to_owned(), last.to_owned()]));
    words
}

fn quota_words(command: &QuotaCommand, pod: &str) -> Vec<String> {
    let how = |how: &How| [("force", how.force), ("dry-run", how.dry_run)];
    match command {
        QuotaCommand::Set(SetArgs { target, memory, cores, policy, gpu, how: by }) => {
            let output = by.output.word();
            let options = [
                ("memory", memory.as_ref()),
                ("cores", cores.as_ref()),
                ("policy", policy.as_ref()),
                ("gpu", gpu.as_ref()),
                ("container", target.container.as_ref()),
                ("reason", by.reason.as_ref()),
                ("output", output.as_ref()),
            ];
            words(&["quota", "set"], &options, &how(by), Some(pod))
        }
        QuotaCommand::Reset(ResetArgs { target, how: by }) => {
            let output = by.output.word();
            let options = [
                ("container", target.container.as_ref()),
                ("reason", by.reason.as_ref()),
                ("output", output.as_ref()),
            ];
            words(&["quota", "reset"], &options, &how(by), Some(pod))
        }
        QuotaCommand::Show { output, .. } => {
            words(&["quota", "show"], &[("output", output.word().as_ref())], &[], Some(pod))
        }
    }
}

pub(super) async fn quota(
    fleet: &Fleet,
    common: &Common,
    command: QuotaCommand,
) -> Result<ExitCode, Failure> {
    let written = match &command {
        QuotaCommand::Set(args) => &args.target.pod,
        QuotaCommand::Reset(args) => &args.target.pod,
        QuotaCommand::Show { pod, .. } => pod,
    };
    let (place, subject) = holder(fleet, common, written).await?;
    run(fleet, &place, &quota_words(&command, &subject)).await
}

/// The place of a pod, or of an allocation, and what its plugin is asked for.
async fn holder(fleet: &Fleet, common: &Common, written: &str) -> Result<(Place, String), Failure> {
    let allocations = match may_be_id(written) {
        true => fleet.allocations(written).await?,
        false => Vec::new(),
    };
    let pod = match named(written, common, fleet) {
        Ok((namespace, name)) => {
            let found = fleet.user().pod(&namespace, &name).await.map_err(FleetError::from)?;
            if found.is_none() && allocations.is_empty() {
                let or_id = match may_be_id(written) {
                    true => ", and no allocation's id begins so",
                    false => "",
                };
                let text = format!("there is no pod {name} in namespace {namespace}{or_id}");
                return Err(Failure::failed(text));
            }
            found.map(|found| (format!("{namespace}/{name}"), found.spec.node_name))
        }
        // An id needs no namespace.
        Err(_) if !allocations.is_empty() => None,
        Err(failure) => return Err(failure),
    };
    match chosen(written, pod, allocations)? {
        Chosen::Allocation(place, id) => Ok((place, id)),
        Chosen::Pod(pod, node) if node.is_empty() => {
            let name = pod.rsplit('/').next().unwrap_or_default();
            let hint = format!("see `kubectl tessera why-pending {name}`");
            Err(Failure::failed(format!("pod {pod} has no node yet: {hint}")))
        }
        Chosen::Pod(pod, node) => Ok((place(fleet, &node).await?, pod)),
    }
}

/// Whether a name may be the beginning of an allocation's id.
fn may_be_id(written: &str) -> bool {
    written.len() >= BEGINNING
        && written.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// What a written name means.
#[derive(Debug, PartialEq, Eq)]
enum Chosen {
    /// A pod as `namespace/pod`, and its node; empty where it has none.
    Pod(String, String),
    /// An allocation by its id, where it is.
    Allocation(Place, String),
}

/// The one thing of these that is called so; there is at least one. A pod may be called as another's allocation begins:
/// then nothing is chosen.
fn chosen(
    written: &str,
    pod: Option<(String, String)>,
    mut allocations: Vec<(Place, String)>,
) -> Result<Chosen, Failure> {
    match (pod, allocations.len()) {
        (Some((pod, node)), 0) => Ok(Chosen::Pod(pod, node)),
        (Some((pod, _)), _) => Err(Failure::usage(format!(
            "{written} is a pod and begins the id of an allocation: write {pod} for the pod, or more of the id"
        ))),
        (None, 1) => {
            let (place, id) = allocations.remove(0);
            Ok(Chosen::Allocation(place, id))
        }
        (None, _) => {
            let ids = allocations.iter().map(|(place, id)| format!("{id} on {}", place.node));
            Err(Failure::usage(Several::new(written, ids).to_string()))
        }
    }
}

pub(super) async fn cordon(
    fleet: &Fleet,
    common: &Common,
    args: &CordonArgs,
) -> Result<ExitCode, Failure> {
    let (node, gpu) = args.target(common)?;
    let words = cordon_words(args, "cordon", gpu, false);
    run(fleet, &place(fleet, node).await?, &words).await
}

pub(super) async fn uncordon(
    fleet: &Fleet,
    common: &Common,
    args: &UncordonArgs,
) -> Result<ExitCode, Failure> {
    let (node, gpu) = args.cordon.target(common)?;
    let words = cordon_words(&args.cordon, "uncordon", gpu, args.each);
    run(fleet, &place(fleet, node).await?, &words).await
}
impl CordonArgs {
    /// The node, and its GPU where it is one.
    fn target<'a>(&'a self, common: &'a Common) -> Result<(&'a str, Option<&'a str>), Failure> {
        let target = match self.what.as_deref().map(|what| what.split_once('/').ok_or(what)) {
            Some(Ok((node, gpu))) => (node, Some(gpu)),
            Some(Err(node)) => (node, None),
            None => (common.one_node()?, None),
        };
        match target {
            ("", _) => Err(Failure::usage("say the node: NODE --all, or --node NODE --all")),
            (_, Some("")) => Err(Failure::usage("say the GPU behind the slash: NODE/GPU")),
            (node, Some(_)) if self.all => Err(Failure::usage(format!(
                "--all is for the whole node: write {node} --all, or leave out --all"
            ))),
            target => Ok(target),
        }
    }
}

fn cordon_words(args: &CordonArgs, verb: &str, gpu: Option<&str>, each: bool) -> Vec<String> {
    let output = args.output.word();
    let options = [("reason", args.reason.as_ref()), ("output", output.as_ref())];
    words(&[verb], &options, &[("all", gpu.is_none()), ("each", each)], gpu)
}

async fn place(fleet: &Fleet, node: &str) -> Result<Place, Failure> {
    let places = fleet.places().await?;
    let place = places.iter().find(|place| place.node == node);
    place.cloned().ok_or_else(|| {
        let known: Vec<&str> = places.iter().take(12).map(|place| place.node.as_str()).collect();
        Failure::failed(format!(
            "no plugin is on a node called {node}; there is one on {}",
            known.join(", ")
        ))
    })
}

/// Runs it, prints what it prints, and ends as it ends.
async fn run(fleet: &Fleet, place: &Place, words: &[String]) -> Result<ExitCode, Failure> {
    let done = fleet.run_on(place, words).await?;
    super::print(&String::from_utf8_lossy(&done.stdout))?;
    let text = String::from_utf8_lossy(&done.stderr);
    // Nothing can be done about a closed standard error.
    let _ = std::io::stderr().write_all(printable::lines(&text).as_bytes());
    Ok(ExitCode::from(u8::try_from(done.code).unwrap_or(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Quota {
        #[command(subcommand)]
        command: QuotaCommand,
    }

    #[test]
    fn what_is_run_is_the_plugins_own_command_and_names_are_no_options() {
        let of = |text: &str| {
            let parsed =
                Quota::try_parse_from(["quota"].into_iter().chain(text.split(' '))).unwrap();
            quota_words(&parsed.command, "team/chat").join(" ")
        };
        assert_eq!(
            of("set chat --memory 12Gi --cores 40 --force --reason why"),
            "quota set --memory=12Gi --cores=40 --reason=why --force -- team/chat"
        );
        assert_eq!(
            of("reset chat --dry-run --container=a"),
            "quota reset --container=a --dry-run -- team/chat"
        );
        assert_eq!(of("show chat"), "quota show -- team/chat");
        assert_eq!(of("show chat -o json"), "quota show --output=json -- team/chat");
        assert_eq!(
            of("set chat --cores 40 -o json --dry-run"),
            "quota set --cores=40 --output=json --dry-run -- team/chat"
        );
    }

    #[test]
    fn a_name_means_one_thing_or_nothing() {
        let place = |node: &str| Place {
            node: node.into(),
            namespace: "tessera".into(),
            pod: "p".into(),
            port: 0,
            away: String::new(),
        };
        let held = |node: &str, id: &str| (place(node), id.to_owned());
        let pod = || Some(("team/cafe".to_owned(), "n1".to_owned()));
        let says = |pod, held| chosen("cafe", pod, held).unwrap_err().text;
        assert_eq!(
            chosen("cafe", pod(), Vec::new()),
            Ok(Chosen::Pod("team/cafe".into(), "n1".into()))
        );
        assert_eq!(
            chosen("cafe", None, vec![held("n2", "cafe01")]),
            Ok(Chosen::Allocation(place("n2"), "cafe01".into()))
        );
        let both = says(pod(), vec![held("n2", "cafe01")]);
        assert!(both.contains("write team/cafe for the pod"), "{both}");
        let several = says(None, vec![held("n1", "cafe01"), held("n2", "cafe02")]);
        assert!(several.contains("cafe01 on n1, cafe02 on n2"), "{several}");
        for (written, may) in
            [("cafe", true), ("0c1d2e3f", true), ("caf", false), ("chat", false), ("a/cafe", false)]
        {
            assert_eq!(may_be_id(written), may, "{written}");
        }
    }

    #[derive(Parser)]
    struct Node {
        #[command(flatten)]
        common: Common,
        #[command(subcommand)]
        verb: Verb,
    }

    #[derive(Subcommand)]
    enum Verb {
        Cordon(CordonArgs),
        Uncordon(UncordonArgs),
    }

    /// The node that is asked, and what; or what is wrong.
    fn asked(line: &str) -> Result<(String, String), String> {
        let words = ["kubectl-tessera"].into_iter().chain(line.split(' '));
        let Node { common, verb } = Node::try_parse_from(words).map_err(|e| e.to_string())?;
        let (args, verb, each) = match &verb {
            Verb::Cordon(args) => (args, "cordon", false),
            Verb::Uncordon(args) => (&args.cordon, "uncordon", args.each),
        };
        let (node, gpu) = args.target(&common).map_err(|failure| failure.text)?;
        Ok((node.to_owned(), cordon_words(args, verb, gpu, each).join(" ")))
    }

    #[test]
    fn a_node_is_cordoned_as_its_own_command_does_it() {
        for (line, node, words) in [
            ("cordon n1 --reason why", "n1", "cordon --reason=why --all"),
            ("cordon n1 --all", "n1", "cordon --all"),
            ("cordon n1/0 -o json", "n1", "cordon --output=json -- 0"),
            ("cordon n1/--all", "n1", "cordon -- --all"),
            ("uncordon n1", "n1", "uncordon --all"),
            ("uncordon n1 --all --each", "n1", "uncordon --all --each"),
            ("uncordon --all --each --node n2", "n2", "uncordon --all --each"),
            (
                "uncordon --all --each -o json --node n2",
                "n2",
                "uncordon --output=json --all --each",
            ),
        ] {
            assert_eq!(asked(line), Ok((node.to_owned(), words.to_owned())), "{line}");
        }
    }

    #[test]
    fn a_wrong_line_says_what_to_write() {
        for (line, says) in [
            ("uncordon --all --each", "--node NODE --all"),
            ("uncordon n1 --each", "--all"),
            ("uncordon n1/0 --all --each", "n1 --all"),
            ("uncordon n1/", "NODE/GPU"),
            ("cordon", "NODE/GPU"),
            ("cordon n1 --each", "--each"),
            ("cordon --all --node a --node b", "--node once"),
            ("cordon n1 -o yaml", "json"),
        ] {
            let error = asked(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
