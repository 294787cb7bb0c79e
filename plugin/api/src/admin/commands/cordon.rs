//! `tessera cordon` and `tessera uncordon`.

use std::process::ExitCode;

use clap::Args;
use tessera_view::change::{CordonRequest, CordonResponse, StandingCordon, UncordonRequest};

use super::{ask, show};
use crate::admin::client::Format;
use crate::print::{Page, Paper, Tone};
use tessera_config::Config;
use tessera_model::clock::unix_ms;
use tessera_model::counted::plural;
use tessera_model::steered::Cordon;
use tessera_model::time_format;

/// Arguments of `tessera cordon`.
#[derive(Debug, Args)]
pub struct CordonArgs {
    /// UUID, index or product name; of a MIG parent, all its instances
    #[arg(value_name = "GPU", required_unless_present = "all", conflicts_with = "all")]
    gpu: Option<String>,
    /// The whole node, with GPUs that are yet to be found
    #[arg(long)]
    all: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

/// Arguments of `tessera uncordon`.
#[derive(Debug, Args)]
pub struct UncordonArgs {
    /// UUID, index or product name; of a MIG parent, all its instances
    #[arg(value_name = "GPU", required_unless_present = "all", conflicts_with = "all")]
    gpu: Option<String>,
    /// The node's own cordon; GPUs that were cordoned by themselves remain so
    #[arg(long)]
    all: bool,
    /// With --all: also the cordon of each GPU
    #[arg(long, requires = "all")]
    each: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

/// `tessera cordon`.
///
/// # Errors
/// No runtime, or the answer cannot be printed.
pub fn cordon(args: CordonArgs, config: &Config) -> anyhow::Result<ExitCode> {
    let CordonArgs { gpu, all, reason, output } = args;
    let request = CordonRequest { gpu: gpu.unwrap_or_default(), all, reason };
    let answer = ask(config, &request)?;
    show(answer, output, config, |answer| text(answer, false, unix_ms(), Paper::of_stdout(false)))
}

/// `tessera uncordon`.
///
/// # Errors
/// No runtime, or the answer cannot be printed.
pub fn uncordon(args: UncordonArgs, config: &Config) -> anyhow::Result<ExitCode> {
    let UncordonArgs { gpu, all, each, reason, output } = args;
    let request = UncordonRequest { gpu: gpu.unwrap_or_default(), all, each, reason };
    let answer = ask(config, &request)?;
    show(answer, output, config, |answer| text(answer, true, unix_ms(), Paper::of_stdout(false)))
}

fn text(answer: &CordonResponse, again: bool, now_unix_ms: i64, paper: Paper) -> String {
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
    if answer.standing.is_empty() {
        page.say(0, Tone::Plain, "nothing is cordoned");
        return page.finish();
    }
    page.say(0, Tone::Plain, if again { "still cordoned:" } else { "cordoned now:" });
    for one in &answer.standing {
        page.say(2, Tone::Plain, &standing(one, now_unix_ms));
    }
    let gpus = answer.standing.iter().filter(|one| one.gpu_uuid != Cordon::NODE).count();
    if again && gpus > 1 {
        page.say(0, Tone::Plain, "`tessera uncordon --all --each` lifts all of them");
    }
    page.finish()
}

/// A cordon, by whom, and how it is lifted.
fn standing(one: &StandingCordon, now_unix_ms: i64) -> String {
    let (name, lift) = match (one.gpu_uuid.as_str(), one.gpu_index) {
        (Cordon::NODE, _) => ("the node".to_owned(), "--all".to_owned()),
        (uuid, Some(index)) => (format!("GPU {index} ({uuid})"), uuid.to_owned()),
        (uuid, None) => (uuid.to_owned(), uuid.to_owned()),
    };
    let ago = time_format::ago(one.since_unix_ms, now_unix_ms);
    let reason = if one.reason.is_empty() { String::new() } else { format!(": {}", one.reason) };
    format!("{name}, since {ago} by {}{reason}; `tessera uncordon {lift}` lifts it", one.by)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing_on(uuid: &str, gpu_index: Option<u32>, reason: &str) -> StandingCordon {
        StandingCordon {
            gpu_uuid: uuid.into(),
            gpu_index,
            since_unix_ms: 1,
            by: "root (logged in as alice)".into(),
            reason: reason.into(),
        }
    }

    #[test]
    fn a_cordon_tells_what_goes_on_and_what_stands_by_whom() {
        let answer = CordonResponse {
            changed: vec!["GPU-a".into()],
            cordoned: vec!["*".into(), "GPU-a".into()],
            running: 1,
            standing: vec![standing_on("*", None, ""), standing_on("GPU-a", Some(3), "fans")],
            ..CordonResponse::default()
        };
        let said = text(&answer, false, 60_001, Paper::plain());
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(
            lines,
            [
                "GPU-a: cordoned; nothing more is given out, 1 running allocation goes on",
                "cordoned now:",
                "  the node, since 1m 0s by root (logged in as alice); `tessera uncordon --all` lifts it",
                "  GPU 3 (GPU-a), since 1m 0s by root (logged in as alice): fans; `tessera uncordon GPU-a` lifts it",
            ]
        );
        let none = CordonResponse::default();
        assert_eq!(text(&none, true, 0, Paper::plain()), "nothing to do\nnothing is cordoned\n");
    }

    #[test]
    fn what_remains_cordoned_is_named_with_the_way_to_lift_it() {
        let answer = CordonResponse {
            changed: vec!["*".into()],
            standing: vec![standing_on("GPU-a", Some(0), ""), standing_on("GPU-gone", None, "")],
            ..CordonResponse::default()
        };
        let said = text(&answer, true, 1, Paper::plain());
        for part in [
            "the node: no longer cordoned",
            "still cordoned:",
            "GPU 0 (GPU-a), since 0s",
            "`tessera uncordon GPU-gone`",
            "`tessera uncordon --all --each` lifts all of them",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}
