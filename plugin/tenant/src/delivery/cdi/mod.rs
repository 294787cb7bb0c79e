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
pub mod spec;

use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use tessera_region::layout;

use super::{DeliveryPlan, VISIBLE_DEVICES, VOID, edits};
use spec::{ContainerEdits, Device, DeviceNode, Mount, Spec, SpecError};
use tessera_config::{Config, DeviceListStrategy, GpuNames};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;

/// The kind of our devices. Not that of the resource, which is not known of an allocation adopted
/// from its pages alone.
pub const KIND: &str = "tessera.dev/share";

/// Prefix of the annotations that container runtimes look for.
const ANNOTATION: &str = "cdi.k8s.io/tessera.share_";

/// The qualified name of an allocation's device.
#[must_use]
pub fn name(id: &AllocationId) -> String {
    format!("{KIND}={id}")
}

/// The names of all that a container of this allocation needs.
fn names(parcel: &DeliveryPlan<'_>, config: &Config) -> Vec<String> {
    let mut names = Vec::with_capacity(parcel.gpus.len() + 1);
    if let Some(kind) = &config.cdi.gpu_kind {
        let naming = config.cdi.gpu_names;
        names.extend(parcel.gpus.iter().map(|gpu| format!("{kind}={}", gpu_name(gpu, naming))));
    }
    names.push(name(parcel.id));
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
    parcel: &DeliveryPlan<'_>,
    config: &Config,
    answer: &mut ContainerAllocateResponse,
) {
    let names = names(parcel, config);
    if config.container.device_list_strategy == DeviceListStrategy::CdiAnnotations {
        answer.annotations.insert(format!("{ANNOTATION}{}", parcel.id), names.join(","));
    } else {
        answer.cdi_devices = names.into_iter().map(|name| CdiDevice { name }).collect();
    }
    // For a kubelet or runtime that ignores the names: without a quota there is to be no GPU either.
    answer.envs.insert(VISIBLE_DEVICES.into(), VOID.into());
}

/// The spec of an allocation.
///
/// # Errors
/// What CDI cannot express; the configuration was checked for all of it.
pub fn spec(parcel: &DeliveryPlan<'_>, config: &Config) -> Result<Spec, SpecError> {
    let mut env = vec![format!("{VISIBLE_DEVICES}={VOID}")];
    if config.container.inject_env() {
        env.push(format!("LD_PRELOAD={}", layout::CONTAINER_SHIM));
    }
    let nodes = if config.cdi.gpu_kind.is_none() { parcel.parts.nodes.as_slice() } else { &[] };
    let device_nodes = nodes
        .iter()
        .map(|node| DeviceNode {
            path: node.container.clone(),
            host_path: (node.host != node.container).then(|| node.host.clone()),
            permissions: "rw".into(),
        })
        .collect();
    let mounts = edits::mounts(parcel, config).iter().map(Mount::bind).collect();
    let container_edits = ContainerEdits { env, device_nodes, mounts };
    Spec::new(KIND, vec![Device { name: parcel.id.to_string(), container_edits }])
}
