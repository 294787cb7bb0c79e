//! `kubectl tessera why-pending`.

use std::process::ExitCode;

use tessera_api::print::{Page, Paper};
use tessera_fleet::Fleet;
use tessera_fleet::pending::{NodeRoom, Pending, pending};
use tessera_model::counted::times;

use super::Common;
use crate::output::{Format, show};
use crate::source::Failure;

/// Nodes that are shown; JSON has all.
const SHOWN: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The pod: NAME or NAMESPACE/NAME
    #[arg(value_name = "PENDING")]
    pod: String,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

pub(super) async fn main(fleet: &Fleet, common: &Common, args: &Args) -> Result<ExitCode, Failure> {
    let (namespace, name) = common.pod(fleet, &args.pod)?;
    let Some(pending) = pending(fleet, &namespace, &name).await? else {
        return Err(Failure::failed(format!("there is no pod {name} in namespace {namespace}")));
    };
    show(&pending, args.output, |paper| text(&pending, paper))?;
    Ok(ExitCode::SUCCESS)
}

fn text(pending: &Pending, paper: Paper) -> String {
    let mut page = Page::new(paper);
    page.labelled("", &format!("{}: {}.", pending.pod, pending.state));
    if !pending.asks.is_empty() {
        page.labelled("  asks for   ", &pending.asks.join(", "));
    }
    if pending.waits {
        scheduler(&mut page, pending);
        nodes(&mut page, &pending.nodes);
    }
    for unread in &pending.unread {
        page.gap();
        page.labelled("not read: ", unread);
    }
    page.finish()
}

/// What the scheduler says last, and how often it said so.
fn scheduler(page: &mut Page, pending: &Pending) {
    let mut said = pending.scheduler_says.clone();
    if let Some(event) = &pending.event {
        if said.is_empty() {
            said.clone_from(&event.message);
        }
        let times = times(event.times);
        match event.message == said {
            true => said.push_str(&format!(" (said {times}, at {})", event.last)),
            false => {
                said.push_str(&format!(" (event, {times}, at {}: {})", event.last, event.message))
            }
        }
    }
    let said = if said.is_empty() { "has said nothing of it yet" } else { &said };
    page.labelled("  scheduler  ", said);
}

fn nodes(page: &mut Page, nodes: &[NodeRoom]) {
    let with = nodes.iter().filter(|one| one.has_room == Some(true)).count();
    let text = match (with, nodes.len()) {
        (0, all) => format!("of {all} with the plugin none is known to have room for it"),
        (with, all) => format!(
            "{with} of {all} with the plugin have room for it; what else keeps it from them, the scheduler says"
        ),
    };
    page.labelled("  nodes      ", &text);
    for node in nodes.iter().take(SHOWN) {
        page.gap();
        let word = match node.has_room {
            Some(true) => "has room",
            Some(false) => "has no room",
            None if node.error.is_empty() => "may have room",
            None => "does not answer",
        };
        let left = match node.left.as_slice() {
            [] => String::new(),
            left => format!("; left: {}", left.join(", ")),
        };
        page.labelled("", &format!("{}: {word}{left}", node.node));
        if !node.error.is_empty() {
            page.labelled("  ", &node.error);
        }
        if !node.largest.is_empty() {
            page.labelled("  largest that fits  ", &node.largest);
        }
        for trouble in &node.amiss {
            page.labelled("  ", trouble);
        }
    }
    if nodes.len() > SHOWN {
        page.gap();
        page.labelled("", &format!("and {} more nodes: -o json has all", nodes.len() - SHOWN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_fleet::pending::Said;

    #[test]
    fn the_scheduler_comes_first_then_each_node_and_no_line_is_too_wide() {
        let message = format!("0/2 nodes are available: {}", "x".repeat(500));
        let full = NodeRoom {
            node: "n1".into(),
            has_room: Some(false),
            left: vec!["0 of 8 × tessera.dev/gpu".into()],
            largest: "nothing".into(),
            amiss: vec![format!("GPU 0 is cordoned: {}", "\u{1b}[2J ".repeat(60))],
            ..NodeRoom::default()
        };
        let silent =
            NodeRoom { node: "n2".into(), error: "no answer".into(), ..NodeRoom::default() };
        let pending = Pending {
            pod: "team/chat".into(),
            state: "it waits for a node".into(),
            waits: true,
            asks: vec!["1 × tessera.dev/gpu".into()],
            scheduler_says: message.clone(),
            event: Some(Said { message, times: 7, last: "2026-11-22T11:00:00Z".into() }),
            nodes: vec![silent, full],
            ..Pending::default()
        };
        let text = text(&pending, Paper::plain());
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("(said 7 times, at 2026-11-22T11:00:00Z)"), "{text}");
        assert!(text.contains("n2: does not answer\n  no answer\n"), "{text}");
        assert!(text.contains("n1: has no room; left: 0 of 8 × tessera.dev/gpu\n"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }
}
