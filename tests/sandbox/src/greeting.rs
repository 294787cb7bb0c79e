//! What to point commands, a browser and Prometheus at.

use std::fmt::Write;
use std::path::Path;

use super::node::Node;
use super::sandbox::Sandbox;

/// The file that Prometheus takes.
pub const PROMETHEUS: &str = "prometheus.yml";

/// A command of `tessera` that asks this node's plugin.
pub fn command(node: &Node, words: &[&str]) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "tessera".into());
    format!("{} -c {} {}", program.display(), node.file().display(), words.join(" "))
}

/// Exact lines for everything that can look at the sandbox.
pub fn text(sandbox: &Sandbox) -> String {
    let mut out = String::new();
    let dir = sandbox.scratch.path();
    let _ = writeln!(out, "{}, in {}\n", sandbox.described, dir.display());
    for node in &sandbox.nodes {
        let title = match sandbox.nodes.len() {
            1 => String::new(),
            _ => format!("{}: ", node.spec.name),
        };
        let _ = writeln!(out, "{title}{}", command(node, &["status"]));
        if sandbox.nodes.len() == 1 {
            let _ = writeln!(out, "{}", command(node, &["top"]));
            let _ =
                writeln!(out, "{}   # once `chat` is there", command(node, &["explain", "chat"]));
        }
    }
    out.push('\n');
    if let Some(console) = &sandbox.console {
        let _ = writeln!(out, "page of all nodes   http://{}/", console.address());
    }
    for node in &sandbox.nodes {
        let name = &node.spec.name;
        if let (Some(api), None) = (node.api, &sandbox.console) {
            let _ = writeln!(out, "page                http://{api}/");
        }
        if let Some(api) = node.api {
            let _ = writeln!(out, "API of {name}           curl -s http://{api}/api/v1/fleet");
        }
        if let Some(metrics) = node.metrics {
            let _ = writeln!(out, "metrics of {name}       curl -s http://{metrics}/metrics");
        }
    }
    let file = dir.join(PROMETHEUS);
    let _ = writeln!(out, "Prometheus          prometheus --config.file={}", file.display());
    let _ = write!(
        out,
        "\nPlace pods here with `run chat --load serve`, or from another terminal with\n\
         `tessera sandbox run chat --load serve`; `help` lists all commands. Ctrl-C ends and removes everything."
    );
    out
}

/// Prometheus' configuration for all nodes.
pub fn prometheus(nodes: &[Node]) -> String {
    let mut text = String::from(
        "# Written by `tessera sandbox`.\nglobal:\n  scrape_interval: 5s\nscrape_configs:\n- job_name: tessera\n  \
         static_configs:\n",
    );
    for node in nodes {
        if let Some(address) = node.metrics {
            let name = &node.spec.name;
            let _ =
                writeln!(text, "  - targets: [\"{address}\"]\n    labels: {{node: \"{name}\"}}");
        }
    }
    text
}

/// Writes it where [`text`] says.
///
/// # Errors
/// The file system's.
pub fn write_prometheus(nodes: &[Node], dir: &Path) -> std::io::Result<()> {
    std::fs::write(dir.join(PROMETHEUS), prometheus(nodes))
}
