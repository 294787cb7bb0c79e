//! What `list`, `run` and `where` print: nodes, pods, and what to point commands, a browser and Prometheus at.

use std::fmt::Write;
use std::path::Path;

use clap::ValueEnum;
use tessera_api::print::table;
use tessera_model::quantity::format_bytes;

use super::node::Node;
use super::pod::{Pod, State, Work};
use super::sandbox::Sandbox;

pub fn list(sandbox: &mut Sandbox) -> String {
    let mut out = String::new();
    let nodes = sandbox.nodes.iter_mut().map(|node| {
        let plugin = match node.plugin_runs() {
            true => format!("pid {}", node.plugin_pid().unwrap_or(0)),
            false => "does not run".to_owned(),
        };
        let free = |resource: &String| {
            let (free, all) = (node.free(resource), node.kubelet.devices(resource).len());
            format!("{resource}: {free} of {all}")
        };
        let free: Vec<String> = node.resources().iter().map(free).collect();
        vec![node.spec.name.clone(), plugin, free.join(", ")]
    });
    table(&mut out, &["NODE", "PLUGIN", "FREE"], nodes.collect());
    if sandbox.pods.is_empty() {
        return out + "\nno pods; `tessera sandbox run chat` places one";
    }
    out.push('\n');
    let names: Vec<String> = sandbox.nodes.iter().map(|node| node.spec.name.clone()).collect();
    let pods = sandbox.pods.iter_mut().map(|pod| {
        let state = match pod.look() {
            State::Running => "runs".to_owned(),
            State::Ended(code) => format!("ended ({code})"),
        };
        vec![
            pod.full_name(),
            names[pod.node].clone(),
            format!("{} × {}", pod.placement.device_ids.len(), pod.resource),
            format_bytes(pod.placement.memory()),
            work(&pod.work),
            state,
            pod.says(),
        ]
    });
    table(&mut out, &["POD", "NODE", "ASKED", "QUOTA", "LOAD", "STATE", "SAYS"], pods.collect());
    out.trim_end().to_owned()
}

/// What a pod got, in a line.
pub fn placed(pod: &Pod, node: &Node) -> String {
    let gpus = pod.placement.uuids();
    let plural = if gpus.len() == 1 { "GPU" } else { "GPUs" };
    format!(
        "{}: on {}, {plural} {}, quota {}; {}",
        pod.full_name(),
        node.spec.name,
        gpus.join(", "),
        format_bytes(pod.placement.memory()),
        work(&pod.work)
    )
}

fn work(work: &Work) -> String {
    match work {
        Work::Load(load, _) => {
            let value = load.to_possible_value();
            value.map_or_else(String::new, |value| value.get_name().to_owned())
        }
        Work::Command(words) => words.first().cloned().unwrap_or_default(),
    }
}

/// The file that Prometheus takes.
const PROMETHEUS: &str = "prometheus.yml";

/// A command of `tessera` that asks this node's plugin.
fn command(node: &Node, words: &[&str]) -> String {
    format!("{} -c {} {}", program(), node.file().display(), words.join(" "))
}

fn program() -> String {
    std::env::current_exe().map_or("tessera".to_owned(), |path| path.display().to_string())
}

/// Exact lines for everything that can look at the sandbox. `has_shell`: a shell runs in it.
pub fn greeting(sandbox: &Sandbox, has_shell: bool) -> String {
    let mut out = String::new();
    let dir = &sandbox.scratch.path;
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
        let _ = writeln!(out, "page of all nodes   http://{}/", console.address);
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

/// Writes Prometheus' configuration for all nodes where [`greeting`] says.
pub fn write_prometheus(nodes: &[Node], dir: &Path) -> std::io::Result<()> {
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
    std::fs::write(dir.join(PROMETHEUS), text)
}
