//! Bad input and broken surroundings: a clear error that says what to do, and nothing lost.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::sys::socket::{MsgFlags, send};
use tessera_harness::plugin::*;
use tessera_model::audit::What;
use tessera_region::layout::{USAGE_BYTES, USAGE_FILE};
use tessera_tenant::shim_install::{PRELOAD, SHIM};

fn usage_file(pages: &std::path::Path) -> std::fs::File {
    std::fs::OpenOptions::new().write(true).open(pages.join(USAGE_FILE)).unwrap()
}

#[tokio::test]
async fn a_usage_page_that_is_spoilt_is_restored_and_flagged() {
    let mut node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("a", 1).await;
    let is_whole =
        || std::fs::metadata(pages.join(USAGE_FILE)).unwrap().len() == USAGE_BYTES as u64;
    // Housekeeping restores it although nobody asks about it.
    usage_file(&pages).set_len(1 << 30).unwrap();
    until(|| is_whole().then_some(())).await;
    assert_eq!(node.allocation(&ids).await.unwrap().tamperings, 1);
    for size in [0, 100, 1 << 20] {
        usage_file(&pages).set_len(size).unwrap();
        assert!(node.allocation(&ids).await.unwrap().tamperings > 1);
        assert!(is_whole());
    }
    node.warned("tampered").await;
    assert_eq!(limit(&pages), 8 * GIB);
    std::fs::write(pages.join(USAGE_FILE), [0xff; USAGE_BYTES]).unwrap();
    node.allocation(&ids).await.unwrap();
    // No container restarts; its next process attaches.
    drop(Tenant::hold(&pages, 2 * GIB));
    node.stop_plugin().await;
    // In the trail the first is at once; what later looks found, counted, when the plugin ends.
    let events = crate::trail(&node.ledger());
    let tampered = What::Tampered { what: "usage page".into() };
    let tampered = events.iter().filter(|event| event.what == tampered).count();
    assert!(matches!(tampered, 1 | 2), "{events:?}");
}

#[tokio::test]
async fn garbage_on_a_session_is_counted_and_the_neighbour_is_served() {
    let node = TestNode::start().await;
    let bad = node.start_pod("bad", 1).await;
    let good = node.start_pod("good", 1).await;
    // Before kubelet has said so, it is an allocation's and no pod's.
    node.all_named().await;
    let session = connect(&bad.pages);
    for _ in 0..100 {
        // The plugin closes the session at some point.
        if send(session.as_raw_fd(), &[0xa5; 64], MsgFlags::MSG_NOSIGNAL).is_err() {
            break;
        }
    }
    let warning = node.warned("garbage to its session socket").await;
    assert!(warning.contains("default/bad"), "{warning}");
    let tenant = Tenant::hold(&good.pages, GIB);
    node.allocation_until(&good.ids, |one| {
        one.processes.iter().any(|p| p.host_pid == tenant.pid())
    })
    .await;
}

/// Emptied, removed, or corrupt: what was in it is gone either way, and somebody has to know. It costs no running pod.
#[tokio::test]
async fn a_lost_ledger_is_a_warning_and_its_pages_are_adopted() {
    let mut node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("a", 2).await;
    let tenant = Tenant::hold(&pages, 9 * GIB);
    let before = generation(&pages);
    let garbage = b"a disk error".repeat(1000);
    for (content, says) in [
        (Some(&b""[..]), &["is empty", "Cordons"][..]),
        (None, &[][..]),
        (Some(&garbage[..]), &["the ledger was unreadable"][..]),
    ] {
        node.stop_plugin().await;
        match content {
            Some(content) => std::fs::write(node.ledger(), content).unwrap(),
            None => std::fs::remove_file(node.ledger()).unwrap(),
        }
        node.start_plugin().await;
        let warnings = node.status().await.warnings.join("\n");
        let adopted = "1 allocations have pages and no record";
        for says in says.iter().chain(&[adopted]) {
            assert!(warnings.contains(says), "{says}: {warnings}");
        }
        assert_eq!(node.agent().allocations.adopted, 1);
        assert_eq!((limit(&pages), generation(&pages)), (16 * GIB, before));
        // Kubelet says whose they are.
        let allocation = node.allocation_until(&ids, |one| one.holder.is_some()).await;
        assert_eq!(allocation.replica_ids, ids);
        assert_eq!(allocation.gpus[0].memory_limit_bytes, 16 * GIB);
        assert_eq!(allocation.gpus[0].memory_charged_bytes, 9 * GIB);
        // Until it is in the ledger again.
        node.stop_plugin().await;
        node.start_plugin().await;
        // The plugin before this one may still hold its history.
        node.unwarned().await;
    }
    drop(tenant);
    let state = std::fs::read_dir(node.dir.path().join("state")).unwrap().flatten();
    assert!(state.map(|e| e.file_name().into_string().unwrap()).any(|n| n.contains("unreadable")));
    // Its generations are not given out again.
    let next = node.start_pod("b", 1).await;
    assert!(generation(&next.pages) > before);
}

