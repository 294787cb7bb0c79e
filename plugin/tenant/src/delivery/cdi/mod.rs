//! `cdi-cri` and `cdi-annotations`: the container runtime makes the container by specs that it reads
//! itself, and kubelet's answer only names devices of them.
//!
//! The GPU is a device of NVIDIA's spec (`cdi.gpu_kind`), pages and shim are a device of ours, one
//! for each allocation in a file of its own. Not one file for all: a file that is damaged, or cannot
//! be written, then concerns one container, and nothing rewrites what running containers will be
//! restarted from. The name is a function of the allocation alone ([`KIND`] and its id), because
//! kubelet keeps it in its checkpoint: after a restart of the plugin, or of the node, which empties
//! `/var/run`, the same name must be there again.

pub mod files;
mod spec;

use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use tessera_region::layout;

use super::driver::Parts;
use super::{DeliveryPlan, VISIBLE_DEVICES, VOID, mounts};
use spec::{ContainerEdits, DeviceNode, Mount};
use tessera_config::{Config, DeviceListStrategy, GpuNames};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;

pub use spec::Spec;
pub use tessera_model::cdi_name::SHARE_KIND as KIND;

/// Prefix of the annotations that container runtimes look for.
const ANNOTATION: &str = "cdi.k8s.io/tessera.share_";

/// The qualified name of an allocation's device.
pub fn name(id: &AllocationId) -> String {
    format!("{KIND}={id}")
}

/// The qualified names of all that a container of this allocation needs.
pub fn names(plan: &DeliveryPlan<'_>, config: &Config) -> Vec<String> {
    let mut names = Vec::with_capacity(plan.gpus.len() + 1);
    let is_given = config.container.device_list_strategy != DeviceListStrategy::None;
    if let Some(kind) = config.cdi.gpu_kind.as_ref().filter(|_| is_given) {
        let naming = config.cdi.gpu_names;
        names.extend(plan.gpus.iter().map(|gpu| format!("{kind}={}", gpu_name(gpu, naming))));
    }
    names.push(name(plan.id));
    names
}

fn gpu_name(gpu: &Gpu, naming: GpuNames) -> String {
    match naming {
        GpuNames::Uuid => gpu.uuid.clone(),
        GpuNames::Index => match &gpu.mig {
            None => gpu.index.to_string(),
            Some(mig) => format!("{}:{}", mig.parent_index, mig.index),
        },
    }
}

pub(super) fn add(
    plan: &DeliveryPlan<'_>,
    config: &Config,
    answer: &mut ContainerAllocateResponse,
) {
    let names = names(plan, config);
    if config.container.device_list_strategy == DeviceListStrategy::CdiAnnotations {
        answer.annotations.insert(format!("{ANNOTATION}{}", plan.id), names.join(","));
    } else {
        answer.cdi_devices = names.into_iter().map(|name| CdiDevice { name }).collect();
    }
    // For a kubelet or runtime that ignores the names: without a quota there is to be no GPU either.
    answer.envs.insert(VISIBLE_DEVICES.into(), VOID.into());
}

/// The spec of an allocation.
pub fn spec(plan: &DeliveryPlan<'_>, config: &Config) -> Spec {
    let mut env = vec![format!("{VISIBLE_DEVICES}={VOID}")];
    if config.container.inject_env() {
        env.push(format!("LD_PRELOAD={}", layout::CONTAINER_SHIM));
    }
    if plan.by_cdi_alone {
        env.extend(variables(config));
    }
    let device_nodes = device_nodes(&plan.parts, config);
    let mounts = mounts(plan, config).iter().map(Mount::bind).collect();
    Spec::new(plan.id, ContainerEdits { env, device_nodes, mounts })
}

/// The name under which a GPU is shown to those that monitor it: no pages, no shim, nothing granted.
pub fn view_id(gpu: &Gpu) -> AllocationId {
    // No resource has a name with a colon, and no claim's share this one.
    AllocationId::of("view:", [gpu.uuid.as_str()])
}

/// The qualified names of all that a container needs to see a GPU.
pub fn view_names(gpu: &Gpu, config: &Config) -> Vec<String> {
    let mut names = vec![name(&view_id(gpu))];
    if let Some(kind) = &config.cdi.gpu_kind {
        names.push(format!("{kind}={}", gpu_name(gpu, config.cdi.gpu_names)));
    }
    names
}

/// The spec of the sight of a GPU: the driver, and the device where no other spec has it.
pub fn view_spec(gpu: &Gpu, parts: &Parts, config: &Config) -> Spec {
    let mounts = parts.libraries.iter().chain(&config.driver.mounts).map(Mount::bind).collect();
    let mut env = vec![format!("{VISIBLE_DEVICES}={VOID}")];
    env.extend(variables(config));
    let device_nodes = device_nodes(parts, config);
    Spec::new(&view_id(gpu), ContainerEdits { env, device_nodes, mounts })
}

fn variables(config: &Config) -> impl Iterator<Item = String> {
    super::driver_env(config).into_iter().map(|(name, value)| format!("{name}={value}"))
}

fn device_nodes(parts: &Parts, config: &Config) -> Vec<DeviceNode> {
    let nodes = if config.cdi.gpu_kind.is_none() { parts.nodes.as_slice() } else { &[] };
    let node = |node: &super::driver::Node| DeviceNode {
        path: node.container.clone(),
        host_path: (node.host != node.container).then(|| node.host.clone()),
        permissions: "rw",
    };
    nodes.iter().map(node).collect()
}
