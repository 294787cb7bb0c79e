//! Upgrades: which shim a container mounts, at its first start and at every later one, and when an
//! old one goes.

use std::path::{Path, PathBuf};

use tessera_fake_kubelet::Admitted;
use tessera_harness::plugin::*;

const OLD: &[u8] = b"\x7fELF of yesterday";
const NEW: &[u8] = b"\x7fELF of today";

/// Replaces the plugin by one that brings this shim.
async fn upgrade(node: &mut TestNode, shim: &[u8]) {
    node.stop_plugin().await;
    std::fs::write(node.dir.path().join("libtessera.so"), shim).unwrap();
    node.start_plugin().await;
}

async fn started_with(shim: &[u8]) -> TestNode {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    std::fs::write(node.dir.path().join("libtessera.so"), shim).unwrap();
    node.start_plugin().await;
    node
}

/// The shim that a container mounts when it starts now, as kubelet remembers it.
async fn mounted(node: &TestNode, name: &str) -> PathBuf {
    let options = node.kubelet.start_container(&pod(name, 1), "main").await.unwrap();
    let mount = options.mounts.iter().find(|m| m.container_path.ends_with("libtessera.so"));
    PathBuf::from(&mount.unwrap().host_path)
}

async fn run(node: &TestNode, name: &str) -> Admitted {
    node.kubelet.run(&pod(name, 1)).await.unwrap().remove(0)
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[tokio::test]
async fn after_an_upgrade_old_containers_keep_their_shim_and_new_ones_get_the_new() {
    let mut node = started_with(OLD).await;
    run(&node, "old").await;
    let before = mounted(&node, "old").await;
    upgrade(&mut node, NEW).await;
    run(&node, "new").await;
    assert_eq!(content(&mounted(&node, "new").await), NEW);
    // Restarts, at any later time: it is not taken for unused.
    for _ in 0..10 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(mounted(&node, "old").await, before);
        assert_eq!(content(&before), OLD);
    }
    node.kubelet.remove("default", "old");
    until(|| (!before.parent().unwrap().exists()).then_some(())).await;
    assert_eq!(content(&mounted(&node, "new").await), NEW);
    node.stop_plugin().await;
}

/// The plugin may have begun to make it again before all of it is gone.
fn remove(shim: &Path) {
    let _ = std::fs::remove_dir_all(shim.parent().unwrap());
}

#[tokio::test]
async fn a_shim_that_was_removed_by_hand_is_back_before_a_container_starts() {
    let mut node = started_with(OLD).await;
    run(&node, "old").await;
    let shim = mounted(&node, "old").await;
    remove(&shim);
    assert_eq!(content(&mounted(&node, "old").await), OLD);
    // Of another version's there is no copy; with today's, the quota holds as well.
    upgrade(&mut node, NEW).await;
    remove(&shim);
    assert_eq!(mounted(&node, "old").await, shim);
    assert_eq!(content(&shim), NEW);
    // What containerd makes of a missing source.
    while std::fs::create_dir(&shim).is_err() {
        let _ = std::fs::remove_file(&shim);
    }
    assert_eq!(content(&mounted(&node, "old").await), NEW);
    node.stop_plugin().await;
}

#[tokio::test]
async fn without_any_shim_to_restore_no_container_starts() {
    let mut node = started_with(OLD).await;
    run(&node, "old").await;
    let shim = mounted(&node, "old").await;
    std::fs::remove_file(node.dir.path().join("libtessera.so")).unwrap();
    std::fs::remove_file(&shim).unwrap();
    let error = node.kubelet.start_container(&pod("old", 1), "main").await.unwrap_err();
    assert!(error.to_string().contains("the shim is gone from"), "{error}");
    let error = node.allocate(&[replica(1, 3)]).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::FailedPrecondition);
    assert!(error.message().contains("paths.shim_source"), "{error}");
    node.stop_plugin().await;
}
