//! What a front end asks for, and what it comes to. Pure.

use tessera_model::allocation_id::AllocationId;
use tessera_model::origin::Origin;
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;

/// What a front end asks for: one tenant's part of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Replicas of a resource that kubelet assigned to one container.
    Replicas {
        /// The extended resource.
        resource: String,
        /// Replica ids, in any order.
        ids: Vec<String>,
    },
    /// So much of each of some GPUs.
    Share(ShareAsk),
    /// What is recorded already, as it is: for a front end that is asked again for it.
    Recorded(AllocationId),
}

/// A tenant's limits, as a claim or a person states them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareAsk {
    /// The allocation's name.
    pub id: AllocationId,
    /// The front end, and what it calls the share.
    pub origin: Origin,
    /// The limits, one entry a GPU.
    pub parts: Vec<SharePart>,
}

/// Limits on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharePart {
    /// The GPU or MIG instance.
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold.
    pub memory_bytes: u64,
    /// Thousandths of the GPU's time, 1 to 1000.
    pub cores_millis: u32,
    /// What that share of time means.
    pub compute: Compute,
}

/// What one tenant will get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Its name.
    pub id: AllocationId,
    /// The resource of its replicas; empty where no replicas were asked for.
    pub resource: String,
    /// Replica ids, sorted.
    pub replicas: Vec<String>,
    /// Limits per GPU, sorted by UUID.
    pub grants: Vec<Grant>,
    /// The front end that asked.
    pub origin: Origin,
}

impl Plan {
    /// The plan of what is recorded, as it is.
    pub fn of(record: &Record) -> Self {
        Plan {
            id: record.id.clone(),
            resource: record.resource.clone(),
            replicas: record.replicas.clone(),
            grants: record.grants.clone(),
            origin: record.origin.clone(),
        }
    }
}
