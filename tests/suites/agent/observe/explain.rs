//! The audit trail of what containers are refused, and `Explain` of pods that live and that are gone.

use std::os::fd::AsRawFd;
use std::os::fd::OwnedFd;

use nix::sys::socket::{MsgFlags, send};
use tessera_harness::plugin::{GIB, TestNode, admin, connect, id_of, until, until_async};
use tessera_region::account::Account;
use tessera_region::layout::Kind;
use tessera_region::quota::QuotaReader;
use tessera_region::session::{EVENT_UUID_LEN, Event, EventKind, Message};
use tessera_region::usage::UsageMap;
use tessera_store::Filter;
use tessera_view::explain::{Explanation, Story};
use tessera_web::client::{ClientError, query};

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

/// Says that a request over the quota was refused, as the shim does.
fn refused(session: &OwnedFd, bytes: u64) {
    let kind = EventKind::OverQuota;
    let event = Event { kind, gpu: Some(0), bytes, uuid: [0; EVENT_UUID_LEN] };
    send(session.as_raw_fd(), &Message::Event(event).encode(), MsgFlags::empty()).unwrap();
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
        let all = node.agent().allocations().with_regions();
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
            let all = node.agent().allocations().with_regions();
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

#[tokio::test]
async fn allocate_does_not_wait_for_who_reads_the_audit_trail() {
    let node = TestNode::start().await;
    let before = node.agent().journal().trail().unwrap();
    node.start_pod("llm", 1).await;
    node.start_pod("web", 1).await;
    let before = before.read(&Filter::all()).unwrap();
    assert!(before.events.is_empty(), "it is of the moment before");
    let after = node.agent().journal().read_trail(|trail| trail.read(&Filter::all())).unwrap();
    assert!(after.events.iter().filter(|event| event.what.name() == "allocated").count() >= 2);
}