#[tokio::test]
async fn a_full_disk_refuses_new_pods_and_no_running_one() {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    let state = node.dir.path().join("state");
    let none = nix::mount::MsFlags::empty();
    let Some(_mounted) = Mounted::tmpfs(&state, none, "size=3m") else { return };
    node.start_plugin().await;
    let running = node.start_pod("running", 1).await;
    // The history takes nothing of a disk that has little.
    let warning = node.warned("stay for the ledger").await;
    assert!(warning.starts_with("history "), "{warning}");
    let filler = std::fs::File::create(state.join("filler")).unwrap();
    let chunk = vec![1; 4096];
    let mut at = 0;
    // The ledger may have room of its own left, and gives some of it back; it runs out soon.
    let mut refused = None;
    for attempt in 0..5000 {
        while filler.write_all_at(&chunk, at).is_ok() {
            at += 4096;
        }
        let ids = [replica(1, attempt % 4)];
        if let Err(status) = node.allocate(&ids).await {
            refused = Some(status);
            break;
        }
    }
    let refused = refused.expect("a full disk is noticed");
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert!(refused.message().contains("free space on its disk"), "{refused}");
    // Running pods: quota, restart.
    node.kubelet.start_container(&pod("running", 1), "main").await.unwrap();
    assert_eq!(limit(&running.pages), 8 * GIB);
    // And once there is space again, everything works.
    drop(filler);
    std::fs::remove_file(state.join("filler")).unwrap();
    node.allocate(&[replica(1, 0)]).await.unwrap();
    node.stop_plugin().await;
}

#[tokio::test]
async fn a_missing_pod_resources_socket_is_reported_and_releases_nothing() {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    node.start_plugin().await;
    let admitted = node.start_pod("a", 1).await;
    std::fs::remove_file(node.kubelet.pod_resources_socket()).unwrap();
    node.kubelet.remove("default", "a");
    let warning = node.warned("nothing is released").await;
    assert!(warning.contains("pod resources"), "{warning}");
    assert!(admitted.pages.exists());
}

#[tokio::test]
async fn a_missing_shim_keeps_the_plugin_from_starting() {
    let node = TestNode::without_plugin(SETTINGS).await;
    std::fs::remove_file(node.dir.path().join("libtessera.so")).unwrap();
    let error = node.try_app().unwrap_err();
    assert!(error.to_string().contains("paths.shim_source"), "{error}");
}

#[tokio::test]
async fn what_cannot_be_read_is_left_alone_and_forgotten_once_it_is_released() {
    let mut node = TestNode::start().await;
    // A kubelet without any pod would have just started.
    node.start_pod("stays", 1).await;
    let pages = node.start_pod("newer", 1).await.pages;
    node.stop_plugin().await;
    // As a plugin of the next page version leaves it to this one.
    let newer = tessera_region::abi::version() + 1;
    let quota = std::fs::File::options().write(true).open(pages.join("quota")).unwrap();
    quota.write_all_at(&newer.to_le_bytes(), 8).unwrap();
    node.start_plugin().await;
    node.warned("page ABI").await;
    assert_eq!(tessera_region::quota::abi_in(&pages), Some(newer));
    node.kubelet.remove("default", "newer");
    until(|| (!pages.exists()).then_some(())).await;
    node.unwarned().await;
}

// Somebody removes what lies on the host: what is missing is made again before anything that needs it
// starts, and nothing has to be started again for it.

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
