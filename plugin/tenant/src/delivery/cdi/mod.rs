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

use serde::Serialize;
use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use tessera_region::layout;

use super::driver::Parts;
use super::{DeliveryPlan, VISIBLE_DEVICES, VOID, mounts};
use tessera_config::{Config, DeviceListStrategy, GpuNames};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;

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

/// The lowest version in which a device's name may begin with a digit, and a node have another path on the host. A runtime
/// refuses a spec that is newer than itself. (Table "Released versions" of the specification.)
const VERSION: &str = "0.5.0";

/// One spec file.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: [Device; 1],
}

/// A device, and what a container that asks for it gets.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: ContainerEdits,
}

/// Changes to a container's OCI specification. They win over what the pod says: of a variable or a
/// mount that is there already, the runtime keeps only this one. One at least has to be there.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerEdits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    /// Device nodes; type and number are the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceNode {
    /// In the container.
    path: String,
    /// On the host, where that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_path: Option<String>,
    /// Of `r`, `w` and `m`.
    permissions: &'static str,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    /// As `mount(8)` has them.
    options: [&'static str; 3],
}

impl Mount {
    /// A bind mount, with the options that containerd gives kubelet's mounts.
    fn bind(mount: &tessera_config::Mount) -> Self {
        let access = if mount.read_only { "ro" } else { "rw" };
        Mount {
            host_path: mount.host.to_string_lossy().into_owned(),
            container_path: mount.container.to_string_lossy().into_owned(),
            options: ["rbind", "rprivate", access],
        }
    }
}

impl Spec {
    /// A spec of our kind. Names and paths are what the configuration takes.
    fn new(id: &AllocationId, container_edits: ContainerEdits) -> Self {
        let devices = [Device { name: id.to_string(), container_edits }];
        Spec { cdi_version: VERSION, kind: KIND, devices }
    }

    /// The file's content.
    fn to_json(&self) -> Vec<u8> {
        // Strings, lists and maps with string keys: there is nothing that JSON lacks.
        let mut json = serde_json::to_vec_pretty(self).unwrap_or_default();
        json.push(b'\n');
        json
    }
}

#[cfg(test)]
mod tests;
