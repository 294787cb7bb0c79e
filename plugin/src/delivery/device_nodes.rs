//! `device-nodes`: the nodes of `driver.device_nodes`, for machines without NVIDIA's toolkit.

use tessera_kubelet::deviceplugin::{ContainerAllocateResponse, DeviceSpec};

use crate::allocate::{Catalogue, Plan};
use crate::config::Driver;

pub(super) fn add(
    plan: &Plan,
    driver: &Driver,
    catalogue: &Catalogue,
    response: &mut ContainerAllocateResponse,
) {
    let minors: Vec<u32> = plan
        .grants
        .iter()
        .filter_map(|grant| catalogue.gpus.get(&grant.uuid))
        .map(|sold| sold.gpu.minor)
        .collect();
    let mut nodes = Vec::new();
    for pattern in &driver.device_nodes {
        if pattern.contains("{minor}") {
            nodes.extend(minors.iter().map(|minor| pattern.replace("{minor}", &minor.to_string())));
        } else {
            nodes.push(pattern.clone());
        }
    }
    response.devices.extend(nodes.into_iter().map(|path| DeviceSpec {
        container_path: path.clone(),
        host_path: path,
        permissions: "rw".into(),
    }));
}
