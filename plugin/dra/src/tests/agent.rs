//! The driver over the agent itself: ledger, pages and CDI files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_agent::Agent;
use tessera_cluster::fixtures::FakeApi;
use tessera_cluster::resource::DeviceResult;
use tessera_config::Config;
use tessera_fake_kubelet::dra::DraKubelet;
use tessera_model::gpu::Gpu;
use tessera_tenant::delivery::Delivery;
use tessera_tenant::shim_install::{PRELOAD, SHIM};

use super::support::{bounded, claim, named, share};
use crate::door::Core;
use crate::names;
use crate::prepare::Sweeping;
use crate::serve::{Serving, Settings, Timing, serve};

const GIB: u64 = 1 << 30;

fn config(dir: &Path) -> Config {
    let at = |name: &str| dir.join(name).display().to_string();
    Config::parse(&format!(
        "[paths]\nledger = \"{}\"\npages = \"{}\"\nshim = \"{}\"\nadmin = \"{}\"\n\
         [cdi]\ndirectory = \"{}\"\ngpu_kind = \"nvidia.com/gpu\"\n[gpus]\nreserve = 0\n[dra]\nenabled = true\n",
        at("ledger"),
        at("pages"),
        at("shim"),
        at("admin"),
        at("cdi"),
    ))
    .unwrap()
}

/// The agent as a start of the plugin finds the disk.
pub(super) fn open(dir: &Path) -> Arc<Agent> {
    let config = config(dir);
    let home = config.paths.shim.join("v1");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::create_dir_all(&config.paths.pages).unwrap();
    let delivery = Delivery { shim: home.join(SHIM), preload: home.join(PRELOAD) };
    std::fs::write(&delivery.shim, "a library").unwrap();
    std::fs::write(&delivery.preload, "a line").unwrap();
    let gpu = |uuid, index| Gpu {
        memory_bytes: 16 * GIB,
        context_measured_bytes: Some(256 << 20),
        ..Gpu::example(uuid, index)
    };
    let gpus = [gpu("GPU-a", 0), gpu("GPU-b", 1)];
    Agent::open(config, &gpus, delivery, Arc::default()).unwrap()
}

