//! What kubelet is told of devices.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;

use super::Node;
use super::offers::Offers;
use crate::kubelet::Device;
use crate::locks::lock;

/// What is offered, and by resource who waits for it.
#[derive(Debug, Default)]
pub(super) struct Devices {
    offers: Offers,
    senders: BTreeMap<String, watch::Sender<Vec<Device>>>,
}

impl Node {
    /// Tells kubelet what has changed of the devices, if anything.
    pub(super) fn refresh_devices(&self) {
        // Held throughout, so that no older answer overtakes a newer one.
        let mut devices = lock(&self.devices);
        let Devices { offers, senders } = &mut *devices;
        let catalogue = self.catalogue();
        let withheld = |uuid: &str| self.withheld_of(uuid);
        if !offers.renew(&catalogue, catalogue.reserve_bytes, &lock(&self.records), &withheld) {
            return;
        }
        let all = offers.devices(&catalogue);
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
        lock(&self.devices).senders.entry(resource.to_owned()).or_default().subscribe()
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
        let devices = lock(&self.devices);
        devices
            .senders
            .iter()
            .map(|(name, sender)| (name.clone(), sender.borrow().clone()))
            .collect()
    }
}
