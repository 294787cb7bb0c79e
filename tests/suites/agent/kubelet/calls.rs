//! Registration and its upkeep, against the stand-in for kubelet.

use std::time::{Duration, Instant};

use tessera_fake_kubelet::{Behaviour, Container, Pod};
use tessera_harness::scripted::{GPU, Node, bounded};
use tessera_kubelet::Phase;
use tessera_kubelet::pod_resources::{PodResources, PodResourcesError};
use tessera_model::holding::Holding;
use tokio::net::UnixListener;

#[tokio::test]
async fn sends_changes_in_bursts_as_one_message() {
    let node = Node::new().await;
    let plugin = node.plugin(4);
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    assert_eq!(node.kubelet.lists(), 1);
    // The stream's task runs between the changes, and waits for more.
    for sick in 1..=4 {
        plugin.set_healthy(4 - sick, 4);
        tokio::task::yield_now().await;
    }
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
    assert!(node.kubelet.lists() <= 3, "{} messages", node.kubelet.lists());
    assert_eq!(node.kubelet.devices(GPU).len(), 4);
    plugin.set_healthy(4, 4);
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
}

#[tokio::test]
async fn calls_reach_the_plugin_in_kubelets_order() {
    let node = Node::new().await;
    let plugin = node.plugin(4);
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let pod = Pod::new("default", "llm")
        .with_init(Container::new("fetch").asking(GPU, 1))
        .with(Container::new("server").asking(GPU, 2));
    let admitted = bounded(node.kubelet.run(&pod)).await.unwrap();
    // The test's plugin prefers the highest ids.
    assert_eq!(admitted[0].device_ids, ["replica-3"]);
    assert_eq!(admitted[1].device_ids, ["replica-2", "replica-3"]);
    assert_eq!(
        plugin.calls(),
        [
            "preferred 1 of replica-0 replica-1 replica-2 replica-3 with ",
            "allocate replica-3",
            "preferred 2 of replica-0 replica-1 replica-2 replica-3 with replica-3",
            "allocate replica-2 replica-3",
            "pre_start replica-3",
            "pre_start replica-2 replica-3",
        ]
    );
    assert_eq!(admitted[1].response.envs["REPLICAS"], "replica-2 replica-3");
    // A container that starts again keeps its devices.
    let options = bounded(node.kubelet.start_container(&pod, "server")).await.unwrap();
    assert_eq!(options.envs["REPLICAS"], "replica-2 replica-3");
    assert_eq!(plugin.calls().last().unwrap(), "pre_start replica-2 replica-3");
}

