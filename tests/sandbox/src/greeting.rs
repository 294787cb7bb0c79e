//! What to point commands, a browser and Prometheus at.

use std::fmt::Write;
use std::path::Path;

use super::node::Node;
use super::sandbox::Sandbox;

/// The file that Prometheus takes.
pub const PROMETHEUS: &str = "prometheus.yml";

/// A command of `tessera` that asks this node's plugin.
fn command(node: &Node, words: &[&str]) -> String {
    format!("{} -c {} {}", program(), node.file().display(), words.join(" "))
}

fn program() -> String {
    std::env::current_exe().map_or("tessera".to_owned(), |path| path.display().to_string())
}

/// Exact lines for everything that can look at the sandbox. `has_shell`: a shell runs in it.
pub fn text(sandbox: &Sandbox, has_shell: bool) -> String {
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
    let named = match sandbox.scratch.is_kept() {
        true => format!(" --dir {}", dir.display()),
        false => String::new(),
    };
    let here =
        if has_shell { "in this shell or another terminal" } else { "from another terminal" };
    let _ = write!(
        out,
        "\nPlace pods {here}; `tessera sandbox help` lists all commands:\n  \
         {} sandbox{named} run chat --load serve\n{} ends{}.",
        program(),
        if has_shell { "`exit`" } else { "Ctrl-C" },
        if sandbox.scratch.is_kept() { " it" } else { " and removes everything" }
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
pub fn write_prometheus(nodes: &[Node], dir: &Path) -> std::io::Result<()> {
    std::fs::write(dir.join(PROMETHEUS), prometheus(nodes))
}
