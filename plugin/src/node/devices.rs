//! What kubelet is told of devices, by the capacity rule.

use std::collections::{BTreeMap, BTreeSet};

use super::{Node, lock};
use crate::allocate::{AllocationId, Catalogue};
use crate::capacity::Capacity;
use crate::coexist::withhold;
use crate::kubelet::Device;
use crate::ledger::Record;
use crate::replica::Replica;

/// Every replica with its health: those of sick GPUs, free ones for which there is no room beside the
/// live limits, and held ones that are retired, are unhealthy.
pub(super) fn advertise(
    catalogue: &Catalogue,
    reserve_bytes: u64,
    records: &BTreeMap<AllocationId, Record>,
) -> Vec<Device> {
    let live: Vec<&Record> = records.values().filter(|record| record.is_live()).collect();
    let mut devices = Vec::new();
    for (uuid, sold) in &catalogue.gpus {
        let held: Vec<u32> = live
            .iter()
            .filter(|record| record.resource == catalogue.resource)
            .flat_map(|record| &record.replicas)
            .filter_map(|id| Replica::parse(id))
            .filter(|replica| replica.uuid == *uuid)
            .map(|replica| replica.index)
            .collect();
        let live_bytes: u64 = live
            .iter()
            .flat_map(|record| &record.grants)
            .filter(|grant| grant.uuid == *uuid)
            .fold(0, |sum, grant| sum.saturating_add(grant.memory_limit_bytes));
        let free: Vec<u32> = (0..catalogue.replicas).filter(|n| !held.contains(n)).collect();
        let capacity = Capacity { memory_bytes: sold.gpu.memory_bytes, reserve_bytes };
        let count = u32::try_from(free.len()).unwrap_or(u32::MAX);
        let room = capacity.healthy_free(live_bytes, count, sold.limit.memory_bytes);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let mut add = |index, healthy| {
            devices.push(Device {
                id: Replica { uuid: uuid.clone(), index }.to_string(),
                healthy: healthy && sold.sick.is_none(),
                numa_node: sold.gpu.numa_node,
            });
        };
        for index in 0..catalogue.replicas {
            let rank = free.iter().position(|n| *n == index);
            add(index, rank.is_none_or(|rank| rank < room));
        }
        let mut retired: Vec<u32> = held.into_iter().filter(|n| *n >= catalogue.replicas).collect();
        retired.sort_unstable();
        for index in retired {
            add(index, false);
        }
    }
    devices
}

/// Replicas that a live allocation holds.
fn held(records: &BTreeMap<AllocationId, Record>) -> BTreeSet<String> {
    let live = records.values().filter(|record| record.is_live());
    live.flat_map(|record| record.replicas.iter().cloned()).collect()
}

impl Node {
    /// Works out anew what kubelet is told, and tells it if it changed.
    pub(super) fn refresh_devices(&self) {
        let catalogue = self.catalogue();
        let reserve = self.config.gpus.reserve_bytes;
        let (mut devices, held) = {
            let records = lock(&self.records);
            (advertise(&catalogue, reserve, &records), held(&records))
        };
        withhold(&mut devices, |uuid| self.withheld(uuid).is_some(), &held);
        self.devices.send_if_modified(|current| {
            let changed = *current != devices;
            *current = devices;
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::ReplicaLimit;
    use crate::config::{Compute, Split};
    use crate::device::Gpu;
    use crate::ledger::{Grant, State};

    const GIB: u64 = 1 << 30;

    fn catalogue() -> Catalogue {
        let limit = ReplicaLimit { memory_bytes: 20 * GIB, cores_millis: 250 };
        let sold = crate::allocate::Sold { gpu: Gpu::example("GPU-a", 0), limit, sick: None };
        Catalogue {
            resource: "r".into(),
            replicas: 4,
            split: Split::Reject,
            context_overhead_bytes: 0,
            compute: Compute::Burst,
            gpus: [("GPU-a".to_owned(), sold)].into(),
        }
    }

    fn held(replicas: &[&str], memory: u64) -> BTreeMap<AllocationId, Record> {
        let id = AllocationId::of("r", replicas.iter().copied());
        let record = Record {
            id: id.clone(),
            resource: "r".into(),
            generation: 1,
            replicas: replicas.iter().map(ToString::to_string).collect(),
            grants: vec![Grant {
                uuid: "GPU-a".into(),
                memory_limit_bytes: memory,
                context_overhead_bytes: 0,
                cores_millis: 250,
                compute: Compute::Burst,
            }],
            state: State::Started,
            allocated_unix_ms: 0,
            started_unix_ms: 0,
            holder: None,
            predecessor: None,
            shim: None,
        };
        [(id, record)].into()
    }

    fn health(devices: &[Device]) -> String {
        devices.iter().map(|device| if device.healthy { 'H' } else { 'u' }).collect()
    }

    #[test]
    fn a_sick_gpu_makes_all_its_replicas_unhealthy() {
        let mut catalogue = catalogue();
        assert_eq!(health(&advertise(&catalogue, 0, &BTreeMap::new())), "HHHH");
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("XID 79".into());
        assert_eq!(health(&advertise(&catalogue, 0, &BTreeMap::new())), "uuuu");
    }

    #[test]
    fn limits_granted_before_a_change_of_configuration_take_free_replicas_away() {
        // One replica still holds the 40 GiB it was sold with.
        let devices = advertise(&catalogue(), 0, &held(&["GPU-a::0"], 40 * GIB));
        assert_eq!(health(&devices), "HHHu");
        let devices = advertise(&catalogue(), GIB, &held(&["GPU-a::1"], 40 * GIB));
        assert_eq!(health(&devices), "HHuu");
    }

    #[test]
    fn a_retired_replica_is_listed_while_it_is_held() {
        let devices = advertise(&catalogue(), 0, &held(&["GPU-a::7"], 20 * GIB));
        assert_eq!(health(&devices), "HHHuu");
        assert_eq!(devices[4].id, "GPU-a::7");
    }

    #[test]
    fn parked_limits_are_not_counted() {
        let mut records = held(&["GPU-a::0"], 80 * GIB);
        records.values_mut().for_each(|record| record.state = State::Parked);
        assert_eq!(health(&advertise(&catalogue(), 0, &records)), "HHHH");
    }
}
