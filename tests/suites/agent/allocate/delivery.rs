//! How containers get their GPU, pages and shim, by every strategy: what kubelet is sent, and the
//! CDI specs on disk through all that happens to a node.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_fake_kubelet::Admitted;
use tessera_harness::plugin::*;
use tonic::Code;

fn set(node: &mut TestNode, strategy: &str) {
    node.settings = format!("{SETTINGS}[container]\ndevice_list_strategy = \"{strategy}\"\n");
}

async fn started(strategy: &str) -> TestNode {
    let mut node = TestNode::without_plugin("").await;
    set(&mut node, strategy);
    node.start_plugin().await;
    node
}

fn spec_file(node: &TestNode, ids: &[String]) -> PathBuf {
    node.dir.path().join("cdi").join(format!("tessera.dev-share_{}.json", id_of(ids)))
}

fn spec(node: &TestNode, ids: &[String]) -> Value {
    serde_json::from_slice(&std::fs::read(spec_file(node, ids)).unwrap()).unwrap()
}

#[tokio::test]
async fn device_nodes_come_with_the_libraries_below_a_driver_root_or_not_at_all() {
    let mut node = TestNode::without_plugin("").await;
    set(&mut node, "device-nodes");
    let root = node.dir.path().join("driver");
    node.settings += &format!("[driver]\nroot = \"{}\"\n", root.display());
    node.start_plugin().await;
    let missing = node.allocate(&[replica(0, 0)]).await.unwrap_err();
    assert_eq!(missing.code(), Code::FailedPrecondition);
    assert!(missing.message().contains("no libcuda.so.1 below driver.root"), "{missing}");
    assert!(node.status().await.allocations.is_empty(), "nothing was granted");

    std::fs::create_dir_all(root.join("usr/lib64")).unwrap();
    std::fs::write(root.join("usr/lib64/libcuda.so.1"), b"\x7fELF").unwrap();
    let pod = pod("a", 1);
    let admitted = node.kubelet.run(&pod).await.unwrap().remove(0);
    let answer = &admitted.response;
    let nodes: Vec<_> = answer.devices.iter().map(|device| device.host_path.as_str()).collect();
    let fixed = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];
    assert_eq!(nodes, fixed);
    let last = answer.mounts.last().unwrap();
    assert_eq!(last.host_path, root.join("usr/lib64/libcuda.so.1").display().to_string());
    assert_eq!(last.container_path, "/usr/local/tessera/driver/libcuda.so.1");
    assert_eq!(answer.envs["LD_LIBRARY_PATH"], "/usr/local/tessera/driver");

    // A runtime would make an empty directory where the library was, and go on.
    std::fs::remove_dir_all(&root).unwrap();
    let refused = node.kubelet.start_container(&pod, "main").await.unwrap_err();
    assert!(refused.to_string().contains("no libcuda.so.1"), "{refused}");
}

#[tokio::test]
async fn a_spec_outlives_the_plugin_and_reappears_after_a_reboot_before_kubelet_hears_of_us() {
    let mut node = started("cdi-cri").await;
    let pod = pod("a", 1);
    let ids = node.kubelet.run(&pod).await.unwrap().remove(0).device_ids;
    let before = std::fs::read(spec_file(&node, &ids)).unwrap();
    node.stop_plugin().await;
    assert_eq!(std::fs::read(spec_file(&node, &ids)).unwrap(), before, "it is needed meanwhile");

    // /run is empty. So is the pages' tmpfs. One of an allocation that nobody remembers, and another's.
    std::fs::remove_dir_all(node.dir.path().join("cdi")).unwrap();
    std::fs::remove_dir_all(node.dir.path().join("pages")).unwrap();
    std::fs::create_dir(node.dir.path().join("cdi")).unwrap();
    let stale = spec_file(&node, &[replica(1, 3)]);
    std::fs::write(&stale, &before).unwrap();
    let foreign = node.dir.path().join("cdi/nvidia.yaml");
    std::fs::write(&foreign, b"kind: nvidia.com/gpu").unwrap();
    // The name stays in kubelet's checkpoint whatever the configuration says by now.
    set(&mut node, "envvar");
    node.start_plugin().await;
    assert_eq!(std::fs::read(spec_file(&node, &ids)).unwrap(), before);
    assert!(!stale.exists());
    assert!(foreign.exists());
    let other = node.start_pod("b", 1).await.ids;
    assert!(!spec_file(&node, &other).exists(), "made without CDI");
    node.kubelet.start_container(&pod, "main").await.unwrap();
}

