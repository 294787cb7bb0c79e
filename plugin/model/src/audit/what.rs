//! The event of a line of the audit trail, with one sentence and one piece of advice for each: the log, Kubernetes events,
//! `explain`, the page and the history use them.
//!
//! A pod's owner has rights in one namespace: no sentence names another tenant or an operator. Those who have more rights
//! get [`Event::detail`] and [`Event::by`] beside it.

use serde::{Deserialize, Serialize};

use super::{Actor, Event};
use crate::health;
use crate::percent::format_cores;
use crate::quantity::format_bytes;
use crate::record::{Grant, Holder};
use crate::sharing::Compute;
use strum::{EnumIter, IntoStaticStr};

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
    #[default]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, EnumIter, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", const_into_str)]
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
        let is_kubelets = matches!(
            self,
            What::Allocated | What::PagesKept | What::Parked | What::Released | What::Adopted
        );
        // The last is what a container does to itself.
        is_kubelets || matches!(self, What::Restored { .. }) || self.is_tenants()
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

impl Event {
    /// What happened, in words. `gpu` is what the reader calls its GPU.
    pub fn sentence(&self, gpu: &str) -> String {
        match &self.what {
            What::Allocated => "kubelet allocated it".to_owned(),
            What::PagesKept => "allocated again while a process of the generation before still used its pages".to_owned(),
            What::Started => "a container started with it".to_owned(),
            What::Parked => "its replicas went to another allocation".to_owned(),
            What::Released => "released".to_owned(),
            What::Adopted => "found on disk without a record, and adopted".to_owned(),
            What::Unaccounted => "its processes hold device memory outside its account, far more than calls obtained; \
                                  it counts against the quota"
                .to_owned(),
            What::SoldByOthers => format!("another device plugin sells {gpu}, too"),
            What::SoldAlone => format!("nobody else sells {gpu} any more"),
            What::Health { from, to } => format!("{gpu} is {} (was {})", to.into_str(), from.into_str()),
            What::QuotaSet { before, after, forced } => {
                let forced = if *forced { ", below what was in use" } else { "" };
                format!("limits set from {} to {}{forced}", limits(before), limits(after))
            }
            What::QuotaReset { before, after } => {
                format!("limits reset from {} to {}", limits(before), limits(after))
            }
            What::Cordoned => format!("{gpu} is cordoned, and new pods do not get it"),
            What::Uncordoned => format!("{gpu} is no longer cordoned"),
            What::ConfigurationReloaded { changes } => {
                format!("another configuration is in force: {}", changes.join("; "))
            }
            What::ConfigurationRefused { problems } => {
                format!("a configuration was refused: {}", problems.join("; "))
            }
            What::RefusedMemory { bytes, charged_bytes, limit_bytes } => {
                self.refused(*bytes, *charged_bytes, *limit_bytes)
            }
            What::DriverRefused => "a request within the quota was refused by the driver: the GPU itself is full, or its \
                                    memory fragmented"
                .to_owned(),
            What::Delayed { waited_ms, within_ms, .. } => {
                let seconds = |ms: &u64| *ms as f64 / 1000.0;
                let within = match within_ms {
                    0 => String::new(),
                    ms => format!(" in {:.1} s", seconds(ms)),
                };
                format!("waited {:.1} s{within} for its part of GPU time", seconds(waited_ms))
            }
            What::Overlapped => {
                "its work went on beyond the end of its lease, so that others ran beside it".to_owned()
            }
            What::Rationed => {
                "it kept to its part of GPU time by itself, because the plugin did not answer".to_owned()
            }
            What::Unlisted => {
                "a process found no free slot, or saw a GPU that was not granted to its container".to_owned()
            }
            What::Tampered { what } => {
                format!("Tessera's files in the container were tampered with: {what}")
            }
            What::Bypassed { pid, bytes } => {
                let uses = match bytes {
                    0 => gpu.to_owned(),
                    bytes => format!("{} of {gpu}", format_bytes(*bytes)),
                };
                match self.id {
                    Some(_) => format!(
                        "process {pid} uses {uses} past Tessera's library; the memory counts against the quota, and no \
                         request of this process is refused"
                    ),
                    None => format!("process {pid} uses {uses}, which is shared, and has no share of it"),
                }
            }
            What::Restored { what } => {
                format!("{what}: missing or damaged, so that no container could start; restored")
            }
        }
    }

