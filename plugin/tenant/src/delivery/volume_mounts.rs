//! `volume-mounts`: the list of GPUs as mounts of `/dev/null`, one named after each. A pod may set a
//! variable, but to mount there it would need a `hostPath`, which policies can refuse. NVIDIA's
//! toolkit reads it with `accept-nvidia-visible-devices-as-volume-mounts = true`.

use tessera_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};

use super::{DeliveryPlan, VISIBLE_DEVICES, device_nodes};

/// Where NVIDIA's toolkit looks; the variable names the place, as NVIDIA's device plugin has it.
const LIST: &str = "/var/run/nvidia-container-devices";

pub(super) fn add(plan: &DeliveryPlan<'_>, answer: &mut ContainerAllocateResponse) {
    answer.envs.insert(VISIBLE_DEVICES.into(), LIST.into());
    answer.mounts.extend(plan.gpus.iter().map(|gpu| Mount {
        host_path: "/dev/null".into(),
        container_path: format!("{LIST}/{}", gpu.uuid),
        read_only: false,
    }));
    device_nodes::name(plan, answer);
}
