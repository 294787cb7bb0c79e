//! `Allocate`: replica ids to a plan. Pure. What becomes of the plan is [`crate::delivery`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use sha2::{Digest, Sha256};
use tessera_region::layout;

use crate::capacity::ReplicaLimit;
use crate::config::Split;
use crate::device::Gpu;
use crate::ledger::Grant;
use crate::replica::Replica;

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
        AllocationId(digest[..16].iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Reads a directory name back. `None` for what [`AllocationId::of`] would not have written.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (name.len() == 32 && name.bytes().all(hex)).then(|| AllocationId(name.to_owned()))
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One GPU as allocation sees it.
#[derive(Clone, Debug)]
pub struct Sold {
    /// The device.
    pub gpu: Gpu,
    /// What one replica of it gets.
    pub limit: ReplicaLimit,
    /// Why nothing of it can be had now.
    pub sick: Option<String>,
}

/// All that can be allocated.
#[derive(Clone, Debug)]
pub struct Catalogue {
    /// The resource's name.
    pub resource: String,
    /// Replicas of each GPU.
    pub replicas: u32,
    /// What to do about several GPUs.
    pub split: Split,
    /// Bytes charged for each context.
    pub context_overhead_bytes: u64,
    /// What the compute share means.
    pub compute: crate::config::Compute,
    /// By UUID.
    pub gpus: BTreeMap<String, Sold>,
}

/// What one container will get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Its name.
    pub id: AllocationId,
    /// Replica ids, sorted.
    pub replicas: Vec<String>,
    /// Limits per GPU, sorted by UUID.
    pub grants: Vec<Grant>,
}

/// Why an allocation is refused. Kubelet shows the message in the pod's events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No replicas at all.
    #[error("no replicas were asked for")]
    Empty,
    /// Not an id of ours.
    #[error(
        "unknown replica {0}: no GPU of this node has it; was the GPU replaced, or does another \
         plugin serve this resource name?"
    )]
    Unknown(String),
    /// The GPU is here but has fewer replicas now.
    #[error(
        "replica {id} is retired: share.replicas is {replicas} now; delete the pod, so that it is \
         scheduled anew"
    )]
    Retired {
        /// The id.
        id: String,
        /// Replicas per GPU now.
        replicas: u32,
    },
    /// The GPU is unhealthy.
    #[error("GPU {uuid} is unhealthy ({reason}); the pod can run when another GPU has room")]
    Dead {
        /// The GPU.
        uuid: String,
        /// Why.
        reason: String,
    },
    /// Several GPUs for one container.
    #[error(
        "the {count} replicas lie on {gpus} GPUs and share.split = \"reject\": no single GPU had \
         that many free; ask for fewer, or set share.split = \"spread\" if the program can use \
         several GPUs"
    )]
    Split {
        /// Replicas asked for.
        count: usize,
        /// GPUs they are on.
        gpus: usize,
    },
    /// More GPUs than a page has room for.
    #[error("{0} GPUs in one container; at most {max} are possible", max = layout::MAX_GPUS)]
    TooManyGpus(usize),
}

/// What `ids` come to.
///
/// # Errors
/// Ids that are unknown or retired, a dead GPU, a split that is not allowed. *Not* a replica that is
/// in use: kubelet owns assignment (an init container's replicas are allocated again to the next
/// container, a deleted pod's to its successor at once).
pub fn plan(catalogue: &Catalogue, ids: &[String]) -> Result<Plan, Refusal> {
    let plan = plan_for_running(catalogue, ids)?;
    for grant in &plan.grants {
        if let Some(reason) = catalogue.gpus.get(&grant.uuid).and_then(|sold| sold.sick.clone()) {
            return Err(Refusal::Dead { uuid: grant.uuid.clone(), reason });
        }
    }
    if plan.grants.len() > 1 && catalogue.split == Split::Reject {
        return Err(Refusal::Split { count: plan.replicas.len(), gpus: plan.grants.len() });
    }
    Ok(plan)
}

