//! A GPU, or a MIG instance, as everything else sees it.

use std::fmt;

use super::mig::MigInstance;

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

impl Gpu {
    /// A GPU for tests.
    #[must_use]
    pub fn example(uuid: &str, index: u32) -> Self {
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
}
