//! What was, of a running plugin: pods that are gone, plugins that were replaced, what happened meanwhile.

use tessera_harness::plugin::{
    GIB, TestNode, admin, bounded, connect, id_of, target, until, until_async,
};
use tessera_region::account::Account;
use tessera_region::layout::Kind;
use tessera_region::quota::QuotaReader;
use tessera_region::usage::UsageMap;
use tessera_view::change::SetQuotaRequest;
use tessera_view::explain::{Explanation, Story};
use tessera_view::history::Answer;
use tessera_web::client::{ClientError, query};

use crate::refused;

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

// The audit trail of what containers are refused, and `Explain` of pods that live and that are gone.

async fn explain(node: &TestNode, subject: &str) -> Result<Explanation, ClientError> {
    let path = format!("/api/v1/explain{}", query(&[("subject", subject)]));
    admin(node.dir.path()).get(&path).await
}

/// The pod's story, once it satisfies.
async fn story_until(node: &TestNode, subject: &str, enough: impl Fn(&Story) -> bool) -> Story {
    until_async(async || {
        let mut answer = explain(node, subject).await.ok()?;
        let enough = answer.allocations.first().is_some_and(&enough);
        enough.then(|| answer.allocations.remove(0))
    })
    .await
}

#[tokio::test]
async fn a_pod_is_explained_while_it_lives_and_when_it_is_gone() {
    let node = TestNode::start().await;
    let ids = node.start_pod("llm", 2).await.ids;
    let story = story_until(&node, "default/llm", |story| story.started_unix_ms > 0).await;
    assert_eq!(story.replica_ids, ids);
    let placement = story.placement.unwrap();
    assert!(placement.as_preferred, "{placement:?}");
    assert!(placement.reason.contains("of 8 free replicas on 2 GPUs (packed"), "{placement:?}");
    let limit = &story.limits[0];
    assert_eq!(limit.memory_limit_bytes, 16 * GIB);
    assert!(limit.memory_origin.starts_with("2 × share.memory (line "), "{limit:?}");
    let how = story.enforcement.unwrap();
    assert_eq!((how.shim.is_empty(), how.page_version), (false, tessera_region::abi::version()));

    // A kubelet without any pod has just started, and releases nothing.
    node.start_pod("other", 1).await;
    node.kubelet.remove("default", "llm");
    let gone = story_until(&node, "llm", |story| story.released_unix_ms > 0).await;
    assert!(gone.now.is_none() && gone.enforcement.is_none());
    let reason = gone.placement.unwrap().reason;
    assert!(reason.contains(&ids[0]) && reason.contains("16 GiB and 50%"), "{reason}");
    let whats: Vec<&str> = gone.trail.iter().map(|line| line.what.as_str()).collect();
    assert_eq!(whats, ["allocated", "started", "released"]);
}

#[tokio::test]
async fn refusals_reach_the_trail_with_their_sizes_and_a_flood_makes_no_more_lines() {
    let node = TestNode::start().await;
    let ids = node.start_pod("greedy", 1).await.ids;
    let session = connect(&node.pages(&ids));
    refused(&session, 9 * GIB);
    let story = story_until(&node, "greedy", |story| !story.incidents.is_empty()).await;
    let incident = &story.incidents[0];
    assert_eq!((incident.what.as_str(), incident.times), ("refused-memory", 1));
    assert_eq!(
        incident.reason,
        "a request for 9 GiB was refused: 0 B of 8 GiB device memory were in use"
    );
    assert_eq!(story.trail.last().unwrap().by, "container");

    // The plugin reads on this thread, and only so fast.
    let flood = move || {
        (0..500).for_each(|_| refused(&session, GIB));
        session
    };
    let _session = tokio::task::spawn_blocking(flood).await.unwrap();
    let story = story_until(&node, "greedy", |story| story.incidents[0].times == 501).await;
    let lines = story.trail.iter().filter(|line| line.what == "refused-memory").count();
    assert_eq!(lines, 2, "the first, and all others together: {:?}", story.trail);
}

#[tokio::test]
async fn a_refusal_is_remembered_with_what_was_in_use_then_although_the_job_is_gone() {
    let node = TestNode::start().await;
    let pages = node.start_pod("job", 1).await.pages;
    let usage = UsageMap::attach(&pages).unwrap();
    let slot = usage.claim().unwrap();
    let job = Account::new(QuotaReader::attach(&pages).unwrap(), usage, slot);
    job.reserve(0, 5 * GIB).unwrap().commit(5 * GIB, Kind::Plain).unwrap();
    refused(&connect(&pages), 9 * GIB);
    let region = || {
        let all = node.agent().allocations.with_regions();
        all.into_iter().find_map(|(_, region)| region).unwrap()
    };
    until(|| (region().tenant().counters().over_quota >= 1).then_some(())).await;
    job.release(0, 5 * GIB, Kind::Plain);
    drop(job);
    let story = story_until(&node, "job", |story| !story.incidents.is_empty()).await;
    let reason = "a request for 9 GiB was refused: 5 GiB of 8 GiB device memory were in use";
    assert_eq!(story.incidents[0].reason, reason);
}

#[tokio::test]
async fn what_is_counted_is_explained_at_once() {
    let node = TestNode::start().await;
    let ids = node.start_pod("greedy", 1).await.ids;
    let session = connect(&node.pages(&ids));
    let id = id_of(&ids);
    for times in 1..=5 {
        refused(&session, GIB);
        // As soon as it is counted, before housekeeping had its turn.
        let counted = || {
            let all = node.agent().allocations.with_regions();
            let greedy = all.iter().find(|(record, _)| record.replicas == ids);
            let region = greedy.and_then(|(_, region)| region.as_ref());
            region.map_or(0, |region| region.tenant().counters().over_quota)
        };
        until(|| (counted() >= times).then_some(())).await;
        let answer = explain(&node, id.as_str()).await.unwrap();
        let incidents = &answer.allocations[0].incidents;
        let explained: u64 = incidents.iter().map(|incident| incident.times).sum();
        assert!(explained >= times, "{times} counted, explained: {incidents:?}");
    }
}
