//! Tenants that do what they can to their files, and what their neighbours notice of it: nothing.
//!
//! Bounds are generous (30 s of [`bounded`]): what is looked for is waiting without end.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tessera_harness::plugin::*;
use tessera_harness::{Owned, again};
use tessera_region::layout::{QUOTA_FILE, USAGE_BYTES, USAGE_FILE};
use tessera_region::quota::QuotaReader;
use tessera_view::status::Allocation;

/// A process of a hostile container.
struct Hostile(#[expect(dead_code, reason = "its drop ends it")] Owned);

impl Hostile {
    /// `None` where this machine does not let it be hostile in that way.
    fn start(mode: &str, pages: &Path) -> Option<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("adversity/hostile.py");
        let mut child = Command::new("python3")
            .arg(script)
            .arg(mode)
            .arg(pages.join(USAGE_FILE))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let hostile = Hostile(Owned(child));
        if line.trim() != "ready" {
            eprintln!("not run: {mode}: {line}");
            return None;
        }
        Some(hostile)
    }
}

/// Everything that a neighbour needs of the plugin, while something hostile goes on.
async fn neighbours_are_served(node: &TestNode, name: &str) {
    bounded(async {
        let Held { ids, pages } = node.start_pod(name, 1).await;
        let tenant = Tenant::hold(&pages, GIB);
        let of_tenant = |one: &Allocation| {
            let own = one.processes.iter().find(|process| process.host_pid == tenant.pid());
            own.map(|process| process.memory_charged_bytes)
        };
        let seen = node.allocation_until(&ids, |one| of_tenant(one).is_some()).await;
        assert_eq!((of_tenant(&seen), seen.tamperings), (Some(GIB), 0));
        // Its death is noticed, and it may start again.
        tenant.kill();
        node.allocation_until(&ids, |one| one.processes.is_empty()).await;
        node.kubelet.start_container(&pod(name, 1), "main").await.unwrap();
        // The plugin's sign of life goes on.
        let quota = QuotaReader::attach(&pages).unwrap();
        let before = quota.heartbeat_ns();
        until(|| (quota.heartbeat_ns() > before).then_some(())).await;
        node.kubelet.remove("default", name);
    })
    .await;
}

#[tokio::test]
async fn a_tenant_in_an_endless_write_holds_nobody_up_and_may_start_again() {
    let node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("bad", 1).await;
    // A dead process's slot, so that there is something to write for the plugin.
    let tenant = Tenant::hold(&pages, GIB);
    let Some(hostile) = Hostile::start("stuck", &pages) else { return };
    tenant.kill();
    neighbours_are_served(&node, "good").await;
    let flagged = node.allocation_until(&ids, |one| one.tamperings > 0).await;
    assert_eq!(flagged.gpus[0].memory_charged_bytes, GIB, "still there: {flagged:?}");
    // Its next container does not get the file that nobody can change.
    bounded(node.kubelet.start_container(&pod("bad", 1), "main")).await.unwrap();
    drop(Tenant::hold(&pages, 8 * GIB));
    neighbours_are_served(&node, "other").await;
    drop(hostile);
    let root = pages.parent().unwrap().to_owned();
    let aside = || std::fs::read_dir(&root).unwrap().flatten().map(|e| e.file_name());
    until(|| aside().all(|n| !n.to_string_lossy().starts_with(".aside")).then_some(())).await;
}

#[tokio::test]
async fn locks_on_every_byte_and_leases_hold_nobody_up() {
    let mut node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("bad", 1).await;
    let hostile = Hostile::start("locks", &pages).unwrap();
    neighbours_are_served(&node, "good").await;
    // A process that holds locks counts as living, and its next container starts all the same.
    bounded(node.kubelet.start_container(&pod("bad", 1), "main")).await.unwrap();
    drop(hostile);
    drop(Tenant::hold(&pages, 8 * GIB));

    // While no plugin runs, there is a lease to be had. The next plugin cannot open the file for now.
    node.stop_plugin().await;
    let Some(leased) = Hostile::start("lease", &pages) else { return };
    node.start_plugin().await;
    neighbours_are_served(&node, "late").await;
    drop(leased);
    node.allocation_until(&ids, |one| !one.pages_dir.is_empty()).await;
    drop(Tenant::hold(&pages, 8 * GIB));
}

