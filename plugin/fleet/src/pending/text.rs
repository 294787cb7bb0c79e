//! A verdict for people.

use std::fmt::Write;

use tessera_model::printable;

use super::{Fit, NodeVerdict, Verdict};

/// Widest line.
const WIDTH: usize = 118;
/// Nodes that are shown; JSON has all.
const SHOWN: usize = 20;

/// At most 120 columns wide.
pub fn text(verdict: &Verdict) -> String {
    let mut out = String::new();
    wrapped(&mut out, "", &format!("{}: {}.", verdict.pod, verdict.state));
    if !verdict.asks.is_empty() {
        wrapped(&mut out, "  asks for   ", &verdict.asks.join(", "));
    }
    if !verdict.waits {
        return out;
    }
    let nodes = &verdict.nodes;
    let count = |fit: Fit| nodes.iter().filter(|one| one.fit == fit).count();
    let (fits, may) = (count(Fit::Fits), count(Fit::May));
    for block in &verdict.blocks {
        wrapped(&mut out, &format!("  {:<10} ", block.kind.name()), &block.text);
    }
    let summary = match (fits, may, verdict.blocks.is_empty()) {
        (_, _, false) => "no node can take it while that holds".to_owned(),
        (0, 0, true) => format!("none of {} nodes has room", nodes.len()),
        (0, may, true) => format!("{may} of {} nodes may have room", nodes.len()),
        (fits, _, true) => {
            format!(
                "{fits} of {} nodes have room: the scheduler should place it with its next try",
                nodes.len()
            )
        }
    };
    wrapped(&mut out, "  nodes      ", &summary);
    if !verdict.scheduler_says.is_empty() {
        wrapped(&mut out, "  scheduler  ", &verdict.scheduler_says);
    }
    // Nodes that will never have a GPU are counted, not listed.
    let concerns = |one: &&NodeVerdict| {
        one.blocks.iter().all(|block| block.kind != super::BlockKind::NoPlugin)
    };
    let listed: Vec<&NodeVerdict> = nodes.iter().filter(concerns).collect();
    for node in listed.iter().take(SHOWN) {
        out.push('\n');
        let word = match node.fit {
            Fit::Fits => "has room",
            Fit::May => "may have room",
            Fit::Not => "has no room",
        };
        let left = match node.left.as_slice() {
            [] => String::new(),
            left => format!("; left: {}", left.join(", ")),
        };
        wrapped(&mut out, "", &format!("{}: {word}{left}", node.node));
        if !node.largest.is_empty() {
            wrapped(&mut out, "  largest that fits  ", &node.largest);
        }
        for block in &node.blocks {
            wrapped(&mut out, &format!("  {:<17}  ", block.kind.name()), &block.text);
        }
        for open in &node.open {
            wrapped(&mut out, "  open               ", open);
        }
    }
    if listed.len() > SHOWN {
        let _ = writeln!(out, "\nand {} more nodes: -o json has all", listed.len() - SHOWN);
    }
    let bare = nodes.len() - listed.len();
    if bare > 0 {
        let _ = writeln!(out, "\n{bare} more nodes have no plugin.");
    }
    for unread in &verdict.unread {
        out.push('\n');
        wrapped(&mut out, "not read: ", unread);
    }
    out
}

/// Lines of at most [`WIDTH`], the first after the title, the others below its end.
fn wrapped(out: &mut String, title: &str, text: &str) {
    let text = printable::line(text);
    let indent = title.chars().count();
    let (mut line, mut width) = (title.to_owned(), indent);
    let mut is_first = true;
    for word in text.split(' ') {
        let length = word.chars().count();
        if !is_first && width + 1 + length > WIDTH {
            let _ = writeln!(out, "{}", line.trim_end());
            (line, width, is_first) = (" ".repeat(indent), indent, true);
        }
        if !is_first {
            line.push(' ');
            width += 1;
        }
        // A word that no line holds is cut into those that do.
        let mut rest: Vec<char> = word.chars().collect();
        while width + rest.len() > WIDTH && width < WIDTH {
            let tail = rest.split_off(WIDTH - width);
            line.extend(rest);
            let _ = writeln!(out, "{}", line.trim_end());
            (line, width, rest) = (" ".repeat(indent), indent, tail);
        }
        width += rest.len();
        line.extend(rest);
        is_first = false;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}
