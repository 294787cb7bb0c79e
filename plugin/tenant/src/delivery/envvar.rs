//! `envvar`: `NVIDIA_VISIBLE_DEVICES`, which NVIDIA's container toolkit reads.

use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;

use super::{DeliveryPlan, VISIBLE_DEVICES, device_nodes};

pub(super) fn add(plan: &DeliveryPlan<'_>, answer: &mut ContainerAllocateResponse) {
    let uuids: Vec<&str> = plan.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    answer.envs.insert(VISIBLE_DEVICES.into(), uuids.join(","));
    device_nodes::name(plan, answer);
}
