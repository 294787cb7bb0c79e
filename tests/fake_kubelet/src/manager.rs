//! Pods as far as devices are concerned, and the device manager's bookkeeping and choices; no I/O.

use std::collections::{BTreeMap, BTreeSet};

use tessera_kubelet_api::deviceplugin::{
    CdiDevice, ContainerAllocateResponse, Device, DeviceSpec, HEALTHY, Mount, UNHEALTHY,
};

use super::StandinError;

/// What a container was given; the real one keeps this in its checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Assignment {
    pub(super) device_ids: Vec<String>,
    pub(super) response: ContainerAllocateResponse,
    pub(super) init: bool,
}

/// How a container's request is to be met.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Choice {
    /// It already has its devices; the plugin is not asked.
    Held(Assignment),
    Settled(BTreeSet<String>),
    /// Some of `available`, and all of `must_include`.
    Ask {
        available: BTreeSet<String>,
        must_include: BTreeSet<String>,
    },
}

/// Plugins of type `P`, their devices, and who holds what.
#[derive(Debug)]
pub(super) struct Manager<P> {
    plugins: BTreeMap<String, (u64, P)>,
    registered: u64,
    devices: BTreeMap<String, BTreeMap<String, Device>>,
    assignments: BTreeMap<Key, Assignment>,
}

impl<P> Default for Manager<P> {
    fn default() -> Self {
        Self {
            plugins: BTreeMap::new(),
            registered: 0,
            devices: BTreeMap::new(),
            assignments: BTreeMap::new(),
        }
    }
}

impl<P> Manager<P> {
    /// A number for a plugin that is about to register.
    pub(super) fn next_id(&mut self) -> u64 {
        self.registered += 1;
        self.registered
    }

    /// A plugin has registered; it replaces an earlier one, whose devices stay until the new one has
    /// listed its own.
    pub(super) fn connect(&mut self, resource_name: &str, id: u64, plugin: P) {
        self.plugins.insert(resource_name.to_owned(), (id, plugin));
    }

    pub(super) fn list(&mut self, resource_name: &str, id: u64, devices: Vec<Device>) {
        if self.is_current(resource_name, id) {
            let devices = devices.into_iter().map(|device| (device.id.clone(), device)).collect();
            self.devices.insert(resource_name.to_owned(), devices);
        }
    }

    /// A plugin's stream has ended.
    pub(super) fn ended(&mut self, resource_name: &str, id: u64) {
        if self.is_current(resource_name, id) {
            self.disconnect(resource_name);
        }
    }

    /// The plugin of a resource is gone: its devices are all unhealthy.
    pub(super) fn disconnect(&mut self, resource_name: &str) {
        self.plugins.remove(resource_name);
        self.mark_unhealthy(resource_name);
    }

    pub(super) fn mark_unhealthy(&mut self, resource_name: &str) {
        for device in self.devices.entry(resource_name.to_owned()).or_default().values_mut() {
            UNHEALTHY.clone_into(&mut device.health);
        }
    }

    /// Nothing is known about plugins and devices; the assignments stay.
    pub(super) fn forget_plugins(&mut self) {
        self.plugins.clear();
        self.devices.clear();
    }

    fn is_current(&self, resource_name: &str, id: u64) -> bool {
        self.plugins.get(resource_name).is_some_and(|(current, _)| *current == id)
    }

    pub(super) fn plugin(&self, resource_name: &str) -> Option<&P> {
        self.plugins.get(resource_name).map(|(_, plugin)| plugin)
    }

    pub(super) fn resources(&self) -> impl Iterator<Item = &String> {
        self.devices.keys()
    }

    pub(super) fn devices(&self, resource_name: &str) -> Vec<Device> {
        self.devices
            .get(resource_name)
            .map(|devices| devices.values().cloned().collect())
            .unwrap_or_default()
    }

