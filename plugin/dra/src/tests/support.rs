//! A node: kubelet, API server, and what is on disk; drivers come and go.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tessera_cluster::fixtures::FakeApi;
use tessera_cluster::resource::{Claim, Consumer, DeviceResult};
use tessera_fake_kubelet::dra::{ClaimName, DraBehaviour, DraKubelet};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::door::DraGpu;
use crate::fixtures::{Disk, FakeCore, gpu};
use crate::names;
use crate::prepare::Sweeping;
use crate::serve::{Serving, Settings, SocketError, Timing, serve};

/// Bounds whatever a test waits for.
pub async fn bounded<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), work).await.expect("an answer in time")
}

/// See the module.
pub struct Node {
    pub root: tempfile::TempDir,
    pub kubelet: DraKubelet,
    pub api: FakeApi,
    pub disk: Arc<Mutex<Disk>>,
    pub gpus: Vec<DraGpu>,
    pub sweeping: Sweeping,
}

impl Node {
    /// With `GPU-a` of 16 GiB and `GPU-b` of 24.
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let kubelet = DraKubelet::start(root.path(), names::DRIVER).unwrap();
        let behaviour =
            DraBehaviour { health_retry: Duration::from_millis(50), ..DraBehaviour::default() };
        kubelet.set_behaviour(behaviour);
        Node {
            kubelet,
            api: FakeApi::new(names::DRIVER, "node"),
            disk: Arc::default(),
            gpus: vec![gpu("GPU-a", 16), gpu("GPU-b", 24)],
            // Tests that look at orphans set their own.
            sweeping: Sweeping {
                interval: Duration::from_secs(900),
                grace: Duration::from_secs(900),
            },
            root,
        }
    }

    pub fn settings(&self, pod_uid: Option<&str>) -> Settings {
        Settings {
            node: "node".into(),
            registry: self.kubelet.registry().to_owned(),
            dir: self.root.path().join("plugins").join(names::DRIVER),
            pod_uid: pod_uid.map(str::to_owned),
            sweeping: self.sweeping,
            timing: Timing {
                heartbeat: Duration::from_millis(100),
                look: Duration::from_millis(50),
                drain: Duration::from_secs(2),
            },
        }
    }

    /// Starts a driver over what is on disk.
    pub fn try_plugin(&self, pod_uid: Option<&str>) -> Result<Plugin, SocketError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let core = Arc::new(FakeCore::new(self.gpus.clone(), Arc::clone(&self.disk)));
        let (stop, stopped) = oneshot::channel::<()>();
        let served = {
            let _entered = runtime.enter();
            let api = Arc::new(self.api.clone());
            serve(self.settings(pod_uid), Arc::<FakeCore>::clone(&core), api, async move {
                let _ = stopped.await;
            })
        };
        let serving = match served {
            Ok(serving) => serving,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let sockets = serving.sockets().map(Path::to_owned);
        Ok(Plugin {
            core,
            serving: Some(serving),
            stop: Some(stop),
            runtime: Some(runtime),
            sockets,
        })
    }

    /// Starts a driver and waits until kubelet has registered it.
    pub async fn plugin(&self) -> Plugin {
        let before = self.kubelet.registrations();
        let plugin = self.try_plugin(None).unwrap();
        self.registered(before + 1).await;
        plugin
    }

    /// Waits for so many registrations in all.
    pub async fn registered(&self, registrations: u64) {
        bounded(self.kubelet.wait_until(|kubelet| kubelet.registrations() >= registrations)).await;
    }

    pub fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limits that are recorded, by the claim's name and request: bytes and thousandths in all.
    pub fn recorded(&self) -> Vec<(String, String, u64, u32)> {
        let disk = self.disk();
        let mut all: Vec<_> = disk
            .records
            .values()
            .map(|record| {
                let claim = record.origin.claim().expect("a claim's");
                let memory = record.grants.iter().map(|grant| grant.memory_limit_bytes).sum();
                let cores = record.grants.iter().map(|grant| grant.cores_millis).sum();
                (claim.name.clone(), claim.request.clone(), memory, cores)
            })
            .collect();
        all.sort();
        all
    }
}

/// A driver that runs.
pub struct Plugin {
    pub core: Arc<FakeCore>,
    pub serving: Option<Serving>,
    stop: Option<oneshot::Sender<()>>,
    runtime: Option<Runtime>,
    sockets: [PathBuf; 2],
}

impl Plugin {
    pub fn serving(&self) -> &Serving {
        self.serving.as_ref().expect("it runs")
    }

    /// SIGTERM.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            bounded(serving.finished()).await.unwrap();
        }
        for socket in &self.sockets {
            assert!(!socket.exists(), "{}", socket.display());
        }
    }

    /// SIGKILL: nothing is waited for, and the sockets' files stay.
    pub fn kill(mut self) {
        self.runtime.take().expect("it runs").shutdown_background();
        for socket in &self.sockets {
            let _ = std::fs::remove_file(socket);
            drop(std::os::unix::net::UnixListener::bind(socket).unwrap());
        }
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A share as the scheduler allocates it.
pub fn share(request: &str, device: &str, share: &str, memory: &str, cores: &str) -> DeviceResult {
    let capacity = [("memory", memory), ("cores", cores)];
    DeviceResult {
        request: request.into(),
        driver: names::DRIVER.into(),
        pool: "node".into(),
        device: device.into(),
        share_id: Some(share.into()),
        consumed_capacity: capacity.map(|(name, value)| (name.into(), value.into())).into(),
        admin_access: false,
    }
}

/// A claim in namespace `team`, allocated, reserved for some pod.
pub fn claim(name: &str, uid: &str, results: Vec<DeviceResult>) -> Claim {
    let consumer = Consumer { resource: "pods".into(), name: "pod".into(), uid: "pod-uid".into() };
    Claim {
        uid: uid.into(),
        namespace: "team".into(),
        name: name.into(),
        allocated: Some(results),
        reserved_for: vec![consumer],
        ..Claim::default()
    }
}

/// As kubelet names it.
pub fn named(claim: &Claim) -> ClaimName {
    let Claim { namespace, name, uid, .. } = claim;
    ClaimName { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() }
}

/// Sockets in a directory.
pub fn sockets(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().ends_with(".sock")).count()
}