/// Kubelet closes its client when the stream ends, and so would lose the answer.
#[tokio::test]
async fn a_plugin_that_ends_answers_what_it_was_asked_before_its_stream_ends() {
    let node = Node::new().await;
    let plugin = node.plugin_with(2, |options| {
        options.timing.drain_timeout = Duration::from_secs(20);
    });
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    let socket = node.kubelet.device_plugins_dir().join(node.kubelet.endpoint(GPU).unwrap());
    plugin.answers.send_replace(false);
    let answers = plugin.answers.clone();
    let pod = Pod::new("default", "llm").with(Container::new("server").asking(GPU, 1));
    let (admitted, (), ()) = bounded(async {
        let asked = async {
            while !plugin.calls().iter().any(|call| call.starts_with("allocate")) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let admitted = node.kubelet.admit(&pod);
        tokio::pin!(admitted);
        tokio::select! {
            _ = &mut admitted => panic!("answered too early"),
            () = asked => {}
        }
        let open = async {
            while socket.exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // It is ending; a stream that did not wait would be over soon.
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(node.kubelet.allocatable(GPU), 2, "the stream ended first");
            answers.send_replace(true);
        };
        tokio::join!(admitted, plugin.stop(), open)
    })
    .await;
    assert_eq!(admitted.unwrap()[0].response.envs["REPLICAS"], "replica-1");
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
}

#[tokio::test]
async fn registers_again_on_a_new_socket_when_kubelet_restarts() {
    let node = Node::new().await;
    let plugin = node.plugin(4);
    let pod = Pod::new("default", "llm").with(Container::new("server").asking(GPU, 4));
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    bounded(node.kubelet.admit(&pod)).await.unwrap();
    for restart in 1..=3 {
        let before = node.kubelet.endpoint(GPU).unwrap();
        node.kubelet.restart().await.unwrap();
        bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
        assert_ne!(node.kubelet.endpoint(GPU).unwrap(), before);
        assert_eq!(node.kubelet.registrations(), 1 + restart);
        // What was admitted before is neither asked for nor given to others.
        bounded(node.kubelet.admit(&pod)).await.unwrap();
        let other = Pod::new("default", "other").with(Container::new("server").asking(GPU, 1));
        assert!(bounded(node.kubelet.admit(&other)).await.is_err());
    }
    assert_eq!(plugin.calls().len(), 1, "{:?}", plugin.calls());
    assert!(bounded(plugin.readiness().wait_live()).await);
    assert_eq!(node.sockets().len(), 1, "{:?}", node.sockets());
}

#[tokio::test]
async fn makes_a_new_socket_when_its_own_is_wiped() {
    let node = Node::new().await;
    let plugin = node.plugin(2);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    let before = node.kubelet.endpoint(GPU).unwrap();
    std::fs::remove_file(node.kubelet.device_plugins_dir().join(&before)).unwrap();
    bounded(node.kubelet.wait_until(|kubelet| {
        kubelet.allocatable(GPU) == 2 && kubelet.endpoint(GPU).is_some_and(|now| now != before)
    }))
    .await;
    assert!(bounded(plugin.readiness().wait_live()).await);
}

#[tokio::test]
async fn registers_again_when_the_stream_is_never_opened() {
    let node = Node::new().await;
    node.kubelet.set_behaviour(Behaviour { no_stream: true, ..Behaviour::default() });
    let plugin = node.plugin(2);
    bounded(plugin.readiness().wait_for(|report| report.registrations > 0)).await.unwrap();
    assert_eq!(plugin.readiness().report().phase, Phase::Accepted);
    assert_ne!(plugin.readiness().report().phase, Phase::Live);
    node.kubelet.set_behaviour(Behaviour::default());
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
}

#[tokio::test]
async fn what_hinders_a_registration_is_reported_and_it_is_tried_again() {
    let refuse = Some("requested API version is not supported".to_owned());
    let delay = Duration::from_secs(3600);
    for (behaviour, is_there, says) in [
        (Behaviour { refuse, ..Behaviour::default() }, true, "not supported"),
        (Behaviour { delay, ..Behaviour::default() }, true, "did not answer"),
        // The socket's file stays, as a killed kubelet leaves it.
        (Behaviour::default(), false, "cannot reach kubelet"),
        (Behaviour::default(), false, "there is no"),
    ] {
        let node = Node::new().await;
        node.kubelet.set_behaviour(behaviour);
        if !is_there {
            node.kubelet.stop().await;
        }
        if says == "there is no" {
            let socket = node.kubelet.device_plugins_dir().join("kubelet.sock");
            std::fs::remove_file(socket).unwrap();
        }
        let plugin = node.plugin(2);
        let hindered = plugin.readiness();
        let report = bounded(hindered.wait_for(|report| report.last_error.is_some())).await;
        let report = report.unwrap();
        assert!(report.last_error.as_ref().unwrap().contains(says), "{report:?}");
        assert_eq!(report.phase, Phase::Waiting);
        node.kubelet.set_behaviour(Behaviour::default());
        if !is_there {
            node.kubelet.resume().await.unwrap();
        }
        bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
        assert!(bounded(plugin.readiness().wait_live()).await);
        assert_eq!(plugin.readiness().report().last_error, None);
    }
}

#[tokio::test]
async fn two_plugins_for_one_resource_take_turns_ever_more_slowly() {
    let node = Node::new().await;
    let first = node.plugin(2);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    let second = node.plugin(3);
    // The second one's sockets do not vanish under the first one's start, nor the reverse.
    bounded(node.kubelet.wait_allocatable(GPU, 3)).await;
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    bounded(node.kubelet.wait_allocatable(GPU, 3)).await;
    let before = node.kubelet.registrations();
    bounded(node.kubelet.wait_until(|kubelet| kubelet.registrations() > before + 2)).await;
    // Whichever stays has the resource for good.
    second.stop().await;
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    first.stop().await;
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
}

#[tokio::test]
async fn a_registration_that_kubelet_lost_is_made_again() {
    let node = Node::new().await;
    let plugin = node.plugin_with(2, |options| {
        options.pod_resources = Some(node.kubelet.pod_resources_socket().to_path_buf());
    });
    assert!(bounded(plugin.readiness().wait_live()).await);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    // As #121994: the stream is open, and kubelet holds the devices for unhealthy.
    node.kubelet.lose_devices(GPU);
    assert_eq!(node.kubelet.allocatable(GPU), 0);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    assert_eq!(node.kubelet.registrations(), 2);
}

#[tokio::test]
async fn stopping_ends_the_stream_and_removes_the_socket() {
    let node = Node::new().await;
    let plugin = node.plugin(2);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    assert_eq!(node.sockets().len(), 1);
    let readiness = plugin.readiness();
    bounded(plugin.stop()).await;
    assert_eq!(readiness.report().phase, Phase::Stopped);
    assert_eq!(node.sockets(), [] as [String; 0]);
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
}

// The pod resources client, against the stand-in for kubelet and what else may be at its socket.

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
    let held = Holding {
        namespace: "default".into(),
        pod: "llm".into(),
        container: "server".into(),
        resource_name: GPU.into(),
        device_ids: vec!["replica-0".into()],
    };
    for answer in [one, two] {
        assert_eq!(answer.unwrap(), std::slice::from_ref(&held));
    }
    assert_eq!(node.kubelet.pod_lists(), 2);
    assert!(started.elapsed() > Duration::from_millis(300), "{:?}", started.elapsed());
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
    let text = error.to_string();
    assert!(text.contains("cannot reach kubelet") && text.contains("refused"), "{text}");

    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        loop {
            // Somebody who hangs up.
            drop(listener.accept().await.unwrap());
        }
    });
    let error = bounded(pod_resources.allocatable(GPU)).await.unwrap_err();
    assert!(error.to_string().contains("cannot reach kubelet"), "{error}");
}
