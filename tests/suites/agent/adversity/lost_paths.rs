//! Somebody removes what lies on the host: what is missing is made again before anything that needs it
//! starts, and nothing has to be started again for it.

use std::path::PathBuf;

use tessera_harness::plugin::*;
use tessera_tenant::shim_install::{PRELOAD, SHIM};

const GIB: u64 = 1 << 30;

/// The directory of the one installed shim.
fn shim_dir(node: &TestNode) -> PathBuf {
    std::fs::read_dir(node.dir.path().join("shim")).unwrap().next().unwrap().unwrap().path()
}

/// Without it, the container would have no shim, and its processes no limit.
#[tokio::test]
async fn a_removed_or_emptied_preload_file_is_back_before_any_container_mounts_it() {
    let mut node = TestNode::start().await;
    let preload = shim_dir(&node).join(PRELOAD);
    let line = std::fs::read(&preload).unwrap();
    let damages: [&dyn Fn(); 3] = [
        &|| std::fs::remove_file(&preload).unwrap(),
        &|| std::fs::write(&preload, b"").unwrap(),
        // As containerd leaves a missing source.
        &|| {
            // The plugin may be quicker.
            while std::fs::create_dir(&preload).is_err() {
                let _ = std::fs::remove_file(&preload);
            }
        },
    ];
    for (n, damage) in damages.iter().enumerate() {
        damage();
        node.start_pod(&format!("new-{n}"), 1).await;
        assert_eq!(std::fs::read(&preload).unwrap(), line, "before a new container");
        damage();
        node.kubelet.start_container(&pod("new-0", 1), "main").await.unwrap();
        assert_eq!(std::fs::read(&preload).unwrap(), line, "before a restart");
    }
    // Another content is found when the plugin starts.
    node.stop_plugin().await;
    std::fs::write(&preload, b"/nothing.so\n").unwrap();
    node.start_plugin().await;
    assert_eq!(std::fs::read(&preload).unwrap(), line);
    assert!(shim_dir(&node).join(SHIM).is_file());
    node.stop_plugin().await;
}

#[tokio::test]
async fn a_removed_admin_socket_is_made_again_and_a_strangers_is_left_alone() {
    use std::os::unix::fs::PermissionsExt;
    let node = TestNode::start().await;
    let socket = node.dir.path().join("admin.sock");
    std::fs::remove_file(&socket).unwrap();
    until(|| std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(())).await;
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "mine").unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "mine");
}

/// All at once, while nobody looks after it: what registers is whole.
#[tokio::test]
async fn whatever_was_removed_while_the_plugin_was_away_is_there_before_it_registers() {
    let mut node = TestNode::start().await;
    let pages = node.start_pod("kept", 1).await.pages;
    let shim = shim_dir(&node);
    node.stop_plugin().await;
    for dir in [node.dir.path().join("pages"), node.dir.path().join("shim")] {
        std::fs::remove_dir_all(dir).unwrap();
    }
    node.start_plugin().await;
    assert_eq!(limit(&pages), 8 * GIB);
    assert!(shim.join(SHIM).is_file() && shim.join(PRELOAD).is_file());
    drop(Tenant::hold(&pages, 8 * GIB));

    // With the ledger gone as well nobody knows of it, until its container starts again.
    node.stop_plugin().await;
    std::fs::remove_dir_all(node.dir.path().join("pages")).unwrap();
    std::fs::remove_file(node.ledger()).unwrap();
    node.start_plugin().await;
    assert!(!pages.exists());
    node.kubelet.start_container(&pod("kept", 1), "main").await.unwrap();
    assert_eq!(limit(&pages), 8 * GIB);
    drop(Tenant::hold(&pages, 8 * GIB));
    node.stop_plugin().await;
}

/// The tmpfs is empty, the ledger and kubelet's checkpoint are not.
#[tokio::test]
async fn after_a_reboot_restarting_containers_find_their_pages_whoever_is_first() {
    for kubelet_first in [true, false] {
        let mut node = TestNode::start().await;
        let pages = node.start_pod("a", 2).await.pages;
        node.kubelet.stop().await;
        node.stop_plugin().await;
        std::fs::remove_dir_all(node.dir.path().join("pages")).unwrap();
        if kubelet_first {
            node.kubelet.resume().await.unwrap();
            // Without a plugin nobody prepares it, and it finds no page.
            node.kubelet.start_container(&pod("a", 2), "main").await.unwrap();
            assert!(!pages.exists());
            node.launch_plugin();
        } else {
            node.launch_plugin();
            until(|| pages.exists().then_some(())).await;
            node.kubelet.resume().await.unwrap();
        }
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        assert_eq!(limit(&pages), 16 * GIB, "before it registered");
        node.kubelet.start_container(&pod("a", 2), "main").await.unwrap();
        drop(Tenant::hold(&pages, 16 * GIB));
        assert_eq!(node.status().await.gpus[0].memory_limits_bytes, 16 * GIB);
        node.stop_plugin().await;
    }
}
