//! A cluster of nodes with two simulated GPUs each, an API server, and a person with a kubeconfig for it.

use std::fs;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use tessera_cluster::fixtures::{ApiServer, Behind};
use tessera_harness::plugin::{GPU, Simulated, Tenant, bounded, until};
use tessera_harness::{MIB, artefacts};

/// The nodes, and `kubectl-tessera`.
pub struct Cluster {
    pub api: ApiServer,
    pub nodes: Vec<Node>,
    dir: TempDir,
}

/// A machine with kubelet and the plugin.
pub struct Node {
    pub name: String,
    node: Simulated,
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
        let address = node.node.address().await;
        self.api.with(|store| store.put_plugin(name, Some(Behind::At(address))));
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
        let machine = format!(
            "[memory]\nreserved = \"128MiB\"\ncontext_overhead = \"64MiB\"\n{}{}",
            gpu(0),
            gpu(1)
        );
        let mut node = Simulated::on(&machine, "reserve = \"256Mi\"").await;
        node.configure("replicas = 2", "replicas = 4");
        let api = "[api]\nlisten = \"127.0.0.1:0\"\nauthorisation = \"none\"";
        node.configure("[api]\nlisten = \"\"", api);
        node.envs = vec![("NODE_NAME", name.into())];
        node.launch();
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        Self { name: name.to_owned(), node }
    }

    /// What `tessera status -o json` prints on the node.
    pub fn status(&self) -> Value {
        self.node.json()
    }

    /// Runs a pod of so many shares, in which a process holds so much; the plugin knows both when this returns.
    pub async fn run(&self, name: &str, shares: usize, bytes: u64) -> Tenant {
        let pages = self.node.start_pod(name, shares).await.pages;
        self.node.named(name).await;
        let tenant = Tenant::hold(&pages, bytes);
        until(|| {
            let status = self.status();
            let mut known = status["allocations"].as_array()?.iter();
            let own = known.find(|one| one["holder"]["pod"] == name)?;
            (own["gpus"][0]["memory_charged_bytes"] == bytes).then_some(())
        })
        .await;
        tenant
    }
}

// Numbers are those of each node; a node that is gone is said so, and hides no other.

fn entry<'a>(fleet: &'a Value, node: &str) -> &'a Value {
    fleet["nodes"].as_array().unwrap().iter().find(|entry| entry["node"] == node).unwrap()
}

/// The figures of both that have the same names, which are those of memory and GPU time.
fn assert_same(theirs: &Value, own: &Value, names: &[&str]) {
    for name in names {
        assert!(own[name].is_number(), "status has no {name}: {own}");
        assert_eq!(theirs[name], own[name], "{name}");
    }
}

/// Compares a node's part of the fleet with what the node itself says.
fn assert_is_of(fleet: &Value, node: &Node, own: &Value) {
    let entry = entry(fleet, &node.name);
    assert_eq!((&entry["answers"], &entry["error"]), (&true.into(), &"".into()), "{entry}");
    let view = &entry["view"];
    let [gpus, own_gpus] = [&view["gpus"], &own["gpus"]].map(|all| all.as_array().unwrap());
    assert_eq!(gpus.len(), own_gpus.len());
    for (gpu, own) in gpus.iter().zip(own_gpus) {
        assert_eq!(gpu["uuid"], own["uuid"]);
        let names = ["memory_total_bytes", "memory_used_bytes", "memory_limits_bytes"];
        assert_same(gpu, own, &names);
    }
    let [tenants, known] =
        [&view["tenants"], &own["allocations"]].map(|all| all.as_array().unwrap());
    assert_eq!(tenants.len(), known.len());
    for (tenant, own) in tenants.iter().zip(known) {
        assert_eq!((&tenant["id"], &tenant["pod"]), (&own["id"], &own["holder"]["pod"]));
        let names = ["memory_limit_bytes", "memory_charged_bytes", "cores_millis"];
        assert_same(&tenant["gpus"][0], &own["gpus"][0], &names);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_are_those_of_each_node_and_a_killed_one_hides_no_other() {
    let mut cluster = Cluster::start(&["n0", "n1", "n2"]).await;
    let mut tenants = Vec::new();
    for (index, node) in cluster.nodes.iter().enumerate() {
        tenants
            .push(node.run(&format!("chat-{index}"), index + 1, (100 + index as u64) * MIB).await);
    }
    until(|| {
        let before: Vec<Value> = cluster.nodes.iter().map(Node::status).collect();
        let fleet = cluster.fleet();
        let after = cluster.nodes.iter().map(Node::status);
        let is_still = before.iter().zip(after).all(|(before, after)| {
            before["gpus"] == after["gpus"] && before["allocations"] == after["allocations"]
        });
        if !is_still {
            return None;
        }
        for (node, own) in cluster.nodes.iter().zip(&before) {
            assert_is_of(&fleet, node, own);
        }
        Some(())
    })
    .await;
    let text = cluster.text(&["status"]);
    assert!(text.starts_with("sandbox: 3 of 3 nodes answer, 6 GPUs, 3 tenants\n"), "{text}");
    let top = cluster.text(&["top", "--once", "-A", "--sort", "name"]);
    let pods: Vec<&str> = top.lines().filter(|line| line.contains("chat-")).collect();
    assert_eq!(pods.len(), 3, "{top}");
    for (index, row) in pods.iter().enumerate() {
        let used = format!(" {}M/", 100 + index);
        assert!(row.contains(&format!("chat-{index}")) && row.contains(&used), "{top}");
    }

    cluster.nodes[1].node.kill();
    let fleet = cluster.fleet();
    let gone = entry(&fleet, "n1");
    assert_eq!((&gone["answers"], &gone["view"]), (&false.into(), &Value::Null), "{gone}");
    let why = gone["error"].as_str().unwrap();
    assert!(
        why.to_lowercase().contains("connection refused") && why.contains("tessera/tessera-n1"),
        "{why}"
    );
    for at in [0, 2] {
        let node = &cluster.nodes[at];
        assert_is_of(&fleet, node, &node.status());
    }
    let text = cluster.text(&["status"]);
    assert!(
        text.starts_with(
            "sandbox: 2 of 3 nodes answer, 4 GPUs, 2 tenants\n! n1: does not answer: "
        ),
        "{text}"
    );
    // A pod of a node that answers is found, and one of the other is not said to be nowhere.
    let explained = cluster.text(&["explain", "default/chat-2"]);
    assert!(explained.starts_with("On node n2:"), "{explained}");
    let lost = cluster.says(&["explain", "default/chat-1"]);
    let why = String::from_utf8(lost.stderr).unwrap();
    assert_eq!(lost.status.code(), Some(69), "{why}");
    assert!(why.contains("node n1: "), "{why}");
    // What it has not heard of it does not add up in silence.
    let waste = cluster.says(&["waste", "-A"]);
    let said = String::from_utf8(waste.stdout).unwrap();
    assert!(said.starts_with("note: node n1 is left out: "), "{said}");
}
