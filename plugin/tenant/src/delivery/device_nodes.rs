//! `device-nodes`: the nodes of `driver.device_nodes`, for machines without NVIDIA's toolkit.

use tessera_kubelet_api::deviceplugin::{ContainerAllocateResponse, DeviceSpec};

use super::{DeliveryPlan, VISIBLE_DEVICES, VOID};

pub(super) fn add(plan: &DeliveryPlan<'_>, answer: &mut ContainerAllocateResponse) {
    answer.envs.insert(VISIBLE_DEVICES.into(), VOID.into());
    name(plan, answer);
}

/// Tells kubelet the nodes, so that they are in the container's device rules whoever writes these again.
pub(super) fn name(plan: &DeliveryPlan<'_>, answer: &mut ContainerAllocateResponse) {
    answer.devices.extend(plan.parts.nodes.iter().map(|node| DeviceSpec {
        container_path: node.container.clone(),
        host_path: node.host.clone(),
        permissions: "rw".into(),
    }));
}
