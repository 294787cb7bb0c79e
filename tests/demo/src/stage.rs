//! What the tenants play on: one node of a sandbox.

use std::path::PathBuf;

use toml::{Table, Value};

use tessera_config::Config;
use tessera_fake_kubelet::Kubelet;
use tessera_gpu::Discovery;
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_model::gpu::Gpu;
use tessera_run::{Artefact, SIM_CONTEXT_OVERHEAD, enter_simulation, find_artefact};
use tessera_sandbox::machine::{Machine, Simulation};
use tessera_sandbox::node::{Node, NodeSpec};
use tessera_sandbox::scratch::{PREFIX, Scratch};

/// Tells this program, started again, that the directory is there already.
const SCRATCH: &str = "TESSERA_DEMO_DIR";

/// The demo's directory, and with `simulated` this process on a simulated machine of its own there, for which this
/// program starts itself again.
///
/// # Errors
/// No place for temporary files, no simulated GPU beside this program.
pub(super) fn enter(simulated: bool, keep: bool) -> anyhow::Result<Scratch> {
    let again = std::env::var_os(SCRATCH).map(PathBuf::from);
    let mut scratch = match again {
        Some(path) => Scratch::adopted(path),
        None => Scratch::temporary(PREFIX)?,
    };
    if simulated {
        let simulation = Simulation::of(scratch.path())?;
        std::fs::write(&simulation.config, Machine::default().toml(0))?;
        let dir = [(SCRATCH, scratch.path())];
        let envs: Vec<_> = dir.into_iter().chain(simulation.envs()).collect();
        enter_simulation(&envs)?;
    }
    scratch.occupy()?;
    if keep {
        scratch.keep();
        eprintln!("tessera: everything is kept in {}", scratch.path().display());
    }
    Ok(scratch)
}

/// Everything but the tenants.
pub(super) struct Stage {
    /// GPUs in NVML's order.
    pub gpus: Vec<Gpu>,
    /// The extended resource.
    pub resource: String,
    /// NVML's library, where it is not the loader's.
    pub nvml: Option<PathBuf>,
    /// Replicas of each GPU.
    pub replicas_per_gpu: usize,
    /// Bytes charged for each context; the most of any GPU.
    pub context_overhead: u64,
    /// Kubelet and plugin.
    pub node: Node,
    /// After the plugin, so that it is gone before its files are.
    pub scratch: Scratch,
}

impl Stage {
    /// Starts the stand-in and the plugin, and waits until all replicas can be had.
    ///
    /// # Errors
    /// No GPU, no artefacts, a plugin that ends or does not register.
    pub async fn set(real: bool, scratch: Scratch, config: &Config) -> anyhow::Result<Self> {
        let simulation = (!real).then(|| Simulation::of(scratch.path())).transpose()?;
        let nvml = simulation.as_ref().map(Simulation::nvml);
        let nvml = nvml.or_else(|| config.paths.nvml.clone());
        let spec = NodeSpec {
            name: "demo".into(),
            dir: scratch.path().to_owned(),
            mark: scratch.path().to_owned(),
            shim: find_artefact(Artefact::Shim, None)?,
            simulation,
            nvml: nvml.clone(),
            user: settings(config, real),
            // A port of the machine is not the demo's to take.
            listens: false,
        };
        let mut node = Node::prepare(spec).await?;
        node.start_plugin().await?;
        let gpus = NvmlDiscovery::new(nvml.clone()).gpus(&node.config.gpus)?;
        let of_gpus =
            gpus.iter().map(|gpu| gpu.context_overhead(config.gpus.context_overhead_bytes)).max();
        let context_overhead = of_gpus.filter(|_| real).unwrap_or(SIM_CONTEXT_OVERHEAD);
        let resource = config.resource.name.clone();
        let replicas = node.kubelet.devices(&resource).len();
        anyhow::ensure!(replicas > 0, "the plugin offers nothing of {resource}");
        Ok(Self {
            replicas_per_gpu: replicas / gpus.len().max(1),
            gpus,
            resource,
            nvml,
            context_overhead,
            node,
            scratch,
        })
    }

    /// The stand-in.
    pub fn kubelet(&self) -> &Kubelet {
        &self.node.kubelet
    }

    /// Ends plugin and stand-in.
    pub async fn strike(self) {
        self.node.strike().await;
    }
}

/// What of the user's configuration the demo plays with: shares, and on real GPUs which.
fn settings(config: &Config, real: bool) -> Table {
    let bytes = |bytes: u64| Value::from(bytes.to_string());
    let list = |names: &[String]| Value::from(names.to_vec());
    let memory = config.share.memory_bytes.map_or(Value::from("auto"), bytes);
    let mut keys = vec![
        ("resource", "name", Value::from(config.resource.name.clone())),
        ("share", "replicas", Value::from(i64::from(config.share.replicas))),
        ("share", "memory", memory),
        // Somebody waits for each step of `answer`: short leases, and little in flight when one ends.
        ("compute", "quantum", Value::from("2ms")),
        ("compute", "quantum_min", Value::from("1ms")),
        ("compute", "quantum_max", Value::from("4ms")),
        ("compute", "credit", Value::from("1ms")),
        ("compute", "window", Value::from(4)),
    ];
    if real {
        let overhead = config.gpus.context_overhead_bytes;
        keys.extend([
            ("gpus", "include", list(&config.gpus.include)),
            ("gpus", "exclude", list(&config.gpus.exclude)),
            ("gpus", "reserve", bytes(config.gpus.reserve_bytes)),
            ("gpus", "context_overhead", overhead.map_or(Value::from("auto"), bytes)),
        ]);
    }
    let mut whole = Table::new();
    for (section, key, value) in keys {
        let section = whole.entry(section).or_insert_with(|| Table::new().into());
        if let Some(section) = section.as_table_mut() {
            section.insert(key.to_owned(), value);
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_shares_are_played_with_and_on_real_gpus_the_users_choice_of_them() {
        let mut users = Config::default();
        users.share.replicas = 3;
        users.gpus.exclude = vec!["1".into()];
        for real in [false, true] {
            let text = settings(&users, real).to_string();
            let config = Config::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!(config.share.replicas, 3);
            assert_eq!(config.gpus.exclude == ["1"], real);
        }
    }
}
