//! `envvar`: `NVIDIA_VISIBLE_DEVICES`, which NVIDIA's container toolkit reads.

use tessera_kubelet::deviceplugin::ContainerAllocateResponse;

use crate::allocate::Plan;

pub(super) fn add(plan: &Plan, response: &mut ContainerAllocateResponse) {
    let uuids: Vec<&str> = plan.grants.iter().map(|grant| grant.uuid.as_str()).collect();
    response.envs.insert("NVIDIA_VISIBLE_DEVICES".into(), uuids.join(","));
}
