//! The devices that a node has to offer, in the order in which the scheduler shall try them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

use tessera_agent::Agent;
use tessera_cluster::k8s_openapi::api::resource::v1::Device;
use tessera_config::{Config, Placement};
use tessera_gpu::Facts;
use tessera_rules::allocate::AdvertisedGpu;
use tessera_rules::capacity::{Capacity, Left};
use tessera_rules::shares::FrontEnd;

use super::device::{Policy, attributes, taints};
use crate::names;

/// A GPU that is sold by claims, with what the slices say beside what is sold of it.
#[derive(Clone, Debug)]
pub struct Published {
    pub sold: AdvertisedGpu,
    /// The driver's version, as NVML prints it, where it is known.
    pub driver_version: Option<String>,
    /// The CUDA version that the driver speaks, major and minor, where it is known.
    pub cuda_version: Option<(u32, u32)>,
    /// CUDA compute capability, major and minor, where it is known.
    pub compute_capability: Option<(u32, u32)>,
    /// The PCIe root that it hangs on: `pci0000:16`.
    pub pcie_root: Option<String>,
    /// Bytes that shares may add up to: what the capacity rule leaves.
    pub memory_bytes: u64,
    /// Bytes of those that quotas gave to claims beyond what was allocated: the scheduler must not give them again.
    pub grown_bytes: u64,
    /// Bytes that count for no share.
    pub free_bytes: u64,
    pub is_cordoned: bool,
    /// The device plugin still has allocations on it: it is not published yet.
    pub is_moving: bool,
}

impl Published {
    /// All of them. `facts` is what the driver says of them, `pci_devices` the kernel's directory of PCI devices.
    pub fn all(agent: &Agent, facts: &Facts, pci_devices: &Path) -> Vec<Self> {
        let (catalogue, config) = (agent.inventory.catalogue(), agent.config());
        // All of one moment.
        let mut records = agent.allocations.records();
        records.retain(|record| record.is_live());
        let live = || records.iter().map(AsRef::as_ref);
        let published = |sold: &AdvertisedGpu| {
            let (uuid, capacity) = (&sold.gpu.uuid, Capacity::of(&sold.gpu, &config));
            Published {
                sold: sold.clone(),
                driver_version: facts.driver_version.clone(),
                cuda_version: facts.cuda_version,
                compute_capability: facts.compute_capability.get(uuid).copied(),
                pcie_root: tessera_gpu::pcie_root(pci_devices, &sold.gpu.pci_bus_id),
                memory_bytes: capacity.sellable(),
                grown_bytes: live().map(|one| one.grown_bytes(uuid)).fold(0, u64::saturating_add),
                free_bytes: Left::beside(capacity, uuid, live()).memory_bytes,
                is_cordoned: agent.inventory.cordon_of(uuid).is_some(),
                is_moving: agent.allocations.is_moving(sold),
            }
        };
        catalogue.gpus.values().filter(|sold| sold.seller == FrontEnd::Dra).map(published).collect()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offer {
    /// One device per GPU, for any number of claims.
    pub devices: Vec<Device>,
    pub problems: Vec<String>,
}

impl Offer {
    /// Of these GPUs. What still belongs to another front end is left out.
    pub fn new(gpus: &[Published], config: &Config) -> Self {
        let mut offer = Offer::default();
        for published in ordered(gpus, config) {
            let gpu = &published.sold.gpu;
            let Some(memory) = Policy::memory(published, config) else {
                offer.problems.push(format!(
                    "{} is not published: dra.memory_step is more than all of its memory that can be sold{}",
                    gpu,
                    if published.grown_bytes > 0 { ", beside what quotas have given to claims" } else { "" }
                ));
                continue;
            };
            let cores = Policy::cores(published);
            let taints = Some(taints(published, config)).filter(|taints| !taints.is_empty());
            offer.devices.push(Device {
                name: names::device(&gpu.uuid),
                attributes: Some(attributes(published)),
                allow_multiple_allocations: Some(true),
                capacity: Some(BTreeMap::from([
                    (names::MEMORY.to_owned(), memory.capacity()),
                    (names::CORES.to_owned(), cores.capacity()),
                ])),
                taints,
                ..Device::default()
            });
        }
        offer
    }
}

/// By index, so that the first are filled first; or by what is free, so that the emptiest is.
fn ordered<'p>(gpus: &'p [Published], config: &Config) -> Vec<&'p Published> {
    let mut order: Vec<&Published> = gpus.iter().filter(|gpu| !gpu.is_moving).collect();
    let place = |published: &Published| {
        let gpu = &published.sold.gpu;
        let instance = gpu.mig.as_ref().map(|mig| mig.index);
        (gpu.index, instance, gpu.uuid.clone())
    };
    order.sort_by_cached_key(|published| {
        let free = match config.share.placement {
            Placement::Packed => 0,
            Placement::Distributed => published.free_bytes,
        };
        (Reverse(free), place(published))
    });
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{MIB, gpu, mig};

    fn names(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn a_stable_order_packs_and_an_order_by_free_memory_spreads() {
        let free = |uuid, index, mib| Published { free_bytes: mib * MIB, ..gpu(uuid, index) };
        let gpus = [free("GPU-b", 1, 70_000), free("GPU-a", 0, 1000), free("GPU-c", 2, 80_000)];
        let packed = Offer::new(&gpus, &Config::default());
        assert_eq!(names(&packed.devices), ["gpu-a", "gpu-b", "gpu-c"]);
        let config = Config::parse("[share]\nplacement = \"distributed\"").unwrap();
        assert_eq!(names(&Offer::new(&gpus, &config).devices), ["gpu-c", "gpu-b", "gpu-a"]);
    }

    #[test]
    fn a_gpu_that_another_front_end_still_sells_is_left_out() {
        let moving = Published { is_moving: true, ..gpu("GPU-a", 0) };
        let offer = Offer::new(&[moving, gpu("GPU-b", 1)], &Config::default());
        assert_eq!(names(&offer.devices), ["gpu-b"]);
    }

    #[test]
    fn instances_are_devices_of_their_own() {
        let gpus = [mig("MIG-b", 1), mig("MIG-a", 0), gpu("GPU-c", 1)];
        let offer = Offer::new(&gpus, &Config::default());
        assert_eq!(names(&offer.devices), ["mig-a", "mig-b", "gpu-c"]);
        let attributes = offer.devices[0].attributes.as_ref().unwrap();
        assert!(attributes.contains_key("profile") && attributes.contains_key("parentUUID"));
        assert!(!offer.devices[2].attributes.as_ref().unwrap().contains_key("profile"));
    }

    #[test]
    fn what_quotas_gave_away_is_offered_to_nobody() {
        let one = Published { grown_bytes: 10_176 * MIB + 1, ..gpu("GPU-a", 0) };
        let offer = Offer::new(&[one], &Config::default());
        assert_eq!(offer.devices[0].capacity.as_ref().unwrap()["memory"].value.0, "71168Mi");
    }

    #[test]
    fn what_cannot_be_published_is_named() {
        let config = Config::parse("[dra]\nmemory_step = \"1Gi\"").unwrap();
        let tiny = Published { memory_bytes: 900 * MIB, ..gpu("GPU-a", 0) };
        let offer = Offer::new(&[tiny, gpu("GPU-b", 1)], &config);
        assert_eq!(names(&offer.devices), ["gpu-b"]);
        assert_eq!(offer.problems.len(), 1);
        assert!(offer.problems[0].starts_with("GPU 0 (Example, GPU-a) is not published"));
    }
}
