//! Which GPUs a container gets on a node of eight: the plugin as a process, on simulated GPUs that report
//! NVLinks, PCIe switches and NUMA nodes, through kubelet's own calls.

use std::collections::BTreeMap;
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
    /// Pods by the index of the one GPU that they hold.
    holders: BTreeMap<usize, String>,
    pods: usize,
}

impl Node {
    async fn start(placement: &str) -> Self {
        let share = format!(
            "replicas = 1\nsplit = \"spread\"\nplacement = \"{placement}\"\n[ledger]\nfsync = false"
        );
        let mut node = Simulated::new(&share).await;
        let config = node.dir.path().join("simgpu.toml");
        std::fs::write(&config, machine()).unwrap();
        let made = Command::new(artefacts().simgpu_ctl())
            .arg("status")
            .env("SIMGPU_STATE", node.dir.path().join("simgpu.state"))
            .env("SIMGPU_CONFIG", config)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", stderr(&made));
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let status = node.json();
        let gpus = status["gpus"].as_array().unwrap();
        let uuids = gpus.iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect();
        Self { node, uuids, holders: BTreeMap::new(), pods: 0 }
    }

    /// Runs a pod with so many GPUs; gives their indexes, in order.
    async fn run(&self, name: &str, gpus: usize) -> Vec<usize> {
        let admitted = self.node.kubelet.run(&pod(name, gpus)).await.unwrap().remove(0);
        let index = |id: &String| self.uuids.iter().position(|uuid| id.starts_with(uuid)).unwrap();
        let mut indexes: Vec<usize> = admitted.device_ids.iter().map(index).collect();
        indexes.sort_unstable();
        indexes
    }

    /// A pod on every GPU that is free.
    async fn fill(&mut self) {
        while self.holders.len() < 8 {
            self.pods += 1;
            let name = format!("single-{}", self.pods);
            let gpu = self.run(&name, 1).await[0];
            self.holders.insert(gpu, name);
        }
    }

    /// With every other GPU held: asks for so many of these.
    async fn among(&mut self, free: &[usize], gpus: usize) -> Vec<usize> {
        self.fill().await;
        for gpu in free {
            self.node.kubelet.remove("default", &self.holders.remove(gpu).unwrap());
        }
        let chosen = self.run("asking", gpus).await;
        self.node.kubelet.remove("default", "asking");
        chosen
    }
}

#[tokio::test]
async fn as_gpus_fill_up_the_next_best_are_chosen() {
    let mut node = Node::start("packed").await;
    // Linked pairs; the second beside the first, so that the other half stays whole.
    assert_eq!(node.run("a", 2).await, [0, 2]);
    assert_eq!(node.run("b", 2).await, [1, 3]);
    // Four of one node are left, linked in a ring.
    assert_eq!(node.run("c", 4).await, [4, 5, 6, 7]);
    for name in ["a", "b", "c"] {
        node.node.kubelet.remove("default", name);
    }

    for (free, gpus, chosen) in [
        // Four links.
        (&[0, 1, 2, 3, 4, 5, 6, 7][..], 2, &[0, 2][..]),
        (&[0, 1, 3, 4, 5], 2, &[1, 3]),
        (&[0, 1, 4, 6], 2, &[4, 6]),
        // One link, before a common switch.
        (&[0, 1, 4, 5], 2, &[4, 5]),
        (&[0, 1, 6, 7], 2, &[6, 7]),
        // A common switch, before the NUMA node.
        (&[0, 1, 4, 7], 2, &[0, 1]),
        (&[2, 3, 4, 7], 2, &[2, 3]),
        // The NUMA node, before the rest.
        (&[0, 3, 4], 2, &[0, 3]),
        (&[2, 4, 7], 2, &[4, 7]),
        // What is left.
        (&[0, 7], 2, &[0, 7]),
        // Three and four: the sum of all pairs counts.
        (&[0, 1, 2, 4, 5, 6], 3, &[4, 5, 6]),
        (&[0, 1, 2, 3, 4, 6], 4, &[0, 1, 2, 3]),
        (&[0, 1, 2, 4, 6, 7], 4, &[0, 2, 4, 6]),
        (&[0, 1, 2, 3, 4, 5, 6, 7], 4, &[4, 5, 6, 7]),
        (&[0, 1, 2, 3, 4, 5, 6, 7], 8, &[0, 1, 2, 3, 4, 5, 6, 7]),
    ] {
        assert_eq!(node.among(free, gpus).await, chosen, "{gpus} among {free:?}");
    }
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
