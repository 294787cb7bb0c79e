//! MIG instances of simulated GPUs, sold by the plugin as a process to a stand-in kubelet.

mod node_support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use node_support::{GPU, bounded, id_of, pod, until};
use serde_json::Value;
use tessera_plugin::standin::Kubelet;

const MIB: u64 = 1 << 20;

/// GPU 0 with three instances, of which two are compute instances of one GPU instance; GPU 1 whole;
/// GPU 2 in MIG mode without instances.
const MACHINE: &str = r#"
[memory]
context_overhead = "64MiB"
[[gpu]]
memory = "16GiB"
numa_node = 1
mig = ["1g.4gb", { profile = "3g.8gb", compute = ["1c", "2c"] }]
[[gpu]]
memory = "16GiB"
[[gpu]]
mig = []
"#;
const FIRST: &str = "MIG-5e55e4a0-0101-4000-8000-000000000000";
const TWINS: [&str; 2] =
    ["MIG-5e55e4a0-0201-4000-8000-000000000000", "MIG-5e55e4a0-0202-4000-8000-000000000000"];
const WHOLE: &str = "GPU-5e55e4a0-0000-4000-8000-000000000001";

/// A built file; see `TESSERA_ARTEFACTS` in `tests/README.md`.
fn artefact(name: &str) -> PathBuf {
    let dir = std::env::var_os("TESSERA_ARTEFACTS").map(PathBuf::from);
    let dir =
        dir.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/release"));
    let found = dir.join(name);
    assert!(found.exists(), "no {}: run `make build`", found.display());
    found
}

struct Node {
    dir: tempfile::TempDir,
    kubelet: Kubelet,
    plugin: Option<Child>,
}

impl Node {
    async fn new(machine: &str, settings: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await.unwrap();
        std::fs::write(dir.path().join("machine.toml"), machine).unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let config = format!(
            "[share]\nreplicas = 2\n{settings}\n\
             [paths]\nkubelet = \"{}\"\npod_resources = \"{}\"\npages = \"{}\"\nshim = \"{}\"\n\
             shim_source = \"{}\"\nledger = \"{}\"\nadmin = \"{}\"\nnvml = \"{}\"\n\
             [pages]\ntmpfs = \"off\"\n",
            kubelet.device_plugins_dir().display(),
            kubelet.pod_resources_socket().display(),
            at("pages"),
            at("shim"),
            artefact("libtessera.so").display(),
            at("ledger.redb"),
            at("admin.sock"),
            artefact("sim/libnvidia-ml.so.1").display(),
        );
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        Self { dir, kubelet, plugin: None }
    }

    fn on_machine(&self, mut command: Command) -> Command {
        command.env("SIMGPU_STATE", self.dir.path().join("simgpu.state"));
        command.env("SIMGPU_CONFIG", self.dir.path().join("machine.toml"));
        command
    }

    fn tessera(&self) -> Command {
        let mut command = self.on_machine(Command::new(env!("CARGO_BIN_EXE_tessera")));
        command.arg("--config").arg(self.dir.path().join("config.toml"));
        command
    }

    fn serve(&mut self) {
        let log = std::fs::File::create(self.dir.path().join("log")).unwrap();
        let plugin = self.tessera().arg("serve").stderr(log).stdin(Stdio::null()).spawn();
        self.plugin = Some(plugin.unwrap());
    }

    async fn with_replicas(machine: &str, settings: &str, count: usize) -> Self {
        let mut node = Self::new(machine, settings).await;
        node.serve();
        bounded(node.kubelet.wait_allocatable(GPU, count)).await;
        node
    }

    fn status(&self) -> Value {
        let out = self.tessera().args(["status", "-o", "json"]).output().unwrap();
        serde_json::from_slice(&out.stdout).unwrap_or(Value::Null)
    }

    fn control(&self, args: &[&str]) {
        let mut control = self.on_machine(Command::new(artefact("sim/simgpu-ctl")));
        assert!(control.args(args).status().unwrap().success(), "{args:?}");
    }

    /// The replicas that kubelet may give out, by what they are replicas of.
    fn sold(&self) -> Vec<String> {
        let devices = self.kubelet.devices(GPU).into_iter();
        let healthy = devices.filter(|device| device.health == "Healthy");
        let mut ids: Vec<String> =
            healthy.map(|d| d.id.split("::").next().unwrap().into()).collect();
        ids.sort();
        ids.dedup();
        ids
    }

    /// What a container that was answered like this runs: the tenant, under the shim, in its pages.
    fn container(&self, ids: &[String], envs: &[(String, String)], args: &[&str]) -> Output {
        let mut tenant = self.on_machine(Command::new(artefact("tessera-tenant")));
        tenant.envs(envs.iter().map(|(name, value)| (name, value)));
        tenant.env("LD_LIBRARY_PATH", artefact("sim"));
        tenant.env("LD_PRELOAD", artefact("libtessera.so"));
        let pages = self.dir.path().join("pages").join(id_of(ids).as_str());
        tenant.env(tessera_region::layout::PAGES_DIR_ENV, pages);
        tenant.args(args).output().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(plugin) = &mut self.plugin {
            let _ = plugin.kill();
            let _ = plugin.wait();
        }
    }
}

