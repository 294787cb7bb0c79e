//! What the kubelet tests share: a node with a fake kubelet, and a plugin that writes down its
//! calls.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_fake_kubelet::Kubelet;
use tessera_kubelet::{
    ContainerAllocateResponse, Device, DevicePlugin, Options, Phase, Report, Reports, Serving,
    Timing, serve,
};
use tokio::sync::{oneshot, watch};
use tonic::Status;

pub use crate::plugin::{GPU, bounded};

/// A plugin that prefers the highest ids and writes down what it is asked.
pub struct FakePlugin {
    pub devices: watch::Sender<Vec<Device>>,
    /// What it was asked, in order.
    pub calls: Mutex<Vec<String>>,
    /// Allocate answers while it is true.
    pub answers: watch::Sender<bool>,
}

impl FakePlugin {
    /// With so many devices, all healthy.
    pub fn new(count: usize) -> Arc<Self> {
        Arc::new(Self {
            devices: watch::Sender::new(devices(count, count)),
            calls: Mutex::default(),
            answers: watch::Sender::new(true),
        })
    }

    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }
}

/// `count` devices of which the first `healthy` are healthy.
fn devices(healthy: usize, count: usize) -> Vec<Device> {
    (0..count)
        .map(|n| Device { id: format!("replica-{n}"), healthy: n < healthy, numa_node: Some(0) })
        .collect()
}

impl DevicePlugin for FakePlugin {
    fn devices(&self) -> watch::Receiver<Vec<Device>> {
        self.devices.subscribe()
    }

    fn preferred(
        &self,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Result<Vec<String>, Status> {
        self.note(format!(
            "preferred {size} of {} with {}",
            available.join(" "),
            must_include.join(" ")
        ));
        let mut best = available.to_vec();
        best.sort();
        best.reverse();
        best.truncate(size);
        Ok(best)
    }

    async fn allocate(
        &self,
        containers: Vec<Vec<String>>,
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        let answers = containers
            .into_iter()
            .map(|ids| {
                self.note(format!("allocate {}", ids.join(" ")));
                Ok(ContainerAllocateResponse {
                    envs: [("REPLICAS".to_owned(), ids.join(" "))].into(),
                    ..ContainerAllocateResponse::default()
                })
            })
            .collect();
        let _ = self.answers.subscribe().wait_for(|answers| *answers).await;
        answers
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), Status> {
        self.note(format!("pre_start {}", ids.join(" ")));
        Ok(())
    }
}

/// One resource, for good.
pub fn only(resource: &str) -> watch::Receiver<BTreeSet<String>> {
    watch::channel(BTreeSet::from([resource.to_owned()])).1
}

/// A plugin being served.
pub struct Plugin {
    plugin: Arc<FakePlugin>,
    serving: Serving,
    stop: oneshot::Sender<()>,
}

impl std::ops::Deref for Plugin {
    type Target = FakePlugin;
    fn deref(&self) -> &FakePlugin {
        &self.plugin
    }
}

impl Plugin {
    /// Whether kubelet knows it.
    pub fn readiness(&self) -> Readiness {
        Readiness(self.serving.reports())
    }

    /// What it was asked so far.
    pub fn calls(&self) -> Vec<String> {
        self.plugin.calls.lock().unwrap().clone()
    }

    /// From now on it has `count` devices, the first `healthy` of them healthy.
    pub fn set_healthy(&self, healthy: usize, count: usize) {
        self.plugin.devices.send_replace(devices(healthy, count));
    }

    /// Ends it, and waits until it has ended.
    pub async fn stop(self) {
        self.stop.send(()).unwrap();
        bounded(self.serving.finished()).await;
    }
}

/// How a plugin stands with kubelet.
pub struct Readiness(Reports);

impl Readiness {
    /// Now.
    pub fn report(&self) -> Report {
        self.0.borrow()[GPU].clone()
    }

    /// The first report for which `condition` holds; `None` if the server stopped before.
    pub async fn wait_for(&self, mut condition: impl FnMut(&Report) -> bool) -> Option<Report> {
        Some(self.0.clone().wait_for(|all| condition(&all[GPU])).await.ok()?[GPU].clone())
    }

    /// Waits until the node offers the resource; false if the server stopped first.
    pub async fn wait_live(&self) -> bool {
        self.wait_for(|report| report.phase == Phase::Live).await.is_some()
    }
}

/// A directory with a fake kubelet.
pub struct Node {
    _root: tempfile::TempDir,
    pub kubelet: Kubelet,
}

impl Node {
    /// With a kubelet and no plugin.
    pub async fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(root.path()).await.unwrap();
        Self { _root: root, kubelet }
    }

    /// Serves a plugin with so many devices.
    pub fn plugin(&self, count: usize) -> Plugin {
        self.plugin_with(count, |_| {})
    }

    /// A plugin with short waiting times.
    pub fn plugin_with(&self, count: usize, change: impl FnOnce(&mut Options)) -> Plugin {
        let plugin = FakePlugin::new(count);
        let mut options = Options {
            timing: Timing {
                register_timeout: Duration::from_millis(500),
                live_timeout: Duration::from_millis(500),
                min_backoff: Duration::from_millis(20),
                max_backoff: Duration::from_millis(500),
                ..Timing::default()
            },
            pod_resources: None,
        };
        change(&mut options);
        let (stop, stopped) = oneshot::channel::<()>();
        // A dropped sender does not stop the plugin: tests that end do.
        let shutdown = async move {
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let dir = self.kubelet.device_plugins_dir();
        let (served, resources) = (Arc::clone(&plugin), only(GPU));
        let serving =
            serve(resources, dir, move |_| Arc::clone(&served), shutdown, options).unwrap();
        Plugin { plugin, serving, stop }
    }

    /// File names of the plugin sockets in the directory.
    pub fn sockets(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.kubelet.device_plugins_dir()).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "kubelet.sock")
            .collect();
        names.sort();
        names
    }
}
