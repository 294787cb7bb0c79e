//! Device plugin and DRA driver on one node, a GPU that moves from one to the other, and DRA that is turned off.

use std::time::{Duration, Instant};

use serde_json::Value;
use tessera_fake_kubelet::{Container, Pod};
use tessera_harness::plugin::{GPU, bounded, until};
use tessera_harness::{GIB, PATIENCE, Rng};

use super::node::{Claim, Node, one};

const ONLY_1: &str = "[dra]\nenabled = true\ngpus = [\"1\"]\n";
const BOTH: &str = "[dra]\nenabled = true\ngpus = [\"0\", \"1\"]\n";

fn pod(name: &str) -> Pod {
    Pod::new("team", name).with(Container::new("main").asking(GPU, 1))
}

/// No GPU has sold more than it has, and none by both.
fn nothing_is_oversold(node: &Node) {
    let status = node.status();
    for gpu in status["gpus"].as_array().unwrap() {
        let uuid = gpu["uuid"].as_str().unwrap();
        assert!(gpu["memory_limits_bytes"].as_u64().unwrap() <= 8 * GIB - (256 << 20), "{gpu}");
        let of_it = |allocation: &&Value| {
            allocation["gpus"]
                .as_array()
                .unwrap()
                .iter()
                .any(|part| part["uuid"] == uuid || part["gpu_uuid"] == uuid)
        };
        let all: Vec<&Value> =
            status["allocations"].as_array().unwrap().iter().filter(of_it).collect();
        let claims = all.iter().filter(|allocation| !allocation["claim"].is_null()).count();
        assert!(claims == 0 || claims == all.len(), "{uuid} is sold by both: {all:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_moves_over_when_its_last_pod_has_ended_and_is_never_sold_twice() {
    let node = Node::start_with(ONLY_1).await;
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    bounded(node.kubelet.run(&pod("stays"))).await.unwrap();
    bounded(node.kubelet.run(&pod("ends"))).await.unwrap();
    node.configure(BOTH);
    node.must(&["config", "reload"]);
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
    let early = one("early", &node.device(0), "1Gi", "10");
    // Load from both sides while it moves: nothing gets in before the pods have ended.
    let refused = async || {
        let text = node.refusal(&early).await;
        assert!(text.contains("early"), "{text}");
    };
    refused().await;
    assert!(bounded(node.kubelet.run(&pod("late"))).await.is_err());
    node.kubelet.remove("team", "ends");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        refused().await;
        nothing_is_oversold(&node);
        let devices = node.devices();
        let tainted = devices.get(&node.device(0)).is_none_or(|device| device["taints"].is_array());
        assert!(tainted, "published while a pod is on it: {devices:?}");
    }
    node.kubelet.remove("team", "stays");
    // Kubelet lists it no more; it is released after `ledger.release_after`.
    let free = || {
        let devices = node.devices();
        let device = devices.get(&node.device(0))?;
        device.get("taints").is_none().then_some(())
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), until(free)).await;
    assert!(waited.is_ok(), "{:#}\n{:#?}", node.status(), node.devices());
    nothing_is_oversold(&node);
    node.prepare(&early).await.unwrap();
    // And back, under the claim.
    node.configure(ONLY_1);
    node.must(&["config", "reload"]);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        assert_eq!(node.kubelet.allocatable(GPU), 0, "sold while a claim is on it");
        nothing_is_oversold(&node);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    node.unprepare(&early).await;
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    bounded(node.kubelet.run(&pod("late"))).await.unwrap();
    nothing_is_oversold(&node);
}

const ON: &str = "[dra]\nenabled = true\n";
const OFF: &str = "[dra]\nenabled = false\n";

/// What `status` warns of.
fn warnings(node: &Node) -> String {
    node.status()["warnings"].to_string()
}

/// Bytes that are sold of each GPU.
fn limits(node: &Node) -> Vec<u64> {
    let status = node.status();
    let gpus = status["gpus"].as_array().unwrap().iter();
    gpus.map(|gpu| gpu["memory_limits_bytes"].as_u64().unwrap()).collect()
}

async fn gone(node: &Node) {
    bounded(node.dra.wait_until(|kubelet| kubelet.plugins().is_empty())).await;
}

