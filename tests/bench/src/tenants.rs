//! A node with 64 idle pods on eight simulated GPUs: as large as those are on which views are measured.

use tessera_fake_kubelet::{Container, Pod};

use crate::node::{Api, Node, RESOURCE, Setup};
use crate::world::World;

/// Pods, one share of a GPU each.
pub const TENANTS: usize = 64;
/// GPUs that they are on.
pub const GPUS: usize = 8;
/// The pods' namespace, and the beginning of their names; a number follows.
pub const NAMESPACE: &str = "bench";
/// See above.
pub const POD: &str = "pod-";

/// The plugin on a machine of its own, of this name.
///
/// # Errors
/// The file system's.
pub fn setup(world: &World, name: &str, api: Api, history: bool) -> anyhow::Result<Setup> {
    let config = "[[gpu]]\nmemory = \"80GiB\"\n".repeat(GPUS);
    let file = world.path(&format!("{name}.toml"));
    std::fs::write(&file, config)?;
    let state = world.path(&format!("{name}.state"));
    Ok(Setup {
        artefacts: world.artefacts.clone(),
        envs: vec![("SIMGPU_CONFIG", file), ("SIMGPU_STATE", state)],
        gpus: GPUS,
        replicas: TENANTS / GPUS,
        memory: (256 << 20, 32 << 20),
        fsync: true,
        log: "warn,tessera_web=info",
        api,
        history,
    })
}

/// Starts it, and all pods on it.
///
/// # Errors
/// A plugin that does not start, register or allocate.
pub async fn start(setup: &Setup) -> anyhow::Result<Node> {
    let node = Node::start(setup).await?;
    for number in 0..TENANTS {
        let container = Container::new("main").asking(RESOURCE, 1);
        node.kubelet.run(&Pod::new(NAMESPACE, &format!("{POD}{number}")).with(container)).await?;
    }
    Ok(node)
}