    pub(super) fn healthy(&self, resource_name: &str) -> BTreeSet<String> {
        let devices = self.devices.get(resource_name).into_iter().flat_map(BTreeMap::values);
        devices.filter(|device| device.health == HEALTHY).map(|device| device.id.clone()).collect()
    }

    pub(super) fn assign(&mut self, key: Key, assignment: Assignment) {
        self.assignments.insert(key, assignment);
    }

    pub(super) fn remove(&mut self, namespace: &str, pod: &str) {
        self.assignments.retain(|key, _| key.namespace != namespace || key.pod != pod);
    }

    pub(super) fn assignments(&self) -> impl Iterator<Item = (&Key, &Assignment)> {
        self.assignments.iter()
    }

    pub(super) fn container(&self, pod: &Pod, container: &str) -> Vec<(Key, Assignment)> {
        self.assignments
            .iter()
            .filter(|(key, _)| {
                key.namespace == pod.namespace && key.pod == pod.name && key.container == container
            })
            .map(|(key, assignment)| (key.clone(), assignment.clone()))
            .collect()
    }

    /// How `count` devices for `key` are to be found: `spare` ones of the pod's init containers first.
    pub(super) fn choose(
        &self,
        key: &Key,
        count: usize,
        spare: &BTreeSet<String>,
    ) -> Result<Choice, StandinError> {
        if let Some(assignment) = self.assignments.get(key) {
            return Ok(Choice::Held(assignment.clone()));
        }
        let must_include: BTreeSet<String> = spare.iter().take(count).cloned().collect();
        let needed = count - must_include.len();
        if needed == 0 {
            return Ok(Choice::Settled(must_include));
        }
        let used: BTreeSet<&String> = self
            .assignments
            .iter()
            .filter(|(other, _)| other.resource_name == key.resource_name)
            .flat_map(|(_, assignment)| &assignment.device_ids)
            .collect();
        let mut available = self.healthy(&key.resource_name);
        available.retain(|id| !used.contains(id));
        if available.len() < needed {
            return Err(StandinError::Unavailable {
                resource_name: key.resource_name.clone(),
                requested: needed,
                available: available.len(),
            });
        }
        if available.len() == needed {
            return Ok(Choice::Settled(available.into_iter().chain(must_include).collect()));
        }
        Ok(Choice::Ask { available, must_include })
    }
}

/// The devices after the plugin has said which it prefers: of those, what is available; then whatever
/// is, until there are `count`.
pub(super) fn settle(
    preferred: &[String],
    available: &BTreeSet<String>,
    must_include: BTreeSet<String>,
    count: usize,
) -> BTreeSet<String> {
    let mut chosen = must_include;
    for id in preferred.iter().filter(|id| available.contains(*id)).chain(available) {
        if chosen.len() == count {
            break;
        }
        chosen.insert(id.clone());
    }
    chosen
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// Containers that run one after the other before the others.
    pub init_containers: Vec<Container>,
    pub app_containers: Vec<Container>,
}

impl Pod {
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
    pub name: String,
    /// Devices asked for, by extended resource.
    pub requests: BTreeMap<String, usize>,
}

impl Container {
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), requests: BTreeMap::new() }
    }

    pub fn asking(mut self, resource_name: &str, count: usize) -> Self {
        self.requests.insert(resource_name.to_owned(), count);
        self
    }
}

/// What a container got of one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Admitted {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_end_of_a_replaced_plugins_stream_changes_nothing() {
        const GPU: &str = "tessera.dev/gpu";
        let mut manager = Manager::default();
        let [first, second] = [(); 2].map(|()| manager.next_id());
        manager.connect(GPU, first, ());
        let health = HEALTHY.to_owned();
        manager.list(GPU, first, vec![Device { id: "a".to_owned(), health, topology: None }]);
        manager.connect(GPU, second, ());
        manager.ended(GPU, first);
        assert_eq!(manager.healthy(GPU).len(), 1);
        manager.ended(GPU, second);
        assert_eq!(manager.healthy(GPU).len(), 0);
        assert_eq!(manager.devices(GPU).len(), 1);
    }
}
