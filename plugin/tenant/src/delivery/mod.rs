//! How a container gets its GPU, its pages and the shim.
//!
//! What [`driver`] finds on the host and where pages and shim lie make a [`DeliveryPlan`]; from that come,
//! without any I/O, kubelet's [`answer`] and, for the CDI strategies, the spec that the container
//! runtime reads ([`cdi::spec`]). One file each for what `container.device_list_strategy` can be.

pub mod cdi;
mod device_nodes;
pub mod driver;
mod edits;
mod envvar;
mod volume_mounts;

use std::path::{Path, PathBuf};

use tessera_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};
use tessera_region::layout;

use tessera_config::{CONTAINER_DRIVER_DIR, Config, DeviceListStrategy};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;

/// The list of GPUs for NVIDIA's container toolkit.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// The same for CUDA itself, which shows a process one MIG instance, the first it has access to (MIG User
/// Guide, "CUDA Device Enumeration"): a container that sees more is not to get another's.
const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// What it says where the toolkit is to keep away, whatever the image says: CUDA's own images ask for
/// `all`. ("`void` or empty or unset: the same behavior as runc", nvidia-container-runtime's README.)
const VOID: &str = "void";

/// Where an installed shim is on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The installed shim.
    pub shim: PathBuf,
    /// The file to mount as `/etc/ld.so.preload`.
    pub preload: PathBuf,
}

/// All that a container of one allocation is given.
#[derive(Clone, Debug)]
pub struct DeliveryPlan<'a> {
    pub id: &'a AllocationId,
    /// Its GPUs, in the order of its pages.
    pub gpus: Vec<&'a Gpu>,
    /// The directory of its pages on the host.
    pub pages: &'a Path,
    pub shim: &'a Delivery,
    /// What the host has of the driver.
    pub parts: driver::Parts,
    /// Its CDI devices are all that reaches the container: a claim's share has no answer beside them.
    pub by_cdi_alone: bool,
}

/// Variables without which a program finds no driver.
fn driver_env(config: &Config) -> Vec<(String, String)> {
    let mut env = Vec::new();
    if config.driver.libraries.is_some() || config.driver.root.is_some() {
        env.push(("LD_LIBRARY_PATH".to_owned(), CONTAINER_DRIVER_DIR.to_owned()));
    }
    env.extend(config.driver.env.iter().map(|(name, value)| (name.clone(), value.clone())));
    env
}

/// Kubelet's answer: paths and names only. What the limits are stands in the quota page, because a
/// pod's own environment would override ours.
pub fn answer(plan: &DeliveryPlan<'_>, config: &Config) -> ContainerAllocateResponse {
    let mut answer = ContainerAllocateResponse::default();
    let strategy = config.container.device_list_strategy;
    if strategy.is_cdi() {
        cdi::add(plan, config, &mut answer);
    } else {
        answer.mounts = edits::mounts(plan, config)
            .iter()
            .map(|mount| Mount {
                host_path: mount.host.to_string_lossy().into_owned(),
                container_path: mount.container.to_string_lossy().into_owned(),
                read_only: mount.read_only,
            })
            .collect();
        if config.container.inject_env() {
            answer.envs.insert("LD_PRELOAD".into(), layout::CONTAINER_SHIM.into());
        }
    }
    match strategy {
        DeviceListStrategy::Envvar => envvar::add(plan, &mut answer),
        DeviceListStrategy::VolumeMounts => volume_mounts::add(plan, &mut answer),
        DeviceListStrategy::DeviceNodes => device_nodes::add(plan, &mut answer),
        DeviceListStrategy::CdiAnnotations
        | DeviceListStrategy::CdiCri
        | DeviceListStrategy::None => {}
    }
    if plan.gpus.iter().any(|gpu| gpu.mig.is_some()) {
        let uuids: Vec<&str> = plan.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        answer.envs.insert(CUDA_VISIBLE_DEVICES.into(), uuids.join(","));
    }
    // Here also for CDI, whose variables win over a pod's own: a program may need more than our
    // directory in its path.
    answer.envs.extend(driver_env(config));
    answer
}

#[cfg(test)]
mod tests;
