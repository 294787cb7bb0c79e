//! DRA is turned off, on, and off again under claims: the driver stays until the last has ended, prepares no other, and
//! only then is a GPU sold otherwise.

use std::collections::BTreeSet;

use serde_json::Value;
use tessera_fake_kubelet::dra::DraError;
use tessera_fake_kubelet::{Container, Pod};
use tessera_harness::plugin::{GPU, bounded, until};
use tessera_harness::{GIB, PATIENCE, Random};

use super::node::{Claim, Node, one};

const ON: &str = "[dra]\nenabled = true\n";
const OFF: &str = "[dra]\nenabled = false\n";

/// What `status` warns of.
fn warnings(node: &Node) -> String {
    node.status()["warnings"].to_string()
}

/// Bytes that are sold of each GPU.
fn sold(node: &Node) -> Vec<u64> {
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
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
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
    let Err(DraError::Claim { error, .. }) = node.prepare(&late).await else { panic!("prepared") };
    assert!(error.contains("team/late") && error.contains("dra.enabled is false"), "{error}");
    tenant.must("retain 0");
    tenant.must(&format!("alloc {GIB}"));
    tenant.kill();
    ended(&node, &chat).await;
    until(|| (sold(&node) == [0, 0]).then_some(())).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    // The pod that was refused is one that kubelet has to end, too.
    assert!(warnings(&node).contains("claim team/late"), "{}", warnings(&node));
    ended(&node, &late).await;
    gone(&node).await;
    until(|| node.slices().is_empty().then_some(())).await;
    until(|| (warnings(&node) == "[]").then_some(())).await;
    assert_eq!(node.status()["plugin"]["dra"], Value::Null);
    let pod = Pod::new("team", "next").with(Container::new("main").asking(GPU, 1));
    bounded(node.kubelet.run(&pod)).await.unwrap();
}

/// Turned off and on, killed, restarted, with pods that come, are refused, end, and are deleted by force while nobody
/// listens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whenever_dra_is_turned_off_no_pod_waits_for_ever_and_nothing_stays_sold() {
    let mut node = Node::start_with(ON).await;
    let (mut random, mut is_on, mut made) = (Random(18), true, 0);
    let mut pods: Vec<(Claim, bool)> = Vec::new();
    for step in 0..30 {
        match random.below(10) {
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
                let claim = one(&format!("c{made}"), &node.device(random.index(2)), "2Gi", "10");
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
                let (claim, _) = pods.remove(random.index(pods.len()));
                ended(&node, &claim).await;
            }
            _ => {}
        }
        let holding = pods.iter().filter(|(_, holds)| *holds).count() as u64;
        assert_eq!(sold(&node).iter().sum::<u64>(), holding * 2 * GIB, "step {step}");
        let gpus = node.status()["gpus"].clone();
        let claimed: BTreeSet<usize> = gpus
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
            .filter(|(_, gpu)| gpu["memory_limits_bytes"] != 0)
            .map(|(at, _)| at)
            .collect();
        // What has claims is sold by nobody else.
        if !is_on {
            let free = (2 - claimed.len()) * 4;
            bounded(node.kubelet.wait_allocatable(GPU, free)).await;
        }
    }
    node.configure(OFF);
    node.restart().await;
    for (claim, _) in pods {
        ended(&node, &claim).await;
    }
    until(|| (sold(&node) == [0, 0]).then_some(())).await;
    gone(&node).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    until(|| (warnings(&node) == "[]").then_some(())).await;
}
