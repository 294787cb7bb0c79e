//! Registration, restarts, two instances, health.

use std::time::{Duration, Instant};

use tessera_fake_kubelet::dra::{DeviceState, DraBehaviour};

use super::support::{Node, bounded, fall_ill, recover, sockets};

#[tokio::test]
async fn kubelet_finds_the_driver_and_forgets_one_that_has_ended() {
    let (node, plugin) = Node::served().await;
    let mut registration = plugin.serving.as_ref().unwrap().registration.clone();
    bounded(registration.wait_for(|standing| standing.is_registered)).await.unwrap();
    assert_eq!(registration.borrow().registrations, 1);
    plugin.stop().await;
    bounded(node.kubelet.wait_until(|kubelet| kubelet.plugins().is_empty())).await;
}

#[tokio::test]
async fn a_driver_that_kubelet_refuses_says_why() {
    let node = Node::new();
    let reject = Some("no such driver here".to_owned());
    node.kubelet.set_behaviour(DraBehaviour { reject, ..DraBehaviour::default() });
    let plugin = node.try_plugin(None).unwrap();
    let mut registration = plugin.serving.as_ref().unwrap().registration.clone();
    bounded(registration.wait_for(|standing| standing.last_error.is_some())).await.unwrap();
    let error = registration.borrow().last_error.clone().unwrap();
    assert!(error.contains("no such driver here") && error.contains("kubelet"), "{error}");
}

#[tokio::test]
async fn a_rolling_update_has_two_instances_for_a_while() {
    let node = Node::new();
    let old = node.try_plugin(Some("0f2a-old")).unwrap();
    node.registered(1).await;
    let chat = node.claim("chat", "u1", "6Gi", "30");
    let first = node.run("pod", &[&chat]).await;
    let new = node.try_plugin(Some("7d5b-new")).unwrap();
    node.registered(2).await;
    assert_eq!(node.kubelet.plugins().len(), 2);
    // The new one goes on where the old one was; both answer the same.
    assert_eq!(node.ask(&chat).await.unwrap(), first[0]);
    old.stop().await;
    bounded(node.kubelet.wait_until(|kubelet| kubelet.plugins().len() == 1)).await;
    node.end("pod").await;
    assert!(node.agent.claims().is_empty());
    new.stop().await;
    assert_eq!(sockets(node.kubelet.registry()), 0);
}

#[tokio::test]
async fn without_pod_uids_a_second_instance_says_what_is_in_its_way() {
    let (node, _first) = Node::served().await;
    let error = node.try_plugin(None).err().unwrap().to_string();
    assert!(error.contains("another instance") && error.contains("POD_UID"), "{error}");
}

#[tokio::test]
async fn removed_sockets_are_made_again() {
    let (node, _plugin) = Node::served().await;
    std::fs::remove_file(&node.kubelet.plugins()[0]).unwrap();
    node.registered(2).await;
    std::fs::remove_file(node.kubelet.endpoint().unwrap()).unwrap();
    node.registered(3).await;
    let chat = node.claim("chat", "u1", "6Gi", "30");
    node.run("pod", &[&chat]).await;
}

#[tokio::test]
async fn kubelet_hears_of_health_at_once_and_by_heartbeat_in_both_versions() {
    for health in ["v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"] {
        let node = Node::new();
        let health_retry = Duration::from_millis(50);
        let health = Some(health);
        node.kubelet.set_behaviour(DraBehaviour {
            health,
            health_retry,
            ..DraBehaviour::default()
        });
        let plugin = node.plugin().await;
        let of = |device: &str| (String::from("node"), String::from(device));
        let state =
            |device: &str| node.kubelet.health().get(&of(device)).map(|reported| reported.state);
        let is = |device: &'static str, wanted| {
            let state = &state;
            bounded(node.kubelet.wait_until(move |_| state(device) == Some(wanted)))
        };
        is("gpu-a", DeviceState::Healthy).await;
        let began = Instant::now();
        fall_ill(&node.agent, "GPU-a");
        is("gpu-a", DeviceState::Unhealthy).await;
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_eq!(node.kubelet.health()[&of("gpu-a")].message, "XID 79");
        is("gpu-b", DeviceState::Healthy).await;
        bounded(recover(&node.agent, "GPU-a")).await;
        is("gpu-a", DeviceState::Healthy).await;
        // Nothing changes, and it is said all the same.
        let before = node.kubelet.health_messages();
        bounded(node.kubelet.wait_until(|kubelet| kubelet.health_messages() >= before + 3)).await;
        plugin.stop().await;
        is("gpu-a", DeviceState::Unknown).await;
    }
}
