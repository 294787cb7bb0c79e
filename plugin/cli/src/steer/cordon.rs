//! `cordon` and `uncordon`.

use std::process::ExitCode;

use clap::Args;
use tessera_api::print::{Page, Paper, Tone};
use tessera_model::counted::plural;
use tessera_model::steered::Cordon;
use tessera_view::change::{CordonRequest, CordonResponse, UncordonRequest};

use super::{given, place, run, words};
use crate::kubectl::Common;
use crate::output::{Format, show};
use crate::source::{Failure, Source, change};

#[derive(Debug, Args)]
pub(crate) struct CordonArgs {
    /// The GPU's UUID, index or product name; of a MIG parent, all its instances. Through kubectl: NODE, or NODE/GPU
    /// with the GPU's UUID or index
    #[arg(value_name = "GPU|NODE/GPU", required_unless_present = "all")]
    what: Option<String>,
    /// The whole node, with GPUs that are yet to be found; `uncordon` lifts the node's own cordon alone
    #[arg(long)]
    all: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Debug, Args)]
pub(crate) struct UncordonArgs {
    #[command(flatten)]
    cordon: CordonArgs,
    /// With --all: also the cordon of each GPU
    #[arg(long, requires = "all")]
    each: bool,
}

pub(crate) async fn cordon(args: CordonArgs, source: &Source) -> Result<ExitCode, Failure> {
    steer(args, None, source).await
}

pub(crate) async fn uncordon(args: UncordonArgs, source: &Source) -> Result<ExitCode, Failure> {
    steer(args.cordon, Some(args.each), source).await
}

/// With `lift`, gives out again; where that is true, also each GPU that was cordoned by itself.
async fn steer(args: CordonArgs, lift: Option<bool>, source: &Source) -> Result<ExitCode, Failure> {
    let config = match source {
        Source::Node(config) => config,
        Source::Cluster(fleet, common) => {
            let (node, gpu) = args.of_cluster(common)?;
            let verb = if lift.is_some() { "uncordon" } else { "cordon" };
            let words = args.words(verb, gpu, lift == Some(true));
            return run(fleet, &place(fleet, node).await?, &words).await;
        }
    };
    let gpu = args.gpu()?.to_owned();
    let CordonArgs { all, reason, output, .. } = args;
    let answer = match lift {
        None => change(config, &CordonRequest { gpu, all, reason }).await?,
        Some(each) => change(config, &UncordonRequest { gpu, all, each, reason }).await?,
    };
    show(&answer, output, |paper| text(&answer, lift.is_some(), paper))?;
    Ok(ExitCode::SUCCESS)
}

impl CordonArgs {
    /// The GPU of this node; empty for the whole node.
    fn gpu(&self) -> Result<&str, Failure> {
        match &self.what {
            Some(gpu) if self.all => Err(Failure::usage(format!(
                "--all is for the whole node: leave out {gpu}, or --all"
            ))),
            gpu => Ok(gpu.as_deref().unwrap_or_default()),
        }
    }

    /// The node, and its GPU where it is one.
    fn of_cluster<'a>(&'a self, common: &'a Common) -> Result<(&'a str, Option<&'a str>), Failure> {
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

    fn words(&self, verb: &str, gpu: Option<&str>, each: bool) -> Vec<String> {
        let options = [("reason", given(&self.reason))];
        words(&[verb], &options, &[("all", gpu.is_none()), ("each", each)], self.output, gpu)
    }
}

fn text(answer: &CordonResponse, again: bool, paper: Paper) -> String {
    let words = |list: &[String]| {
        let words = list.iter().map(|uuid| match uuid.as_str() {
            Cordon::NODE => "the node",
            uuid => uuid,
        });
        words.collect::<Vec<_>>().join(", ")
    };
    let mut page = Page::new(paper);
    let done = match (answer.changed.is_empty(), again) {
        (true, _) => "nothing to do".to_owned(),
        (false, true) => format!("{}: no longer cordoned", words(&answer.changed)),
        (false, false) => {
            let running = usize::try_from(answer.running).unwrap_or(usize::MAX);
            let go = if running == 1 { "goes" } else { "go" };
            let running = plural(running, "running allocation");
            format!(
                "{}: cordoned; nothing more is given out, {running} {go} on",
                words(&answer.changed)
            )
        }
    };
    page.say(0, Tone::Plain, &done);
    let standing = match (answer.cordoned.as_slice(), again) {
        ([], _) => "nothing is cordoned".to_owned(),
        (standing, true) => {
            format!("still cordoned: {}; `tessera status` says why", words(standing))
        }
        (standing, false) => format!("cordoned now: {}", words(standing)),
    };
    page.say(0, Tone::Plain, &standing);
    page.finish()
}

#[cfg(test)]
mod tests {
    use clap::{Parser, Subcommand};

    use super::*;

    #[test]
    fn a_cordon_tells_what_goes_on_and_what_stands() {
        let of = |changed: &[&str], cordoned: &[&str]| CordonResponse {
            changed: changed.iter().map(ToString::to_string).collect(),
            cordoned: cordoned.iter().map(ToString::to_string).collect(),
            running: 1,
            ..CordonResponse::default()
        };
        for (answer, again, said) in [
            (
                of(&["GPU-a"], &["*", "GPU-a"]),
                false,
                "GPU-a: cordoned; nothing more is given out, 1 running allocation goes on\n\
                 cordoned now: the node, GPU-a\n",
            ),
            (
                of(&["*"], &["GPU-a"]),
                true,
                "the node: no longer cordoned\nstill cordoned: GPU-a; `tessera status` says why\n",
            ),
            (of(&[], &[]), true, "nothing to do\nnothing is cordoned\n"),
        ] {
            assert_eq!(text(&answer, again, Paper::plain()), said);
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
        let (node, gpu) = args.of_cluster(&common).map_err(|failure| failure.text)?;
        Ok((node.to_owned(), args.words(verb, gpu, each).join(" ")))
    }

    #[test]
    fn a_node_is_cordoned_as_its_own_command_does_it() {
        for (line, node, words) in [
            ("cordon n1 --reason why", "n1", "cordon --reason=why --all"),
            ("cordon n1/0 -o json", "n1", "cordon --output=json -- 0"),
            ("cordon n1/--all", "n1", "cordon -- --all"),
            ("uncordon n1", "n1", "uncordon --all"),
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
            ("cordon --all --node a --node b", "--node once"),
            ("cordon n1 -o yaml", "json"),
        ] {
            let error = asked(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
