//! Changes made by hand at run time: limits of an allocation, and cordoned GPUs.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::audit::Actor;
use crate::record::{Grant, Record};

/// Limits of an allocation that are not those it was allocated with. It ends with its generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Override {
    /// Limits per GPU that it was allocated with, in the order of the pages.
    pub allocated: Vec<Grant>,
    /// By UUID: bytes that it held beyond its limit when that was forced below its use, and has not let
    /// go of yet. They are sold to nobody else.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub owed: BTreeMap<String, u64>,
}

/// Nothing more of a GPU is given out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cordon {
    pub at_unix_ms: i64,
    pub by: Actor,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Cordon {
    /// In the place of a GPU's UUID: the whole node.
    pub const NODE: &'static str = "*";
}

impl fmt::Display for Cordon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cordoned by {}", self.by.who())?;
        match &self.reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

impl Record {
    /// Bytes of a GPU that count as its own by the capacity rule: its limit, and what it has yet to let
    /// go of. `None` where it has no limit there.
    pub fn counted_bytes(&self, uuid: &str) -> Option<u64> {
        let granted = self.grants.iter().filter(|grant| grant.uuid == uuid);
        let limit = granted.map(|grant| grant.memory_limit_bytes).reduce(u64::saturating_add)?;
        Some(limit.saturating_add(self.owed_bytes(uuid)))
    }

    /// See [`Override::owed`].
    pub fn owed_bytes(&self, uuid: &str) -> u64 {
        self.overridden.as_ref().and_then(|over| over.owed.get(uuid).copied()).unwrap_or(0)
    }

    /// The limits that it was allocated with.
    pub fn allocated(&self) -> &[Grant] {
        self.overridden.as_ref().map_or(&self.grants, |over| &over.allocated)
    }

    /// Bytes of a GPU that count for it beyond those that it was allocated: a scheduler that counts allocations does not
    /// know of them.
    pub fn grown_bytes(&self, uuid: &str) -> u64 {
        let allocated = self.allocated().iter().filter(|grant| grant.uuid == uuid);
        let allocated =
            allocated.map(|grant| grant.memory_limit_bytes).fold(0, u64::saturating_add);
        self.counted_bytes(uuid).unwrap_or(0).saturating_sub(allocated)
    }

    /// This record with other limits, and what it owes. Drops what says no more than `grants`.
    pub fn with_limits(&self, grants: Vec<Grant>, owed: BTreeMap<String, u64>) -> Self {
        let allocated = self.allocated().to_vec();
        let overridden = (allocated != grants || !owed.is_empty())
            .then(|| Box::new(Override { allocated, owed }));
        Record { grants, overridden, ..self.clone() }
    }
}