#[tokio::test]
async fn whatever_is_done_to_a_usage_file_stays_its_tenants_affair() {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    let Some(_mounted) = small_tmpfs(&node.dir.path().join("pages")) else { return };
    node.start_plugin().await;
    let Held { ids, pages } = node.start_pod("bad", 1).await;
    let hostile = Hostile::start("damage", &pages).unwrap();
    for round in 0..3 {
        neighbours_are_served(&node, &format!("good-{round}")).await;
        bounded(node.kubelet.start_container(&pod("bad", 1), "main")).await.unwrap();
    }
    assert!(node.allocation(&ids).await.unwrap().tamperings > 0);
    drop(hostile);
    bounded(node.kubelet.start_container(&pod("bad", 1), "main")).await.unwrap();
    drop(Tenant::hold(&pages, 8 * GIB));
    assert_eq!(std::fs::metadata(pages.join(USAGE_FILE)).unwrap().len(), USAGE_BYTES as u64);
    node.stop_plugin().await;
}

/// Mounts a small tmpfs for the pages; `None` where that may not be done.
fn small_tmpfs(dir: &Path) -> Option<Mounted> {
    Mounted::tmpfs(dir, nix::mount::MsFlags::empty(), "size=8m")
}

#[tokio::test]
async fn a_tenant_that_fills_the_pages_file_system_refuses_nobody() {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    let Some(_mounted) = small_tmpfs(&node.dir.path().join("pages")) else { return };
    node.start_plugin().await;
    let running = node.start_pod("running", 1).await;
    let bad = node.start_pod("bad", 1).await;
    let _hostile = Hostile::start("fill", &bad.pages).unwrap();
    // What runs, goes on and starts again.
    let tenant = Tenant::hold(&running.pages, 2 * GIB);
    for _ in 0..20 {
        bounded(node.kubelet.start_container(&pod("running", 1), "main")).await.unwrap();
    }
    drop(tenant);
    // What is new finds the room that was kept for it, as long as that lasts.
    for index in 0..4 {
        neighbours_are_served(&node, &format!("new-{index}")).await;
    }
    assert!(node.allocation(&bad.ids).await.unwrap().tamperings > 0);
    node.stop_plugin().await;
}

/// Set for the child that has no capabilities: where to say which pages to take from it.
const POWERLESS: &str = "TESSERA_TEST_POWERLESS";
/// What takes its capabilities from it.
const POWERLESSLY: [&str; 3] = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"];

#[test]
fn a_usage_file_given_to_another_user_is_replaced_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let message = dir.path().join("pages");
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not run: only root can give files away");
        return;
    }
    let mut child = again(&POWERLESSLY, "adversity::hostile::powerless_plugin")
        .env(POWERLESS, &message)
        .spawn()
        .unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(180);
    let pages = loop {
        if let Ok(path) = std::fs::read_to_string(&message)
            && path.ends_with('\n')
        {
            break PathBuf::from(path.trim());
        }
        assert!(std::time::Instant::now() < deadline && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    };
    let usage = pages.join(USAGE_FILE);
    std::fs::set_permissions(&usage, std::fs::Permissions::from_mode(0o000)).unwrap();
    std::os::unix::fs::chown(&usage, Some(4711), Some(4711)).unwrap();
    assert!(child.wait().unwrap().success());
}

#[tokio::test]
async fn powerless_plugin() {
    let Some(message) = std::env::var_os(POWERLESS).map(PathBuf::from) else { return };
    let mut node = TestNode::start().await;
    let pages = node.start_pod("bad", 1).await.pages;
    std::fs::write(&message, format!("{}\n", pages.display())).unwrap();
    let owner = || std::fs::metadata(pages.join(USAGE_FILE)).unwrap().uid();
    until(|| (owner() == 4711).then_some(())).await;
    assert!(std::fs::File::open(pages.join(USAGE_FILE)).is_err(), "it has its capabilities still");
    neighbours_are_served(&node, "good").await;
    // Also for a plugin that starts and cannot open it.
    node.stop_plugin().await;
    node.start_plugin().await;
    neighbours_are_served(&node, "other").await;
    node.kubelet.start_container(&pod("bad", 1), "main").await.unwrap();
    assert_eq!(owner(), 0);
    drop(Tenant::hold(&pages, 8 * GIB));
    assert!(pages.join(QUOTA_FILE).exists());
}
