//! The name of an allocation.

use std::collections::BTreeSet;
use std::fmt;

use sha2::{Digest, Sha256};

/// Name of an allocation: a hash of resource and sorted replica ids, so that a retry, a rebuild and
/// a restart reach the same paths. 32 hexadecimal digits.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct AllocationId(String);

impl AllocationId {
    /// The id of these replicas of this resource. Order and repetition do not matter.
    pub fn of<'a>(resource: &str, replicas: impl IntoIterator<Item = &'a str>) -> Self {
        let replicas: BTreeSet<&str> = replicas.into_iter().collect();
        let mut hash = Sha256::new();
        hash.update(resource.as_bytes());
        for replica in replicas {
            // No name contains NUL, so no two sets run together.
            hash.update([0]);
            hash.update(replica.as_bytes());
        }
        let digest = hash.finalize();
        let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
        AllocationId(digest[..16].iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect())
    }

    /// Reads a directory name back. `None` for what [`AllocationId::of`] would not have written.
    pub fn parse(name: &str) -> Option<Self> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (name.len() == 32 && name.bytes().all(hex)).then(|| AllocationId(name.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
