//! The event of a line of the audit trail.

use serde::{Deserialize, Serialize};

use super::Actor;
use crate::health;
use crate::record::{Grant, Holder};
use crate::sharing::Compute;

/// Limits on one GPU, as the trail tells them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold.
    pub memory_limit_bytes: u64,
    /// Thousandths of the GPU's time.
    pub cores_millis: u32,
    /// What that share means.
    pub compute: Compute,
}

impl From<&Grant> for Limits {
    fn from(grant: &Grant) -> Self {
        Limits {
            uuid: grant.uuid.clone(),
            memory_limit_bytes: grant.memory_limit_bytes,
            cores_millis: grant.cores_millis,
            compute: grant.compute,
        }
    }
}

/// The allocation that had what another waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Behind {
    /// Said in the line's reason, if at all: a line of an earlier version.
    #[default]
    Unsaid,
    Nobody,
    Allocation {
        id: String,
        /// The container that holds it, if known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holder: Option<Holder>,
    },
}

/// What happened. Those that [`What::is_tenants`] a container can cause itself; what they say of it is
/// the container's word or was seen from outside, and they have room of their own in the trail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    Allocated,
    /// Kubelet allocated it while a process of the generation before still used its pages.
    PagesKept,
    Started,
    /// Its replicas went to another allocation.
    Parked,
    /// Kubelet no longer knows it and nothing uses its pages.
    Released,
    Adopted,
    /// A process of it holds device memory outside its account.
    Unaccounted,
    /// Another plugin sells a GPU of ours, too.
    SoldByOthers,
    /// Nobody else sells it any more.
    SoldAlone,
    /// A GPU's health went from one state to another.
    Health {
        from: health::State,
        to: health::State,
    },
    /// Somebody changed its limits while it ran.
    QuotaSet {
        before: Vec<Limits>,
        after: Vec<Limits>,
        /// Below what was in use, which was asked for.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        forced: bool,
    },
    /// Somebody gave it back the limits that it was allocated with.
    QuotaReset {
        before: Vec<Limits>,
        after: Vec<Limits>,
    },
    /// Nothing more of a GPU is given out until it is uncordoned.
    Cordoned,
    Uncordoned,
    ConfigurationReloaded {
        changes: Vec<String>,
    },
    /// A new configuration was refused; the one before stays in force.
    ConfigurationRefused {
        /// What is wrong with it, `file:line: key: …` each.
        problems: Vec<String>,
    },
    /// A request for device memory was refused because of the quota.
    RefusedMemory {
        /// Bytes asked for, of the largest request that is known; 0 where none is.
        #[serde(default)]
        bytes: u64,
        #[serde(default)]
        charged_bytes: u64,
        /// The limit at that time, bytes.
        #[serde(default)]
        limit_bytes: u64,
    },
    /// It waited long for its part of GPU time.
    Delayed {
        /// How long in all, milliseconds.
        waited_ms: u64,
        /// Within how long, milliseconds; 0 where that is not known.
        #[serde(default)]
        within_ms: u64,
        /// The allocation that had the lease.
        #[serde(default)]
        behind: Behind,
    },
    /// The driver refused memory that the quota allowed.
    DriverRefused,
    /// It drained a GPU too late, so that others ran beside it.
    Overlapped,
    /// A process of it kept to its part of GPU time by itself, because the arbiter was silent.
    Rationed,
    /// A process of it found no free slot, or saw a GPU that it was not given.
    Unlisted,
    /// Something that holds it to its quota was changed or is missing.
    Tampered {
        what: String,
    },
    /// A process of it uses the GPU past the shim, or a process that nobody can explain does.
    Bypassed {
        /// Its pid on the host; 0 where unknown.
        #[serde(default)]
        pid: u32,
        /// Device memory that it holds, bytes.
        #[serde(default)]
        bytes: u64,
    },
    /// Something without which its containers cannot start was missing or damaged, and is whole again.
    Restored {
        what: String,
    },
}

impl What {
    pub fn name(&self) -> &'static str {
        match self {
            What::Allocated => "allocated",
            What::PagesKept => "pages-kept",
            What::Started => "started",
            What::Parked => "parked",
            What::Released => "released",
            What::Adopted => "adopted",
            What::Unaccounted => "unaccounted",
            What::SoldByOthers => "sold-by-others",
            What::SoldAlone => "sold-alone",
            What::Health { .. } => "health",
            What::QuotaSet { .. } => "quota-set",
            What::QuotaReset { .. } => "quota-reset",
            What::Cordoned => "cordoned",
            What::Uncordoned => "uncordoned",
            What::ConfigurationReloaded { .. } => "configuration-reloaded",
            What::ConfigurationRefused { .. } => "configuration-refused",
            What::RefusedMemory { .. } => "refused-memory",
            What::Delayed { .. } => "delayed",
            What::DriverRefused => "driver-refused",
            What::Overlapped => "overlapped",
            What::Rationed => "rationed",
            What::Unlisted => "unlisted",
            What::Tampered { .. } => "tampered",
            What::Bypassed { .. } => "bypassed",
            What::Restored { .. } => "restored",
        }
    }

    /// Whether a container can cause it, as often as it likes.
    pub fn is_tenants(&self) -> bool {
        matches!(
            self,
            What::Started
                | What::Unaccounted
                | What::RefusedMemory { .. }
                | What::Delayed { .. }
                | What::DriverRefused
                | What::Overlapped
                | What::Rationed
                | What::Unlisted
                | What::Tampered { .. }
                | What::Bypassed { .. }
        )
    }

    /// Whether the reason of such a line is about its own allocation alone: the plugin wrote it, and it names no
    /// other. What operators write may name anybody.
    pub(super) fn reason_is_own(&self) -> bool {
        match self {
            // An earlier version named the other in the reason.
            What::Delayed { behind, .. } => *behind != Behind::Unsaid,
            What::Allocated
            | What::PagesKept
            | What::Parked
            | What::Released
            | What::Adopted
            | What::Restored { .. } => true,
            // What a container does to itself.
            what => what.is_tenants(),
        }
    }

    /// The usual originator, for lines that name none.
    pub(super) fn usually_by(&self) -> Actor {
        match self {
            What::Allocated | What::PagesKept | What::Started | What::Parked => Actor::Kubelet,
            What::Health { .. } => Actor::Driver,
            What::ConfigurationReloaded { .. } | What::ConfigurationRefused { .. } => {
                Actor::Configuration
            }
            what if what.is_tenants() => Actor::Tenant,
            _ => Actor::Plugin,
        }
    }

    /// Of two in a row: the later one, with what has to be added up or compared.
    pub(super) fn after(self, before: &What) -> What {
        match (before, self) {
            (
                What::RefusedMemory { bytes: before, .. },
                What::RefusedMemory { bytes, charged_bytes, limit_bytes },
            ) => What::RefusedMemory { bytes: bytes.max(*before), charged_bytes, limit_bytes },
            (
                What::Delayed { waited_ms: waited, within_ms: within, .. },
                What::Delayed { waited_ms, within_ms, behind },
            ) => What::Delayed {
                waited_ms: waited_ms.saturating_add(*waited),
                within_ms: within_ms.saturating_add(*within),
                behind,
            },
            (_, what) => what,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_the_name_that_its_line_has() {
        for what in What::examples() {
            let json = serde_json::to_value(&what).unwrap();
            let name = json.as_str().or_else(|| Some(json.as_object()?.keys().next()?));
            assert_eq!(name, Some(what.name()));
            assert_eq!(serde_json::from_value::<What>(json).unwrap(), what);
        }
    }
}
