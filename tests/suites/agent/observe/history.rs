//! What was, of a running plugin: pods that are gone, plugins that were replaced, what happened meanwhile.

use tessera_harness::plugin::{TestNode, admin, bounded, id_of, target, until, until_async};
use tessera_view::change::{CordonRequest, SetQuotaRequest};
use tessera_view::history::Answer;
use tessera_web::client::{ClientError, query};

async fn ask(node: &TestNode, subject: &str) -> Result<Answer, ClientError> {
    let path = format!("/api/v1/history{}", query(&[("subject", subject)]));
    admin(node.dir.path()).get(&path).await
}

/// The answer, once it satisfies.
async fn answer_until(node: &TestNode, subject: &str, enough: impl Fn(&Answer) -> bool) -> Answer {
    until_async(async || ask(node, subject).await.ok().filter(&enough)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_gone_is_found_by_its_name_also_after_a_restart() {
    let mut node = TestNode::start_with("[share]\nreplicas = 4\nmemory = \"8Gi\"\n").await;
    // A kubelet that lists nothing at all is not believed.
    node.start_pod("other-0", 1).await;
    node.start_pod("chat-7c9d8f6b5-x2v4q", 1).await;
    let seen = |answer: &Answer| {
        answer.tenants.iter().any(|one| one.live && one.points.iter().any(|p| p.seconds > 0.0))
    };
    let answer = answer_until(&node, "default/chat-7c9d8f6b5-x2v4q", seen).await;
    let [one] = answer.tenants.as_slice() else { panic!("{answer:?}") };
    assert_eq!((one.workload.as_str(), one.container.as_str()), ("chat", "main"));
    assert_eq!(one.points[0].memory_limit_bytes, 8 << 30);

    let memory_limit_bytes = Some(9 << 30);
    let change = SetQuotaRequest {
        target: target("chat-7c9d8f6b5-x2v4q"),
        memory_limit_bytes,
        ..Default::default()
    };
    admin(node.dir.path()).call(&change).await.unwrap();
    let is_set = |answer: &Answer| {
        let points = answer.tenants.iter().flat_map(|one| &one.points);
        points.last().is_some_and(|point| point.memory_limit_bytes == 9 << 30)
    };
    let answer = answer_until(&node, "chat-7c9d8f6b5-x2v4q", is_set).await;
    let event = answer.events.iter().find(|event| event.what == "quota-set").unwrap();
    assert!(
        event.text.contains("9 GiB") && event.pod == "default/chat-7c9d8f6b5-x2v4q",
        "{event:?}"
    );

    node.kubelet.remove("default", "chat-7c9d8f6b5-x2v4q");
    let gone = |answer: &Answer| answer.tenants.iter().any(|one| !one.live);
    let before = answer_until(&node, "chat-7c9d8f6b5-x2v4q", gone).await;
    node.stop_plugin().await;
    node.start_plugin().await;
    let after = answer_until(&node, "chat-7c9d8f6b5-x2v4q", |_| true).await;
    let seconds = |answer: &Answer| -> f64 {
        answer.tenants.iter().flat_map(|one| &one.points).map(|point| point.seconds).sum()
    };
    // What was stored as the plugin ended is all that it had seen.
    assert!(seconds(&after) >= seconds(&before) - 0.01, "{after:?}");
    assert_eq!(after.tenants[0].pod, "chat-7c9d8f6b5-x2v4q");
    let error = ask(&node, "chta").await.unwrap_err();
    assert_eq!(error.exit(), 1);
    assert!(error.to_string().contains("nothing is called \"chta\""), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpus_history_has_its_tenants_and_cordons() {
    let node = TestNode::start().await;
    let admitted = node.start_pod("chat-0", 1).await;
    let request = CordonRequest { gpu: "0".into(), reason: "fans".into(), ..Default::default() };
    admin(node.dir.path()).call(&request).await.unwrap();
    let cordoned = |answer: &Answer| {
        let points = answer.gpus.iter().flat_map(|gpu| &gpu.points);
        points.last().is_some_and(|point| point.cordoned_seconds > 0.0)
            && answer.tenants.iter().any(|one| one.pod == "chat-0")
    };
    let answer = answer_until(&node, "0", cordoned).await;
    assert_eq!(answer.gpus[0].index, Some(0));
    let event = answer.events.iter().find(|event| event.what == "cordoned").unwrap();
    assert!(event.text.contains("fans"), "{event:?}");
    // By the beginning of its id, too.
    let id = id_of(&admitted.ids);
    let answer = answer_until(&node, &id.as_str()[..8], |answer| !answer.tenants.is_empty()).await;
    assert!(answer.gpus.is_empty() && answer.tenants[0].id == id.as_str());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_that_is_off_says_so_and_is_on_again_without_a_restart() {
    let mut node = TestNode::without_plugin("[history]\nenabled = false\n").await;
    let off = node.dir.path().join("tessera.toml");
    std::fs::write(&off, node.config_text()).unwrap();
    node.launch_plugin_on(&off);
    bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable("tessera.dev/gpu") > 0)).await;
    let error = until_async(async || {
        let error = ask(&node, "").await.err()?;
        error.to_string().contains("nothing is recorded").then_some(error)
    })
    .await;
    assert!(error.to_string().contains("history.enabled"), "{error}");
    assert!(!node.ledger().with_file_name("history.redb").exists());
    std::fs::write(&off, node.config_text().replace("enabled = false", "enabled = true")).unwrap();
    answer_until(&node, "", |answer| answer.gpus.iter().any(|gpu| !gpu.points.is_empty())).await;
    until(|| node.ledger().with_file_name("history.redb").exists().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_that_cannot_be_opened_keeps_nothing_from_starting() {
    let mut node = TestNode::without_plugin("").await;
    let path = node.ledger().with_file_name("history.redb");
    std::fs::create_dir_all(&path).unwrap();
    node.start_plugin().await;
    node.start_pod("chat-0", 1).await;
    node.warned("nothing is recorded").await;
    // What was seen meanwhile is shown, and stored as soon as that can be.
    answer_until(&node, "chat-0", |answer| {
        answer.remarks.iter().any(|r| r.contains("is not open"))
    })
    .await;
    std::fs::remove_dir(&path).unwrap();
    answer_until(&node, "chat-0", |answer| answer.remarks.is_empty()).await;
}