/// As [`plan`], for a container that kubelet has already admitted: whatever Allocate would say of the
/// GPU's health and of splits today is no reason to take its quota away.
///
/// # Errors
/// Ids that are unknown or retired.
pub fn plan_for_running(catalogue: &Catalogue, ids: &[String]) -> Result<Plan, Refusal> {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    let replicas: BTreeSet<&String> = ids.iter().collect();
    for id in &replicas {
        let known = Replica::parse(id).and_then(|replica| {
            Some((replica.index, catalogue.gpus.get_key_value(&replica.uuid)?))
        });
        let Some((index, (uuid, _))) = known else {
            return Err(Refusal::Unknown((*id).clone()));
        };
        if index >= catalogue.replicas {
            return Err(Refusal::Retired { id: (*id).clone(), replicas: catalogue.replicas });
        }
        *counts.entry(uuid).or_default() += 1;
    }
    match counts.len() {
        0 => return Err(Refusal::Empty),
        gpus if gpus > layout::MAX_GPUS => return Err(Refusal::TooManyGpus(gpus)),
        _ => {}
    }
    let grants = counts.iter().map(|(uuid, count)| {
        let limit = catalogue.gpus[*uuid].limit;
        Grant {
            uuid: (*uuid).to_owned(),
            memory_limit_bytes: limit.memory_bytes.saturating_mul(u64::from(*count)),
            context_overhead_bytes: catalogue.context_overhead_bytes,
            cores_millis: limit.cores_millis.saturating_mul(*count).min(1000),
            compute: catalogue.compute,
        }
    });
    Ok(Plan {
        id: AllocationId::of(&catalogue.resource, ids.iter().map(String::as_str)),
        replicas: replicas.into_iter().cloned().collect(),
        grants: grants.collect(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Compute;

    fn catalogue() -> Catalogue {
        let sold = |uuid: &str, index| {
            let limit = ReplicaLimit { memory_bytes: 8 << 30, cores_millis: 250 };
            (uuid.to_owned(), Sold { gpu: Gpu::example(uuid, index), limit, sick: None })
        };
        Catalogue {
            resource: "tessera.dev/gpu".into(),
            replicas: 4,
            split: Split::Reject,
            context_overhead_bytes: 1 << 28,
            compute: Compute::Burst,
            gpus: [sold("GPU-a", 0), sold("GPU-b", 1)].into(),
        }
    }

    fn ids(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn replicas_of_one_gpu_add_up() {
        let plan = plan(&catalogue(), &ids(&["GPU-a::3", "GPU-a::1"])).unwrap();
        assert_eq!(plan.replicas, ["GPU-a::1", "GPU-a::3"]);
        assert_eq!(plan.grants.len(), 1);
        assert_eq!(plan.grants[0].memory_limit_bytes, 16 << 30);
        assert_eq!(plan.grants[0].cores_millis, 500);
    }

    #[test]
    fn each_bad_request_is_told_apart() {
        let mut catalogue = catalogue();
        let refused =
            |catalogue: &Catalogue, list: &[&str]| plan(catalogue, &ids(list)).unwrap_err();
        assert_eq!(refused(&catalogue, &[]), Refusal::Empty);
        assert_eq!(refused(&catalogue, &["GPU-z::0"]), Refusal::Unknown("GPU-z::0".into()));
        assert_eq!(refused(&catalogue, &["nonsense"]), Refusal::Unknown("nonsense".into()));
        assert_eq!(
            refused(&catalogue, &["GPU-a::4"]),
            Refusal::Retired { id: "GPU-a::4".into(), replicas: 4 }
        );
        assert_eq!(
            refused(&catalogue, &["GPU-a::0", "GPU-b::0"]),
            Refusal::Split { count: 2, gpus: 2 }
        );
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("XID 79".into());
        assert_eq!(
            refused(&catalogue, &["GPU-a::0"]),
            Refusal::Dead { uuid: "GPU-a".into(), reason: "XID 79".into() }
        );
        assert!(plan_for_running(&catalogue, &ids(&["GPU-a::0"])).is_ok());
    }

    #[test]
    fn a_spread_container_gets_each_gpu_in_uuid_order() {
        let catalogue = Catalogue { split: Split::Spread, ..catalogue() };
        let plan = plan(&catalogue, &ids(&["GPU-b::0", "GPU-a::2", "GPU-b::1"])).unwrap();
        let limits: Vec<_> =
            plan.grants.iter().map(|g| (g.uuid.as_str(), g.memory_limit_bytes >> 30)).collect();
        assert_eq!(limits, [("GPU-a", 8), ("GPU-b", 16)]);
    }

    proptest! {
        #[test]
        fn the_id_depends_on_the_set_alone(
            mut list in prop::collection::vec("GPU-[ab]::[0-3]", 1..8),
        ) {
            let id = AllocationId::of("r/x", list.iter().map(String::as_str));
            list.reverse();
            list.push(list[0].clone());
            prop_assert_eq!(&AllocationId::of("r/x", list.iter().map(String::as_str)), &id);
            prop_assert_ne!(&AllocationId::of("r/y", list.iter().map(String::as_str)), &id);
            prop_assert_eq!(AllocationId::parse(id.as_str()), Some(id));
        }

        #[test]
        fn limits_of_disjoint_plans_never_exceed_the_gpu(
            split in prop::collection::vec(0usize..3, 4),
        ) {
            let catalogue = catalogue();
            let total: u64 = (0..3)
                .filter_map(|group| {
                    let ids: Vec<String> = (0..4)
                        .filter(|n| split[*n] == group)
                        .map(|n| format!("GPU-a::{n}"))
                        .collect();
                    plan(&catalogue, &ids).ok()
                })
                .map(|plan| plan.grants[0].memory_limit_bytes)
                .sum();
            prop_assert_eq!(total, 4 * (8 << 30));
        }
    }
}
