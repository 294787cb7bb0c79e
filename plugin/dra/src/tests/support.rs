//! A node as its kubelet and its scheduler see it: a stand-in kubelet, an API server, and the agent over a directory;
//! drivers come and go.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::{Agent, Lift};
use tessera_cluster::k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tessera_config::{Config, Current};
use tessera_fake_kubelet::dra::{ClaimName, DraBehaviour, DraKubelet, PreparedDevice};
use tessera_gpu::health::{Observation, Silence};
use tessera_model::audit::Actor;
use tessera_model::gpu::Gpu;
use tessera_tenant::delivery::Delivery;
use tessera_tenant::shim_install::{PRELOAD, SHIM};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::fixtures::{Cluster, claim, share};
use crate::names;
use crate::prepare::Sweeping;
use crate::serve::{Serving, Settings, SocketError, Timing, serve};

const GIB: u64 = 1 << 30;

/// Bounds whatever a test waits for.
pub async fn bounded<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), work).await.expect("an answer in time")
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 10 s");
}

/// The configuration of a node whose files are in `dir`, with these lines.
pub fn config(dir: &Path, more: &str) -> Config {
    let at = |name: &str| dir.join(name).display().to_string();
    Config::parse(&format!(
        "[paths]\nledger = \"{}\"\npages = \"{}\"\nshim = \"{}\"\nadmin = \"{}\"\n\
         [cdi]\ndirectory = \"{}\"\ngpu_kind = \"nvidia.com/gpu\"\n[gpus]\nreserve = 0\n[dra]\nenabled = true\n\
         [health]\nprobes_passed = 1\nrecovery = \"100ms\"\nrecovery_max = \"100ms\"\n{more}",
        at("ledger"),
        at("pages"),
        at("shim"),
        at("admin"),
        at("cdi"),
    ))
    .unwrap()
}

/// `GPU-a` of 16 GiB and `GPU-b` of 24.
pub fn gpus() -> [Gpu; 2] {
    [("GPU-a", 0, 16), ("GPU-b", 1, 24)]
        .map(|(uuid, index, gib)| Gpu { memory_bytes: gib * GIB, ..Gpu::example(uuid, index) })
}

/// The agent as a start of the plugin finds the disk.
pub fn open(config: impl Into<Current>) -> Arc<Agent> {
    let current: Current = config.into();
    let paths = current.get().paths.clone();
    let home = paths.shim.join("v1");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::create_dir_all(&paths.pages).unwrap();
    let delivery = Delivery { shim: home.join(SHIM), preload: home.join(PRELOAD) };
    std::fs::write(&delivery.shim, "a library").unwrap();
    std::fs::write(&delivery.preload, "a line").unwrap();
    Agent::open(current, &gpus(), delivery, Arc::default()).unwrap()
}

/// Has a GPU fall ill.
pub fn fall_ill(agent: &Agent, uuid: &str) {
    agent.observe(&Observation::Xid { uuid: uuid.into(), xid: 79 });
}

/// Has the driver reset a GPU, and waits until it is sold again.
pub async fn recover(agent: &Agent, uuid: &str) {
    let probe = |answer| agent.observe(&Observation::Probe { uuid: uuid.into(), answer });
    probe(Err(Silence { why: "it is reset".into(), gone: true }));
    while agent.inventory.catalogue().gpus[uuid].sick.is_some() {
        tokio::time::sleep(Duration::from_millis(20)).await;
        probe(Ok(()));
    }
}

pub fn cordon(agent: &Agent, uuid: &str, is_cordoned: bool) {
    let changed = match is_cordoned {
        true => agent.cordon(Some(uuid), Some("a new fan".into()), Actor::Plugin),
        false => agent.uncordon(Lift::Gpu(uuid), None, Actor::Plugin),
    };
    // Lifting what does not stand is an error.
    assert!(changed.is_ok() || !is_cordoned);
}

pub struct Node {
    pub root: tempfile::TempDir,
    pub kubelet: DraKubelet,
    pub cluster: Cluster,
    /// It outlives drivers: two share one ledger in turn.
    pub agent: Arc<Agent>,
    pub sweeping: Sweeping,
}

