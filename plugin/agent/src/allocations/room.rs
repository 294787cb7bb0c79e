//! What a new allocation is judged by: room beside those there are, on its own GPUs, not on all of the node's; and that a
//! GPU is sold by one front end at a time: by the one that the configuration names, once nothing of the other is live
//! there any more.
//!
//! What is offered of each GPU, by the capacity rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_kubelet::Device;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::clock::unix_ms;
use tessera_model::counted::{self, plural};
use tessera_model::origin::Origin;
use tessera_model::record::{Record, State};
use tessera_model::replica::Replica;
use tessera_rules::allocate::{AdvertisedGpu, Catalogue, Refusal};
use tessera_rules::capacity::{Capacity, Held, Left, WHOLE_MILLIS, judge};
use tessera_rules::shares::FrontEnd;
use tessera_store::Change;

use super::{Allocations, Records};
use crate::inventory::Withheld;

impl Allocations {
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
                let (uuid, seller) = (grant.uuid.clone(), sold.seller.into_str());
                return Err(Refusal::OtherFrontEnd { uuid, seller });
            }
            if let Some((from, count)) = left_by_other(&records, &grant.uuid, sold.seller) {
                let (uuid, from, live) =
                    (grant.uuid.clone(), from.into_str(), plural(count, "share"));
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
                let known = on(&records, &grant.uuid).filter(|record| !newer(&record.id));
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
            if grant.memory_limit_bytes > left.memory_bytes {
                let grown = live().filter(stays).map(|record| record.grown_bytes(&grant.uuid));
                return Err(Refusal::MemoryOversold {
                    uuid: grant.uuid.clone(),
                    asked_bytes: grant.memory_limit_bytes,
                    held_bytes: others,
                    grown_bytes: grown.fold(0, u64::saturating_add),
                    sellable_bytes: capacity.sellable(),
                });
            }
            if grant.cores_millis > left.cores_millis {
                return Err(Refusal::CoresOversold {
                    uuid: grant.uuid.clone(),
                    asked_millis: grant.cores_millis,
                    held_millis: WHOLE_MILLIS - left.cores_millis,
                });
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
        let overlapping = records.values().filter(|other| {
            other.is_live()
                && other.id != record.id
                && other.overlaps(&record.resource, &record.replicas)
        });
        for other in overlapping {
            let parked = Record { state: State::Parked, ..Record::clone(other) };
            change.put(parked, What::Parked, unix_ms());
        }
    }
}

/// Bytes of a GPU that count as theirs by the capacity rule.
pub(super) fn limits<'a>(records: impl Iterator<Item = &'a Record>, uuid: &str) -> u64 {
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
    let others = on(records, uuid).map(|record| of_origin(&record.origin));
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
                kept.entry((&grant.uuid, from.into_str())).or_default().insert(who, record.name());
            }
        }
    }
    let sentence = |((uuid, from), names): ((&str, &str), BTreeMap<&str, String>)| {
        let names: Vec<String> = names.into_values().collect();
        let sold = catalogue.gpus.get(uuid);
        let gpu = sold.map_or_else(|| format!("GPU {uuid}"), |sold| sold.gpu.to_string());
        let what = if from == FrontEnd::Dra.into_str() { "claim" } else { "allocation" };
        let (who, until) = match names.len() {
            1 => (format!("1 {what} keeps"), "it ends"),
            several => (format!("{several} {what}s keep"), "they end"),
        };
        let then = match sold {
            Some(sold) => format!("the {} sells it then", sold.seller.into_str()),
            None => "the configuration leaves it out, and nobody sells it then".to_owned(),
        };
        format!("{gpu}: {who} it with {from} until {until} ({}); {then}", list(&names))
    };
    kept.into_iter().map(sentence).collect()
}

/// Names as a sentence has them: of many the first.
pub fn list(names: &[String]) -> String {
    counted::first(names.iter().cloned(), MOST_NAMES).join(", ")
}

