//! Unequal shares and several resources from one plugin, through the gRPC calls that a kubelet makes.

use tessera_fake_kubelet::{Admitted, Container, Pod};
use tessera_harness::plugin::*;
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, PreStartContainerRequest,
};
use tessera_model::allocation_id::AllocationId;
use tessera_view::status::Registration;

const LARGE: &str = "tessera.dev/gpu-large";
const SMALL: &str = "tessera.dev/gpu-small";

/// Each GPU of 40 GiB as one of 20 and two of 10.
const LAYOUT: &str = "[gpus]\nreserve = 0\n[[layout]]\ngpus = [\"Example\"]\nshares = [\n\
    { resource = \"tessera.dev/gpu-large\", memory = \"50%\", cores = \"50%\" },\n\
    { resource = \"tessera.dev/gpu-small\", count = 2, memory = \"25%\", cores = \"250m\" },\n]\n";

async fn start(settings: &str) -> TestNode {
    let mut node = TestNode::without_plugin(settings).await;
    node.launch_plugin();
    node
}

async fn offered(node: &TestNode, large: usize, small: usize) {
    bounded(node.kubelet.wait_allocatable(LARGE, large)).await;
    bounded(node.kubelet.wait_allocatable(SMALL, small)).await;
}

async fn restart(node: &mut TestNode, settings: &str) {
    node.stop_plugin().await;
    node.settings = settings.into();
    node.launch_plugin();
}

fn asking(name: &str, resource: &str, count: usize) -> Pod {
    Pod::new("default", name).with(Container::new("main").asking(resource, count))
}

async fn run(node: &TestNode, name: &str, resource: &str, count: usize) -> Admitted {
    bounded(node.kubelet.run(&asking(name, resource, count))).await.unwrap().remove(0)
}

/// The limit of an allocation's first GPU in GiB, as its tenant reads it.
fn gib(node: &TestNode, admitted: &Admitted) -> u64 {
    let ids = admitted.device_ids.iter().map(String::as_str);
    let id = AllocationId::of(&admitted.resource_name, ids);
    limit(&node.dir.path().join("pages").join(id.as_str())) / GIB
}

async fn allocate(node: &TestNode, resource: &str, ids: &[String]) -> Result<(), tonic::Status> {
    let request = ContainerAllocateRequest { device_ids: ids.to_vec() };
    let request = AllocateRequest { container_requests: vec![request] };
    node.client_of(resource).await.allocate(request).await.map(drop)
}

async fn pre_start(node: &TestNode, resource: &str, ids: &[String]) -> Result<(), tonic::Status> {
    let request = PreStartContainerRequest { device_ids: ids.to_vec() };
    node.client_of(resource).await.pre_start_container(request).await.map(drop)
}

#[tokio::test]
async fn a_gpu_is_sold_as_unequal_shares_under_their_own_names() {
    let node = start(LAYOUT).await;
    offered(&node, 2, 4).await;
    assert_ne!(node.kubelet.endpoint(LARGE), node.kubelet.endpoint(SMALL));
    let large = run(&node, "a", LARGE, 1).await;
    let small = run(&node, "b", SMALL, 1).await;
    let both = run(&node, "c", SMALL, 2).await;
    assert_eq!((gib(&node, &large), gib(&node, &small), gib(&node, &both)), (20, 10, 20));
    // A container that lives as it was sold takes nothing from anybody.
    offered(&node, 2, 4).await;
    assert_eq!(large.device_ids, [replica(0, 0)]);
    assert_eq!(small.device_ids, [replica(0, 0)], "the same id, another resource");

    let status = node.status().await;
    let mut held: Vec<_> = status
        .allocations
        .iter()
        .map(|a| (a.resource_name.as_str(), a.gpus[0].memory_limit_bytes / GIB, a.state.into_str()))
        .collect();
    held.sort_unstable();
    // Equal ids have parked nobody.
    assert_eq!(held, [(LARGE, 20, "started"), (SMALL, 10, "started"), (SMALL, 20, "started")]);
    let sold: Vec<_> = status.gpus[0]
        .replicas
        .iter()
        .map(|r| (r.resource_name.as_str(), r.index, r.memory_limit_bytes / GIB, r.cores_millis))
        .collect();
    assert_eq!(sold, [(LARGE, 0, 20, 500), (SMALL, 0, 10, 250), (SMALL, 1, 10, 250)]);
    assert!(status.gpus[0].replicas[..2].iter().all(|r| !r.allocation_id.is_empty()));
    assert_ne!(status.gpus[0].replicas[0].allocation_id, status.gpus[0].replicas[1].allocation_id);
    let plugin = status.plugin;
    assert_eq!(plugin.resource_name, format!("{LARGE}, {SMALL}"));
    assert_eq!(plugin.registration, Registration::Live);
    assert_eq!(plugin.resources.len(), 2);
    assert_eq!(status.warnings, Vec::<String>::new());
}

