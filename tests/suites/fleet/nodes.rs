//! A cluster of nodes with two simulated GPUs each, an API server, and a person with a kubeconfig for it.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use tessera_cluster::fixtures::{ApiServer, Behind};
use tessera_fake_kubelet::Kubelet;
use tessera_harness::plugin::{GPU, Tenant, bounded, pod, until};
use tessera_harness::{SimGpu, artefacts, own_paths};

/// The nodes, and `kubectl-tessera`.
pub struct Cluster {
    pub api: ApiServer,
    pub nodes: Vec<Node>,
    dir: TempDir,
}

/// A machine with kubelet and the plugin.
pub struct Node {
    pub name: String,
    pub kubelet: Kubelet,
    sim: SimGpu,
    dir: TempDir,
    plugin: Child,
}

impl Cluster {
    /// Of nodes with these names, whose plugins serve.
    pub async fn start(names: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let api = ApiServer::start(dir.path());
        fs::write(dir.path().join("kubeconfig"), api.kubeconfig()).unwrap();
        std::os::unix::fs::symlink(artefacts().tessera(), dir.path().join("kubectl-tessera"))
            .unwrap();
        let mut cluster = Self { api, nodes: Vec::new(), dir };
        for (index, name) in names.iter().enumerate() {
            let node = cluster.node(name, index).await;
            cluster.nodes.push(node);
        }
        cluster
    }

    async fn node(&self, name: &str, index: usize) -> Node {
        let node = Node::start(name, index).await;
        let address = node.address().await;
        let plugin = format!("tessera-{name}");
        self.api.with(|store| {
            let object = json!({
                "metadata": { "name": plugin, "namespace": "tessera",
                    "ownerReferences": [{ "kind": "DaemonSet", "name": "tessera" }] },
                "spec": { "nodeName": name, "containers": [{ "name": "tessera" }] },
                "status": { "phase": "Running" },
            });
            store.pods.insert(("tessera".to_owned(), plugin.clone()), object);
            store.behind.insert(plugin, Behind::At(address));
        });
        node
    }

    /// What `kubectl-tessera` says, and how it ends.
    pub fn says(&self, args: &[&str]) -> Output {
        let mut command = Command::new(self.dir.path().join("kubectl-tessera"));
        command.arg("--kubeconfig").arg(self.dir.path().join("kubeconfig")).args(args);
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// What it prints as text; it has to succeed.
    pub fn text(&self, args: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.says(args);
        assert!(status.success(), "{args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    /// The fleet as JSON; it has to succeed.
    pub fn fleet(&self) -> Value {
        serde_json::from_str(&self.text(&["status", "-o", "json"])).unwrap()
    }
}

impl Node {
    async fn start(name: &str, index: usize) -> Self {
        let gpu = |gpu: usize| {
            format!(
                "[[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-0000000000{index}{gpu}\"\nmemory = \"8GiB\"\n"
            )
        };
        let sim = SimGpu::start(&format!(
            "[memory]\nreserved = \"128MiB\"\ncontext_overhead = \"64MiB\"\n{}{}",
            gpu(0),
            gpu(1)
        ));
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await.unwrap();
        let paths = own_paths(
            dir.path(),
            &[
                ("kubelet", kubelet.device_plugins_dir()),
                ("pod_resources", kubelet.pod_resources_socket()),
                ("shim_source", &artefacts().shim()),
                ("nvml", &artefacts().libnvml()),
            ],
        );
        let config = format!(
            "[gpus]\nreserve = \"256Mi\"\ncontext_overhead = \"64Mi\"\n[share]\nreplicas = 4\n\
             [metrics]\nlisten = \"\"\n[api]\nlisten = \"127.0.0.1:0\"\nauthorisation = \"none\"\n{paths}"
        );
        fs::write(dir.path().join("config.toml"), config).unwrap();
        let mut command = command(&dir, &sim);
        let log = fs::File::create(dir.path().join("log")).unwrap();
        command.arg("serve").stderr(log).env("NODE_NAME", name);
        let plugin = command.spawn().unwrap();
        let node = Self { name: name.to_owned(), kubelet, sim, dir, plugin };
        bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) == 8)).await;
        node
    }

    /// Where it serves the JSON API.
    async fn address(&self) -> SocketAddr {
        let log = self.dir.path().join("log");
        until(|| {
            let log = fs::read_to_string(&log).unwrap_or_default();
            let line = log.lines().find(|line| line.contains("serving the JSON API"))?;
            let word = line.split("address=").nth(1)?.split_whitespace().next()?;
            word.trim_matches('"').parse().ok()
        })
        .await
    }

    /// What `tessera status -o json` prints on the node.
    pub fn status(&self) -> Value {
        let output = command(&self.dir, &self.sim).args(["status", "-o", "json"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Runs a pod of so many shares, in which a process holds so much; the plugin knows both when this returns.
    pub async fn run(&self, name: &str, shares: usize, bytes: u64) -> Tenant {
        bounded(self.kubelet.run(&pod(name, shares))).await.unwrap();
        let id = until(|| {
            let status = self.status();
            let known = status["allocations"].as_array()?.iter().cloned();
            let own = known.into_iter().find(|one| one["holder"]["pod"] == name)?;
            own["id"].as_str().map(str::to_owned)
        })
        .await;
        let tenant = Tenant::hold(&self.pages(&id), bytes);
        until(|| {
            let status = self.status();
            let mut known = status["allocations"].as_array()?.iter();
            let own = known.find(|one| one["id"] == id.as_str())?;
            (own["gpus"][0]["memory_charged_bytes"] == bytes).then_some(())
        })
        .await;
        tenant
    }

    fn pages(&self, id: &str) -> PathBuf {
        self.dir.path().join("pages").join(id)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.plugin.kill().unwrap();
        self.plugin.wait().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.plugin.kill();
        let _ = self.plugin.wait();
    }
}

fn command(dir: &TempDir, sim: &SimGpu) -> Command {
    let mut command = Command::new(artefacts().tessera());
    command.arg("--config").arg(dir.path().join("config.toml")).envs(sim.envs());
    command.stdin(Stdio::null());
    command
}
