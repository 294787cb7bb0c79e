//! The quota page: what a tenant may use. The plugin writes it, the tenant maps it read-only.
//!
//! A page appears whole ([`create`] links a finished file into place) and its inode never changes
//! while the allocation lives: running containers have it mounted and mapped, so a later
//! [`create`] for the same allocation updates the words in place. Identity (allocation, UUIDs) is
//! immutable once published, which is why it may be plain bytes; everything that changes is an
//! atomic word. The tenant needs no ordering among limits: each word stands for itself. Only the
//! magic orders: `Release` by the maker of the page, `Acquire` in [`QuotaReader::attach`].

mod reader;
#[cfg(feature = "std")]
mod writer;

pub use reader::QuotaReader;
#[cfg(feature = "std")]
pub use writer::{GpuQuota, QuotaSpec, QuotaWriter, abi_in, create, create_from};

use crate::layout::{POLICY_BURST, POLICY_NONE, POLICY_STRICT};

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
