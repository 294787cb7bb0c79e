//! How a container gets its GPU, its pages and the shim.
//!
//! What [`driver`] finds on the host and where pages and shim lie make a [`DeliveryPlan`]; from that come,
//! without any I/O, kubelet's [`answer`] and, for the CDI strategies, the spec that the container
//! runtime reads ([`cdi::spec`]).

pub mod cdi;
pub mod driver;

use std::path::{Path, PathBuf};

use tessera_kubelet_api::deviceplugin::{ContainerAllocateResponse, DeviceSpec, Mount};
use tessera_region::layout;

use tessera_config::{self as config, CONTAINER_DRIVER_DIR, Config, DeviceListStrategy};
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

/// Where NVIDIA's toolkit looks for the list of GPUs as mounts of `/dev/null`, one named after each; the variable names
/// the place, as NVIDIA's device plugin has it. A pod may set a variable, but to mount there it would need a `hostPath`,
/// which policies can refuse. The toolkit reads it with `accept-nvidia-visible-devices-as-volume-mounts = true`.
const MOUNTED_LIST: &str = "/var/run/nvidia-container-devices";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub shim: PathBuf,
    /// The file to mount as `/etc/ld.so.preload`.
    pub preload: PathBuf,
}

/// All that a container of one allocation is given.
#[derive(Clone, Debug)]
pub struct DeliveryPlan<'a> {
    pub id: &'a AllocationId,
    pub gpus: Vec<&'a Gpu>,
    pub pages: &'a Path,
    pub shim: &'a Delivery,
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

/// What a container gets whatever the strategy (its pages, the shim, the driver's libraries), in an order that serves a runtime which does not sort them: the pages' directory first,
/// the writable file over it after. A container may have several shares, so each has a directory of its own,
/// named by its allocation; the runtime makes the one that they are in.
fn mounts(plan: &DeliveryPlan<'_>, config: &Config) -> Vec<config::Mount> {
    let mount = |host: &Path, container: PathBuf, read_only| config::Mount {
        host: host.to_owned(),
        container,
        read_only,
    };
    let pages = Path::new(layout::CONTAINER_PAGES_DIR).join(plan.id.as_str());
    let mut mounts = vec![
        mount(plan.pages, pages.clone(), true),
        mount(&plan.pages.join(layout::USAGE_FILE), pages.join(layout::USAGE_FILE), false),
        mount(&plan.shim.shim, layout::CONTAINER_SHIM.into(), true),
    ];
    if config.container.inject_file() {
        mounts.push(mount(&plan.shim.preload, "/etc/ld.so.preload".into(), true));
    }
    mounts.extend(plan.parts.libraries.iter().cloned());
    mounts.extend(config.driver.mounts.iter().cloned());
    mounts
}

/// Kubelet's answer: paths and names only. What the limits are stands in the quota page, because a
/// pod's own environment would override ours.
pub fn answer(plan: &DeliveryPlan<'_>, config: &Config) -> ContainerAllocateResponse {
    let mut answer = ContainerAllocateResponse::default();
    let strategy = config.container.device_list_strategy;
    let uuids = || plan.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>().join(",");
    if strategy.is_cdi() {
        cdi::add(plan, config, &mut answer);
    } else {
        answer.mounts = mounts(plan, config)
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
    let visible = match strategy {
        DeviceListStrategy::Envvar => Some(uuids()),
        DeviceListStrategy::VolumeMounts => {
            answer.mounts.extend(plan.gpus.iter().map(|gpu| Mount {
                host_path: "/dev/null".into(),
                container_path: format!("{MOUNTED_LIST}/{}", gpu.uuid),
                read_only: false,
            }));
            Some(MOUNTED_LIST.to_owned())
        }
        // For machines without NVIDIA's toolkit.
        DeviceListStrategy::DeviceNodes => Some(VOID.to_owned()),
        DeviceListStrategy::CdiAnnotations
        | DeviceListStrategy::CdiCri
        | DeviceListStrategy::None => None,
    };
    if let Some(visible) = visible {
        answer.envs.insert(VISIBLE_DEVICES.into(), visible);
        // Kubelet knows the nodes then, so that they are in the container's device rules whoever writes these again.
        answer.devices.extend(plan.parts.nodes.iter().map(|node| DeviceSpec {
            container_path: node.container.clone(),
            host_path: node.host.clone(),
            permissions: "rw".into(),
        }));
    }
    if plan.gpus.iter().any(|gpu| gpu.mig.is_some()) {
        answer.envs.insert(CUDA_VISIBLE_DEVICES.into(), uuids());
    }
    // Here also for CDI, whose variables win over a pod's own: a program may need more than our
    // directory in its path.
    answer.envs.extend(driver_env(config));
    answer
}

#[cfg(test)]
mod tests;
