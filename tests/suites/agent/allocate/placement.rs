//! Which GPUs a container gets on a node of eight: the plugin as a process, on simulated GPUs that report
//! NVLinks, PCIe switches and NUMA nodes, through kubelet's own calls.

use std::process::Command;

use tessera_harness::artefacts;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, stderr};

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

struct Node {
    node: Simulated,
    uuids: Vec<String>,
}

impl Node {
    async fn start(placement: &str) -> Self {
        let share = format!(
            "replicas = 1\nsplit = \"spread\"\nplacement = \"{placement}\"\n[ledger]\nfsync = false"
        );
        let mut node = Simulated::new(&share).await;
        let config = node.dir.path().join("simgpu.toml");
        std::fs::write(&config, machine()).unwrap();
        let made = node
            .on_machine(Command::new(artefacts().simgpu_ctl()))
            .arg("status")
            .env("SIMGPU_CONFIG", config)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", stderr(&made));
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
async fn as_gpus_fill_up_the_next_best_are_chosen() {
    let node = Node::start("packed").await;
    // Linked pairs; the second beside the first, so that the other half stays whole.
    assert_eq!(node.run("a", 2).await, [0, 2]);
    assert_eq!(node.run("b", 2).await, [1, 3]);
    // Four of one node are left, linked in a ring.
    assert_eq!(node.run("c", 4).await, [4, 5, 6, 7]);
}

#[tokio::test]
async fn numa_nodes_reach_kubelet() {
    let node = Node::start("distributed").await;
    let devices = node.node.kubelet.devices(GPU);
    assert_eq!(devices.len(), 8);
    for device in devices {
        let gpu = node.uuids.iter().position(|uuid| device.id.starts_with(uuid)).unwrap();
        let nodes: Vec<i64> = device.topology.unwrap().nodes.iter().map(|node| node.id).collect();
        assert_eq!(nodes, [gpu as i64 / 4], "GPU {gpu}");
    }
    // Distributed goes where nobody is; the half that is far from the first pod.
    assert_eq!(node.run("a", 1).await, [0]);
    assert_eq!(node.run("b", 1).await, [4]);
}
