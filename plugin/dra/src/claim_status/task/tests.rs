//! The task against an API server in memory.

use serde_json::Value;
use tessera_agent::allocations::steer::{SetQuotaRequest, Target};
use tessera_cluster::error::{Kind, Verb};
use tessera_cluster::fixtures::{FakeApi, Mood};
use tessera_model::audit::Actor;

use super::*;
use crate::tests::support::{Node, claim, named, share};

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 10 s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_shows_its_limits_and_follows_their_changes() {
    let node = Node::new();
    let _plugin = node.plugin().await;
    let api: &FakeApi = &node.api;
    let chat = claim("chat", "u1", vec![share("gpu", "gpu-a", "s", "6Gi", "30")]);
    let gone = claim("gone", "u2", vec![share("gpu", "gpu-b", "t", "1Gi", "10")]);
    api.put_claim(&chat);
    api.put_claim(&gone);
    let task = tokio::spawn(Reporter::new(Arc::new(api.clone()), Arc::clone(&node.agent)).run());
    let memory = || {
        let found = api.device_status("team", "chat");
        found.first().map(|entry| entry["data"]["limits"]["memory"].clone())
    };
    node.kubelet.call_prepare(&[named(&chat)]).await.unwrap();
    until("the first status", || memory() == Some(Value::from("6144Mi"))).await;
    let calls = || api.calls(Verb::Patch, Kind::ClaimStatus);
    assert_eq!(calls(), 1);
    // Something else happened: nothing to write.
    node.agent.cordon(Some("GPU-b"), None, Actor::Plugin).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(calls(), 1);
    api.set_mood(Mood::Away);
    let target = Target { name: node.agent.claims()[0].id.to_string(), ..Target::default() };
    let memory_limit_bytes = Some(8 << 30);
    let request = SetQuotaRequest { target, memory_limit_bytes, ..SetQuotaRequest::default() };
    node.agent.set_quota(&request, Actor::Plugin).unwrap();
    until("the attempt", || calls() > 1).await;
    api.set_mood(Mood::Works);
    until("the changed status", || memory() == Some(Value::from("8192Mi"))).await;
    // A claim that is gone is left alone.
    node.agent.uncordon(tessera_agent::Lift::Gpu("GPU-b"), None, Actor::Plugin).unwrap();
    task.abort();
    node.kubelet.call_prepare(&[named(&gone)]).await.unwrap();
    api.remove_claim("team", "gone");
    let before = calls();
    let task = tokio::spawn(Reporter::new(Arc::new(api.clone()), Arc::clone(&node.agent)).run());
    until("both attempts", || calls() == before + 2).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(calls(), before + 2);
    task.abort();
}
