//! `deploy/examples/dra`, as far as two GPUs of 4 GiB and no network card go.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, RESOURCE};
use crate::dra::slices::bytes;
use crate::dra::{claims, mode};
use crate::pods::{self, Pod};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// A GPU of 4 GiB stands for one of 32 GiB.
const SCALE: u64 = 8;

/// What each container of the pods sees of its GPU: the example's sizes, to scale.
pub fn dra_examples_run_as_they_are_written(suite: &Suite<'_>) -> Result<()> {
    let share = mode::published(suite)?[0].default_memory;
    wait_until_kubelet_has_forgotten(suite)?;
    let (gib, mut files) = ((1 << 30) / SCALE, 0);
    for (file, pods, want) in [
        ("extended-resource", 1, vec![("main", share)]),
        ("fraction", 2, vec![("main", 6 * gib)]),
        ("one-share-two-containers", 1, vec![("server", 4 * gib), ("sidecar", 4 * gib)]),
        ("two-models", 1, vec![("chat", 12 * gib), ("embeddings", 4 * gib)]),
    ] {
        run(suite, file, pods, &want).with_context(|| format!("{file}.yaml"))?;
        files += 1;
    }
    println!("     {files} examples");
    Ok(())
}

fn run(suite: &Suite<'_>, file: &str, count: usize, want: &[(&str, u64)]) -> Result<()> {
    let path = suite.repo.join(format!("deploy/examples/dra/{file}.yaml"));
    let mut objects = suite.kubectl.read_manifest(&path)?;
    objects.iter_mut().try_for_each(overlay)?;
    suite.kubectl.create_all(objects)?;
    let pods = wait::until("the example's pods are there", wait::LIMIT, || {
        let items = suite.kubectl.items(&["pods", "-n", NAMESPACE])?;
        let names = items.iter().filter_map(|pod| pod["metadata"]["name"].as_str());
        let names: Vec<String> = names.map(str::to_owned).collect();
        let seen = format!("{names:?}");
        Ok(Look::found(Some(names).filter(|names| names.len() == count), seen))
    })?;
    for name in pods {
        let pod = Pod::named(suite.kubectl, &name);
        pod.wait_until_running()?;
        for (container, bytes) in want {
            let gpus = pod.gpus(container)?;
            ensure!(gpus.len() == 1 && gpus[0].total == *bytes, "{name}/{container}: {gpus:?}");
        }
    }
    let delete = ["delete", "deployments,pods", "--all", "-n", NAMESPACE, "--wait=false"];
    suite.kubectl.run(&delete)?;
    wait::until("the example's pods are gone", wait::LIMIT, || {
        let count = suite.kubectl.items(&["pods", "-n", NAMESPACE])?.len();
        Ok(Look::when(count == 0, format!("{count} pods")))
    })?;
    claims::remove_all(suite)
}

/// In the tests' namespace, with their image, without a pod network, and to scale.
fn overlay(object: &mut Value) -> Result<()> {
    object["metadata"]["namespace"] = json!(NAMESPACE);
    if object["kind"] == "ResourceClaimTemplate" {
        let requests = object["spec"]["spec"]["devices"]["requests"].as_array_mut();
        for request in requests.context("requests")? {
            let memory = &mut request["exactly"]["capacity"]["requests"]["memory"];
            *memory = json!((bytes(memory)? / SCALE).to_string());
        }
        return Ok(());
    }
    let is_pod = object["kind"] == "Pod";
    let place = if is_pod { "/spec" } else { "/spec/template/spec" };
    pods::adapt_example(object.pointer_mut(place).context("no pod")?);
    Ok(())
}

/// Kubelet 1.36 remembers what a device plugin offered for five minutes after it has ended. Until then it looks for
/// that plugin's devices when a container starts that asks for the name, though a claim serves it: "no devices
/// found allocated in local cache".
fn wait_until_kubelet_has_forgotten(suite: &Suite<'_>) -> Result<()> {
    wait::until("kubelet has forgotten the device plugin", 2 * wait::LIMIT, || {
        let node = suite.kubectl.get(&["node", &suite.node])?;
        let capacity = node["status"]["capacity"][RESOURCE].as_str().unwrap_or("0").to_owned();
        Ok(Look::when(capacity == "0", format!("capacity {capacity}")))
    })
}
