//! Pods as far as devices are concerned.

use std::collections::BTreeMap;

use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

use super::StandinError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// Containers that run one after the other before the others.
    pub init_containers: Vec<Container>,
    pub app_containers: Vec<Container>,
}

impl Pod {
    /// A pod without containers.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            init_containers: vec![],
            app_containers: vec![],
        }
    }

    pub fn with(mut self, container: Container) -> Self {
        self.app_containers.push(container);
        self
    }

    pub fn with_init(mut self, container: Container) -> Self {
        self.init_containers.push(container);
        self
    }

    /// All containers in the order of their admission, and whether each is an init container.
    pub(super) fn containers(&self) -> impl Iterator<Item = (bool, &Container)> {
        let init = self.init_containers.iter().map(|container| (true, container));
        init.chain(self.app_containers.iter().map(|container| (false, container)))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name, unique in the pod.
    pub name: String,
    /// Devices asked for, by extended resource.
    pub requests: BTreeMap<String, usize>,
}

impl Container {
    /// A container that asks for nothing.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), requests: BTreeMap::new() }
    }

    /// Asks for `count` devices.
    pub fn asking(mut self, resource_name: &str, count: usize) -> Self {
        self.requests.insert(resource_name.to_owned(), count);
        self
    }
}

/// What a container got of one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Admitted {
    /// The container's name.
    pub container: String,
    pub resource_name: String,
    pub device_ids: Vec<String>,
    /// The plugin's answer to Allocate.
    pub response: ContainerAllocateResponse,
}

/// What a container runtime gets, merged over the container's resources: for the same variable, path
/// or device the first resource wins, as with kubelet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunOptions {
    pub envs: BTreeMap<String, String>,
    pub mounts: Vec<Mount>,
    pub devices: Vec<DeviceSpec>,
    pub annotations: BTreeMap<String, String>,
    pub cdi_devices: Vec<CdiDevice>,
}

impl RunOptions {
    pub(super) fn merge(&mut self, response: &ContainerAllocateResponse) {
        for (name, value) in &response.envs {
            self.envs.entry(name.clone()).or_insert_with(|| value.clone());
        }
        for (name, value) in &response.annotations {
            self.annotations.entry(name.clone()).or_insert_with(|| value.clone());
        }
        for mount in &response.mounts {
            if !self.mounts.iter().any(|have| have.container_path == mount.container_path) {
                self.mounts.push(mount.clone());
            }
        }
        for device in &response.devices {
            if !self.devices.iter().any(|have| have.container_path == device.container_path) {
                self.devices.push(device.clone());
            }
        }
        for device in &response.cdi_devices {
            if !self.cdi_devices.contains(device) {
                self.cdi_devices.push(device.clone());
            }
        }
    }
}

/// One container's share of one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) container: String,
    pub(super) resource_name: String,
}

impl Key {
    pub(super) fn new(pod: &Pod, container: &str, resource_name: &str) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: container.to_owned(),
            resource_name: resource_name.to_owned(),
        }
    }

    pub(super) fn failed(&self, call: &'static str, status: tonic::Status) -> StandinError {
        StandinError::Plugin {
            call,
            resource_name: self.resource_name.clone(),
            status: Box::new(status),
        }
    }
}
