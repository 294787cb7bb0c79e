//! Room for a new allocation beside those there are. Looks at those of its GPUs, not at all of the
//! node's.

use super::Allocations;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::clock::unix_ms;
use tessera_model::record::{Record, State};
use tessera_rules::allocate::Catalogue;
use tessera_rules::capacity::Capacity;
use tessera_rules::refusal::Refusal;
use tessera_rules::room::{Lack, Left, WHOLE_MILLIS};
use tessera_store::Change;

impl Allocations {
    /// The capacity rule for what was planned, beside what is live and what `change` makes so. What kubelet
    /// was sent lets it never ask for more; but the newest change may not have reached it.
    pub(super) fn check_room(
        &self,
        catalogue: &Catalogue,
        planned: &Record,
        change: &Change,
    ) -> Result<(), Refusal> {
        let config = self.config.get();
        let records = self.records.lock();
        let newer = |id: &AllocationId| change.put.iter().any(|record| record.id == *id);
        for grant in &planned.grants {
            let Some(sold) = catalogue.gpus.get(&grant.uuid) else { continue };
            let live = || {
                let known = records.on(&grant.uuid).map(AsRef::as_ref);
                let known = known.filter(|record| !newer(&record.id));
                known.chain(change.put.iter().filter(|record| record.is_live()))
            };
            let stays = |record: &&Record| {
                record.id != planned.id && !record.overlaps(&planned.resource, &planned.replicas)
            };
            let others = limits(live().filter(stays), &grant.uuid);
            let capacity = Capacity::of(&sold.gpu, &config);
            if planned.origin.is_device_plugin() {
                let before = limits(live(), &grant.uuid);
                if !capacity.grants(before, others, grant.memory_limit_bytes) {
                    return Err(Refusal::NoRoom { uuid: grant.uuid.clone() });
                }
                continue;
            }
            let left = Left::beside(capacity, &grant.uuid, live().filter(stays));
            match left.lack(grant.memory_limit_bytes, grant.cores_millis) {
                None => {}
                Some(Lack::Time) => {
                    return Err(Refusal::CoresOversold {
                        uuid: grant.uuid.clone(),
                        asked_millis: grant.cores_millis,
                        held_millis: WHOLE_MILLIS - left.cores_millis,
                    });
                }
                Some(Lack::Memory | Lack::Both) => {
                    let grown = live().filter(stays).map(|record| record.grown_bytes(&grant.uuid));
                    return Err(Refusal::MemoryOversold {
                        uuid: grant.uuid.clone(),
                        asked_bytes: grant.memory_limit_bytes,
                        held_bytes: others,
                        grown_bytes: grown.fold(0, u64::saturating_add),
                        sellable_bytes: capacity.sellable(),
                    });
                }
            }
        }
        Ok(())
    }

    /// The capacity rule for a container that starts with what is not live: its replicas went to another meanwhile, or
    /// it was released. Kubelet has admitted it; but the limits of others may have been given its room since.
    pub(super) fn check_start(&self, record: &Record) -> Result<(), Refusal> {
        match self.check_room(&self.inventory.catalogue(), record, &Change::default()) {
            Err(Refusal::NoRoom { uuid }) => Err(Refusal::RoomTaken { uuid }),
            checked => checked,
        }
    }

    /// Parks every other live allocation that holds a replica of `record`.
    pub(super) fn supersede(&self, record: &Record, change: &mut Change) {
        let records = self.records.lock();
        // A replica of one lies on a GPU of the other.
        let overlapping = records.beside(record).filter(|other| {
            other.id != record.id && other.overlaps(&record.resource, &record.replicas)
        });
        for other in overlapping {
            let parked = Record { state: State::Parked, ..Record::clone(other) };
            change.put(parked, What::Parked, unix_ms());
        }
    }
}

/// What these may hold of a GPU in all, bytes.
fn limits<'a>(records: impl Iterator<Item = &'a Record>, uuid: &str) -> u64 {
    records.filter_map(|record| record.counted_bytes(uuid)).fold(0, u64::saturating_add)
}