#[tokio::test]
async fn instances_are_sold_beside_whole_gpus() {
    let node = Node::with_replicas(MACHINE, "", 8).await;
    assert_eq!(node.sold(), [WHOLE, FIRST, TWINS[0], TWINS[1]]);
    // Ids that kubelet and everything that stores them can carry.
    let devices = node.kubelet.devices(GPU);
    assert!(devices.iter().all(|d| d.id.len() <= 63 && !d.id.contains('/')), "{devices:?}");
    let status = node.status();
    let gpus = status["gpus"].as_array().unwrap();
    let shown: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            (gpu["uuid"].as_str().unwrap(), gpu["memory_total_bytes"].as_u64().unwrap() / MIB)
        })
        .collect();
    let expected = [(FIRST, 4 << 10), (TWINS[0], 4 << 10), (TWINS[1], 4 << 10), (WHOLE, 16 << 10)];
    assert_eq!(shown, expected);
    let warnings = status["warnings"].to_string();
    assert!(warnings.contains("GPU 2 ") && warnings.contains("has no instances"), "{warnings}");
}

#[tokio::test]
async fn instances_are_chosen_one_by_one_or_by_their_gpu() {
    for (settings, count, expected) in [
        ("[gpus]\ninclude = [\"0:0\", \"1\"]", 4, &[WHOLE, FIRST][..]),
        ("[gpus]\nexclude = [\"0\", \"2\"]", 2, &[WHOLE]),
        ("[gpus]\nexclude = [\"GPU-5e55e4a0-0000-4000-8000-000000000000\", \"1:0\"]", 2, &[WHOLE]),
        (&format!("[gpus]\ninclude = [\"{}\"]", TWINS[1]), 2, &[TWINS[1]]),
    ] {
        let node = Node::with_replicas(MACHINE, settings, count).await;
        assert_eq!(node.sold(), expected, "{settings}");
    }
}

#[tokio::test]
async fn a_fault_takes_out_the_instance_that_it_is_attributed_to() {
    let node = Node::with_replicas(MACHINE, "", 8).await;
    // The compute instances of one GPU instance share its memory and its faults.
    node.control(&["xid", "0:1", "95"]);
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    assert_eq!(node.sold(), [WHOLE, FIRST]);
    node.control(&["xid", "0", "95"]);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    assert_eq!(node.sold(), [WHOLE]);
}

#[tokio::test]
async fn a_container_is_held_to_its_quota_on_its_instance() {
    // Not the first of the machine, which CUDA would choose by itself. A replica: (8 GiB - 512 MiB) / 2.
    let settings = format!("[gpus]\ninclude = [\"{}\"]\ncontext_overhead = \"64Mi\"", TWINS[1]);
    let node = Node::with_replicas(MACHINE, &settings, 2).await;
    for name in ["a", "b"] {
        let admitted = node.kubelet.run(&pod(name, 1)).await.unwrap().remove(0);
        let envs = &admitted.response.envs;
        assert_eq!(envs["NVIDIA_VISIBLE_DEVICES"], TWINS[1]);
        let envs: Vec<_> = envs.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        let greedy = ["greedy", "--device", TWINS[1], "--apis", "plain", "--at-most", "3840Mi"];
        let out = node.container(&admitted.device_ids, &envs, &greedy);
        assert!(out.status.success(), "{out:?}");
        let lines = String::from_utf8(out.stdout).unwrap();
        let mut said = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let full = said.find(|line| line["event"] == "full").unwrap();
        assert_eq!(full["held"], (3840 - 64) * MIB, "its quota less a context: {lines}");
    }
    let status = node.status();
    let allocations = status["allocations"].as_array().unwrap();
    assert_eq!(allocations.len(), 2);
    for allocation in allocations {
        assert_eq!(allocation["gpus"][0]["gpu_uuid"], TWINS[1]);
        assert_eq!(allocation["gpus"][0]["memory_limit_bytes"], 3840 * MIB);
    }
}

#[tokio::test]
async fn a_machine_of_which_nothing_can_be_sold_says_why() {
    let old = "driver_version = \"460.32.03\"\n[[gpu]]\nmig = [\"1g.4gb\"]\n";
    for (machine, why) in [
        ("[[gpu]]\nmig = []\n", "is in MIG mode and has no instances"),
        (old, "which is no UUID: nothing of it is sold; drivers from 470.42.01 on"),
    ] {
        let mut node = Node::new(machine, "").await;
        node.serve();
        let said = until(|| {
            let warnings = node.status()["warnings"].to_string();
            warnings.contains("waiting for GPUs").then_some(warnings)
        })
        .await;
        assert!(said.contains(why), "{said}");
        assert_eq!(node.kubelet.registrations(), 0);
    }
}
