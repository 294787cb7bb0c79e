//! What a tenant sees of its claim, and that it gets no more; quotas and views of claims' shares.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_harness::metrics::scrape_until;
use tessera_harness::plugin::{bounded, until};
use tessera_harness::{Conversation, GIB, MIB};

use super::node::{CONTEXT, Node, Plugin, claim, one};

const OUT_OF_MEMORY: i64 = 2;

/// That the current GPU has so much in all for this process, all of it can be had, and no more.
fn holds(tenant: &mut Conversation, gpu: usize, bytes: u64) {
    tenant.must(&format!("retain {gpu}"));
    assert_eq!(tenant.must(&format!("total {gpu}")), bytes);
    assert_eq!(tenant.ask("info").values, [bytes - CONTEXT, bytes]);
    let all = tenant.must(&format!("alloc {}", bytes - CONTEXT));
    assert_eq!(tenant.ask(&format!("alloc {}", 2 * MIB)).result, OUT_OF_MEMORY);
    tenant.must(&format!("free {all}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_sees_and_keeps_what_its_claim_was_allocated() {
    let Some(node) = Node::with_containers().await else { return };
    let device = node.device(0);
    let (chat, draft) = (one("chat", &device, "2Gi", "30"), one("draft", &device, "5440Mi", "70"));
    let chat = node.prepare(&chat).await.unwrap();
    let draft = node.prepare(&draft).await.unwrap();
    // Side by side, to the last byte that each has.
    let (mut one, mut other) = (node.tenant(&chat), node.tenant(&draft));
    holds(&mut one, 0, 2 * GIB);
    holds(&mut other, 0, 5440 * MIB);
    let sum = [(&mut one, 2 * GIB), (&mut other, 5440 * MIB)].map(|(tenant, bytes)| {
        tenant.must(&format!("alloc {}", bytes - CONTEXT));
        tenant.must("info")
    });
    assert_eq!(sum, [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_shares_of_two_gpus_in_one_container_are_apart() {
    let Some(node) = Node::with_containers().await else { return };
    let pair = claim("pair").asking("large", &node.device(1), "4Gi", "50").asking(
        "small",
        &node.device(0),
        "1Gi",
        "10",
    );
    let container = node.prepare(&pair).await.unwrap();
    assert_eq!(container.shares.len(), 2);
    let mut tenant = node.tenant(&container);
    holds(&mut tenant, 0, GIB);
    holds(&mut tenant, 1, 4 * GIB);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_requests_of_one_gpu_in_one_container_are_their_sum() {
    let Some(node) = Node::with_containers().await else { return };
    let device = node.device(0);
    let both =
        claim("both").asking("one", &device, "2Gi", "20").asking("two", &device, "1Gi", "10");
    let container = node.prepare(&both).await.unwrap();
    let mut tenant = node.tenant(&container);
    tenant.must("retain 0");
    assert_eq!(tenant.must("total 0"), 3 * GIB);
    // More than either has, and no more than both.
    tenant.must(&format!("alloc {}", 2 * GIB + 512 * MIB));
    assert_eq!(tenant.ask(&format!("alloc {}", 512 * MIB)).result, OUT_OF_MEMORY);
    let devices = bounded(node.dra.prepare("both", &[both.name()])).await.unwrap().remove(0);
    node.kubelet.run_claiming(("team", "both"), "main", &both.name(), &devices);
    are_series(&node, &[GIB, 2 * GIB], 2 * GIB + 512 * MIB + CONTEXT).await;
    // And of two claims.
    let third = node.prepare(&one("third", &device, "1Gi", "10")).await.unwrap();
    let mut tenant = node.tenant(&container.and(third));
    assert_eq!(tenant.must("total 0"), 4 * GIB);
}

/// Waits until each share of a container is a series of its own in the metrics, with these limits in ascending order,
/// and their sum is what the container uses.
async fn are_series(node: &Node, limits: &[u64], used: u64) {
    let address = node.plugin.as_ref().and_then(Plugin::address).unwrap();
    scrape_until(address, |exposed| {
        let of = |name: &'static str| exposed.of(name).map(|sample| sample.value);
        let mut found: Vec<String> =
            of("tessera_container_memory_limit_bytes").map(|bytes| bytes.to_string()).collect();
        found.sort();
        let wanted: Vec<String> = limits.iter().map(u64::to_string).collect();
        let sum: f64 = of("tessera_container_memory_used_bytes").sum();
        (found == wanted && sum.to_string() == used.to_string()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_that_name_one_request_share_its_quota() {
    let Some(node) = Node::with_containers().await else { return };
    let shared = one("shared", &node.device(0), "2Gi", "30");
    let first = node.prepare(&shared).await.unwrap();
    let again = bounded(node.dra.prepare("another-pod", &[shared.name()])).await.unwrap();
    let second = node.container(&again[0]);
    assert_eq!(first.shares, second.shares);
    let (mut one, mut other) = (node.tenant(&first), node.tenant(&second));
    one.must("retain 0");
    other.must("retain 0");
    one.must(&format!("alloc {GIB}"));
    assert_eq!(other.must("info"), GIB - 2 * CONTEXT);
    assert_eq!(other.ask(&format!("alloc {GIB}")).result, OUT_OF_MEMORY);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_is_refused_with_numbers_and_takes_nothing() {
    let Some(node) = Node::with_containers().await else { return };
    let device = node.device(0);
    let fits = one("fits", &device, "6Gi", "60");
    node.prepare(&fits).await.unwrap();
    let name = fits.name();
    let devices = bounded(node.dra.prepare(&name.name, &[fits.name()])).await.unwrap().remove(0);
    node.kubelet.run_claiming(("team", "fits"), "main", &name, &devices);
    let named = until(|| {
        let pod = node.status()["allocations"][0]["holder"]["pod"].clone();
        pod.as_str().map(str::to_owned)
    });
    // Long before the next round of housekeeping.
    let named = tokio::time::timeout(Duration::from_secs(4), named).await;
    assert_eq!(named.expect("it has no name"), "fits");
    for (name, memory, cores, part) in
        [("memory", "2Gi", "10", "GiB"), ("cores", "1Gi", "50", "%"), ("gpu", "80Gi", "10", "80")]
    {
        let text = node.refusal(&one(name, &device, memory, cores)).await;
        assert!(text.contains(part) && text.contains(name), "{text}");
    }
    // The pod that was refused is known by name, with what kubelet was told.
    let told = node.must(&["explain", "team/cores"]);
    assert!(told.contains("team/cores cannot start") && told.contains("% do not fit"), "{told}");
    let refused = node.status()["refusals"].as_array().unwrap().clone();
    let pods: Vec<&Value> = refused.iter().map(|one| &one["pods"][0]).collect();
    assert_eq!(pods, ["memory", "cores", "gpu"]);
    let error = node.refusal(&one("nowhere", "gpu-none", "1Gi", "10")).await;
    assert!(error.contains("gpu-none"), "{error}");
    assert_eq!(node.delivered(), [1, 1]);
    // The same fits when the other has ended.
    node.unprepare(&fits).await;
    assert_eq!(node.delivered(), [0, 0]);
    let memory = node.prepare(&one("memory", &device, "7Gi", "90")).await.unwrap();
    holds(&mut node.tenant(&memory), 0, 7 * GIB);
    assert_eq!(
        node.status()["refusals"][0]["claim"],
        "cores",
        "what was granted is refused no more"
    );
    // A GPU without time has no room, and says what it has too little of.
    let gpu = || {
        let gpus = node.status()["gpus"].as_array().unwrap().clone();
        gpus.into_iter().find(|gpu| gpu["uuid"] == node.sim.uuid(0)).unwrap()
    };
    let before = gpu();
    assert_eq!((&before["no_room"], &before["left_cores_millis"]), (&json!(""), &json!(100)));
    node.prepare(&one("rest", &device, "320Mi", "10")).await.unwrap();
    let after = gpu();
    assert_eq!((&after["no_room"], &after["left_cores_millis"]), (&json!("GPU time"), &json!(0)));
    assert!(after["left_memory_bytes"].as_u64().unwrap() > 300 * MIB, "{after}");
    let status = node.must(&["status"]);
    assert!(status.contains("no GPU time"), "{status}");
}

fn data(node: &Node, claim: &str) -> Value {
    node.api.with(|store| store.claim("team", claim).unwrap()["status"]["devices"][0].clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shares_quota_is_changed_by_its_claims_name_under_its_tenant() {
    let Some(node) = Node::with_containers().await else { return };
    let chat = one("chat", &node.device(0), "2Gi", "30");
    let mut tenant = node.tenant(&node.prepare(&chat).await.unwrap());
    tenant.must("retain 0");
    let large = format!("alloc {}", 2 * GIB);
    assert_eq!(tenant.ask(&large).result, OUT_OF_MEMORY);
    until(|| (data(&node, "chat")["data"]["limits"]["memory"] == "2048Mi").then_some(())).await;

    // What it takes, and from whom; the scheduler learns of it.
    let published = || node.devices()[&node.device(0)]["capacity"]["memory"]["value"].clone();
    assert_eq!(published(), "7936Mi");
    let said = node.must(&["quota", "set", "team/chat", "--memory", "3Gi", "--cores", "40"]);
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "it takes 1 GiB of the 5.7 GiB",
        "none of more than 4.7 GiB finds room there",
        "not prepared yet",
    ] {
        assert!(said.contains(part), "{part} is not in:\n{said}");
    }
    until(|| (published() == "6912Mi").then_some(())).await;
    let held = tenant.must(&large);
    assert_eq!(tenant.ask("info").values, [GIB - CONTEXT, 3 * GIB]);
    // What is, and what was allocated.
    let limits = json!({ "memory": "3072Mi", "cores": "40", "compute": "burst" });
    until(|| (data(&node, "chat")["data"]["limits"] == limits).then_some(())).await;
    assert_eq!(data(&node, "chat")["data"]["allocated"]["memory"], "2048Mi");
    assert_eq!(data(&node, "chat")["conditions"][0]["reason"], "QuotaChanged");
    let object = node.api.with(|store| store.claim("team", "chat").cloned()).unwrap();
    let consumed = &object["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"];
    assert_eq!(consumed["memory"], "2Gi");

    // Beyond the GPU, by words that say how much there is.
    let refused = node.says(&["quota", "set", "team/chat", "--memory", "9Gi"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("GiB"), "{text}");
    // A claim that the scheduler places into what the quota took is refused, not oversold.
    let error = node.refusal(&one("next", &node.device(0), "5Gi", "10")).await;
    assert!(
        error.contains("next") && error.contains("1 GiB of it by `tessera quota set`"),
        "{error}"
    );
    tenant.must(&format!("free {held}"));
    node.must(&["quota", "reset", "team/chat"]);
    until(|| (published() == "7936Mi").then_some(())).await;
    assert_eq!(tenant.must("total 0"), 2 * GIB);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_and_explain_know_the_claim() {
    let node = Node::start().await;
    let chat = one("chat", &node.device(0), "2Gi", "30");
    node.prepare(&chat).await.unwrap();
    let status = node.status();
    let allocation = &status["allocations"][0];
    let claim = &allocation["claim"];
    assert_eq!(claim["name"], "chat");
    assert_eq!(claim["namespace"], "team");
    assert_eq!(claim["request"], "gpu");
    assert_eq!(allocation["gpus"][0]["memory_limit_bytes"], 2 * GIB);
    assert_eq!(allocation["gpus"][0]["cores_millis"], 300);
    let text = node.must(&["status"]);
    assert!(text.contains("claim team/chat") && text.contains("1 claim prepared"), "{text}");
    let why = node.must(&["explain", "team/chat", "-o", "wide"]);
    for part in [
        "claim team/chat",
        "asked for 2 GiB of memory and 30 %",
        "allocated 2 GiB and 30%",
        node.sim.uuid(0),
    ] {
        assert!(why.contains(part), "{part} is not in:\n{why}");
    }
}
