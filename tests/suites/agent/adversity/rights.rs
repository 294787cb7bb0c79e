//! The plugin with what deploy/tessera.yaml leaves it: no capability, and where hostPID is not granted
//! no pids. It runs as a process of its own, so that the rights are really gone.

use std::os::unix::fs::PermissionsExt;

use nix::mount::MsFlags;
use serde_json::Value;
use tessera_harness::plugin::{
    GIB, GPU, Held, Mounted, Simulated, Tenant, bounded, id_of, pod, stderr, until,
};

/// Root without any capability, and none to be had: as in a container with `drop: [ALL]` and
/// `allowPrivilegeEscalation: false`.
const POWERLESS: &str = "exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs";
/// A pid namespace of its own, as without hostPID.
const OWN_PIDS: &str = "exec unshare --pid --fork --kill-child --mount-proc";

/// Whether this test may take and give rights; says so where not.
fn may() -> Option<()> {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("not run: only root has rights to give up");
    }
    root.then_some(())
}

fn warnings(status: &Value) -> Vec<&str> {
    status["warnings"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect()
}

fn charged(node: &Simulated, id: &str) -> Option<u64> {
    let status = node.json();
    let mut allocations = status["allocations"].as_array()?.iter();
    let found = allocations.find(|allocation| allocation["id"] == id)?;
    found["gpus"][0]["memory_charged_bytes"].as_u64()
}

/// Everything that a plugin does for a pod, from its admission to its end.
async fn serves_a_pod(node: &Simulated, name: &str) {
    let Held { ids, pages } = node.start_pod(name, 1).await;
    let id = id_of(&ids).to_string();
    let tenant = Tenant::hold(&pages, GIB);
    assert_eq!(charged(node, &id), Some(GIB));
    tenant.kill();
    until(|| (charged(node, &id) == Some(0)).then_some(())).await;
    // Its container starts again, with whatever became of the pages.
    std::fs::remove_file(pages.join("quota")).unwrap();
    node.kubelet.start_container(&pod(name, 1), "main").await.unwrap();
    drop(Tenant::hold(&pages, GIB));
    node.kubelet.remove("default", name);
}

#[tokio::test]
async fn without_any_capability_the_plugin_does_all_it_has_to() {
    let Some(()) = may() else { return };
    let mut node = Simulated::new("replicas = 4").await;
    let pages = node.dir.path().join("pages");
    let Some(_mounted) = Mounted::tmpfs(&pages, MsFlags::empty(), "size=64m,mode=0755") else {
        return;
    };
    node.configure("tmpfs = \"off\"", "tmpfs = \"require\"");
    node.wrap(POWERLESS);
    for round in ["first", "second"] {
        node.serve().await;
        let pid = node.plugin.as_ref().unwrap().id();
        let own = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
            let line = own.lines().find(|line| line.starts_with(set)).unwrap();
            assert!(line.ends_with("\t0000000000000000"), "{line}");
        }
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        serves_a_pod(&node, round).await;
        assert_eq!(warnings(&node.json()), [""; 0]);
        assert!(node.run(&["status", "--ready"]).status.success());
        assert!(node.run(&["status", "--live"]).status.success());
        assert_eq!(node.terminate().await, Some(0));
    }
    assert!(!node.run(&["status", "--live"]).status.success());
}