pub(crate) fn is_moving(records: &Records, sold: &AdvertisedGpu) -> bool {
    left_by_other(records, &sold.gpu.uuid, sold.seller).is_some()
}

/// Live records with a limit on a GPU, in the order of ids.
pub(super) fn on<'r>(records: &'r Records, uuid: &'r str) -> impl Iterator<Item = &'r Record> {
    let is_on = move |record: &&Record| {
        record.is_live() && record.grants.iter().any(|grant| grant.uuid == uuid)
    };
    records.values().map(|record| &**record).filter(is_on)
}

/// Devices by resource: all that the configuration sells, and retired ones while they have records.
pub(crate) type Offers = BTreeMap<String, Vec<Device>>;

/// Every replica with its health: those of sick GPUs, those for which there is no room by the
/// capacity rule, and held ones that are retired, are unhealthy.
pub(crate) fn offers(
    catalogue: &Catalogue,
    records: &Records,
    withheld: &dyn Fn(&str) -> Withheld,
) -> Offers {
    let mut stakes: BTreeMap<&str, Vec<Stake>> = BTreeMap::new();
    for record in records.values().filter(|record| record.is_live()) {
        let uuids: BTreeSet<&str> = record.grants.iter().map(|grant| grant.uuid.as_str()).collect();
        for uuid in uuids {
            stakes.entry(uuid).or_default().extend(stake(record, uuid));
        }
    }
    let held = records.values().map(|record| &record.resource).filter(|name| !name.is_empty());
    let names: BTreeSet<&String> = catalogue.resources.keys().chain(held).collect();
    let mut all: Offers = names.into_iter().map(|name| (name.clone(), Vec::new())).collect();
    // GPUs that are gone, or that the configuration leaves out now, have records alone.
    let gone = stakes.keys().copied().filter(|uuid| !catalogue.gpus.contains_key(*uuid));
    for uuid in catalogue.gpus.keys().map(String::as_str).chain(gone) {
        let sold = catalogue.gpus.get(uuid);
        let numa_node = sold.and_then(|sold| sold.gpu.numa_node);
        let withheld = sold.map(|_| withheld(uuid)).unwrap_or_default();
        let sold = sold.map(|sold| (sold, catalogue.reserve_bytes));
        let stakes = stakes.get(uuid).map(Vec::as_slice).unwrap_or_default();
        for (resource, replicas) in offer(sold, withheld, stakes) {
            let Some(devices) = all.get_mut(&resource) else { continue };
            devices.extend(replicas.into_iter().map(|(index, healthy)| Device {
                id: Replica::id(uuid, index),
                healthy,
                numa_node,
            }));
        }
    }
    all
}

/// Replicas of a GPU by resource, in the configuration's order: index, and whether it is healthy.
type Offer = Vec<(String, Vec<(u32, bool)>)>;

struct Stake<'a> {
    resource: &'a str,
    granted_bytes: u64,
    indexes: Vec<u32>,
    is_foreign: bool,
}

/// `None` where only a limit counts, and the record has none on this GPU.
fn stake<'a>(record: &'a Record, uuid: &str) -> Option<Stake<'a>> {
    let granted_bytes = record.counted_bytes(uuid)?;
    let held = record.replicas.iter().filter_map(|id| Replica::split(id));
    let indexes = held.filter(|(gpu, _)| *gpu == uuid).map(|(_, index)| index).collect();
    let is_foreign = !record.origin.is_device_plugin();
    Some(Stake { resource: &record.resource, granted_bytes, indexes, is_foreign })
}

