//! The life of an allocation, through the gRPC calls that a kubelet makes.

use std::collections::BTreeSet;

use tessera_fake_kubelet::{Container, Pod};
use tessera_gpu::health::Observation;
use tessera_harness::plugin::*;
use tessera_model::audit::What;
use tessera_region::layout::{SESSION_SOCKET, USAGE_FILE};
use tessera_region::quota::QuotaReader;
use tessera_store::Ledger;

#[tokio::test]
async fn a_pod_gets_its_quota_and_the_shim() {
    let node = TestNode::start().await;
    let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
    let pages = node.pages(&admitted.device_ids);
    assert_eq!(limit(&pages), 8 * GIB);

    let mounts = &admitted.response.mounts;
    let at = |container: &str| mounts.iter().find(|m| m.container_path == container).unwrap();
    let inside = format!("/usr/local/tessera/pages/{}", pages.file_name().unwrap().display());
    assert!(at(&inside).read_only);
    assert_eq!(at(&inside).host_path, pages.display().to_string());
    let usage = at(&format!("{inside}/usage"));
    assert!(!usage.read_only);
    assert_eq!(usage.host_path, pages.join(USAGE_FILE).display().to_string());
    for path in ["/usr/local/tessera/libtessera.so", "/etc/ld.so.preload"] {
        assert!(at(path).read_only);
        assert!(std::path::Path::new(&at(path).host_path).is_file(), "{path}");
    }
    assert_eq!(admitted.response.envs["NVIDIA_VISIBLE_DEVICES"], gpu(0).uuid);
}

#[tokio::test]
async fn what_no_kubelet_should_ask_is_refused_with_what_to_do() {
    let node = TestNode::start().await;
    let refused = async |ids: &[String]| node.allocate(ids).await.unwrap_err();
    let unknown = refused(&["GPU-none::0".into()]).await;
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    assert!(unknown.message().contains("unknown replica GPU-none::0"), "{unknown}");
    assert_eq!(refused(&["nonsense".into()]).await.code(), tonic::Code::NotFound);
    let retired = refused(&[replica(0, 9)]).await;
    assert!(retired.message().contains("retired"), "{retired}");
    let split = refused(&[replica(0, 0), replica(1, 0)]).await;
    assert_eq!(split.code(), tonic::Code::InvalidArgument);
    assert!(split.message().contains("share.split"), "{split}");
    // Whatever an id is, the reason comes through, and short.
    for id in ["x".repeat(8 << 10), "é\n".repeat(4 << 10), "\u{1b}[2J ".repeat(100_000)] {
        let refused = refused(&[id]).await;
        assert_eq!(refused.code(), tonic::Code::NotFound, "{}", refused.message().len());
        let text = refused.message();
        assert!(text.starts_with("unknown replica ") && text.len() < 1600, "{text}");
        assert!(text.ends_with("does another plugin serve this resource name?"), "{text}");
    }
    // Nothing of it left anything behind.
    assert!(node.status().await.allocations.is_empty());
    assert!(tessera_tenant::regions::existing(&node.dir.path().join("pages")).is_empty());
}

/// By kubelet's own calls: it asks which replicas are preferred, and takes them; and where it does not ask.
#[tokio::test]
async fn distinct_replicas_are_of_different_gpus_or_the_pod_is_refused() {
    let node = TestNode::start_with(&format!("{SETTINGS}split = \"distinct\"\n")).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    let admitted = node.start_pod("both", 2).await;
    let gpus: BTreeSet<_> =
        admitted.ids.iter().map(|id| id.split("::").next().unwrap().to_owned()).collect();
    assert_eq!(gpus, [gpu(0).uuid, gpu(1).uuid].into(), "{:?}", admitted.ids);
    let quota = QuotaReader::attach(&admitted.pages).unwrap();
    assert_eq!((quota.memory_limit(0), quota.memory_limit(1)), (8 * GIB, 8 * GIB));
    // More than there are GPUs, and what a kubelet takes that follows no preference.
    let refused = node.kubelet.run(&pod("three", 3)).await.unwrap_err().to_string();
    assert!(refused.contains("share.split = \"distinct\""), "{refused}");
    let refused = node.allocate(&[replica(0, 1), replica(0, 2)]).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().contains("no 2 GPUs with one free"), "{refused}");
    // One is one.
    node.start_pod("one", 1).await;
}

