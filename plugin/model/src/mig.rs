//! A MIG instance, and how the configuration names it.

use std::fmt;

/// What a GPU is an instance of. A MIG device is a compute instance in a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigInstance {
    pub parent_uuid: String,
    pub parent_index: u32,
    /// NVML's index of the instance among those of its GPU.
    pub index: u32,
    /// Id of the GPU instance, unique on the GPU. Its compute instances have its memory in common.
    pub gpu_instance: u32,
    /// Id of the compute instance, unique in its GPU instance.
    pub compute_instance: u32,
}

impl MigInstance {
    /// Whether an entry of `gpus.include` or `gpus.exclude` means this instance, by something else
    /// than its own UUID: its GPU's UUID or index, which mean all of the GPU's instances, or
    /// `<GPU's index>:<index>`, the form of NVIDIA's tools, which means it alone.
    pub fn is_named(&self, entry: &str) -> bool {
        entry == self.parent_uuid
            || entry.parse() == Ok(self.parent_index)
            || entry.split_once(':').is_some_and(|(gpu, instance)| {
                gpu.parse() == Ok(self.parent_index) && instance.parse() == Ok(self.index)
            })
    }
}

impl fmt::Display for MigInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.parent_index, self.index)
    }
}
