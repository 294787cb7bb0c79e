//! What the plugin puts into a quota page.

use super::{Policy, is_name};
use crate::layout::{ALLOCATION_LEN, MAX_BYTES, MAX_GPUS, UUID_LEN};

/// What one allocation may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaSpec {
    /// Hash of resource and sorted replica ids, hex; 1 to 63 printable ASCII characters.
    pub allocation: String,
    /// Grows with every Allocate of this id.
    pub generation: u64,
    /// One entry per GPU, 1 to [`MAX_GPUS`], each UUID once.
    pub gpus: Vec<GpuQuota>,
}

/// What one allocation may use of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuQuota {
    /// The GPU's or MIG instance's UUID as NVML prints it; 1 to 63 printable ASCII characters.
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold, at most [`MAX_BYTES`].
    pub memory_limit_bytes: u64,
    /// Bytes charged for each context.
    pub context_overhead_bytes: u64,
    /// Share of GPU time in thousandths of a GPU.
    pub cores_millis: u32,
    /// How the share is held.
    pub policy: Policy,
}

impl QuotaSpec {
    /// Whether a page can say this; else what is wrong.
    pub(super) fn check(&self) -> Result<(), String> {
        if !is_name(&self.allocation, ALLOCATION_LEN) {
            return Err(format!(
                "allocation id {:?} is not 1 to {} printable ASCII characters",
                self.allocation,
                ALLOCATION_LEN - 1
            ));
        }
        if self.gpus.is_empty() || self.gpus.len() > MAX_GPUS {
            return Err(format!("{} GPUs; an allocation has 1 to {MAX_GPUS}", self.gpus.len()));
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            if !is_name(&gpu.uuid, UUID_LEN) {
                return Err(format!(
                    "GPU UUID {:?} is not 1 to {} printable ASCII characters",
                    gpu.uuid,
                    UUID_LEN - 1
                ));
            }
            if self.gpus[..index].iter().any(|other| other.uuid == gpu.uuid) {
                return Err(format!("GPU {} is there twice", gpu.uuid));
            }
            for bytes in [gpu.memory_limit_bytes, gpu.context_overhead_bytes] {
                if bytes > MAX_BYTES {
                    return Err(format!("{bytes} bytes of GPU {}; at most {MAX_BYTES}", gpu.uuid));
                }
            }
        }
        Ok(())
    }
}
