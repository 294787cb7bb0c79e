//! The device lists for kubelet, computed from inventory and allocations by the capacity rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;

use crate::allocations::room::{Offers, offers};
use crate::allocations::{Allocations, Records, is_moving};
use crate::inventory::{Inventory, Standing, Withheld};
use crate::lock_order::ADVERTISED;
use tessera_kubelet::Device;
use tessera_model::record::Record;
use tessera_model::replica::Replica;
use tessera_rules::allocate::{AdvertisedGpu, Catalogue};
use tessera_rules::shares::Share;
use tessera_system::locks::Ranked;
use tessera_tenant::regions::Region;
use tessera_view::change::{ShareChange, ShareView};

/// What is sold, to whom, and what is offered beside it: of one moment, so that its sums are true. Every view
/// of the node is made of it (status, metrics, `top`, explanations). Pages follow the records, each by
/// itself: limits that were read from them at different moments may add up to what never was.
#[derive(Debug)]
pub struct NodeSnapshot {
    /// All records, with the regions that are open, in the order of ids.
    pub allocations: Vec<(Arc<Record>, Option<Arc<Region>>)>,
    /// What is sold, with health, and the reserve.
    pub catalogue: Arc<Catalogue>,
    pub standings: BTreeMap<String, Standing>,
    pub moving: BTreeSet<String>,
    pub advertised: Offers,
}

type Senders = BTreeMap<String, watch::Sender<Vec<Device>>>;

#[derive(Debug)]
pub struct Advertised {
    inventory: Arc<Inventory>,
    allocations: Arc<Allocations>,
    devices: Ranked<Senders>,
    resources: watch::Sender<BTreeSet<String>>,
    /// Another number after each look: every change of what is sold, withheld or live ends in one.
    looks: watch::Sender<u64>,
}

impl Advertised {
    pub(crate) fn new(inventory: Arc<Inventory>, allocations: Arc<Allocations>) -> Self {
        let devices = Ranked::new(ADVERTISED, Senders::new());
        let (resources, looks) = (watch::Sender::default(), watch::Sender::default());
        Advertised { inventory, allocations, devices, resources, looks }
    }

    /// Tells kubelet what has changed of the devices, if anything.
    pub(crate) fn refresh(&self) {
        // Held throughout, so that no older answer overtakes a newer one.
        let mut devices = self.devices.lock();
        let catalogue = self.inventory.catalogue();
        let withheld = |uuid: &str| self.inventory.withheld_of(uuid);
        let offers = offers(&catalogue, &self.allocations.all(), &withheld);
        self.tell_devices(&mut devices, &offers);
        drop(devices);
        self.looks.send_modify(|number| *number = number.wrapping_add(1));
    }

    /// Another number after each change of GPUs, health, cordons, limits or what is live.
    pub fn events(&self) -> watch::Receiver<u64> {
        self.looks.subscribe()
    }

    fn tell_devices(&self, senders: &mut Senders, offers: &Offers) {
        senders.retain(|resource, _| offers.contains_key(resource));
        for (resource, devices) in offers {
            let sender = senders.entry(resource.clone()).or_default();
            sender.send_if_modified(|current| {
                let changed = current != devices;
                current.clone_from(devices);
                changed
            });
        }
        self.resources.send_if_modified(|current| {
            let changed = !current.iter().eq(offers.keys());
            *current = offers.keys().cloned().collect();
            changed
        });
    }

    pub fn devices(&self, resource: &str) -> watch::Receiver<Vec<Device>> {
        self.devices.lock().entry(resource.to_owned()).or_default().subscribe()
    }

    /// Resources to serve to kubelet, now and after every change: those that the configuration sells,
    /// and retired ones that containers still hold.
    pub fn resources(&self) -> watch::Receiver<BTreeSet<String>> {
        self.resources.subscribe()
    }

