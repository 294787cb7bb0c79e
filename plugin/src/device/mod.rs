//! What GPUs there are and how they feel.

mod context;
pub mod health;
mod mig;
pub mod nvml;
mod nvml_near;
mod nvml_watch;
pub mod topology;

use std::collections::BTreeMap;
use std::fmt;

use crate::config::{self, MOST_PROBLEMS};
use crate::printable;

pub use context::ContextSource;
pub use mig::MigInstance;

/// A GPU, or a MIG instance, which is a GPU here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As NVML prints it.
    pub uuid: String,
    /// NVML's index; of a MIG instance, its GPU's.
    pub index: u32,
    /// Minor number of `/dev/nvidiaN`; of a MIG instance, its GPU's.
    pub minor: u32,
    /// Product name.
    pub name: String,
    /// PCI address.
    pub pci_bus_id: String,
    /// NUMA node, where the platform has any.
    pub numa_node: Option<u32>,
    /// Bytes on the device; of compute instances that have memory in common, an even share of it.
    pub memory_bytes: u64,
    /// What a CUDA context takes of it, by its multiprocessors; `None` where nobody tells how many.
    pub context_bytes: Option<u64>,
    /// What a bare context of such a GPU was seen to take under this driver; `None` where none was.
    pub context_measured_bytes: Option<u64>,
    /// Which instance it is; a whole GPU: `None`.
    pub mig: Option<MigInstance>,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mig {
            None => write!(f, "GPU {} ({}, {})", self.index, self.name, self.uuid),
            Some(instance) => write!(f, "GPU {instance} ({}, {})", self.name, self.uuid),
        }
    }
}

/// What labels say of GPUs and nothing else needs. What can't be found out is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// As NVML prints it, for instance `550.54.15`.
    pub driver_version: Option<String>,
    /// CUDA compute capability, major and minor, by UUID.
    pub compute_capability: BTreeMap<String, (u32, u32)>,
}

/// Why the GPUs could not be listed. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// No driver library.
    #[error(
        "NVML cannot be loaded ({0}); is the NVIDIA driver installed and visible to this process? \
         `paths.nvml` names the library where the loader does not find it"
    )]
    Library(String),
    /// The driver is there but refuses.
    #[error("NVML does not answer: {0}")]
    Nvml(String),
    /// The driver is there and has nothing, or the configuration leaves nothing.
    #[error("{found} GPUs found, none left after gpus.include and gpus.exclude")]
    None {
        /// GPUs before the filter.
        found: usize,
    },
    /// The driver has GPUs, none of which can be sold as it is.
    #[error("{0}")]
    Unsellable(String),
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
    /// All GPUs that `wanted` includes, in NVML's order.
    ///
    /// # Errors
    /// No driver, or no GPUs.
    fn gpus(&self, wanted: &config::Gpus) -> Result<Vec<Gpu>, DiscoveryError>;

    /// What of the machine is not sold although the configuration includes it, and what to do; and what
    /// the configuration names and the machine does not have: as [`Discovery::gpus`] last found.
    fn unsold(&self) -> Vec<String> {
        Vec::new()
    }

    /// Bytes in use on a GPU as the driver says.
    ///
    /// # Errors
    /// The driver's word for a GPU that does not answer.
    fn memory_used(&self, uuid: &str) -> Result<u64, String>;

    /// The processes that have a context on a GPU, each pid once.
    ///
    /// # Errors
    /// The driver's word for a GPU that does not answer.
    fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, String>;

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
    ///
    /// # Errors
    /// Why nothing can be watched.
    fn watch(
        &self,
        gpus: &[Gpu],
        probe: std::time::Duration,
        stop: &(dyn Fn() -> bool + Sync),
        sink: &(dyn Fn(health::Observation) + Sync),
    ) -> Result<(), String>;
}

/// Whether `gpus.include` and `gpus.exclude` leave this GPU in.
#[must_use]
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
    let mut absent = entries.iter().filter(|entry| !named(entry));
    let mut sentences: Vec<String> = absent.by_ref().take(MOST_PROBLEMS).map(sentence).collect();
    let more = absent.count();
    if more > 0 {
        sentences.push(format!("{key} names {more} more that this node does not have"));
    }
    sentences
}

impl Gpu {
    /// Whether an entry of the configuration means this GPU: its UUID, its index, its product name, or
    /// what names its MIG instance. `*` stands for anything in UUIDs and product names.
    #[must_use]
    pub fn is_named(&self, entry: &str) -> bool {
        entry.parse() == Ok(self.index)
            || fits(entry, &self.uuid)
            || fits(entry, &self.name)
            || self.mig.as_ref().is_some_and(|mig| mig.is_named(entry))
    }
}

/// Whether `pattern` with its `*`s covers all of `text`.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The earliest place leaves the most for the others.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
impl Gpu {
    /// A GPU for tests.
    pub(crate) fn example(uuid: &str, index: u32) -> Self {
        Gpu {
            uuid: uuid.into(),
            index,
            minor: index,
            name: "Example".into(),
            pci_bus_id: format!("00000000:{index:02x}:00.0"),
            numa_node: None,
            memory_bytes: 80 << 30,
            context_bytes: None,
            context_measured_bytes: None,
            mig: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Vec<String> {
        entries.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn gpus_are_named_by_product_with_stars() {
        let gpu = Gpu { name: "NVIDIA A100-SXM4-80GB".into(), ..Gpu::example("GPU-a", 2) };
        for entry in ["NVIDIA A100*", "*A100*80GB", "NVIDIA A100-SXM4-80GB", "GPU-*", "*", "2"] {
            assert!(gpu.is_named(entry), "{entry}");
        }
        for entry in ["NVIDIA A100", "A100*", "*A100", "*80GB*80GB", "1", "", "GPU-b", "02x"] {
            assert!(!gpu.is_named(entry), "{entry}");
        }
    }

    #[test]
    fn names_that_match_nothing_are_told() {
        let gpu = Gpu { name: "NVIDIA L4".into(), ..Gpu::example("GPU-a", 2) };
        let told =
            absent("gpus.exclude", &list(&["*", "2", "NVIDIA L4", "GPU-b", "NVIDIA A*"]), &[&gpu]);
        assert_eq!(told.len(), 2, "{told:?}");
        assert_eq!(told[0], "gpus.exclude names GPU-b, which this node does not have");
        assert_eq!(absent("gpus.include", &list(&["*"]), &[]), Vec::<String>::new());
    }

    #[test]
    fn gpus_are_chosen_by_uuid_or_index_and_exclusion_wins() {
        let gpu = Gpu::example("GPU-a", 2);
        assert!(selected(&gpu, &list(&["*"]), &[]));
        assert!(selected(&gpu, &list(&["GPU-a"]), &[]));
        assert!(selected(&gpu, &list(&["2"]), &[]));
        assert!(!selected(&gpu, &list(&["1", "GPU-b"]), &[]));
        assert!(!selected(&gpu, &[], &[]));
        assert!(!selected(&gpu, &list(&["*"]), &list(&["2"])));
        assert!(!selected(&gpu, &list(&["GPU-a"]), &list(&["GPU-a"])));
    }
}
