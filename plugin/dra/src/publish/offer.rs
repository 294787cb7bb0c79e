//! The devices that a node has to offer, in the order in which the scheduler shall try them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::k8s_openapi::api::resource::v1::{Device, DeviceCapacity};
use tessera_config::{Config, Placement};

use super::attributes::attributes;
use super::policy::{Policy, Unit, WHOLE_CORES};
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
    pub shared: Vec<Device>,
    /// Shares of one size, each for one claim: for an API server that cannot share devices.
    pub fixed: Vec<Device>,
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
            let device =
                Device { attributes: Some(attributes(published)), taints, ..Device::default() };
            offer.shared.push(Device {
                name,
                allow_multiple_allocations: Some(true),
                capacity: Some(capacities(
                    memory.shared(Unit::Bytes),
                    cores.shared(Unit::Hundredths),
                )),
                ..device.clone()
            });
            let share = |n| Device {
                name: names::fixed_share(&gpu.gpu.uuid, n),
                capacity: Some(capacities(
                    memory.fixed(Unit::Bytes),
                    cores.fixed(Unit::Hundredths),
                )),
                ..device.clone()
            };
            // Free ones as far as there is memory for them: quotas may have given it to those that are held.
            let mut left = gpu.free_bytes / memory.default;
            let is_there = |device: &Device| {
                let is_held = gpu.held.contains(&device.name);
                let is_there = is_held || left > 0;
                left -= u64::from(is_there && !is_held);
                is_there
            };
            let shares = (0..count(memory, cores, config)).map(share);
            offer.fixed.extend(shares.filter(is_there));
        }
        offer
    }
}

/// What a device of fixed size has, bytes and hundredths of the GPU's time: the same that a shared device gives to
/// a claim that says no size. `None` where the GPU is not published.
pub fn fixed_share(gpu: &DraGpu, config: &Config) -> Option<(u64, u64)> {
    Some((Policy::memory(gpu, config)?.default, Policy::cores(gpu).default))
}

/// How many shares of fixed size a GPU has: its replicas, as far as rounding leaves room for them.
fn count(memory: Policy, cores: Policy, config: &Config) -> u32 {
    let fit = (memory.whole / memory.default).min(WHOLE_CORES / cores.default);
    config.share.replicas.min(u32::try_from(fit).unwrap_or(u32::MAX))
}

fn capacities(memory: DeviceCapacity, cores: DeviceCapacity) -> BTreeMap<String, DeviceCapacity> {
    BTreeMap::from([(names::MEMORY.to_owned(), memory), (names::CORES.to_owned(), cores)])
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
        assert_eq!(names(&packed.shared), ["gpu-a", "gpu-b", "gpu-c"]);
        let config = Config::parse("[share]\nplacement = \"distributed\"").unwrap();
        assert_eq!(names(&Offer::new(&gpus, &config).shared), ["gpu-c", "gpu-b", "gpu-a"]);
    }

    #[test]
    fn a_gpu_that_another_front_end_still_sells_is_left_out() {
        let moving = published(DraGpu { moving: true, ..gpu("GPU-a", 0) });
        let offer = Offer::new(&[moving, published(gpu("GPU-b", 1))], &Config::default());
        assert_eq!(names(&offer.shared), ["gpu-b"]);
    }

    #[test]
    fn instances_are_devices_of_their_own() {
        let gpus =
            [published(mig("MIG-b", 1)), published(mig("MIG-a", 0)), published(gpu("GPU-c", 1))];
        let offer = Offer::new(&gpus, &Config::default());
        assert_eq!(names(&offer.shared), ["mig-a", "mig-b", "gpu-c"]);
        let attributes = offer.shared[0].attributes.as_ref().unwrap();
        assert!(attributes.contains_key("profile") && attributes.contains_key("parentUUID"));
        assert!(!offer.shared[2].attributes.as_ref().unwrap().contains_key("profile"));
    }

    #[test]
    fn shares_of_fixed_size_are_the_replicas() {
        let config = Config::parse("[share]\nreplicas = 3").unwrap();
        let third = DraGpu {
            default_memory_bytes: 27_136 * MIB,
            default_cores_millis: 333,
            ..gpu("GPU-a", 0)
        };
        let offer = Offer::new(&[published(third.clone())], &config);
        assert_eq!(names(&offer.fixed), ["gpu-a-share-0", "gpu-a-share-1", "gpu-a-share-2"]);
        let capacity = offer.fixed[0].capacity.as_ref().unwrap();
        assert_eq!(
            (capacity["memory"].value.0.as_str(), capacity["cores"].value.0.as_str()),
            ("27136Mi", "33")
        );
        assert_eq!(offer.fixed[0].allow_multiple_allocations, None);
        assert_eq!(fixed_share(&third, &config), Some((27_136 * MIB, 33)));
        // More replicas than there are hundredths.
        let config = Config::parse("[share]\nreplicas = 120").unwrap();
        let sliver =
            DraGpu { default_memory_bytes: 640 * MIB, default_cores_millis: 8, ..gpu("GPU-a", 0) };
        assert_eq!(Offer::new(&[published(sliver)], &config).fixed.len(), 100);
    }

    #[test]
    fn what_quotas_gave_away_is_offered_to_nobody() {
        let config = Config::parse("[share]\nreplicas = 4").unwrap();
        let mut one = published(gpu("GPU-a", 0));
        let memory = |device: &Device| device.capacity.as_ref().unwrap()["memory"].value.0.clone();
        let before = Offer::new(std::slice::from_ref(&one), &config);
        assert_eq!((memory(&before.shared[0]).as_str(), before.fixed.len()), ("81408Mi", 4));
        // One of four shares has grown by a half, and there is no room for all of the others.
        one.gpu.held = [names::fixed_share("GPU-a", 2)].into();
        one.gpu.grown_bytes = 10_176 * MIB + 1;
        one.gpu.free_bytes = (81_408 - 20_352 - 10_176) * MIB - 1;
        let after = Offer::new(&[one], &config);
        assert_eq!(memory(&after.shared[0]), "71168Mi");
        assert_eq!(self::names(&after.fixed), ["gpu-a-share-0", "gpu-a-share-1", "gpu-a-share-2"]);
        // What a share of one size is does not change under those who have one.
        assert_eq!(memory(&after.fixed[0]), "20352Mi");
    }

    #[test]
    fn what_cannot_be_published_is_named() {
        let config = Config::parse("[dra]\nmemory_step = \"1Gi\"").unwrap();
        let tiny = published(DraGpu { memory_bytes: 900 * MIB, ..gpu("GPU-a", 0) });
        let twins = [tiny, published(gpu("GPU-b", 1)), published(gpu("GPU-b", 2))];
        let offer = Offer::new(&twins, &config);
        assert_eq!(names(&offer.shared), ["gpu-b"]);
        assert_eq!(offer.problems.len(), 2);
        assert!(offer.problems[0].starts_with("GPU 0 (Example, GPU-a) is not published"));
    }
}
