//! Device plugin and DRA driver on one node, and a GPU that moves from one to the other.

use std::time::{Duration, Instant};

use serde_json::Value;
use tessera_fake_kubelet::{Container, Pod};
use tessera_harness::GIB;
use tessera_harness::plugin::{GPU, bounded, until};

use super::node::{Node, one};

const ONLY_1: &str = "[dra]\nenabled = true\ngpus = [\"1\"]\n";
const BOTH: &str = "[dra]\nenabled = true\ngpus = [\"0\", \"1\"]\n";

fn pod(name: &str) -> Pod {
    Pod::new("team", name).with(Container::new("main").asking(GPU, 1))
}

/// What is sold of each GPU, by status: bytes, and by whom.
fn sold(node: &Node) -> Vec<(String, u64)> {
    let status = node.status();
    let gpus = status["gpus"].as_array().unwrap();
    let one = |gpu: &Value| {
        let front_end = gpu["front_end"].as_str().unwrap_or_default().to_owned();
        (front_end, gpu["memory_limits_bytes"].as_u64().unwrap())
    };
    gpus.iter().map(one).collect()
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
async fn each_front_end_sells_gpus_of_its_own() {
    let node = Node::start_with(ONLY_1).await;
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    assert_eq!(node.devices().into_keys().collect::<Vec<_>>(), [node.device(1)]);
    for name in ["a", "b", "c", "d"] {
        bounded(node.kubelet.run(&pod(name))).await.unwrap();
    }
    let all = one("all", &node.device(1), "7Gi", "100");
    node.prepare(&all).await.unwrap();
    assert!(bounded(node.kubelet.run(&pod("e"))).await.is_err(), "a fifth of four");
    let Err(error) = node.prepare(&one("other", &node.device(0), "1Gi", "10")).await else {
        panic!("a GPU of the device plugin's")
    };
    assert!(error.to_string().contains("dra.gpus"), "{error}");
    nothing_is_oversold(&node);
    let sold = sold(&node);
    assert_eq!(sold[1].1, 7 * GIB);
    assert!(sold[0].1 > 7 * GIB, "{sold:?}");
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
    let refused = |error: Option<String>| {
        let text = error.expect("sold before it was free");
        assert!(text.contains("early"), "{text}");
    };
    refused(node.prepare(&early).await.err().map(|error| error.to_string()));
    assert!(bounded(node.kubelet.run(&pod("late"))).await.is_err());
    node.kubelet.remove("team", "ends");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        refused(node.prepare(&early).await.err().map(|error| error.to_string()));
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
