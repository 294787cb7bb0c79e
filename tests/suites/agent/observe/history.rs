//! What was, of a running plugin: pods that are gone, plugins that were replaced, what happened meanwhile.

use std::time::Duration;

use tessera_harness::plugin::{TestNode, admin, bounded, id_of, pod, target};
use tessera_view::change::{CordonRequest, SetQuotaRequest};
use tessera_view::history::Answer;
use tessera_web::client::{ClientError, query};

async fn ask(node: &TestNode, subject: &str) -> Result<Answer, ClientError> {
    let path = format!("/api/v1/history{}", query(&[("subject", subject)]));
    admin(node.dir.path()).get(&path).await
}

/// The answer, once it satisfies.
async fn until(node: &TestNode, subject: &str, enough: impl Fn(&Answer) -> bool) -> Answer {
    bounded(async {
        loop {
            if let Ok(answer) = ask(node, subject).await
                && enough(&answer)
            {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_gone_is_found_by_its_name_also_after_a_restart() {
    let mut node = TestNode::start_with("[share]\nreplicas = 4\nmemory = \"8Gi\"\n").await;
    // A kubelet that lists nothing at all is not believed.
    bounded(node.kubelet.run(&pod("other-0", 1))).await.unwrap();
    bounded(node.kubelet.run(&pod("chat-7c9d8f6b5-x2v4q", 1))).await.unwrap();
    let seen = |answer: &Answer| {
        answer.tenants.iter().any(|one| one.live && one.points.iter().any(|p| p.seconds > 0.0))
    };
    let answer = until(&node, "default/chat-7c9d8f6b5-x2v4q", seen).await;
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
    let answer = until(&node, "chat-7c9d8f6b5-x2v4q", is_set).await;
    let event = answer.events.iter().find(|event| event.what == "quota-set").unwrap();
    assert!(
        event.text.contains("9 GiB") && event.pod == "default/chat-7c9d8f6b5-x2v4q",
        "{event:?}"
    );

    node.kubelet.remove("default", "chat-7c9d8f6b5-x2v4q");
    let gone = |answer: &Answer| answer.tenants.iter().any(|one| !one.live);
    let before = until(&node, "chat-7c9d8f6b5-x2v4q", gone).await;
    node.stop_plugin().await;
    node.start_plugin().await;
    let after = until(&node, "chat-7c9d8f6b5-x2v4q", |_| true).await;
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
    let admitted = bounded(node.kubelet.run(&pod("chat-0", 1))).await.unwrap().remove(0);
    let request = CordonRequest { gpu: "0".into(), reason: "fans".into(), ..Default::default() };
    admin(node.dir.path()).call(&request).await.unwrap();
    let cordoned = |answer: &Answer| {
        let points = answer.gpus.iter().flat_map(|gpu| &gpu.points);
        points.last().is_some_and(|point| point.cordoned_seconds > 0.0)
            && answer.tenants.iter().any(|one| one.pod == "chat-0")
    };
    let answer = until(&node, "0", cordoned).await;
    assert_eq!(answer.gpus[0].index, Some(0));
    let event = answer.events.iter().find(|event| event.what == "cordoned").unwrap();
    assert!(event.text.contains("fans"), "{event:?}");
    // By the beginning of its id, too.
    let id = id_of(&admitted.device_ids);
    let answer = until(&node, &id.as_str()[..8], |answer| !answer.tenants.is_empty()).await;
    assert!(answer.gpus.is_empty() && answer.tenants[0].id == id.as_str());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_that_is_off_says_so_and_is_on_again_without_a_restart() {
    let mut node = TestNode::without_plugin("[history]\nenabled = false\n").await;
    let off = node.dir.path().join("tessera.toml");
    std::fs::write(&off, node.config_text()).unwrap();
    node.launch_plugin_on(&off);
    bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable("tessera.dev/gpu") > 0)).await;
    let error = bounded(async {
        loop {
            match ask(&node, "").await {
                Err(error) if error.to_string().contains("nothing is recorded") => break error,
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    })
    .await;
    assert!(error.to_string().contains("history.enabled"), "{error}");
    assert!(!node.ledger().with_file_name("history.redb").exists());
    std::fs::write(&off, node.config_text().replace("enabled = false", "enabled = true")).unwrap();
    until(&node, "", |answer| answer.gpus.iter().any(|gpu| !gpu.points.is_empty())).await;
    bounded(async {
        while !node.ledger().with_file_name("history.redb").exists() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_that_cannot_be_opened_keeps_nothing_from_starting() {
    let mut node = TestNode::without_plugin("").await;
    let path = node.ledger().with_file_name("history.redb");
    std::fs::create_dir_all(&path).unwrap();
    node.start_plugin().await;
    bounded(node.kubelet.run(&pod("chat-0", 1))).await.unwrap();
    node.status_until(|status| {
        let mut texts = status.warnings.iter();
        texts.any(|text| text.contains("nothing is recorded")).then_some(())
    })
    .await;
    // What was seen meanwhile is shown, and stored as soon as that can be.
    until(&node, "chat-0", |answer| answer.remarks.iter().any(|r| r.contains("is not open"))).await;
    std::fs::remove_dir(&path).unwrap();
    until(&node, "chat-0", |answer| answer.remarks.is_empty()).await;
}