/// `sold`: with `gpus.reserve`, where the configuration has it.
fn offer(sold: Option<(&AdvertisedGpu, u64)>, withheld: Withheld, stakes: &[Stake<'_>]) -> Offer {
    let shares = sold.map(|(sold, _)| sold.shares.as_slice()).unwrap_or_default();
    // The holder of each replica.
    let mut holders: Vec<Vec<Option<usize>>> =
        shares.iter().map(|share| vec![None; to_usize(share.count)]).collect();
    let mut held = Vec::with_capacity(stakes.len());
    let mut retired: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    for (holder, stake) in stakes.iter().enumerate() {
        let at = shares.iter().position(|share| share.resource == stake.resource);
        let mut regrant = 0u64;
        for index in &stake.indexes {
            match at.and_then(|at| Some((at, holders[at].get_mut(to_usize(*index))?))) {
                Some((at, place)) => {
                    *place = Some(holder);
                    regrant = regrant.saturating_add(shares[at].memory_bytes);
                }
                None => {
                    retired.entry(stake.resource).or_default().insert(*index);
                }
            }
        }
        held.push(Held { granted_bytes: stake.granted_bytes, regrant_bytes: regrant });
    }
    let mut free = Vec::new();
    for (share, holders) in shares.iter().zip(&holders) {
        let count = holders.iter().filter(|holder| holder.is_none()).count();
        free.extend(std::iter::repeat_n(share.memory_bytes, count));
    }
    let capacity = sold.map(|(sold, reserve)| Capacity::within(&sold.gpu, reserve));
    let sellable = capacity.map_or(0, Capacity::sellable);
    let verdict = judge(sellable, &held, &free);
    let mut free = verdict.free.into_iter();
    // A GPU is sold by one front end at a time.
    let is_moving = stakes.iter().any(|stake| stake.is_foreign);
    let offers_free = withheld == Withheld::Nothing && !is_moving;
    let is_sick = sold.is_none_or(|(sold, _)| sold.sick.is_some());
    let mut all = Offer::new();
    for (share, holders) in shares.iter().zip(holders) {
        let mut health = |holder: Option<usize>| {
            let room = match holder {
                Some(holder) => verdict.held[holder],
                None => free.next().unwrap_or(false) && offers_free,
            };
            room && !is_sick && withheld != Withheld::All
        };
        let replicas = (0..share.count).zip(holders).map(|(index, holder)| (index, health(holder)));
        all.push((share.resource.clone(), replicas.collect()));
    }
    for (resource, indexes) in retired {
        let replicas = indexes.into_iter().map(|index| (index, false)).collect();
        all.push((resource.to_owned(), replicas));
    }
    all
}

fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_config::Config;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::gpu::Gpu;
    use tessera_model::record::{Grant, State};
    use tessera_model::sharing::Compute;

    const GIB: u64 = 1 << 30;

    fn catalogue(settings: &str) -> Catalogue {
        let config = Config::parse(&format!("[gpus]\nreserve = 0\n{settings}")).unwrap();
        Catalogue::new(&[Gpu::example("GPU-a", 0)], &config)
    }

    const EQUAL: &str = "[resource]\nname = \"x.dev/r\"\n";
    const UNEQUAL: &str = "[[layout]]\ngpus = [\"*\"]\nshares = [\n\
        { resource = \"x.dev/large\", memory = \"50%\", cores = \"50%\" },\n\
        { resource = \"x.dev/small\", count = 2, memory = \"25%\", cores = \"25%\" },\n]\n";

    fn record(resource: &str, replicas: &[&str], memory: u64) -> (AllocationId, Arc<Record>) {
        let id = AllocationId::of(resource, replicas.iter().copied());
        let record = Record {
            resource: resource.into(),
            replicas: replicas.iter().map(ToString::to_string).collect(),
            state: State::Started,
            ..Record::new(
                id.clone(),
                1,
                vec![Grant {
                    uuid: "GPU-a".into(),
                    memory_limit_bytes: memory,
                    context_overhead_bytes: 0,
                    cores_millis: 250,
                    compute: Compute::Burst,
                }],
            )
        };
        (id, Arc::new(record))
    }

    fn held(replicas: &[&str], memory: u64) -> Records {
        [record("x.dev/r", replicas, memory)].into()
    }

    fn advertise(catalogue: &Catalogue, reserve_bytes: u64, records: &Records) -> Offers {
        let catalogue = Catalogue { reserve_bytes, ..catalogue.clone() };
        offers(&catalogue, records, &|_| Withheld::Nothing)
    }

    fn health(all: &Offers, resource: &str) -> String {
        all[resource].iter().map(|device| if device.healthy { 'H' } else { 'u' }).collect()
    }

    fn equal(records: &Records, reserve: u64) -> String {
        health(&advertise(&catalogue(EQUAL), reserve, records), "x.dev/r")
    }

    #[test]
    fn each_limit_counts_as_long_as_it_is_live() {
        type Change = fn(&mut Record);
        let same: Change = |_| {};
        let cases: [(&[&str], u64, Change, u64, &str); 6] = [
            // Replicas that hold the 40 GiB that they were sold with before a change of configuration.
            (&["GPU-a::0"], 40, same, 0, "HHHu"),
            (&["GPU-a::1"], 40, same, GIB, "HHuu"),
            // Retired ones are listed while they are held, also of a GPU that is left out now.
            (&["GPU-a::7"], 20, same, 0, "HHHuu"),
            (&["GPU-gone::2"], 20, |r| r.grants[0].uuid = "GPU-gone".into(), 0, "HHHHu"),
            // Pages whose replicas are not known yet.
            (&[], 30, |r| r.resource.clear(), 0, "HHuu"),
            (&["GPU-a::0"], 80, |r| r.state = State::Parked, 0, "HHHH"),
        ];
        for (replicas, gib, change, reserve, health) in cases {
            let mut records = held(replicas, gib * GIB);
            records.values_mut().for_each(|record| change(Arc::make_mut(record)));
            assert_eq!(equal(&records, reserve), health, "{replicas:?}");
        }
        let all = advertise(&catalogue(EQUAL), 0, &held(&["GPU-a::7"], 20 * GIB));
        assert_eq!(all["x.dev/r"][4].id, "GPU-a::7");
    }

    #[test]
    fn the_rule_is_kept_over_all_resources_of_a_gpu() {
        let of = |resource: &str, replica: &str, memory: u64| {
            let records = [record(resource, &[replica], memory)].into();
            let all = advertise(&catalogue(UNEQUAL), 0, &records);
            (health(&all, "x.dev/large"), health(&all, "x.dev/small"))
        };
        assert_eq!(of("x.dev/large", "GPU-a::0", 40 * GIB), ("H".into(), "HH".into()));
        assert_eq!(of("x.dev/small", "GPU-a::1", 20 * GIB), ("H".into(), "HH".into()));
        // AdvertisedGpu with more than today's: the largest free one goes.
        assert_eq!(of("x.dev/small", "GPU-a::1", 30 * GIB), ("u".into(), "HH".into()));
        // A resource that is no longer sold counts as much.
        assert_eq!(of("x.dev/old", "GPU-a::0", 20 * GIB), ("u".into(), "HH".into()));
        assert_eq!(of("x.dev/old", "GPU-a::0", 50 * GIB), ("u".into(), "Hu".into()));
        // AdvertisedGpu with less: room is kept for the next one's.
        assert_eq!(of("x.dev/large", "GPU-a::0", GIB), ("H".into(), "HH".into()));
    }

    #[test]
    fn a_held_replica_that_could_not_grow_to_todays_size_goes_to_nobody_else() {
        let records = [
            record("x.dev/large", &["GPU-a::0"], 10 * GIB),
            record("x.dev/old", &["GPU-a::0"], 60 * GIB),
        ];
        let all = advertise(&catalogue(UNEQUAL), 0, &records.into());
        assert_eq!(
            (health(&all, "x.dev/large"), health(&all, "x.dev/small")),
            ("u".into(), "uu".into())
        );
    }
}
