//! The device lists that kubelet would get under another configuration. Pure, except for lookups.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Advertised;
use crate::allocations::offers::Offers;
use crate::allocations::records::Records;
use crate::inventory::Withheld;
use tessera_model::record::Record;
use tessera_model::replica::Replica;
use tessera_rules::allocate::Catalogue;

/// What a resource's replicas on one GPU would come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Replicas that are not there now.
    pub appear: u32,
    /// Replicas that are no longer sold.
    pub retire: u32,
    /// Those of them that are held, and listed until they are not.
    pub retire_held: u32,
    /// Replicas that are sold and Unhealthy for want of room.
    pub no_room: u32,
}

/// Health of replicas by GPU, resource and index.
type Listed = BTreeMap<(String, String), BTreeMap<u32, bool>>;

/// What becomes of each GPU's replicas of each resource where `after` takes the place of `before`, beside
/// `records`, and nothing is withheld.
pub fn forecast(
    before: &Catalogue,
    after: &Catalogue,
    records: &[Arc<Record>],
) -> BTreeMap<(String, String), Turn> {
    forecast_beside(before, after, records, &|_| Withheld::Nothing)
}

fn forecast_beside(
    before: &Catalogue,
    after: &Catalogue,
    records: &[Arc<Record>],
    withheld: &dyn Fn(&str) -> Withheld,
) -> BTreeMap<(String, String), Turn> {
    let records: Records = records.iter().cloned().collect();
    let (old, new) = (listed(before, &records, withheld), listed(after, &records, withheld));
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).cloned().collect();
    let none = BTreeMap::new();
    let turn = |key: (String, String)| {
        let (old, new) = (old.get(&key).unwrap_or(&none), new.get(&key).unwrap_or(&none));
        let is_sold = |catalogue: &Catalogue, index: u32| {
            let share = catalogue.gpus.get(&key.0).and_then(|sold| sold.share(&key.1));
            share.is_some_and(|share| index < share.count)
        };
        let sick = after.gpus.get(&key.0).is_some_and(|sold| sold.sick.is_some());
        let count = |counts: &dyn Fn(u32, bool) -> bool, list: &BTreeMap<u32, bool>| {
            let found = list.iter().filter(|(index, healthy)| counts(**index, **healthy)).count();
            u32::try_from(found).unwrap_or(u32::MAX)
        };
        let retired = |index, _| is_sold(before, index) && !is_sold(after, index);
        let turn = Turn {
            appear: count(&|index, _| is_sold(after, index) && !old.contains_key(&index), new),
            retire: count(&retired, old),
            retire_held: count(&retired, new),
            no_room: match sick || withheld(&key.0) != Withheld::Nothing {
                true => 0,
                false => count(&|index, healthy| is_sold(after, index) && !healthy, new),
            },
        };
        (key, turn)
    };
    keys.into_iter().map(turn).collect()
}

fn listed(catalogue: &Catalogue, records: &Records, withheld: &dyn Fn(&str) -> Withheld) -> Listed {
    let mut offers = Offers::default();
    offers.renew(catalogue, catalogue.reserve_bytes, records, withheld);
    let mut listed = Listed::new();
    for (resource, devices) in offers.devices(catalogue) {
        for device in devices {
            let Some((uuid, index)) = Replica::split(&device.id) else { continue };
            let replicas = listed.entry((uuid.to_owned(), resource.clone())).or_default();
            replicas.insert(index, device.healthy);
        }
    }
    listed
}

impl Advertised {
    /// [`forecast`] for this node as it is now.
    pub fn forecast(&self, after: &Catalogue) -> BTreeMap<(String, String), Turn> {
        let (before, after) = (self.inventory.catalogue(), self.inventory.with_health(after));
        let withheld = |uuid: &str| self.inventory.withheld_of(uuid);
        forecast_beside(&before, &after, &self.allocations.records(), &withheld)
    }
}