#[tokio::test]
async fn without_the_right_to_mount_require_ends_and_prefer_warns() {
    let Some(()) = may() else { return };
    let mut node = Simulated::new("replicas = 4").await;
    node.wrap(POWERLESS);
    node.configure("tmpfs = \"off\"", "tmpfs = \"require\"");
    let refused = node.run(&["serve"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("run `tessera prepare-host` as root"),
        "{}",
        stderr(&refused)
    );
    node.configure("tmpfs = \"require\"", "tmpfs = \"prefer\"");
    node.serve().await;
    let status = node.json();
    let [warning] = warnings(&status)[..] else { panic!("{status}") };
    assert!(warning.contains("can fill the file system"), "{warning}");
    serves_a_pod(&node, "anyhow").await;
}

#[tokio::test]
async fn a_tmpfs_of_another_size_is_used_and_reported() {
    let Some(()) = may() else { return };
    let mut node = Simulated::new("replicas = 4").await;
    let pages = node.dir.path().join("pages");
    let Some(_mounted) = Mounted::tmpfs(&pages, MsFlags::empty(), "size=32m") else { return };
    node.configure("tmpfs = \"off\"", "tmpfs = \"require\"");
    node.wrap(POWERLESS);
    node.serve().await;
    let status = node.json();
    let [warning] = warnings(&status)[..] else { panic!("{status}") };
    assert!(warning.contains("pages.size asks for 64 MiB"), "{warning}");
    serves_a_pod(&node, "smaller").await;
}

#[tokio::test]
async fn in_a_pid_namespace_of_its_own_the_plugin_serves_and_says_what_it_lacks() {
    let Some(()) = may() else { return };
    let mut node = Simulated::new("replicas = 4").await;
    node.wrap(OWN_PIDS);
    node.serve().await;
    // Said before the first tenant comes.
    let status = node.json();
    assert_eq!(status["plugin"]["sees_host_pids"], false);
    let [warning] = warnings(&status)[..] else { panic!("{status}") };
    assert!(warning.contains("hostPID") && warning.contains("audited"), "{warning}");
    assert!(node.run(&["status", "--ready"]).status.success());
    // Death is seen when the socket closes.
    serves_a_pod(&node, "a").await;
    let Held { ids, pages } = node.start_pod("b", 1).await;
    let id = id_of(&ids).to_string();
    let _tenant = Tenant::hold(&pages, GIB);
    let status = node.json();
    let allocations = status["allocations"].as_array().unwrap();
    let allocation = allocations.iter().find(|a| a["id"] == id.as_str()).unwrap();
    assert_eq!(allocation["processes"][0]["host_pid"], 0, "{allocation}");
    assert_eq!(warnings(&status).len(), 1, "{status}");
}

#[tokio::test]
async fn a_noexec_shim_path_ends_the_plugin_before_kubelet_hears_of_it() {
    let Some(()) = may() else { return };
    let node = Simulated::new("replicas = 4").await;
    let shim = node.dir.path().join("shim");
    let Some(_mounted) = Mounted::tmpfs(&shim, MsFlags::MS_NOEXEC, "size=8m") else { return };
    let refused = node.run(&["serve"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = stderr(&refused);
    assert!(text.contains("paths.shim") && text.contains("noexec"), "{text}");
    assert_eq!(std::fs::read_dir(&shim).unwrap().count(), 0);
    assert_eq!(node.kubelet.registrations(), 0);
}

#[tokio::test]
async fn an_error_names_the_directory_that_is_closed_to_another_user() {
    let Some(()) = may() else { return };
    let mut node = Simulated::new("replicas = 4").await;
    // Everything of its own is open to it; kubelet's directory stays root's.
    std::os::unix::fs::chown(node.dir.path(), Some(65534), Some(65534)).unwrap();
    let dir = node.kubelet.device_plugins_dir().to_owned();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o750)).unwrap();
    node.wrap("exec timeout 20 setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs");
    let refused = node.run(&["serve"]);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    let text = stderr(&refused);
    let end = text.lines().last().unwrap_or_default();
    assert!(end.contains(dir.to_str().unwrap()) && end.contains("ermission denied"), "{text}");
}

/// Modes below the node's directory of what the plugin made for a pod, by path.
async fn modes_under(umask: &str) -> std::collections::BTreeMap<String, u32> {
    let mut node = Simulated::new("replicas = 2\n[ledger]\nfsync = false").await;
    node.wrap(&format!("umask {umask}; exec"));
    let given: Vec<_> = std::fs::read_dir(node.dir.path()).unwrap().flatten().collect();
    let given: Vec<_> = given.into_iter().map(|entry| entry.path()).collect();
    node.serve().await;
    let pages = node.start_pod("llm", 1).await.pages;
    let mode = |path: &std::path::Path| {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    };
    assert_eq!(mode(&pages), 0o755, "umask {umask}: not root in the container");
    // Of a run of the plugin that made it otherwise.
    std::fs::set_permissions(&pages, std::fs::Permissions::from_mode(0o700)).unwrap();
    node.kubelet.start_container(&pod("llm", 1), "main").await.unwrap();
    assert_eq!(mode(&pages), 0o755, "umask {umask}: made by another");
    assert_eq!(node.terminate().await, Some(0));
    let mut modes = std::collections::BTreeMap::new();
    let mut left = vec![node.dir.path().to_owned()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let (path, is_dir) = (entry.path(), entry.file_type().unwrap().is_dir());
            // The test's own, the log that it opened, and the simulator's.
            let name = entry.file_name().to_string_lossy().into_owned();
            if given.contains(&path) || name == "log" || name.starts_with("simgpu") {
                continue;
            }
            let below = path.strip_prefix(node.dir.path()).unwrap().display().to_string();
            modes.insert(below, mode(&path));
            if is_dir {
                left.push(path);
            }
        }
    }
    modes
}

#[tokio::test]
async fn modes_are_the_plugins_own_whatever_umask_it_is_started_with() {
    let usual = modes_under("022").await;
    assert!(usual.len() > 8, "{usual:#?}");
    for umask in ["077", "000", "027"] {
        assert_eq!(modes_under(umask).await, usual, "umask {umask}");
    }
    // Anybody writes only what a container's processes write.
    for (path, mode) in usual {
        assert!(mode & 0o002 == 0 || path.starts_with("pages/"), "{path}: {mode:o}");
    }
}
