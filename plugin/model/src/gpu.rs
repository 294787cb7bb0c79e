//! A GPU, or a MIG instance, as everything else sees it.

use std::fmt;

use super::mig::MigInstance;
use strum::IntoStaticStr;

/// A GPU, or a MIG instance, which is a GPU here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// As NVML prints it.
    pub uuid: String,
    /// NVML's index; of a MIG instance, its GPU's.
    pub index: u32,
    /// Minor number of `/dev/nvidiaN`; of a MIG instance, its GPU's.
    pub minor: u32,
    pub name: String,
    pub pci_bus_id: String,
    /// NUMA node, where the platform has any.
    pub numa_node: Option<u32>,
    /// Bytes on the device; of compute instances that have memory in common, an even share of it.
    pub memory_bytes: u64,
    /// Bytes of it that the driver keeps for itself (`reserved` of `nvmlDeviceGetMemoryInfo_v2`).
    pub driver_bytes: u64,
    /// What a CUDA context takes of it, by its multiprocessors; `None` where nobody tells how many.
    pub context_bytes: Option<u64>,
    /// Which instance it is; a whole GPU: `None`.
    pub mig: Option<MigInstance>,
}

/// Bytes that the driver takes while processes run, beyond what it keeps and what contexts take: allocations of the
/// resource manager that are in no process's figure.
pub const DRIVER_MARGIN: u64 = 128 << 20;

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mig {
            None => write!(f, "GPU {} ({}, {})", self.index, self.name, self.uuid),
            Some(instance) => write!(f, "GPU {instance} ({}, {})", self.name, self.uuid),
        }
    }
}

impl Gpu {
    /// Whether an entry of the configuration means this GPU: its UUID, its index, its PCI address, its product
    /// name, or what names its MIG instance. `*` stands for anything in UUIDs and product names.
    pub fn is_named(&self, entry: &str) -> bool {
        entry.parse() == Ok(self.index)
            || fits(entry, &self.uuid)
            || fits(entry, &self.name)
            || is_address(entry, &self.pci_bus_id)
            || self.mig.as_ref().is_some_and(|mig| mig.is_named(entry))
    }

    /// Bytes that are never sold: the setting, or what the driver takes where that is more.
    pub fn reserve(&self, setting: u64) -> u64 {
        match self.driver_bytes {
            0 => setting,
            kept => setting.max(kept.saturating_add(DRIVER_MARGIN)),
        }
    }
}

/// Whether `entry` is this PCI address: `00000000:65:00.0` as NVML writes it, or `0000:65:00.0` as Linux does.
fn is_address(entry: &str, address: &str) -> bool {
    const SHORT: usize = "0000:65:00.0".len();
    let is_whole = entry.len() >= SHORT && entry.len() <= address.len();
    let (zeroes, rest) = address
        .split_at_checked(address.len() - entry.len().min(address.len()))
        .unwrap_or(("", address));
    is_whole && rest.eq_ignore_ascii_case(entry) && zeroes.bytes().all(|byte| byte == b'0')
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

/// Where the GPU does not tell how many multiprocessors it has: enough for most.
const UNKNOWN_BYTES: u64 = 512 << 20;
/// Where a context's constant comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum ContextSource {
    /// `gpus.context_overhead` says it.
    Configured,
    /// By the GPU's multiprocessors and their threads.
    Formula,
    /// For GPUs whose multiprocessors nobody tells.
    Default,
}

impl Gpu {
    /// Bytes that each context is charged, and where the figure comes from: what the configuration
    /// says, else what the GPU's size suggests.
    pub fn context_constant(&self, configured: Option<u64>) -> (u64, ContextSource) {
        match (configured, self.context_bytes) {
            (Some(bytes), _) => (bytes, ContextSource::Configured),
            (None, Some(bytes)) => (bytes, ContextSource::Formula),
            (None, None) => (UNKNOWN_BYTES, ContextSource::Default),
        }
    }

    /// Bytes that each context is charged.
    pub fn context_overhead(&self, configured: Option<u64>) -> u64 {
        self.context_constant(configured).0
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

    #[test]
    fn gpus_are_named_by_pci_address_as_nvml_and_linux_write_it() {
        let gpu = Gpu { pci_bus_id: "00000000:1B:00.0".into(), ..Gpu::example("GPU-a", 2) };
        for entry in ["00000000:1B:00.0", "00000000:1b:00.0", "0000:1b:00.0"] {
            assert!(gpu.is_named(entry), "{entry}");
        }
        let far = Gpu { pci_bus_id: "00010000:1B:00.0".into(), ..Gpu::example("GPU-a", 2) };
        assert!(!far.is_named("0000:1b:00.0") && far.is_named("00010000:1b:00.0"));
        let unknown = Gpu { pci_bus_id: String::new(), ..far };
        for entry in ["0000:1c:00.0", "1b:00.0", "000000000:1B:00.0", ""] {
            assert!(!gpu.is_named(entry) && !unknown.is_named(entry), "{entry}");
        }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_configuration_comes_first() {
        let gpu = |context_bytes| Gpu { context_bytes, ..Gpu::example("GPU-a", 0) };
        for (formula, configured, bytes, source) in [
            (Some(174 * MIB), None, 174 * MIB, ContextSource::Formula),
            (None, None, 512 * MIB, ContextSource::Default),
            (Some(174 * MIB), Some(300 * MIB), 300 * MIB, ContextSource::Configured),
        ] {
            assert_eq!(gpu(formula).context_constant(configured), (bytes, source));
        }
    }
}