#[tokio::test]
async fn a_spec_is_put_right_before_a_container_starts_or_it_does_not_start() {
    let node = started("cdi-annotations").await;
    let pod = pod("a", 1);
    let ids = node.kubelet.run(&pod).await.unwrap().remove(0).device_ids;
    let path = spec_file(&node, &ids);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..100]).unwrap();
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    lose(&node.dir.path().join("cdi"), &[]);
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), whole);

    // What cannot be put right. The plugin may make the directory again meanwhile.
    while std::fs::write(node.dir.path().join("cdi"), b"a file").is_err() {
        let _ = std::fs::remove_dir_all(node.dir.path().join("cdi"));
    }
    let refused = node.kubelet.start_container(&pod, "main").await.unwrap_err();
    assert!(refused.to_string().contains("cannot write the CDI spec"), "{refused}");
    let refused = node.allocate(&[replica(1, 0)]).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let held = node.status().await.allocations;
    assert_eq!(held.len(), 1, "what could not be delivered was not granted");
    assert!(!node.pages(&[replica(1, 0)]).exists());
}

#[tokio::test]
async fn a_released_allocation_takes_its_spec_with_it() {
    let node = started("cdi-cri").await;
    let kept = node.start_pod("kept", 1).await.ids;
    let ids = node.start_pod("a", 1).await.ids;
    assert!(spec_file(&node, &ids).exists());
    node.kubelet.remove("default", "a");
    until(|| (!spec_file(&node, &ids).exists()).then_some(())).await;
    assert!(spec_file(&node, &kept).exists());
}

#[tokio::test]
async fn specs_of_allocations_whose_record_was_lost_stay_and_are_made_again() {
    let mut node = started("cdi-cri").await;
    let pod = pod("a", 1);
    let ids = node.kubelet.run(&pod).await.unwrap().remove(0).device_ids;
    let before = std::fs::read(spec_file(&node, &ids)).unwrap();
    node.stop_plugin().await;
    std::fs::remove_file(node.ledger()).unwrap();
    // Another shim is installed by now; what the container was given is in its spec alone.
    std::fs::write(node.dir.path().join("libtessera.so"), b"\x7fELF, another").unwrap();
    set(&mut node, "envvar");
    node.start_plugin().await;
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(std::fs::read(spec_file(&node, &ids)).unwrap(), before);
    // Half of it tells nothing: today's shim takes the place of the one that was.
    std::fs::write(spec_file(&node, &ids), &before[..100]).unwrap();
    node.kubelet.start_container(&pod, "main").await.unwrap();
    assert_eq!(spec(&node, &ids)["kind"], "tessera.dev/share");
}

// Upgrades: which shim a container mounts, at its first start and at every later one, and when an
// old one goes.

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

#[tokio::test]
async fn without_any_shim_to_restore_no_container_starts() {
    let mut node = started_with(OLD).await;
    run(&node, "stays").await;
    run(&node, "old").await;
    let shim = mounted(&node, "old").await;
    std::fs::remove_file(node.dir.path().join("libtessera.so")).unwrap();
    std::fs::remove_file(&shim).unwrap();
    let error = node.kubelet.start_container(&pod("old", 1), "main").await.unwrap_err();
    assert!(error.to_string().contains("the shim is gone from"), "{error}");
    let error = node.allocate(&[replica(1, 3)]).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::FailedPrecondition);
    assert!(error.message().contains("paths.shim_source"), "{error}");
    // Who asks why the pod waits finds it by its name.
    node.status_until(|status| {
        let refused = status.refusals.iter().find(|one| one.pods == ["old"])?;
        refused.reason.contains("the shim is gone").then_some(())
    })
    .await;
    node.kubelet.remove("default", "old");
    node.status_until(|status| status.refusals.is_empty().then_some(())).await;
    node.stop_plugin().await;
}
