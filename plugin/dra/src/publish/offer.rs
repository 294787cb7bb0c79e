//! The devices that a node has to offer, in the order in which the scheduler shall try them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::k8s_openapi::api::resource::v1::Device;
use tessera_config::{Config, Placement};

use super::attributes::attributes;
use super::policy::{Policy, Unit};
use super::taints::taints;
use crate::names;
use tessera_agent::front_end::dra::DraGpu;

/// A GPU with what the slices say beside what the core knows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// What may be claimed.
    pub gpu: DraGpu,
    /// The PCIe root that it hangs on: `pci0000:16`.
    pub pcie_root: Option<String>,
}

/// What there is to publish.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offer {
    /// One device per GPU, for any number of claims.
    pub devices: Vec<Device>,
    /// GPUs that cannot be published, and why.
    pub problems: Vec<String>,
}

impl Offer {
    /// Of these GPUs. What still belongs to another front end is left out.
    pub fn new(gpus: &[Published], config: &Config) -> Self {
        let mut offer = Offer::default();
        let mut names = BTreeSet::new();
        for published in ordered(gpus, config) {
            let gpu = &published.gpu;
            let name = names::device(&gpu.gpu.uuid);
            let Some(memory) = Policy::memory(gpu, config) else {
                offer.problems.push(format!(
                    "{} is not published: dra.memory_step is more than all of its memory that can be sold{}",
                    gpu.gpu,
                    if gpu.grown_bytes > 0 { ", beside what quotas have given to claims" } else { "" }
                ));
                continue;
            };
            if !names.insert(name.clone()) {
                offer.problems.push(format!("{} is not published: there are two of it", gpu.gpu));
                continue;
            }
            let cores = Policy::cores(gpu);
            let taints = Some(taints(gpu, config)).filter(|taints| !taints.is_empty());
            offer.devices.push(Device {
                name,
                attributes: Some(attributes(published)),
                allow_multiple_allocations: Some(true),
                capacity: Some(BTreeMap::from([
                    (names::MEMORY.to_owned(), memory.capacity(Unit::Bytes)),
                    (names::CORES.to_owned(), cores.capacity(Unit::Hundredths)),
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
    let mut order: Vec<&Published> = gpus.iter().filter(|gpu| !gpu.gpu.moving).collect();
    let place = |published: &Published| {
        let gpu = &published.gpu.gpu;
        let instance = gpu.mig.as_ref().map(|mig| mig.index);
        (gpu.index, instance, gpu.uuid.clone())
    };
    order.sort_by_cached_key(|published| {
        let free = match config.share.placement {
            Placement::Packed => 0,
            Placement::Distributed => published.gpu.free_bytes,
        };
        (Reverse(free), place(published))
    });
    order
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{MIB, gpu, mig, published};
    use super::*;

    fn names(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn a_stable_order_packs_and_an_order_by_free_memory_spreads() {
        let free = |uuid, index, mib: u64| {
            let mut one = published(gpu(uuid, index));
            one.gpu.free_bytes = mib * MIB;
            one
        };
        let gpus = [free("GPU-b", 1, 70_000), free("GPU-a", 0, 1000), free("GPU-c", 2, 80_000)];
        let packed = Offer::new(&gpus, &Config::default());
        assert_eq!(names(&packed.devices), ["gpu-a", "gpu-b", "gpu-c"]);
        let config = Config::parse("[share]\nplacement = \"distributed\"").unwrap();
        assert_eq!(names(&Offer::new(&gpus, &config).devices), ["gpu-c", "gpu-b", "gpu-a"]);
    }

    #[test]
    fn a_gpu_that_another_front_end_still_sells_is_left_out() {
        let moving = published(DraGpu { moving: true, ..gpu("GPU-a", 0) });
        let offer = Offer::new(&[moving, published(gpu("GPU-b", 1))], &Config::default());
        assert_eq!(names(&offer.devices), ["gpu-b"]);
    }

    #[test]
    fn instances_are_devices_of_their_own() {
        let gpus =
            [published(mig("MIG-b", 1)), published(mig("MIG-a", 0)), published(gpu("GPU-c", 1))];
        let offer = Offer::new(&gpus, &Config::default());
        assert_eq!(names(&offer.devices), ["mig-a", "mig-b", "gpu-c"]);
        let attributes = offer.devices[0].attributes.as_ref().unwrap();
        assert!(attributes.contains_key("profile") && attributes.contains_key("parentUUID"));
        assert!(!offer.devices[2].attributes.as_ref().unwrap().contains_key("profile"));
    }

    #[test]
    fn what_quotas_gave_away_is_offered_to_nobody() {
        let mut one = published(gpu("GPU-a", 0));
        one.gpu.grown_bytes = 10_176 * MIB + 1;
        let offer = Offer::new(&[one], &Config::default());
        assert_eq!(offer.devices[0].capacity.as_ref().unwrap()["memory"].value.0, "71168Mi");
    }

    #[test]
    fn what_cannot_be_published_is_named() {
        let config = Config::parse("[dra]\nmemory_step = \"1Gi\"").unwrap();
        let tiny = published(DraGpu { memory_bytes: 900 * MIB, ..gpu("GPU-a", 0) });
        let twins = [tiny, published(gpu("GPU-b", 1)), published(gpu("GPU-b", 2))];
        let offer = Offer::new(&twins, &config);
        assert_eq!(names(&offer.devices), ["gpu-b"]);
        assert_eq!(offer.problems.len(), 2);
        assert!(offer.problems[0].starts_with("GPU 0 (Example, GPU-a) is not published"));
    }
}
