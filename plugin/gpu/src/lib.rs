//! GPU discovery and health.
#![forbid(unsafe_code)]

pub mod health;
mod list;
pub mod nvml;
mod nvml_near;
mod nvml_watch;

use std::collections::BTreeMap;
use std::time::Duration;
use tessera_model::counted;
use tessera_model::gpu::Gpu;
use tessera_model::topology;

pub use list::SilentGpu;
pub use nvml_near::pcie_root;
use tessera_config as config;
use tessera_model::printable;

/// What labels say of GPUs and nothing else needs. What can't be found out is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// As NVML prints it, for instance `550.54.15`.
    pub driver_version: Option<String>,
    /// The newest CUDA version that the driver speaks, major and minor.
    pub cuda_version: Option<(u32, u32)>,
    /// CUDA compute capability, major and minor, by UUID.
    pub compute_capability: BTreeMap<String, (u32, u32)>,
}

/// Why the GPUs could not be listed. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    #[error(
        "NVML cannot be loaded ({0}); is the NVIDIA driver installed and visible to this process? \
         `paths.nvml` names the library where the loader does not find it"
    )]
    Library(String),
    #[error("NVML does not answer: {0}")]
    Nvml(String),
    /// The driver is there and has nothing, or the configuration leaves nothing.
    #[error("{}", none_left(found))]
    None {
        /// GPUs before the filter.
        found: Vec<Gpu>,
    },
    #[error("{0}")]
    Unsellable(String),
}

impl DiscoveryError {
    pub fn has_gpus(&self) -> bool {
        matches!(self, DiscoveryError::None { found } if !found.is_empty())
    }
}

const LISTED: usize = 16;

fn none_left(found: &[Gpu]) -> String {
    if found.is_empty() {
        return "the driver finds no GPU on this node".to_owned();
    }
    let all = counted::first(found.iter().map(ToString::to_string), LISTED);
    format!("gpus.include and gpus.exclude leave none of this node's GPUs: {}", all.join(", "))
}

/// A process with a context on a GPU, as the driver says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its pid, in the plugin's pid namespace.
    pub pid: u32,
    /// All of its memory on the GPU in bytes; `None` where the driver does not tell
    /// (`NVML_VALUE_NOT_AVAILABLE`).
    pub used_bytes: Option<u64>,
}

/// Where GPUs come from: NVML, or a test.
pub trait Discovery: Send + Sync + 'static {
    /// All GPUs that `wanted` includes and that answer, in NVML's order.
    fn gpus(&self, wanted: &config::Gpus) -> Result<Vec<Gpu>, DiscoveryError>;

    /// What of the machine is not sold although the configuration includes it, and what to do; and what
    /// the configuration names and the machine does not have: as [`Discovery::gpus`] last found.
    fn unsold(&self) -> Vec<String> {
        Vec::new()
    }

    /// GPUs that `wanted` may include and that do not answer, as [`Discovery::gpus`] last found.
    fn silent(&self) -> Vec<SilentGpu> {
        Vec::new()
    }

    fn memory_used(&self, uuid: &str) -> Result<u64, String>;

    /// The processes that have a context on a GPU, each pid once.
    fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, String>;

    /// In how many percent of the last `time` each process kept a GPU busy; `None`: of as much as the driver remembers.
    /// Processes that did nothing are left out.
    fn utilisation(&self, _uuid: &str, _time: Option<Duration>) -> Result<Vec<(u32, u32)>, String> {
        Err("not supported".to_owned())
    }

    /// How near these GPUs are to each other. What can't be found out is unknown, never an
    /// error.
    fn topology(&self, gpus: &[Gpu]) -> topology::Topology {
        topology::Topology::by_numa(gpus)
    }

    /// What else there is to say of these GPUs. Asked when others are included.
    fn facts(&self, _gpus: &[Gpu]) -> Facts {
        Facts::default()
    }

    /// Waits for what happens to these GPUs until `stop` says so, and tells `sink`; asks each whether it
    /// answers every `probe` or so. Called on a thread of its own.
    fn watch(
        &self,
        gpus: &[Gpu],
        probe: std::time::Duration,
        stop: &(dyn Fn() -> bool + Sync),
        sink: &(dyn Fn(health::Observation) + Sync),
    ) -> Result<(), String>;
}

pub fn selected(gpu: &Gpu, include: &[String], exclude: &[String]) -> bool {
    let names = |list: &[String]| list.iter().any(|entry| gpu.is_named(entry));
    names(include) && !names(exclude)
}

/// A sentence for each entry of the list `key` that names none of these GPUs.
pub(crate) fn absent(key: &str, entries: &[String], gpus: &[&Gpu]) -> Vec<String> {
    let named = |entry: &&String| entry == &"*" || gpus.iter().any(|gpu| gpu.is_named(entry));
    let sentence = |entry: &String| {
        let entry = printable::brief(entry, 160);
        format!("{key} names {entry}, which this node does not have")
    };
    entries.iter().filter(|entry| !named(entry)).map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Vec<String> {
        entries.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_that_match_nothing_are_reported() {
        let gpu = Gpu { name: "NVIDIA L4".into(), ..Gpu::example("GPU-a", 2) };
        let reported =
            absent("gpus.exclude", &list(&["*", "2", "NVIDIA L4", "GPU-b", "NVIDIA A*"]), &[&gpu]);
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert_eq!(reported[0], "gpus.exclude names GPU-b, which this node does not have");
        assert_eq!(absent("gpus.include", &list(&["*"]), &[]), Vec::<String>::new());
    }
}
