//! MIG instances of simulated GPUs, sold by the plugin as a process to a stand-in kubelet.

use serde_json::Value;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, until};

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

/// A node with such a machine.
struct Node(Simulated);

impl Node {
    async fn with_replicas(machine: &str, gpus: &str, count: usize) -> Self {
        let mut node = Simulated::on(machine, gpus).await;
        node.launch();
        bounded(node.kubelet.wait_allocatable(GPU, count)).await;
        Node(node)
    }

    /// The replicas that kubelet may give out, by what they are replicas of.
    fn sold(&self) -> Vec<String> {
        let devices = self.0.kubelet.devices(GPU).into_iter();
        let healthy = devices.filter(|device| device.health == "Healthy");
        let mut ids: Vec<String> =
            healthy.map(|d| d.id.split("::").next().unwrap().into()).collect();
        ids.sort();
        ids.dedup();
        ids
    }
}

#[tokio::test]
async fn instances_are_sold_beside_whole_gpus() {
    let node = Node::with_replicas(MACHINE, "", 8).await;
    assert_eq!(node.sold(), [WHOLE, FIRST, TWINS[0], TWINS[1]]);
    // Ids that kubelet and everything that stores them can carry.
    let devices = node.0.kubelet.devices(GPU);
    assert!(devices.iter().all(|d| d.id.len() <= 63 && !d.id.contains('/')), "{devices:?}");
    let status = node.0.json();
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
async fn a_fault_takes_out_the_instance_that_it_is_attributed_to() {
    let node = Node::with_replicas(MACHINE, "", 8).await;
    // The compute instances of one GPU instance share its memory and its faults.
    node.0.control(&["xid", "0:1", "95"]);
    bounded(node.0.kubelet.wait_allocatable(GPU, 4)).await;
    assert_eq!(node.sold(), [WHOLE, FIRST]);
    node.0.control(&["xid", "0", "95"]);
    bounded(node.0.kubelet.wait_allocatable(GPU, 2)).await;
    assert_eq!(node.sold(), [WHOLE]);
}

#[tokio::test]
async fn a_container_is_held_to_its_quota_on_its_instance() {
    // Not the first of the machine, which CUDA would choose by itself. A replica: (8 GiB - 512 MiB) / 2.
    let settings = format!("include = [\"{}\"]", TWINS[1]);
    let node = Node::with_replicas(MACHINE, &settings, 2).await;
    for name in ["a", "b"] {
        let admitted = node.0.kubelet.run(&pod(name, 1)).await.unwrap().remove(0);
        let envs = &admitted.response.envs;
        assert_eq!(envs["NVIDIA_VISIBLE_DEVICES"], TWINS[1]);
        let greedy = ["greedy", "--device", TWINS[1], "--apis", "plain", "--at-most", "3840Mi"];
        let mut tenant = node.0.tenant(&admitted.device_ids);
        let out = tenant.envs(envs).args(greedy).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        let lines = String::from_utf8(out.stdout).unwrap();
        let mut said = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let full = said.find(|line| line["event"] == "full").unwrap();
        assert_eq!(full["held"], (3840 - 64) * MIB, "its quota less a context: {lines}");
    }
    let status = node.0.json();
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
        let mut node = Simulated::on(machine, "").await;
        node.launch();
        let said = until(|| {
            let out = node.run(&["status", "-o", "json"]);
            // Nobody answers before it has begun.
            let status: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
            let warnings = status["warnings"].to_string();
            warnings.contains("waiting for GPUs").then_some(warnings)
        })
        .await;
        assert!(said.contains(why), "{said}");
        assert_eq!(node.kubelet.registrations(), 0);
    }
}

// Which GPUs a container gets on a node of eight: the plugin as a process, on simulated GPUs that report
// NVLinks, PCIe switches and NUMA nodes, through kubelet's own calls.

/// Two NUMA nodes; switches a to d for two GPUs each; four links each for 0-2, 1-3, 4-6, 5-7, and one
/// each for 4-5 and 6-7.
fn machine() -> String {
    let gpu = |n: usize| {
        let switch = ["a", "b", "c", "d"][n / 2];
        format!("[[gpu]]\nmemory = \"4GiB\"\nnuma_node = {}\npcie_switch = \"{switch}\"\n", n / 4)
    };
    let link = |a: usize, b: usize, links: usize| {
        format!("[[nvlink]]\ngpus = [{a}, {b}]\nlinks = {links}\n")
    };
    let gpus: String = (0..8).map(gpu).collect();
    let strong = [(0, 2), (1, 3), (4, 6), (5, 7)].map(|(a, b)| link(a, b, 4)).concat();
    gpus + &strong + &link(4, 5, 1) + &link(6, 7, 1)
}

struct Eight {
    node: Simulated,
    uuids: Vec<String>,
}

impl Eight {
    async fn start() -> Self {
        let mut node = Simulated::on(&machine(), "").await;
        node.configure("replicas = 2", "replicas = 1\nsplit = \"spread\"");
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let status = node.json();
        let gpus = status["gpus"].as_array().unwrap();
        let uuids = gpus.iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect();
        Self { node, uuids }
    }

    /// Runs a pod with so many GPUs; gives their indexes, in order.
    async fn run(&self, name: &str, gpus: usize) -> Vec<usize> {
        let admitted = self.node.kubelet.run(&pod(name, gpus)).await.unwrap().remove(0);
        let index = |id: &String| self.uuids.iter().position(|uuid| id.starts_with(uuid)).unwrap();
        let mut indexes: Vec<usize> = admitted.device_ids.iter().map(index).collect();
        indexes.sort_unstable();
        indexes
    }
}

#[tokio::test]
async fn numa_nodes_reach_kubelet_and_as_gpus_fill_up_the_next_best_are_chosen() {
    let node = Eight::start().await;
    let devices = node.node.kubelet.devices(GPU);
    assert_eq!(devices.len(), 8);
    for device in devices {
        let gpu = node.uuids.iter().position(|uuid| device.id.starts_with(uuid)).unwrap();
        let nodes: Vec<i64> = device.topology.unwrap().nodes.iter().map(|node| node.id).collect();
        assert_eq!(nodes, [gpu as i64 / 4], "GPU {gpu}");
    }
    // Linked pairs; the second beside the first, so that the other half stays whole.
    assert_eq!(node.run("a", 2).await, [0, 2]);
    assert_eq!(node.run("b", 2).await, [1, 3]);
    // Four of one node are left, linked in a ring.
    assert_eq!(node.run("c", 4).await, [4, 5, 6, 7]);
}