#[tokio::test]
async fn ready_means_all_resources_and_all_come_back_after_kubelet() {
    let node = start(LAYOUT).await;
    offered(&node, 2, 4).await;
    let before = (node.kubelet.endpoint(LARGE), node.kubelet.endpoint(SMALL));
    node.status_until(|status| (status.plugin.registration == Registration::Live).then_some(()))
        .await;
    node.kubelet.stop().await;
    node.status_until(|status| (status.plugin.registration != Registration::Live).then_some(()))
        .await;
    node.kubelet.resume().await.unwrap();
    offered(&node, 2, 4).await;
    assert_ne!(node.kubelet.endpoint(LARGE), before.0);
    assert_ne!(node.kubelet.endpoint(SMALL), before.1);
    // One stream alone: the other resource is served on, and the plugin as a whole is not ready.
    let other = node.kubelet.endpoint(SMALL);
    node.kubelet.drop_stream(LARGE);
    offered(&node, 2, 4).await;
    assert_eq!(node.kubelet.endpoint(SMALL), other);
    let plugin = node
        .status_until(|status| {
            let plugin = status.plugin.clone();
            (plugin.registration == Registration::Live).then_some(plugin)
        })
        .await;
    assert_eq!(plugin.registrations, 5);
}

#[tokio::test]
async fn a_retired_resource_is_served_while_it_is_held_and_counts() {
    let mut node = start(LAYOUT).await;
    offered(&node, 2, 4).await;
    let large = run(&node, "a", LARGE, 1).await;
    // 40 GiB in halves of 18 GiB: one fits beside the 20 that are held on the first GPU.
    restart(&mut node, "[gpus]\nreserve = 0\n[share]\nreplicas = 2\nmemory = \"18Gi\"\n").await;
    bounded(node.kubelet.wait_allocatable(GPU, 3)).await;
    bounded(node.kubelet.wait_until(|k| k.endpoint(LARGE).is_some())).await;
    bounded(node.kubelet.wait_until(|k| k.devices(LARGE).len() == 1)).await;
    let listed = node.kubelet.devices(LARGE).remove(0);
    assert_eq!((listed.id.as_str(), listed.health.as_str()), (&*replica(0, 0), "Unhealthy"));
    assert!(node.kubelet.endpoint(SMALL).is_none(), "nobody holds it");
    // Its container starts again, with the limit that it had; nobody else gets one.
    bounded(node.kubelet.start_container(&asking("a", LARGE, 1), "main")).await.unwrap();
    assert_eq!(gib(&node, &large), 20);
    let refused = allocate(&node, LARGE, &[replica(1, 0)]).await.unwrap_err();
    assert!(refused.message().contains("retired"), "{refused}");
    let status = node.status().await;
    let retired: Vec<_> =
        status.plugin.resources.into_iter().filter(|r| r.retired).map(|r| r.name).collect();
    assert_eq!(retired, [LARGE]);
    assert_eq!(status.gpus[0].replicas[2].health_reason, "retired");
    // With its last holder the resource goes, and the room is free.
    node.kubelet.remove("default", "a");
    node.kubelet.admit(&asking("alive", GPU, 1)).await.unwrap();
    bounded(node.kubelet.wait_until(|k| k.endpoint(LARGE).is_none())).await;
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
}

#[tokio::test]
async fn a_container_that_starts_names_what_its_adopted_pages_are() {
    let mut node = start(LAYOUT).await;
    offered(&node, 2, 4).await;
    let small = run(&node, "a", SMALL, 2).await;
    node.stop_plugin().await;
    std::fs::remove_file(node.ledger()).unwrap();
    // PodResources is silent, and the configuration gives less now.
    std::fs::remove_file(node.kubelet.pod_resources_socket()).unwrap();
    node.settings = LAYOUT.replace("25%", "20%");
    node.launch_plugin();
    // Until then whose replicas the 20 GiB are is unknown; they count.
    offered(&node, 1, 4).await;
    pre_start(&node, SMALL, &small.device_ids).await.unwrap();
    assert_eq!(gib(&node, &small), 20, "its limits are those it had");
    let status = node.status().await;
    assert_eq!(status.allocations[0].resource_name, SMALL);
    assert_eq!(status.allocations[0].replica_ids, small.device_ids);
}

#[tokio::test]
async fn a_container_with_two_of_our_resources_has_both() {
    let node = start(LAYOUT).await;
    offered(&node, 2, 4).await;
    let both = Container::new("server").asking(LARGE, 1).asking(SMALL, 1);
    let pod = Pod::new("default", "both").with(both);
    let admitted = bounded(node.kubelet.run(&pod)).await.unwrap();
    let mut limits: Vec<u64> = admitted.iter().map(|one| gib(&node, one)).collect();
    limits.sort_unstable();
    assert_eq!(limits, [10, 20]);
    let options = bounded(node.kubelet.start_container(&pod, "server")).await.unwrap();
    for one in &admitted {
        let ids = one.device_ids.iter().map(String::as_str);
        let id = AllocationId::of(&one.resource_name, ids);
        assert!(options.mounts.iter().any(|mount| mount.container_path.ends_with(id.as_str())));
    }
}
