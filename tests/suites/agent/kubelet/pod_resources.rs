//! The pod resources client, against the stand-in for kubelet and what else may be at its socket.

use std::time::{Duration, Instant};

use tessera_fake_kubelet::{Container, Pod};
use tessera_harness::scripted::{GPU, Node, bounded};
use tessera_kubelet::pod_resources::{PodResources, PodResourcesError};
use tessera_model::holding::Holding;
use tokio::net::UnixListener;

fn holding(pod: &str, container: &str, device_ids: &[&str]) -> Holding {
    Holding {
        namespace: "default".into(),
        pod: pod.into(),
        container: container.into(),
        resource_name: GPU.into(),
        device_ids: device_ids.iter().map(ToString::to_string).collect(),
    }
}

#[tokio::test]
async fn tells_who_holds_which_replica_and_what_is_offered() {
    let node = Node::new().await;
    let plugin = node.plugin(4);
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let pod_resources = PodResources::new(node.kubelet.pod_resources_socket());
    assert_eq!(bounded(pod_resources.list(Duration::ZERO)).await.unwrap(), []);
    let pod = Pod::new("default", "llm")
        .with_init(Container::new("fetch").asking(GPU, 1))
        .with(Container::new("server").asking(GPU, 2));
    bounded(node.kubelet.admit(&pod)).await.unwrap();
    let other = Pod::new("default", "other").with(Container::new("one").asking(GPU, 1));
    bounded(node.kubelet.admit(&other)).await.unwrap();
    assert_eq!(
        bounded(pod_resources.list(Duration::ZERO)).await.unwrap(),
        [
            holding("llm", "server", &["replica-2", "replica-3"]),
            holding("other", "one", &["replica-1"])
        ]
    );
    plugin.set_healthy(3, 4);
    bounded(node.kubelet.wait_allocatable(GPU, 3)).await;
    let offered = bounded(pod_resources.allocatable(GPU)).await.unwrap();
    assert_eq!(offered.into_iter().collect::<Vec<_>>(), ["replica-0", "replica-1", "replica-2"]);
    assert!(bounded(pod_resources.allocatable("example.com/none")).await.unwrap().is_empty());
}

#[tokio::test]
async fn asks_kubelet_seldom() {
    let node = Node::new().await;
    let _plugin = node.plugin(1);
    bounded(node.kubelet.wait_allocatable(GPU, 1)).await;
    let pod_resources = PodResources::new(node.kubelet.pod_resources_socket());
    let hour = Duration::from_secs(3600);
    assert_eq!(bounded(pod_resources.list(hour)).await.unwrap(), []);
    let pod = Pod::new("default", "llm").with(Container::new("server").asking(GPU, 1));
    bounded(node.kubelet.admit(&pod)).await.unwrap();
    // An old answer will do, and costs nothing.
    assert_eq!(bounded(pod_resources.list(hour)).await.unwrap(), []);
    assert_eq!(node.kubelet.pod_lists(), 1);
    let started = Instant::now();
    // A fresh one takes its time; concurrent requests share it.
    let (one, two) = tokio::join!(
        bounded(pod_resources.list(Duration::ZERO)),
        bounded(pod_resources.list(Duration::ZERO)),
    );
    assert_eq!(one.unwrap(), [holding("llm", "server", &["replica-0"])]);
    assert_eq!(two.unwrap(), [holding("llm", "server", &["replica-0"])]);
    assert_eq!(node.kubelet.pod_lists(), 2);
    assert!(started.elapsed() > Duration::from_millis(300), "{:?}", started.elapsed());
}

#[tokio::test]
async fn goes_on_after_kubelets_restart() {
    let node = Node::new().await;
    let _plugin = node.plugin(1);
    bounded(node.kubelet.wait_allocatable(GPU, 1)).await;
    let pod_resources = PodResources::new(node.kubelet.pod_resources_socket());
    bounded(pod_resources.list(Duration::ZERO)).await.unwrap();
    node.kubelet.restart().await.unwrap();
    bounded(pod_resources.list(Duration::ZERO)).await.unwrap();
}

#[tokio::test]
async fn an_absent_socket_a_dead_one_and_a_strange_one_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kubelet.sock");
    let pod_resources = PodResources::new(&socket);
    let error = bounded(pod_resources.list(Duration::ZERO)).await.unwrap_err();
    assert!(matches!(&error, PodResourcesError::Absent(path) if *path == socket), "{error}");

    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let error = bounded(pod_resources.allocatable(GPU)).await.unwrap_err();
    assert!(matches!(error, PodResourcesError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");

    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        loop {
            // Somebody who hangs up.
            drop(listener.accept().await.unwrap());
        }
    });
    let error = bounded(pod_resources.allocatable(GPU)).await.unwrap_err();
    assert!(matches!(error, PodResourcesError::Unreachable { .. }), "{error}");
}
