//! The quota page: what a tenant may use. The plugin writes it, the tenant maps it read-only.
//!
//! A page appears whole ([`create`] links a finished file into place) and its inode never changes
//! while the allocation lives: running containers have it mounted and mapped, so a later
//! [`create`] for the same allocation updates the words in place. Identity (allocation, UUIDs) is
//! immutable once published, which is why it may be plain bytes; everything that changes is an
//! atomic word. The tenant needs no ordering among limits: each word stands for itself. Only the
//! magic orders: `Release` by whoever makes the page, `Acquire` in [`QuotaReader::attach`].

mod reader;
mod writer;

pub use reader::QuotaReader;
pub use writer::{QuotaWriter, abi_in, create, create_from};

use crate::layout::{
    ALLOCATION_LEN, MAX_BYTES, MAX_GPUS, POLICY_BURST, POLICY_NONE, POLICY_STRICT, UUID_LEN,
};

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

/// How a compute share is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Work-conserving: a share is a guarantee, idle time is anybody's.
    Burst,
    /// A share is also a cap.
    Strict,
    /// Compute is not limited.
    None,
}

impl Policy {
    fn to_word(self) -> u32 {
        match self {
            Self::Burst => POLICY_BURST,
            Self::Strict => POLICY_STRICT,
            Self::None => POLICY_NONE,
        }
    }

    fn from_word(word: u32) -> Option<Self> {
        [Self::Burst, Self::Strict, Self::None].into_iter().find(|policy| policy.to_word() == word)
    }
}

impl QuotaSpec {
    /// Whether a page can say this; else what is wrong.
    fn check(&self) -> Result<(), String> {
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

/// Printable, without NUL, and leaving room for one.
fn is_name(name: &str, field: usize) -> bool {
    !name.is_empty() && name.len() < field && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The name in a NUL-padded field; `None` if it is not one.
fn name_in(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|&byte| byte == 0)?;
    let (name, padding) = field.split_at(end);
    let name = core::str::from_utf8(name).ok()?;
    (is_name(name, field.len()) && padding.iter().all(|&byte| byte == 0)).then_some(name)
}

#[cfg(test)]
mod tests;
