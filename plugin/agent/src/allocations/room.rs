//! What a new allocation is judged by: room beside those there are, on its own GPUs, not on all of the node's; and that a
//! GPU is sold by one front end at a time: by the one that the configuration names, once nothing of the other is live
//! there any more.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Allocations;
use super::records::Records;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::clock::unix_ms;
use tessera_model::origin::Origin;
use tessera_model::record::{Record, State};
use tessera_rules::allocate::{AdvertisedGpu, Catalogue};
use tessera_rules::capacity::Capacity;
use tessera_rules::front_end::FrontEnd;
use tessera_rules::refusal::Refusal;
use tessera_rules::room::{Lack, Left, WHOLE_MILLIS};
use tessera_store::Change;

impl Allocations {
    /// Refuses what another front end sells, or has not let go of.
    pub(super) fn check_front_end(
        &self,
        catalogue: &Catalogue,
        planned: &Record,
    ) -> Result<(), Refusal> {
        let asks = of_origin(&planned.origin);
        let records = self.records.lock();
        for grant in &planned.grants {
            let Some(sold) = catalogue.gpus.get(&grant.uuid) else { continue };
            if sold.seller != asks {
                let (uuid, seller) = (grant.uuid.clone(), sold.seller.as_str());
                return Err(Refusal::OtherFrontEnd { uuid, seller });
            }
            if let Some((from, count)) = left_by_other(&records, &grant.uuid, sold.seller) {
                let live = match count {
                    1 => "1 share".to_owned(),
                    several => format!("{several} shares"),
                };
                let (uuid, from) = (grant.uuid.clone(), from.as_str());
                return Err(Refusal::Moving { uuid, from, live });
            }
        }
        Ok(())
    }

    /// Whether the front end that does not sell a GPU still has something of it.
    pub fn is_moving(&self, sold: &AdvertisedGpu) -> bool {
        is_moving(&self.records.lock(), sold)
    }

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

const MOST_NAMES: usize = 5;

/// The front end that sells what has this origin; the agent's ledger has no runs.
fn of_origin(origin: &Origin) -> FrontEnd {
    match origin.is_device_plugin() {
        true => FrontEnd::DevicePlugin,
        false => FrontEnd::Dra,
    }
}

/// How many allocations the other front end still has on a GPU, and which one that is; `None` where there are none.
fn left_by_other(records: &Records, uuid: &str, seller: FrontEnd) -> Option<(FrontEnd, usize)> {
    let others = records.on(uuid).map(|record| of_origin(&record.origin));
    let mut others = others.filter(|front_end| *front_end != seller);
    let other = others.next()?;
    Some((other, 1 + others.count()))
}

/// GPUs of `catalogue` that wait for allocations of the front end that does not sell them, and GPUs that are not in
/// it and have claims; a sentence each, which begins with the GPU and names who is waited for.
pub fn kept_by_other<'r>(
    catalogue: &Catalogue,
    records: impl IntoIterator<Item = &'r Arc<Record>>,
) -> Vec<String> {
    // A claim may have several shares of a GPU.
    let mut kept: BTreeMap<(&str, &'static str), BTreeMap<&str, String>> = BTreeMap::new();
    for record in records.into_iter().filter(|record| record.is_live()) {
        let from = of_origin(&record.origin);
        for grant in &record.grants {
            let seller = catalogue.gpus.get(&grant.uuid).map(|sold| sold.seller);
            if seller.map_or(from == FrontEnd::Dra, |seller| seller != from) {
                let asked = record.origin.claim().map(|claim| claim.uid.as_str());
                let who = asked.unwrap_or_else(|| record.id.as_str());
                kept.entry((&grant.uuid, from.as_str())).or_default().insert(who, record.name());
            }
        }
    }
    let sentence = |((uuid, from), names): ((&str, &str), BTreeMap<&str, String>)| {
        let names: Vec<String> = names.into_values().collect();
        let sold = catalogue.gpus.get(uuid);
        let gpu = sold.map_or_else(|| format!("GPU {uuid}"), |sold| sold.gpu.to_string());
        let what = if from == FrontEnd::Dra.as_str() { "claim" } else { "allocation" };
        let (who, until) = match names.len() {
            1 => (format!("1 {what} keeps"), "it ends"),
            several => (format!("{several} {what}s keep"), "they end"),
        };
        let then = match sold {
            Some(sold) => format!("the {} sells it then", sold.seller.as_str()),
            None => "the configuration leaves it out, and nobody sells it then".to_owned(),
        };
        format!("{gpu}: {who} it with {from} until {until} ({}); {then}", list(&names))
    };
    kept.into_iter().map(sentence).collect()
}

/// Names as a sentence has them: of many the first.
pub fn list(names: &[String]) -> String {
    let shown = names[..names.len().min(MOST_NAMES)].join(", ");
    match names.len().saturating_sub(MOST_NAMES) {
        0 => shown,
        more => format!("{shown}, and {more} more"),
    }
}

/// See [`Allocations::is_moving`].
pub(crate) fn is_moving(records: &Records, sold: &AdvertisedGpu) -> bool {
    left_by_other(records, &sold.gpu.uuid, sold.seller).is_some()
}