struct Node {
    dir: tempfile::TempDir,
    kubelet: DraKubelet,
    api: FakeApi,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = DraKubelet::start(dir.path(), names::DRIVER).unwrap();
        Node { dir, kubelet, api: FakeApi::new(names::DRIVER, "node") }
    }

    async fn plugin(&self) -> (Arc<Agent>, Serving, tokio::sync::oneshot::Sender<()>) {
        let agent = open(self.dir.path());
        let settings = Settings {
            node: "node".into(),
            registry: self.kubelet.registry().to_owned(),
            dir: self.dir.path().join("plugins"),
            pod_uid: None,
            sweeping: Sweeping::default(),
            timing: Timing { look: Duration::from_millis(50), ..Timing::default() },
        };
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let before = self.kubelet.registrations();
        let core: Arc<dyn Core> = Arc::<Agent>::clone(&agent);
        let serving = serve(settings, core, Arc::new(self.api.clone()), async move {
            let _ = stopped.await;
        });
        bounded(self.kubelet.wait_until(|kubelet| kubelet.registrations() > before)).await;
        (agent, serving.unwrap(), stop)
    }

    fn files(&self, of: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path().join(of)).into_iter().flatten().flatten();
        let visible =
            |entry: &std::fs::DirEntry| !entry.file_name().to_string_lossy().starts_with('.');
        entries.filter(visible).map(|entry| entry.path()).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_pages_a_cdi_file_and_a_record_from_prepare_to_unprepare() {
    let node = Node::new();
    let (agent, serving, stop) = node.plugin().await;
    let results = vec![
        share("chat", "gpu-a", "s1", "6Gi", "30"),
        share("draft", "gpu-a", "s2", "2560Mi", "10"),
    ];
    let pair = claim("pair", "u1", results);
    node.api.put_claim(&pair);
    let devices = bounded(node.kubelet.prepare("pod", &[named(&pair)])).await.unwrap().remove(0);
    let records = agent.claims();
    assert_eq!(records.len(), 2);
    for (device, request, bytes, cores) in
        [(&devices[0], "chat", 6 * GIB, 300), (&devices[1], "draft", 5 * GIB / 2, 100)]
    {
        let record = records
            .iter()
            .find(|record| record.origin.claim().is_some_and(|claim| claim.request == request));
        let record = record.unwrap();
        assert_eq!(record.grants[0].memory_limit_bytes, bytes);
        assert_eq!(record.grants[0].cores_millis, cores);
        // The share's own name first: kubelet shows it in the pod's status.
        let share = format!("tessera.dev/share={}", record.id);
        assert_eq!(device.cdi_devices, [share, "nvidia.com/gpu=GPU-a".to_owned()]);
        let spec = node.files("cdi").into_iter().find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains(record.id.as_str()))
        });
        let spec = std::fs::read_to_string(spec.unwrap()).unwrap();
        assert!(spec.contains(&format!("pages/{}", record.id)), "{spec}");
        assert!(node.dir.path().join("pages").join(record.id.as_str()).join("quota").exists());
    }
    // A full GPU says with which numbers.
    let large = claim("large", "u2", vec![share("gpu", "gpu-a", "s3", "14Gi", "10")]);
    node.api.put_claim(&large);
    let answer = bounded(node.kubelet.call_prepare(&[named(&large)])).await.unwrap();
    let error = answer["u2"].as_ref().unwrap_err();
    assert!(error.contains("claim team/large") && error.contains("14 GiB"), "{error}");
    // The plugin starts again after its node: CDI files are gone, and are there before the socket is.
    drop(stop);
    bounded(serving.finished()).await.unwrap();
    drop(agent);
    std::fs::remove_dir_all(node.dir.path().join("cdi")).unwrap();
    let (agent, _serving, _stop) = node.plugin().await;
    assert_eq!(node.files("cdi").len(), 2);
    let again = bounded(node.kubelet.call_prepare(&[named(&pair)])).await.unwrap();
    assert_eq!(again["u1"].as_ref().unwrap(), &devices);
    bounded(node.kubelet.unprepare("pod")).await.unwrap();
    assert!(agent.claims().is_empty());
    assert_eq!(node.files("cdi"), Vec::<PathBuf>::new());
    assert!(node.files("pages").iter().all(|path| path.is_file()), "{:?}", node.files("pages"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_is_shown_gpus_without_a_quota_and_keeps_them_over_a_restart() {
    let node = Node::new();
    let (agent, serving, stop) = node.plugin().await;
    let view =
        |device| DeviceResult { admin_access: true, ..share("all", device, "", "16Gi", "100") };
    let monitor = claim("monitor", "u1", vec![view("gpu-a"), view("gpu-b")]);
    node.api.put_claim(&monitor);
    let devices = bounded(node.kubelet.prepare("pod", &[named(&monitor)])).await.unwrap().remove(0);
    assert_eq!(devices[1].cdi_devices[1], "nvidia.com/gpu=GPU-b");
    assert!(agent.claims().is_empty() && node.files("pages").iter().all(|path| path.is_file()));
    let specs = node.files("cdi");
    assert_eq!(specs.len(), 2);
    for spec in &specs {
        let spec = std::fs::read_to_string(spec).unwrap();
        assert!(!spec.contains("pages") && !spec.contains("ld.so.preload"), "{spec}");
    }
    drop(stop);
    bounded(serving.finished()).await.unwrap();
    drop(agent);
    let (_agent, _serving, _stop) = node.plugin().await;
    let mut kept = node.files("cdi");
    let mut before = specs;
    kept.sort();
    before.sort();
    assert_eq!(kept, before, "its pod may start again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cdi_directory_that_cannot_be_written_is_named_and_nothing_stays() {
    let node = Node::new();
    let (agent, _serving, _stop) = node.plugin().await;
    let cdi = node.dir.path().join("cdi");
    let _ = std::fs::remove_dir_all(&cdi);
    std::fs::write(&cdi, "in the way").unwrap();
    let chat = claim("chat", "u1", vec![share("gpu", "gpu-a", "s", "6Gi", "30")]);
    node.api.put_claim(&chat);
    let answer = bounded(node.kubelet.call_prepare(&[named(&chat)])).await.unwrap();
    let error = answer["u1"].as_ref().unwrap_err();
    assert!(error.contains("claim team/chat") && error.contains("cdi"), "{error}");
    assert!(agent.claims().is_empty());
    std::fs::remove_file(&cdi).unwrap();
    bounded(node.kubelet.call_prepare(&[named(&chat)]))
        .await
        .unwrap()
        .remove("u1")
        .unwrap()
        .unwrap();
    assert_eq!(agent.claims().len(), 1);
}

/// Not a figure: the bench measures. Whole milliseconds more would be a mistake of kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_claim_is_prepared_in_some_milliseconds() {
    let node = Node::new();
    let (_agent, _serving, _stop) = node.plugin().await;
    let mut took = Vec::new();
    for n in 0..60 {
        let result = share("gpu", ["gpu-a", "gpu-b"][n % 2], &format!("s{n}"), "768Mi", "1");
        let chat = claim(&format!("c{n}"), &format!("u{n}"), vec![result]);
        node.api.put_claim(&chat);
        let began = Instant::now();
        let answer = bounded(node.kubelet.call_prepare(&[named(&chat)])).await.unwrap();
        took.push(began.elapsed());
        assert!(answer[&chat.uid].is_ok(), "{answer:?}");
        if n >= 20 {
            bounded(node.kubelet.call_unprepare(&[named(&chat)])).await.unwrap();
        }
    }
    took.sort();
    println!("prepare: p50 {:?}, p90 {:?}, worst {:?}", took[30], took[54], took[59]);
    assert!(took[30] < Duration::from_millis(250), "{took:?}");
}
