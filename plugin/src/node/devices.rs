//! What kubelet is told of devices, by the capacity rule.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::watch;

use super::{Node, lock};
use crate::allocate::{AllocationId, Catalogue, Sold};
use crate::capacity::{Capacity, Held, judge};
use crate::kubelet::Device;
use crate::ledger::Record;
use crate::replica::Replica;

/// Devices by resource: all that the configuration sells, and retired ones while they have records.
pub(super) type Advertised = BTreeMap<String, Vec<Device>>;

/// What a live allocation has of one GPU.
struct Stake<'a> {
    resource: &'a str,
    granted_bytes: u64,
    indexes: Vec<u32>,
}

/// Every replica with its health: those of sick GPUs, those for which there is no room by the
/// capacity rule, and held ones that are retired, are unhealthy.
pub(super) fn advertise(
    catalogue: &Catalogue,
    reserve_bytes: u64,
    records: &BTreeMap<AllocationId, Arc<Record>>,
    refused: &dyn Fn(&str) -> bool,
) -> Advertised {
    let mut all: Advertised =
        catalogue.resources.keys().map(|resource| (resource.clone(), Vec::new())).collect();
    for record in records.values().filter(|record| !record.resource.is_empty()) {
        if !all.contains_key(&record.resource) {
            all.insert(record.resource.clone(), Vec::new());
        }
    }
    let mut stakes = stakes(records);
    for (uuid, sold) in &catalogue.gpus {
        let held = stakes.remove(uuid.as_str()).unwrap_or_default();
        let terms = Offered { reserve_bytes, refused: refused(uuid) };
        advertise_gpu(uuid, sold, &terms, &held, &mut all);
    }
    // Of a GPU that is gone, or that the configuration leaves out now.
    let mut rest: Vec<_> = stakes.into_iter().collect();
    rest.sort_by_key(|(uuid, _)| *uuid);
    for (uuid, held) in rest {
        for stake in &held {
            for index in &stake.indexes {
                add(&mut all, stake.resource, uuid, *index, false, None);
            }
        }
    }
    all
}

/// Live allocations by GPU.
fn stakes(records: &BTreeMap<AllocationId, Arc<Record>>) -> HashMap<&str, Vec<Stake<'_>>> {
    let mut stakes: HashMap<&str, Vec<Stake<'_>>> = HashMap::new();
    for record in records.values().filter(|record| record.is_live()) {
        for grant in &record.grants {
            stakes.entry(&grant.uuid).or_default().push(Stake {
                resource: &record.resource,
                granted_bytes: grant.memory_limit_bytes,
                indexes: Vec::new(),
            });
        }
        for (uuid, index) in record.replicas.iter().filter_map(|id| Replica::split(id)) {
            // The last one there is this record's: it has just been added.
            let stake = stakes.get_mut(uuid).and_then(|stakes| stakes.last_mut());
            if let Some(stake) = stake {
                stake.indexes.push(index);
            }
        }
    }
    stakes
}

/// How a GPU is offered.
struct Offered {
    reserve_bytes: u64,
    /// Free replicas are not: another plugin sells the GPU too. Held ones stay as they are: kubelet
    /// would not admit a pod anew, after a reboot of the node, whose device it takes for unhealthy.
    refused: bool,
}