    fn refused(&self, bytes: u64, charged_bytes: u64, limit_bytes: u64) -> String {
        let size = |of: &str| match bytes {
            0 => String::new(),
            bytes => format!(" for {of}{}", format_bytes(bytes)),
        };
        let asked = match self.times {
            1 => format!("a request{} was refused", size("")),
            _ => format!("requests{} were refused", size("up to ")),
        };
        let (charged, limit) = (format_bytes(charged_bytes), format_bytes(limit_bytes));
        match limit_bytes {
            0 => format!("{asked}: they go beyond the quota of device memory"),
            _ => format!("{asked}: {charged} of {limit} device memory were in use"),
        }
    }

    /// What can be done about it; empty where nothing need be.
    pub fn advice(&self) -> &'static str {
        match &self.what {
            What::RefusedMemory { .. } => {
                "Ask for a larger share (more replicas of the resource, or a larger claim), or use less: a smaller batch, \
                 a shorter context"
            }
            What::DriverRefused => "It is not this pod's fault: ask those who run the node",
            What::Overlapped => "Give it more CPU, or launch shorter kernels and graphs",
            What::Rationed => "Nothing is to be done if it ends; else ask those who run the node",
            What::Unlisted => {
                "End processes that use CUDA without need, and leave CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES as \
                 they are"
            }
            What::Delayed { .. } => {
                "Others want the GPU as well: ask for a larger share, or for one whose policy is burst where it is strict"
            }
            What::Bypassed { .. } if self.id.is_some() => {
                "Link programs dynamically, and leave LD_PRELOAD and /etc/ld.so.preload as they are"
            }
            What::Bypassed { .. } => {
                "Request a share, or keep the GPU from the pod: it must not be privileged, and NVIDIA_VISIBLE_DEVICES \
                 (which CUDA's images set to all) must be void"
            }
            What::Unaccounted => {
                "Large modules and kernels' local memory look like that, and those who run the node can then raise \
                 gpus.context_overhead; else something goes past Tessera's library: link programs dynamically, and leave \
                 LD_PRELOAD as it is"
            }
            What::Tampered { .. } => {
                "The pod's volumes, a process of it or somebody on the node did that: mount nothing over these files, and \
                 write to none of them"
            }
            What::Health { to: health::State::Unhealthy, .. } => {
                "New pods do not get this GPU. This one is left alone, but its work on the GPU may have failed: if CUDA \
                 calls fail, delete the pod, so that its controller starts another"
            }
            What::Health { to: health::State::Healthy, .. } => {
                "If CUDA calls still fail, restart the pod"
            }
            What::Cordoned => {
                "This one runs on, unless the operator or dra.no_execute evicts it: ask those who run the node how long it \
                 may stay"
            }
            _ => "",
        }
    }

    /// What the line has beyond its sentence: why, in the driver's, an operator's or a finding's words. It may name others
    /// unless [`Event::reason_is_own`].
    pub fn detail(&self) -> &str {
        self.reason.as_deref().unwrap_or_default()
    }
}

/// On which GPUs is said where there are several.
fn limits(limits: &[Limits]) -> String {
    let one = |l: &Limits| {
        let (memory, cores) = (format_bytes(l.memory_limit_bytes), format_cores(l.cores_millis));
        let on = if limits.len() > 1 { format!(" on {}", l.uuid) } else { String::new() };
        format!("{memory}, {cores} {}{on}", l.compute.into_str())
    };
    limits.iter().map(one).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_the_name_that_its_line_has() {
        for what in What::examples() {
            let json = serde_json::to_value(&what).unwrap();
            let name = json.as_str().or_else(|| Some(json.as_object()?.keys().next()?));
            assert_eq!(name, Some(what.into_str()));
            assert_eq!(serde_json::from_value::<What>(json).unwrap(), what);
        }
    }

    #[test]
    fn a_refusal_says_what_was_asked_and_what_was_in_use() {
        let of = |bytes, limit_bytes, times| {
            let what = What::RefusedMemory { bytes, charged_bytes: 3 << 30, limit_bytes };
            Event::of_node(what, 0).times(times).sentence("")
        };
        let one = "a request for 5 GiB was refused: 3 GiB of 7 GiB device memory were in use";
        assert_eq!(of(5 << 30, 7 << 30, 1), one);
        assert!(
            of(5 << 30, 7 << 30, 2).starts_with("requests for up to 5 GiB were refused: 3 GiB")
        );
        assert!(of(0, 0, 1).starts_with("a request was refused: "));
    }
}
