//! `kubectl tessera why-pending`.

use std::fmt::Write;
use std::process::ExitCode;

use tessera_fleet::Fleet;
use tessera_fleet::pending::{NodeRoom, Pending, pending};

use super::columns::put;
use super::failure::Failure;
use super::options::{Common, Format};

/// Nodes that are shown; JSON has all.
const SHOWN: usize = 20;

/// Arguments of `kubectl tessera why-pending`.
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
    let context = common.namespace(fleet);
    let (namespace, name) = args.pod.split_once('/').unwrap_or((context.as_str(), &args.pod));
    if namespace.is_empty() {
        return Err(Failure::usage("say the pod's namespace: NAMESPACE/NAME, or -n NAMESPACE"));
    }
    let Some(pending) = pending(fleet, namespace, name).await? else {
        return Err(Failure::failed(format!("there is no pod {name} in namespace {namespace}")));
    };
    match args.output {
        Format::Json => super::print_json(&pending)?,
        _ => super::print(&text(&pending))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn text(pending: &Pending) -> String {
    let mut out = String::new();
    put(&mut out, "", &format!("{}: {}.", pending.pod, pending.state));
    if !pending.asks.is_empty() {
        put(&mut out, "  asks for   ", &pending.asks.join(", "));
    }
    if pending.waits {
        scheduler(&mut out, pending);
        nodes(&mut out, &pending.nodes);
    }
    for unread in &pending.unread {
        out.push('\n');
        put(&mut out, "not read: ", unread);
    }
    out
}

/// What the scheduler says last, and how often it said so.
fn scheduler(out: &mut String, pending: &Pending) {
    let mut said = pending.scheduler_says.clone();
    if let Some(event) = &pending.event {
        if said.is_empty() {
            said.clone_from(&event.message);
        }
        let times = match event.times {
            1 => "once".to_owned(),
            times => format!("{times} times"),
        };
        match event.message == said {
            true => said.push_str(&format!(" (said {times}, at {})", event.last)),
            false => {
                said.push_str(&format!(" (event, {times}, at {}: {})", event.last, event.message))
            }
        }
    }
    let said = if said.is_empty() { "has said nothing of it yet" } else { &said };
    put(out, "  scheduler  ", said);
}

fn nodes(out: &mut String, nodes: &[NodeRoom]) {
    let with = nodes.iter().filter(|one| one.has_room == Some(true)).count();
    let text = match (with, nodes.len()) {
        (0, all) => format!("of {all} with the plugin none is known to have room for it"),
        (with, all) => format!(
            "{with} of {all} with the plugin have room for it; what else keeps it from them, the scheduler says"
        ),
    };
    put(out, "  nodes      ", &text);
    for node in nodes.iter().take(SHOWN) {
        out.push('\n');
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
        put(out, "", &format!("{}: {word}{left}", node.node));
        if !node.error.is_empty() {
            put(out, "  ", &node.error);
        }
        if !node.largest.is_empty() {
            put(out, "  largest that fits  ", &node.largest);
        }
        for trouble in &node.amiss {
            put(out, "  ", trouble);
        }
    }
    if nodes.len() > SHOWN {
        let _ = writeln!(out, "\nand {} more nodes: -o json has all", nodes.len() - SHOWN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubectl::columns::WIDTH;
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
        let text = text(&pending);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("(said 7 times, at 2026-11-22T11:00:00Z)"), "{text}");
        assert!(text.contains("n2: does not answer\n  no answer\n"), "{text}");
        assert!(text.contains("n1: has no room; left: 0 of 8 × tessera.dev/gpu\n"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }
}