fn advertise_gpu(
    uuid: &str,
    sold: &Sold,
    offered: &Offered,
    stakes: &[Stake<'_>],
    all: &mut Advertised,
) {
    // Who holds each replica.
    let mut holders: Vec<Vec<Option<usize>>> =
        sold.shares.iter().map(|share| vec![None; to_usize(share.count)]).collect();
    let mut held = Vec::with_capacity(stakes.len());
    let mut retired: BTreeSet<(&str, u32)> = BTreeSet::new();
    for (holder, stake) in stakes.iter().enumerate() {
        let at = sold.shares.iter().position(|share| share.resource == stake.resource);
        let mut anew = 0u64;
        for index in &stake.indexes {
            match at.and_then(|at| Some((at, holders[at].get_mut(to_usize(*index))?))) {
                Some((at, place)) => {
                    *place = Some(holder);
                    anew = anew.saturating_add(sold.shares[at].limit.memory_bytes);
                }
                None => {
                    retired.insert((stake.resource, *index));
                }
            }
        }
        held.push(Held { granted_bytes: stake.granted_bytes, anew_bytes: anew });
    }
    let mut free = Vec::new();
    for (share, holders) in sold.shares.iter().zip(&holders) {
        let count = holders.iter().filter(|holder| holder.is_none()).count();
        free.extend(std::iter::repeat_n(share.limit.memory_bytes, count));
    }
    let reserve_bytes = offered.reserve_bytes;
    let capacity = Capacity { memory_bytes: sold.gpu.memory_bytes, reserve_bytes };
    let verdict = judge(capacity.sellable(), &held, &free);
    let mut free = verdict.free.into_iter();
    let (well, numa) = (sold.sick.is_none(), sold.gpu.numa_node);
    for (share, holders) in sold.shares.iter().zip(holders) {
        for (index, holder) in (0..share.count).zip(holders) {
            let room = match holder {
                Some(holder) => verdict.held[holder],
                None => free.next().unwrap_or(false) && !offered.refused,
            };
            add(all, &share.resource, uuid, index, room && well, numa);
        }
    }
    for (resource, index) in retired {
        add(all, resource, uuid, index, false, numa);
    }
}

fn add(
    all: &mut Advertised,
    resource: &str,
    uuid: &str,
    index: u32,
    healthy: bool,
    numa_node: Option<u32>,
) {
    let id = Replica::id(uuid, index);
    if let Some(devices) = all.get_mut(resource) {
        devices.push(Device { id, healthy, numa_node });
    }
}

fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl Node {
    /// Works out anew what kubelet is told, and tells it what changed.
    pub(super) fn refresh_devices(&self) {
        // Held throughout, so that no older answer overtakes a newer one.
        let mut senders = lock(&self.devices);
        let catalogue = self.catalogue();
        let reserve = self.config.gpus.reserve_bytes;
        let refused = |uuid: &str| self.withheld(uuid).is_some();
        let all = advertise(&catalogue, reserve, &lock(&self.records), &refused);
        senders.retain(|resource, _| all.contains_key(resource));
        let names: BTreeSet<String> = all.keys().cloned().collect();
        for (resource, devices) in all {
            let sender = senders.entry(resource).or_default();
            sender.send_if_modified(|current| {
                let changed = *current != devices;
                *current = devices;
                changed
            });
        }
        self.resources.send_if_modified(|current| {
            let changed = *current != names;
            *current = names;
            changed
        });
    }

    /// The devices of a resource, now and after every change.
    #[must_use]
    pub fn devices(&self, resource: &str) -> watch::Receiver<Vec<Device>> {
        lock(&self.devices).entry(resource.to_owned()).or_default().subscribe()
    }

    /// Resources to serve to kubelet, now and after every change: those that the configuration sells,
    /// and retired ones that containers still hold.
    #[must_use]
    pub fn resources(&self) -> watch::Receiver<BTreeSet<String>> {
        self.resources.subscribe()
    }

    /// The devices of every resource as advertised now.
    #[must_use]
    pub fn advertised(&self) -> BTreeMap<String, Vec<Device>> {
        let senders = lock(&self.devices);
        senders.iter().map(|(name, sender)| (name.clone(), sender.borrow().clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Compute, Config};
    use crate::device::Gpu;
    use crate::ledger::{Grant, State};

    const GIB: u64 = 1 << 30;

    /// One GPU of 80 GiB.
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
            id: id.clone(),
            resource: resource.into(),
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
            cdi: false,
        };
        (id, Arc::new(record))
    }

    fn held(replicas: &[&str], memory: u64) -> BTreeMap<AllocationId, Arc<Record>> {
        [record("x.dev/r", replicas, memory)].into()
    }

    /// No GPU is sold by others.
    fn advertise(
        catalogue: &Catalogue,
        reserve_bytes: u64,
        records: &BTreeMap<AllocationId, Arc<Record>>,
    ) -> Advertised {
        super::advertise(catalogue, reserve_bytes, records, &|_| false)
    }

    fn health(all: &Advertised, resource: &str) -> String {
        all[resource].iter().map(|device| if device.healthy { 'H' } else { 'u' }).collect()
    }

    fn equal(records: &BTreeMap<AllocationId, Arc<Record>>, reserve: u64) -> String {
        health(&advertise(&catalogue(EQUAL), reserve, records), "x.dev/r")
    }

    #[test]
    fn a_sick_gpu_makes_all_its_replicas_unhealthy() {
        let mut catalogue = catalogue(UNEQUAL);
        let all = advertise(&catalogue, 0, &BTreeMap::new());
        assert_eq!(
            (health(&all, "x.dev/large"), health(&all, "x.dev/small")),
            ("H".into(), "HH".into())
        );
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("XID 79".into());
        let all = advertise(&catalogue, 0, &BTreeMap::new());
        assert_eq!(
            (health(&all, "x.dev/large"), health(&all, "x.dev/small")),
            ("u".into(), "uu".into())
        );
    }

    #[test]
    fn only_free_replicas_of_a_refused_gpu_are_withheld() {
        let records = held(&["GPU-a::1"], 20 * GIB);
        let advertised =
            |refused| super::advertise(&catalogue(EQUAL), 0, &records, &|uuid| uuid == refused);
        assert_eq!(health(&advertised("GPU-a"), "x.dev/r"), "uHuu");
        assert_eq!(health(&advertised("GPU-b"), "x.dev/r"), "HHHH");
    }

    #[test]
    fn limits_granted_before_a_change_of_configuration_take_free_replicas_away() {
        // One replica still holds the 40 GiB it was sold with.
        assert_eq!(equal(&held(&["GPU-a::0"], 40 * GIB), 0), "HHHu");
        assert_eq!(equal(&held(&["GPU-a::1"], 40 * GIB), GIB), "HHuu");
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
        // Sold with more than today's: the largest free one goes.
        assert_eq!(of("x.dev/small", "GPU-a::1", 30 * GIB), ("u".into(), "HH".into()));
        // A resource that is no longer sold counts as much.
        assert_eq!(of("x.dev/old", "GPU-a::0", 20 * GIB), ("u".into(), "HH".into()));
        assert_eq!(of("x.dev/old", "GPU-a::0", 50 * GIB), ("u".into(), "Hu".into()));
        // Sold with less: room is kept for the next one's.
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

    #[test]
    fn a_retired_replica_is_listed_while_it_is_held() {
        let all = advertise(&catalogue(EQUAL), 0, &held(&["GPU-a::7"], 20 * GIB));
        assert_eq!(health(&all, "x.dev/r"), "HHHuu");
        assert_eq!(all["x.dev/r"][4].id, "GPU-a::7");
    }

    #[test]
    fn a_retired_resource_is_served_while_it_has_records_and_lists_only_what_is_held() {
        let mut records: BTreeMap<_, _> = [record("x.dev/old", &["GPU-a::1"], 20 * GIB)].into();
        let all = advertise(&catalogue(EQUAL), 0, &records);
        assert_eq!(
            all["x.dev/old"],
            [Device { id: "GPU-a::1".into(), healthy: false, numa_node: None }]
        );
        // Parked: its container may start again, nobody else may have it.
        records.values_mut().for_each(|record| Arc::make_mut(record).state = State::Parked);
        let all = advertise(&catalogue(EQUAL), 0, &records);
        assert_eq!(all["x.dev/old"], []);
        assert_eq!(health(&all, "x.dev/r"), "HHHH");
        assert!(!advertise(&catalogue(EQUAL), 0, &BTreeMap::new()).contains_key("x.dev/old"));
    }

    #[test]
    fn a_replica_of_a_gpu_that_is_left_out_now_is_listed_while_it_is_held() {
        let mut records = held(&["GPU-gone::2"], 20 * GIB);
        records.values_mut().for_each(|r| Arc::make_mut(r).grants[0].uuid = "GPU-gone".into());
        let all = advertise(&catalogue(EQUAL), 0, &records);
        assert_eq!(health(&all, "x.dev/r"), "HHHHu");
    }

    #[test]
    fn pages_whose_replicas_are_not_known_yet_count() {
        let mut records = held(&[], 30 * GIB);
        records.values_mut().for_each(|r| Arc::make_mut(r).resource.clear());
        assert_eq!(equal(&records, 0), "HHuu");
    }

    #[test]
    fn parked_limits_are_not_counted() {
        let mut records = held(&["GPU-a::0"], 80 * GIB);
        records.values_mut().for_each(|record| Arc::make_mut(record).state = State::Parked);
        assert_eq!(equal(&records, 0), "HHHH");
    }
}
