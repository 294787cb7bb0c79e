//! Quotas, cordons and views of claims' shares.

use serde_json::{Value, json};
use tessera_harness::plugin::{bounded, until};
use tessera_harness::{GIB, MIB};

use super::node::{CONTEXT, DRIVER, Node, one};

const OUT_OF_MEMORY: i64 = 2;

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
        "goes from 7.7 GiB to 6.7 GiB",
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
    let Err(error) = node.prepare(&one("next", &node.device(0), "5Gi", "10")).await else {
        panic!("sold twice")
    };
    let error = error.to_string();
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cordon_is_a_taint_and_a_refusal_until_it_is_lifted() {
    let Some(node) = Node::with_containers().await else { return };
    let device = node.device(0);
    let before = node.prepare(&one("before", &device, "1Gi", "10")).await.unwrap();
    node.must(&["cordon", "0", "--reason", "to be replaced"]);
    let taint = || node.devices()[&device]["taints"].get(0).cloned();
    let said = until(taint).await;
    assert_eq!(said["key"], format!("{DRIVER}/cordoned"));
    assert_eq!(said["effect"], "NoSchedule");
    // The operator's words are not for everybody who reads slices.
    assert!(!said.to_string().contains("replaced"), "{said}");
    assert!(node.devices()[&node.device(1)].get("taints").is_none());
    let late = one("late", &device, "1Gi", "10");
    let Err(error) = node.prepare(&late).await else { panic!("prepared on a cordoned GPU") };
    let text = error.to_string();
    assert!(text.contains("cordon") && text.contains("late"), "{text}");
    // What runs there goes on; another pod of its claim too.
    let mut tenant = node.tenant(&before);
    tenant.must("retain 0");
    tenant.must(&format!("alloc {}", 512 * MIB));
    node.must(&["uncordon", "0"]);
    until(|| taint().is_none().then_some(())).await;
    node.prepare(&late).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_unprepared_leaves_nothing() {
    let Some(node) = Node::with_containers().await else { return };
    let chat = one("chat", &node.device(0), "7Gi", "100");
    for _ in 0..3 {
        let container = node.prepare(&chat).await.unwrap();
        assert_eq!(node.delivered(), [1, 1]);
        let mut tenant = node.tenant(&container);
        tenant.must("retain 0");
        tenant.must(&format!("alloc {GIB}"));
        tenant.kill();
        // The claim's object may be gone by then.
        node.api.with(|store| store.remove_claim("team", "chat"));
        node.unprepare(&chat).await;
        assert_eq!(node.delivered(), [0, 0]);
        let status = node.status();
        assert_eq!(status["allocations"], json!([]));
        assert_eq!(status["gpus"][0]["memory_limits_bytes"], 0);
    }
    // Again, and of a claim that nobody knows.
    let both = [chat.name(), one("unknown", "d", "1Gi", "1").name()];
    let gone = bounded(node.dra.call_unprepare(&both)).await.unwrap();
    assert!(gone.values().all(String::is_empty), "{gone:?}");
}