#[tokio::test]
async fn a_sick_gpu_makes_all_its_replicas_unhealthy_and_allocates_nothing() {
    let node = TestNode::start().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    let running = node.kubelet.run(&pod("before", 1)).await.unwrap().remove(0);
    node.gpus.report(Observation::Xid { uuid: gpu(0).uuid, xid: 31 });
    node.gpus.report(Observation::Xid { uuid: gpu(0).uuid, xid: 79 });
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let status = node.allocate(&[replica(0, 2)]).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(status.message().contains("XID 79"), "{status}");
    // The running container keeps its quota, and may start again.
    node.kubelet.start_container(&pod("before", 1), "main").await.unwrap();
    assert_eq!(limit(&node.pages(&running.device_ids)), 8 * GIB);
    assert!(node.status().await.gpus[0].health_reason.contains("XID 79"));
}

#[tokio::test]
async fn an_init_containers_replicas_go_to_the_app_with_more() {
    let node = TestNode::start().await;
    let pod = Pod::new("default", "a")
        .with_init(Container::new("fetch").asking(GPU, 1))
        .with(Container::new("main").asking(GPU, 2));
    let admitted = node.kubelet.admit(&pod).await.unwrap();
    let (init, main) = (&admitted[0].device_ids, &admitted[1].device_ids);
    assert!(main.contains(&init[0]));
    // Only the app's limits count: 16 of 32 GiB.
    assert_eq!(node.status().await.gpus[0].memory_limits_bytes, 16 * GIB);

    node.kubelet.start_container(&pod, "fetch").await.unwrap();
    assert_eq!(limit(&node.pages(init)), 8 * GIB);
    assert_eq!(node.status().await.gpus[0].memory_limits_bytes, 8 * GIB);
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(limit(&node.pages(main)), 16 * GIB);
    assert_eq!(node.status().await.gpus[0].memory_limits_bytes, 16 * GIB);
    // The sandbox dies: kubelet starts the init container again, without Allocate.
    node.kubelet.start_container(&pod, "fetch").await.unwrap();
    assert_eq!(limit(&node.pages(init)), 8 * GIB);
}

#[tokio::test]
async fn a_deleted_pods_replica_serves_its_successor_at_once_with_fresh_pages() {
    let node = TestNode::start().await;
    let first = node.start_pod("first", 4).await;
    let second = node.start_pod("second", 4).await;
    let pages = first.pages;
    let before = generation(&pages);
    Tenant::hold(&pages, GIB).kill();
    node.kubelet.remove("default", "first");
    let third = node.start_pod("third", 4).await;
    assert_eq!(third.ids, first.ids);
    assert_ne!(third.ids, second.ids);
    assert!(generation(&pages) > before);
    let allocation = node.allocation(&third.ids).await.unwrap();
    assert_eq!(allocation.gpus[0].memory_charged_bytes, 0);
    assert_eq!(allocation.gpus[0].memory_peak_bytes, 0, "the peak was the tenant's before");
}

#[tokio::test]
async fn pages_are_kept_while_a_process_of_the_tenant_before_still_holds_memory() {
    let mut node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("first", 1).await;
    let lingering = Tenant::hold(&pages, 5 * GIB);
    // The replica goes to another pod although the process has not died yet.
    node.allocate(&ids).await.unwrap();
    let allocation = node.allocation(&ids).await.unwrap();
    assert_eq!(allocation.gpus[0].memory_charged_bytes, 5 * GIB, "what is held stays counted");
    assert_eq!(generation(&pages), allocation.generation);
    lingering.kill();
    node.allocation_until(&ids, |one| one.gpus[0].memory_charged_bytes == 0).await;
    node.stop_plugin().await;
    let events = crate::trail(&node.ledger()).into_iter().map(|event| event.what);
    let events: Vec<What> = events.collect();
    assert_eq!(events, [What::Allocated, What::Started, What::Allocated, What::PagesKept]);
}

