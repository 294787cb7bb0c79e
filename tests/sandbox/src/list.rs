//! What `list` and `run` print, and the names that a shell completes.

use clap::ValueEnum;
use tessera_api::print::table;
use tessera_model::quantity::format_bytes;

use super::node::Node;
use super::pod::{Pod, State, Work};
use super::sandbox::Sandbox;

/// Nodes, then pods.
pub fn text(sandbox: &mut Sandbox) -> String {
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

/// Names of the pods, a line each.
pub fn names(sandbox: &Sandbox) -> String {
    let names: Vec<&str> = sandbox.pods.iter().map(|pod| pod.name.as_str()).collect();
    names.join("\n")
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