    pub fn books(&self) -> NodeSnapshot {
        let mut devices = self.devices.lock();
        let records = self.allocations.all();
        let (catalogue, standings) = self.inventory.standings();
        let withheld =
            |uuid: &str| standings.get(uuid).map(Standing::keeps_back).unwrap_or_default();
        // The thread that changed a record is about to do it.
        let advertised = offers(&catalogue, &records, &withheld);
        self.tell_devices(&mut devices, &advertised);
        let moving = |sold: &&AdvertisedGpu| is_moving(&records, sold);
        let moving = catalogue.gpus.values().filter(moving);
        let moving = moving.map(|sold| sold.gpu.uuid.clone()).collect();
        drop(devices);
        let regions = self.allocations.pages.lock();
        let open = |record: &Arc<Record>| (Arc::clone(record), regions.get(&record.id).cloned());
        let allocations = records.values().map(open).collect();
        NodeSnapshot { allocations, catalogue, standings, moving, advertised }
    }

    /// What becomes of each GPU's replicas of each resource where `after` takes the place of what is sold now, if that is
    /// cut otherwise.
    pub(crate) fn forecast(&self, after: &Catalogue) -> Vec<ShareChange> {
        let (before, after) = (self.inventory.catalogue(), self.inventory.with_health(after));
        let records = self.allocations.all().clone();
        let withheld = |uuid: &str| self.inventory.withheld_of(uuid);
        let old = listed(&before, &records, &withheld);
        let new = listed(&after, &records, &withheld);
        let keys: BTreeSet<&(String, String)> = old.keys().chain(new.keys()).collect();
        let none = BTreeMap::new();
        let change = |key: &(String, String)| {
            let (uuid, resource) = key;
            let (old, new) = (old.get(key).unwrap_or(&none), new.get(key).unwrap_or(&none));
            let (before, after) = (before.gpus.get(uuid), after.gpus.get(uuid));
            let was = before.and_then(|gpu| gpu.share(resource));
            let will_be = after.and_then(|gpu| gpu.share(resource));
            let is_sold =
                |share: Option<&Share>, index: u32| share.is_some_and(|share| index < share.count);
            let is_sick = after.is_some_and(|gpu| gpu.sick.is_some());
            let count = |list: &BTreeMap<u32, bool>, counts: &dyn Fn(u32, bool) -> bool| {
                let found = list.iter().filter(|(index, healthy)| counts(**index, **healthy));
                u32::try_from(found.count()).unwrap_or(u32::MAX)
            };
            let is_new = |index, _| is_sold(will_be, index) && !old.contains_key(&index);
            let is_retired = |index, _| is_sold(was, index) && !is_sold(will_be, index);
            let has_no_room = |index, healthy: bool| is_sold(will_be, index) && !healthy;
            ShareChange {
                gpu_uuid: uuid.clone(),
                gpu_index: before.or(after).map(|gpu| gpu.gpu.index),
                resource_name: resource.clone(),
                before: was.map(view),
                after: will_be.map(view),
                appear: count(new, &is_new),
                retire: count(old, &is_retired),
                retire_held: count(new, &is_retired),
                no_room: match is_sick || withheld(uuid) != Withheld::Nothing {
                    true => 0,
                    false => count(new, &has_no_room),
                },
            }
        };
        let mut changes: Vec<ShareChange> = keys.into_iter().map(change).collect();
        changes.retain(|change| change.before != change.after);
        changes.sort_by_key(|change| (change.gpu_index, change.gpu_uuid.clone()));
        changes
    }
}

/// Health of replicas by GPU, resource and index.
type Listed = BTreeMap<(String, String), BTreeMap<u32, bool>>;

fn listed(catalogue: &Catalogue, records: &Records, withheld: &dyn Fn(&str) -> Withheld) -> Listed {
    let mut listed = Listed::new();
    for (resource, devices) in offers(catalogue, records, withheld) {
        for device in devices {
            let Some((uuid, index)) = Replica::split(&device.id) else { continue };
            let replicas = listed.entry((uuid.to_owned(), resource.clone())).or_default();
            replicas.insert(index, device.healthy);
        }
    }
    listed
}

fn view(share: &Share) -> ShareView {
    ShareView {
        replicas: share.count,
        memory_bytes: share.memory_bytes,
        cores_millis: share.cores_millis,
        policy: share.compute,
    }
}