#[tokio::test]
async fn killed_processes_give_their_bytes_back_at_once() {
    let node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("a", 1).await;
    let tenant = Tenant::hold(&pages, 6 * GIB);
    // The plugin must know the process by its session.
    let pid = tenant.pid();
    node.allocation_until(&ids, |one| one.processes.iter().any(|p| p.host_pid == pid)).await;
    tenant.kill();
    // Nobody asks for the status here: the pidfd alone has the slot zeroed.
    let usage = tessera_region::usage::UsageMap::attach(&pages).unwrap();
    until(|| (usage.charged_total(0) == 0).then_some(())).await;
}

#[tokio::test]
async fn a_container_that_starts_again_finds_its_pages_whatever_happened_to_them() {
    let node = TestNode::start().await;
    let pod = pod("a", 1);
    let admitted = node.kubelet.run(&pod).await.unwrap().remove(0);
    let pages = node.pages(&admitted.device_ids);

    lose(&pages, &[]);
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(limit(&pages), 8 * GIB);

    // As containerd leaves missing mount sources.
    lose(&pages, &[USAGE_FILE, SESSION_SOCKET]);
    node.kubelet.start_container(&pod, "main").await.unwrap();
    Tenant::hold(&pages, GIB);

    // Pages of somebody else.
    std::fs::write(pages.join("quota"), vec![7; 4096]).unwrap();
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(limit(&pages), 8 * GIB);
}

#[tokio::test]
async fn a_generation_that_was_recorded_and_not_begun_begins_at_the_next_start() {
    let mut node = TestNode::start().await;
    let pages = node.start_pod("a", 1).await.pages;
    Tenant::hold(&pages, 3 * GIB).kill();
    node.stop_plugin().await;
    // Killed right after the commit of another Allocate.
    let (mut ledger, _) = Ledger::open(&node.ledger(), true).unwrap();
    let mut record = ledger.load().unwrap().0.remove(0);
    record.generation += 1;
    let mut change = tessera_store::Change::default();
    change.put(record.clone(), What::Allocated, 0);
    ledger.commit(&change).unwrap();
    drop(ledger);
    let old = std::fs::File::open(pages.join(USAGE_FILE)).unwrap();
    node.start_plugin().await;
    assert_eq!(generation(&pages), record.generation);
    let inode =
        |file: &std::fs::File| std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    assert_ne!(inode(&old), inode(&std::fs::File::open(pages.join(USAGE_FILE)).unwrap()));
}

#[tokio::test]
async fn a_deleted_pod_is_released_once_nothing_runs() {
    let node = TestNode::start().await;
    let gone = node.start_pod("gone", 1).await;
    let stays = node.start_pod("stays", 1).await;
    let (gone_pages, stays_pages) = (gone.pages, stays.pages);
    let tenant = Tenant::hold(&gone_pages, GIB);
    node.kubelet.remove("default", "gone");
    // Held back by the process: several rounds of housekeeping pass.
    let rounds = node.kubelet.pod_lists() + 4;
    until(|| (node.kubelet.pod_lists() > rounds).then_some(())).await;
    assert!(gone_pages.exists());
    tenant.kill();
    until(|| (!gone_pages.exists()).then_some(())).await;
    assert!(stays_pages.exists());
    assert!(node.allocation(&gone.ids).await.is_none());
}

#[tokio::test]
async fn heartbeats_tell_that_the_plugin_lives_and_that_it_has_stopped() {
    let mut node = TestNode::start().await;
    let admitted = node.start_pod("a", 1).await;
    let quota = QuotaReader::attach(&admitted.pages).unwrap();
    let first = quota.heartbeat_ns();
    assert_ne!(first, 0);
    until(|| (quota.heartbeat_ns() > first).then_some(())).await;
    node.stop_plugin().await;
    assert_eq!(quota.heartbeat_ns(), 0);
}