impl Node {
    /// Call it within a runtime.
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let kubelet = DraKubelet::start(root.path(), names::DRIVER).unwrap();
        let behaviour =
            DraBehaviour { health_retry: Duration::from_millis(50), ..DraBehaviour::default() };
        kubelet.set_behaviour(behaviour);
        Node {
            kubelet,
            cluster: Cluster::new("node"),
            agent: open(config(root.path(), "")),
            // Tests that look at orphans set their own.
            sweeping: Sweeping {
                interval: Duration::from_secs(900),
                grace: Duration::from_secs(900),
            },
            root,
        }
    }

    /// With a driver that kubelet has registered.
    pub async fn served() -> (Self, Plugin) {
        let node = Node::new();
        let plugin = node.plugin().await;
        (node, plugin)
    }

    /// A claim of one share of `gpu-a`, as the API server has it.
    pub fn claim(&self, name: &str, uid: &str, memory: &str, cores: &str) -> ResourceClaim {
        let results = vec![share("gpu", "gpu-a", &format!("s-{uid}"), memory, cores)];
        let claim = claim(name, uid, results);
        self.cluster.put(&[&claim]);
        claim
    }

    /// What the driver answers for a claim.
    pub async fn ask(&self, claim: &ResourceClaim) -> Result<Vec<PreparedDevice>, String> {
        let name = named(claim);
        let call = self.kubelet.call_prepare(std::slice::from_ref(&name));
        bounded(call).await.unwrap().remove(&name.uid).unwrap()
    }

    /// Kubelet prepares a pod's claims; the devices of each.
    pub async fn run(&self, pod: &str, claims: &[&ResourceClaim]) -> Vec<Vec<PreparedDevice>> {
        let names: Vec<_> = claims.iter().map(|claim| named(claim)).collect();
        bounded(self.kubelet.prepare(pod, &names)).await.unwrap()
    }

    /// The pod ends.
    pub async fn end(&self, pod: &str) {
        bounded(self.kubelet.unprepare(pod)).await.unwrap();
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

    /// The node's own restart, without a driver: the agent finds the disk as it is.
    pub fn reboot(self) -> Node {
        let Node { root, kubelet, cluster, agent, sweeping } = self;
        agent.close();
        drop(agent);
        Node { kubelet, cluster, agent: open(config(root.path(), "")), sweeping, root }
    }

    /// Starts a driver over what is on disk.
    pub fn try_plugin(&self, pod_uid: Option<&str>) -> Result<Plugin, SocketError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = {
            let _entered = runtime.enter();
            let (agent, client) = (Arc::clone(&self.agent), self.cluster.client());
            serve(self.settings(pod_uid), agent, client, async move {
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
        let sockets = serving.sockets.clone();
        Ok(Plugin { serving: Some(serving), stop: Some(stop), runtime: Some(runtime), sockets })
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

    /// What is visible in a directory of the node's.
    pub fn files(&self, of: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.root.path().join(of)).into_iter().flatten().flatten();
        let visible =
            |entry: &std::fs::DirEntry| !entry.file_name().to_string_lossy().starts_with('.');
        let mut files: Vec<_> = entries.filter(visible).map(|entry| entry.path()).collect();
        files.sort();
        files
    }

    /// The allocations that have pages, by name.
    pub fn pages(&self) -> Vec<PathBuf> {
        self.files("pages").into_iter().filter(|path| path.is_dir()).collect()
    }

    /// The limits that are recorded, by the claim's name and request: bytes and thousandths in all.
    pub fn recorded(&self) -> Vec<(String, String, u64, u32)> {
        let records = self.agent.claims();
        let row = records.iter().map(|record| {
            let claim = record.origin.claim().expect("a claim's");
            let memory = record.grants.iter().map(|grant| grant.memory_limit_bytes).sum();
            let cores = record.grants.iter().map(|grant| grant.cores_millis).sum();
            (claim.name.clone(), claim.request.clone(), memory, cores)
        });
        let mut all: Vec<_> = row.collect();
        all.sort();
        all
    }
}

pub struct Plugin {
    pub serving: Option<Serving>,
    stop: Option<oneshot::Sender<()>>,
    runtime: Option<Runtime>,
    sockets: [PathBuf; 2],
}

impl Plugin {
    /// SIGTERM.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        if let Some(serving) = self.serving.take() {
            bounded(serving.finished()).await;
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

/// As kubelet names it.
pub fn named(claim: &ResourceClaim) -> ClaimName {
    let ObjectMeta { namespace, name, uid, .. } = claim.metadata.clone();
    ClaimName { namespace: namespace.unwrap(), name: name.unwrap(), uid: uid.unwrap() }
}

/// Sockets in a directory.
pub fn sockets(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().ends_with(".sock")).count()
}
