//! Node labels, from the plugin to a pod's affinity.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::deploy::NAMESPACE;
use crate::images;
use crate::pods::Pod;
use crate::suite::Suite;
use crate::wait::{self, Look};

/// The example's pod goes where the labels say that a strong GPU is, and nowhere before. That the plugin writes them for
/// node feature discovery, and takes them away, its own tests show (`plugin/agent/src/labels.rs`).
pub fn labels_lead_a_pod_to_the_strongest_gpu(suite: &Suite<'_>) -> Result<()> {
    let outcome = strongest(suite);
    suite.remove_tenants()?;
    unlabel(suite)?;
    outcome
}

fn strongest(suite: &Suite<'_>) -> Result<()> {
    let file = suite.repo.join("deploy/examples/strongest-gpu.yaml");
    let mut pods = suite.kubectl.read_manifest(&file.display().to_string())?;
    let pod = pods.first_mut().context("a pod")?;
    overlay(pod);
    suite.kubectl.create_pod(pod)?;
    let pod = Pod::named(suite.kubectl, "strongest");
    wait::until("the pod finds no node", wait::LIMIT, || {
        let status = pod.object()?["status"].clone();
        Ok(Look::when(status.to_string().contains("Unschedulable"), status.to_string()))
    })?;
    let lines = suite.plugin.exec(&["tessera", "labels"])?;
    println!("     {}", lines.lines().collect::<Vec<_>>().join(" "));
    // What nfd-worker and nfd-master do with it; the API server judges each key and value.
    let node = ["label", "node", &suite.node, "--overwrite"];
    suite.kubectl.run(&[&node[..], &lines.lines().collect::<Vec<_>>()].concat())?;
    pod.wait_until_running()
}

fn unlabel(suite: &Suite<'_>) -> Result<()> {
    let node = suite.kubectl.get(&["node", &suite.node])?;
    let labels = node["metadata"]["labels"].as_object().context("labels")?;
    let ours = labels.keys().filter(|key| key.starts_with("tessera.dev/gpu."));
    let remove: Vec<String> = ours.map(|key| format!("{key}-")).collect();
    if remove.is_empty() {
        return Ok(());
    }
    let args: Vec<&str> = ["label", "node", &suite.node]
        .into_iter()
        .chain(remove.iter().map(String::as_str))
        .collect();
    suite.kubectl.run(&args).map(drop)
}

fn overlay(pod: &mut Value) {
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    let spec = &mut pod["spec"];
    spec["hostNetwork"] = json!(true);
    spec["automountServiceAccountToken"] = json!(false);
    spec["terminationGracePeriodSeconds"] = json!(1);
    let container = &mut spec["containers"][0];
    container["image"] = json!(images::TENANT);
    container["imagePullPolicy"] = json!("Never");
    container["command"] = json!(["sleep", "2147483647"]);
}
