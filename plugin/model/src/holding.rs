//! What kubelet says that a container holds.

use std::time::Instant;

use crate::allocation_id::AllocationId;
use crate::cdi_name;

/// One container's devices of one resource, or one share that it has by a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holding {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    /// The extended resource; [`cdi_name::SHARE_KIND`] of a share that a claim has.
    pub resource_name: String,
    /// Device ids, sorted; of a claim's share, the allocation's id.
    pub device_ids: Vec<String>,
}

impl Holding {
    /// Whether a claim has it.
    pub fn is_claim(&self) -> bool {
        self.resource_name == cdi_name::SHARE_KIND
    }

    /// The allocation that this is, if it is one of ours.
    pub fn allocation(&self) -> AllocationId {
        let claimed = || AllocationId::parse(self.device_ids.first()?);
        let of_replicas =
            || AllocationId::of(&self.resource_name, self.device_ids.iter().map(String::as_str));
        self.is_claim().then(claimed).flatten().unwrap_or_else(of_replicas)
    }
}

/// What kubelet knows of pods and devices at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// Pods it knows, with or without devices. 0 after a restart means "unknown".
    pub pods: usize,
    /// Containers with devices, one entry per container and resource.
    pub holdings: Vec<Holding>,
    /// When it was asked: what it says is as old as that.
    pub asked: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claims_share_is_called_by_its_allocation_and_replicas_by_what_they_hash_to() {
        let holding = |resource: &str, id: &str| Holding {
            namespace: "n".into(),
            pod: "p".into(),
            container: "c".into(),
            resource_name: resource.into(),
            device_ids: vec![id.into()],
        };
        let id = AllocationId::of("claim:u", ["r"]);
        let claimed = holding(cdi_name::SHARE_KIND, id.as_str());
        assert_eq!((claimed.allocation(), claimed.is_claim()), (id, true));
        let replica = holding("tessera.dev/gpu", "GPU-a::0");
        assert_eq!(replica.allocation(), AllocationId::of("tessera.dev/gpu", ["GPU-a::0"]));
        // A name that is none of ours stays one that nothing has.
        assert_ne!(holding(cdi_name::SHARE_KIND, "x").allocation(), replica.allocation());
    }
}
