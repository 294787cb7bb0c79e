//! Another device plugin sells the same GPUs: seen by what kubelet says, refused by default.

use std::process::Stdio;
use std::time::Duration;

use tessera_fake_kubelet::{Allocatable, Behaviour, Container, Pod};
use tessera_harness::plugin::{GPU, Simulated, bounded, stderr, until, *};
use tessera_harness::scripted::{FakePlugin, only};
use tessera_kubelet::Device;
use tessera_model::audit::{Event, What};
use tessera_view::status::{self, Health};
use tokio::sync::oneshot;

const NVIDIA: &str = "nvidia.com/gpu";

/// NVIDIA's plugin, as far as kubelet sees it.
struct Foreign {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Foreign {
    /// Sells `ids` as `resource`, and is registered when this returns.
    async fn start(node: &TestNode, resource: &str, ids: &[String]) -> Self {
        let device = |id: &String| Device { id: id.clone(), healthy: true, numa_node: None };
        let devices = FakePlugin::new(0);
        devices.devices.send_replace(ids.iter().map(device).collect());
        let (stop, stopped) = oneshot::channel::<()>();
        let dir = node.kubelet.device_plugins_dir().to_owned();
        let until = async {
            let _ = stopped.await;
        };
        let options = tessera_kubelet::Options::default();
        let make = move |_: &str| std::sync::Arc::clone(&devices);
        let serving = tessera_kubelet::serve(only(resource), &dir, make, until, options).unwrap();
        bounded(node.kubelet.wait_allocatable(resource, ids.len())).await;
        Self { stop, task: tokio::spawn(serving.finished()) }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        bounded(self.task).await.unwrap();
    }
}

fn unhealthy(status: &status::Status, gpu_index: u32) -> bool {
    let uuid = gpu(gpu_index).uuid;
    status.gpus.iter().any(|gpu| gpu.uuid == uuid && gpu.health == Health::Unhealthy)
}

#[tokio::test]
async fn a_gpu_that_others_sell_is_given_out_no_more_until_they_have_gone() {
    let mut node = TestNode::start().await;
    // One tenant on the GPU that is going to be sold twice.
    let ids = [replica(1, 0)];
    node.allocate(&ids).await.unwrap();
    node.pre_start(&ids).await.unwrap();
    let tenant = Tenant::hold(&node.pages(&ids), 2 * GIB);

    let foreign = Foreign::start(&node, NVIDIA, &[gpu(1).uuid]).await;
    // The other GPU's four, and the one that is held already.
    bounded(node.kubelet.wait_allocatable(GPU, 5)).await;
    let status = node.status_until(|status| unhealthy(status, 1).then(|| status.clone())).await;
    let sick = status.gpus.iter().find(|g| g.uuid == gpu(1).uuid).unwrap();
    assert!(sick.health_reason.contains("sells it as nvidia.com/gpu"), "{}", sick.health_reason);
    let free = sick.replicas.iter().find(|replica| replica.index == 1).unwrap();
    assert_eq!(free.health_reason, sick.health_reason);
    assert!(!unhealthy(&status, 0));
    let [warning] = &status.warnings[..] else { panic!("{:?}", status.warnings) };
    assert!(warning.contains("gpus.exclude") && warning.contains("gpus.sold_by_others"));
    assert_eq!(status.plugin.others_seen_by, "GetAllocatableResources");

    // A container with a share keeps it, and may start again.
    assert_eq!(node.kubelet.devices(GPU).iter().filter(|d| d.id == ids[0]).count(), 1);
    node.pre_start(&ids).await.unwrap();
    let allocation = node.allocation(&ids).await.unwrap();
    assert_eq!(allocation.gpus[0].memory_charged_bytes, 2 * GIB);
    // Only the other GPU is given out.
    let four = node.kubelet.admit(&pod("four", 4)).await.unwrap();
    assert!(four[0].device_ids.iter().all(|id| id.starts_with(&gpu(0).uuid)), "{four:?}");

    foreign.stop().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    assert_eq!(node.status().await.warnings, Vec::<String>::new());
    drop(tenant);
    node.stop_plugin().await;
    let events: Vec<Event> =
        crate::trail(&node.ledger()).into_iter().filter(|e| e.gpu.is_some()).collect();
    let whats: Vec<What> = events.iter().map(|event| event.what.clone()).collect();
    assert_eq!(whats, [What::SoldByOthers, What::SoldAlone]);
    assert_eq!(events[0].gpu, Some(gpu(1).uuid));
    assert!(events[0].reason.as_ref().unwrap().contains(NVIDIA), "{events:?}");
}

#[tokio::test]
async fn nothing_is_offered_at_the_start_that_others_sell_already() {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    let ids: Vec<String> = (0..2).map(|n| format!("{}::{n}", gpu(0).uuid)).collect();
    let _foreign = Foreign::start(&node, "nvidia.com/gpu.shared", &ids).await;
    node.launch_plugin();
    // The first list that kubelet gets is the right one already.
    bounded(node.kubelet.wait_until(|kubelet| !kubelet.devices(GPU).is_empty())).await;
    let devices = node.kubelet.devices(GPU);
    assert_eq!(devices.len(), 8);
    let healthy = devices.iter().filter(|device| device.health == "Healthy");
    assert!(healthy.clone().all(|device| device.id.starts_with(&gpu(1).uuid)), "{devices:?}");
    assert_eq!(healthy.count(), 4);
}

#[tokio::test]
async fn a_pod_that_still_holds_the_gpu_counts_after_its_plugin_has_gone() {
    let node = TestNode::start().await;
    let foreign = Foreign::start(&node, NVIDIA, &[gpu(0).uuid]).await;
    let train = Pod::new("ml", "train").with(Container::new("main").asking(NVIDIA, 1));
    node.kubelet.admit(&train).await.unwrap();
    foreign.stop().await;
    let reason = node.warned("pod ml/train holds it").await;
    assert!(reason.contains(&gpu(0).uuid), "{reason}");
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    node.kubelet.remove("ml", "train");
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
}

#[tokio::test]
async fn warn_sells_on_and_allow_does_not_even_look() {
    let settings = |word: &str| format!("[gpus]\nsold_by_others = \"{word}\"\n{SETTINGS}");
    let mut node = TestNode::without_plugin(&settings("warn")).await;
    let _foreign = Foreign::start(&node, NVIDIA, &["0".to_owned()]).await;
    node.start_plugin().await;
    let warning = node.status_until(|status| status.warnings.first().cloned()).await;
    assert!(warning.contains("its pods have no quota"), "{warning}");
    assert_eq!(node.kubelet.allocatable(GPU), 8);
    node.stop_plugin().await;
    node.settings = settings("allow");
    node.start_plugin().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let status = node.status().await;
    assert_eq!(status.warnings, Vec::<String>::new());
    assert_eq!(status.plugin.others_seen_by, "");
    assert_eq!(node.kubelet.allocatable(GPU), 8);
}

#[tokio::test]
async fn older_kubelets_tell_once_a_pod_holds_it_and_status_says_so() {
    for allocatable in [Allocatable::Unimplemented, Allocatable::Disabled] {
        let mut node = TestNode::without_plugin(SETTINGS).await;
        node.kubelet.set_behaviour(Behaviour { allocatable, ..Behaviour::default() });
        let _foreign = Foreign::start(&node, NVIDIA, &[gpu(0).uuid]).await;
        node.start_plugin().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        assert_eq!(node.status().await.plugin.others_seen_by, "what pods hold");
        let train = Pod::new("ml", "train").with(Container::new("main").asking(NVIDIA, 1));
        node.kubelet.admit(&train).await.unwrap();
        bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
        assert!(unhealthy(&node.status().await, 0));
        node.stop_plugin().await;
    }
}

// Two plugins and one pages directory.

/// A configuration that differs from the node's own in ledger and admin socket, and has these pages.
fn other(node: &Simulated, pages: &str) -> std::path::PathBuf {
    let text = std::fs::read_to_string(node.file()).unwrap();
    let at = |name: &str| node.dir.path().join(name).display().to_string();
    let text = text
        .replace(&at("ledger.redb"), &at("other.redb"))
        .replace(&at("admin.sock"), &at("other.sock"))
        .replace(&format!("pages = \"{}\"", at("pages")), &format!("pages = \"{pages}\""));
    let file = node.dir.path().join("other.toml");
    std::fs::write(&file, text).unwrap();
    file
}

fn second(node: &Simulated, pages: &str) -> std::process::Output {
    let file = other(node, pages);
    let mut command = node.on_machine(std::process::Command::new(&node.program));
    let child = command.arg("--config").arg(file).arg("serve").stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    for _ in 0..1200 {
        if child.try_wait().unwrap().is_some() {
            return child.wait_with_output().unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    child.kill().unwrap();
    panic!("it serves: {}", stderr(&child.wait_with_output().unwrap()));
}

#[tokio::test]
async fn a_second_plugin_on_the_same_pages_ends() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    node.start_pod("a", 1).await;
    let registrations = node.kubelet.registrations();
    let pages = node.dir.path().join("pages");
    // However the path is written: it is the directory that counts.
    let link = node.dir.path().join("link");
    std::os::unix::fs::symlink(&pages, &link).unwrap();
    let dotted = node.dir.path().join("kubelet/../pages");
    let is_refused = |path: &std::path::Path| {
        let output = second(&node, &path.display().to_string());
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("paths.pages") && text.contains("another Tessera plugin"), "{text}");
        assert!(text.contains("stop it"), "{text}");
    };
    [&pages, &link, &dotted].into_iter().for_each(|path| is_refused(path));
    assert_eq!(node.kubelet.registrations(), registrations, "the second takes nothing");
    // Pages that are removed as a whole are made again, and the second is kept out of the new ones as well.
    lose(&pages, &[]);
    node.start_pod("b", 1).await;
    until(|| {
        // Held by a lock on the directory: nobody else gets it.
        let file = std::fs::File::open(&pages).ok()?;
        file.try_lock().is_err().then_some(())
    })
    .await;
    is_refused(&pages);
    let status = node.json();
    let warnings = status["warnings"].as_array().unwrap();
    let flagged = |text: &serde_json::Value| text.as_str().unwrap().contains("outside");
    assert!(!warnings.iter().any(flagged), "{status:#}");
}

/// One that starts while the other still ends waits a moment instead of giving up.
#[tokio::test]
async fn a_plugin_that_starts_while_the_one_before_ends_takes_over() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    let before = node.plugin.take().unwrap();
    let lists = node.kubelet.lists();
    let file = other(&node, &node.dir.path().join("pages").display().to_string());
    let mut command = node.on_machine(std::process::Command::new(&node.program));
    let log = std::fs::File::create(node.dir.path().join("second")).unwrap();
    command.arg("--config").arg(file).arg("serve").stderr(log).stdin(Stdio::null());
    let pid = nix::unistd::Pid::from_raw(i32::try_from(before.id()).unwrap());
    node.plugin = Some(tessera_harness::Owned(command.spawn().unwrap()));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let mut before = before;
    until(|| before.try_wait().unwrap()).await;
    bounded(node.kubelet.wait_until(|kubelet| kubelet.lists() > lists)).await;
}