/// Kubelet ends a pod, as often as it takes.
async fn ended(node: &Node, claim: &Claim) {
    let ending = async {
        while node.dra.unprepare(&claim.name().name).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, ending).await;
    assert!(waited.is_ok(), "{} stays Terminating: {:#}", claim.name().name, node.status());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_is_turned_off_ends_its_claims_and_then_goes() {
    let Some(mut node) = Node::with_containers().await else { return };
    let chat = one("chat", &node.device(0), "2Gi", "30");
    let mut tenant = node.tenant(&node.prepare(&chat).await.unwrap());
    node.configure(OFF);
    let file = node.file();
    let plan = node.must(&["config", "plan", file.to_str().unwrap()]);
    for part in ["chat", "stays registered with kubelet until 1 claim has ended", "DRA to device"] {
        assert!(plan.contains(part), "{part} is not in:\n{plan}");
    }
    node.restart().await;
    bounded(node.dra.wait_registered()).await;
    until(|| node.devices().is_empty().then_some(())).await;
    // It says who is waited for, and for what.
    for part in
        ["1 claim keeps it with DRA until it ends", "claim team/chat", "dra.enabled is false"]
    {
        until(|| warnings(&node).contains(part).then_some(())).await;
    }
    // The other GPU has changed hands, this one has not.
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    // Kubelet, which has started again, is answered about what runs, and refused anything new.
    node.dra.restart();
    bounded(node.dra.wait_registered()).await;
    node.prepare(&chat).await.unwrap();
    let late = one("late", &node.device(0), "1Gi", "10");
    let error = node.refusal(&late).await;
    assert!(error.contains("team/late") && error.contains("dra.enabled is false"), "{error}");
    tenant.must("retain 0");
    tenant.must(&format!("alloc {GIB}"));
    tenant.kill();
    ended(&node, &chat).await;
    until(|| (limits(&node) == [0, 0]).then_some(())).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    // The pod that was refused is one that kubelet has to end, too.
    assert!(warnings(&node).contains("claim team/late"), "{}", warnings(&node));
    ended(&node, &late).await;
    gone(&node).await;
    until(|| node.slices().is_empty().then_some(())).await;
    until(|| (warnings(&node) == "[]").then_some(())).await;
    assert_eq!(node.status()["plugin"]["dra"], Value::Null);
    bounded(node.kubelet.run(&pod("next"))).await.unwrap();
}

/// Turned off and on, killed, restarted, with pods that come, are refused, end, and are deleted by force while nobody
/// listens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whenever_dra_is_turned_off_no_pod_waits_for_ever_and_nothing_stays_sold() {
    let mut node = Node::start_with(ON).await;
    let (mut random, mut is_on, mut made) = (Rng::with_seed(18), true, 0);
    let mut pods: Vec<(Claim, bool)> = Vec::new();
    for step in 0..30 {
        match random.u64(..10) {
            0 | 1 => {
                is_on = !is_on;
                node.configure(if is_on { ON } else { OFF });
                node.restart().await;
            }
            2 => {
                node.kill();
                // Deleted by force: the object is gone, and kubelet ends the pod when it can.
                if let Some((claim, _)) = pods.first() {
                    node.api.with(|store| store.remove_claim("team", &claim.name().name));
                }
                node.restart().await;
            }
            3..=5 if pods.len() < 6 => {
                if is_on {
                    bounded(node.dra.wait_registered()).await;
                }
                made += 1;
                let claim = one(&format!("c{made}"), &node.device(random.usize(..2)), "2Gi", "10");
                let prepared = node.prepare(&claim).await.map(drop);
                let text = prepared.as_ref().err().map(ToString::to_string).unwrap_or_default();
                assert!(is_on || prepared.is_err(), "step {step}: prepared although it is off");
                assert!(
                    prepared.is_ok() || !is_on || text.contains("GiB"),
                    "step {step}: refused although it is on: {text}"
                );
                pods.push((claim, prepared.is_ok()));
            }
            _ if !pods.is_empty() => {
                let (claim, _) = pods.remove(random.usize(..pods.len()));
                ended(&node, &claim).await;
            }
            _ => {}
        }
        let holding = pods.iter().filter(|(_, holds)| *holds).count() as u64;
        assert_eq!(limits(&node).iter().sum::<u64>(), holding * 2 * GIB, "step {step}");
        // What has claims is sold by nobody else.
        if !is_on {
            let free = limits(&node).iter().filter(|sold| **sold == 0).count() * 4;
            bounded(node.kubelet.wait_allocatable(GPU, free)).await;
        }
    }
    node.configure(OFF);
    node.restart().await;
    for (claim, _) in pods {
        ended(&node, &claim).await;
    }
    until(|| (limits(&node) == [0, 0]).then_some(())).await;
    gone(&node).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    until(|| (warnings(&node) == "[]").then_some(())).await;
}
