//! A stand-in for kubelet's device manager, for `tessera demo` and the tests: it speaks the real gRPC
//! with the plugin, in the order and manner of the real one (Kubernetes `pkg/kubelet/cm/devicemanager`),
//! and runs no containers.
//!
//! As the real one:
//! - Register dials the plugin back before it is answered, asks for its options and then opens
//!   ListAndWatch; a second plugin for the same resource replaces the first.
//! - GetPreferredAllocation is asked only where there is a choice; of the answer, what is not available
//!   is dropped and what is missing is filled up. Allocate is called once per container and resource.
//! - Init containers come first, one after the other; their devices are used again by later containers
//!   of the pod.
//! - PreStartContainer is called at each start of a container. While the plugin is not registered, it
//!   is skipped and the container starts with what Allocate once answered.
//! - When the stream ends, all devices are unhealthy; after [`Kubelet::restart`] there are none until
//!   the plugin has registered again.
//! - Pod resources list app containers only.
//!
//! [`Behaviour`] makes it refuse, dawdle or neglect the stream. It dials as kubelet 1.26 and later do;
//! what older ones send is tried with a raw client in `tests/suites/agent/kubelet/authority.rs`.
//!
//! [`dra`] is a stand-in for kubelet's DRA manager beside it.
#![forbid(unsafe_code)]

pub mod dra;
mod manager;
mod servers;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tessera_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Device, DevicePluginOptions, KUBELET_SOCKET,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use tessera_kubelet_api::podresources::{CdiDevice, ClaimResource, DynamicResource};
use tessera_system::locks::lock;
use tokio::sync::watch;
use tonic::transport::Channel;

pub use manager::{Admitted, Container, Pod, RunOptions};
use manager::{Assignment, Choice, Key, Manager, settle};

/// Longest PreStartContainer, as kubelet has it.
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a pod cannot have its devices or a container cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StandinError {
    /// Not enough healthy free devices; the real one calls this `UnexpectedAdmissionError`.
    #[error(
        "requested number of devices unavailable for {resource_name}: {requested} asked, {available} free"
    )]
    Unavailable {
        resource_name: String,
        /// Devices asked for beyond what the container could use again.
        requested: usize,
        /// Healthy devices that nobody holds.
        available: usize,
    },
    /// The plugin answered a call with an error.
    #[error("{call} of {resource_name} failed: {}", .status.message())]
    Plugin { call: &'static str, resource_name: String, status: Box<tonic::Status> },
    /// The pod has not been admitted, or has no such container.
    #[error("no such container: {0}")]
    Unknown(String),
}

/// How the stand-in treats plugins; the default is as a sound kubelet does.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Register fails with this message.
    pub refuse: Option<String>,
    /// Register is answered only after this time.
    pub delay: Duration,
    /// ListAndWatch is not opened after Register.
    pub no_stream: bool,
    /// What becomes of GetAllocatableResources.
    pub allocatable: Allocatable,
}

/// What becomes of GetAllocatableResources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Allocatable {
    /// Answered: Kubernetes 1.23 and later.
    #[default]
    Served,
    /// Known and switched off: 1.21 and 1.22.
    Disabled,
    /// Unknown: 1.20.
    Unimplemented,
}

/// The stand-in; clones are handles on the same one. The last handle's end stops it.
#[derive(Clone, Debug)]
pub struct Kubelet(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device_plugins_dir: PathBuf,
    pod_resources_socket: PathBuf,
    state: Mutex<State>,
    /// Ticks with every change of the state.
    changed: watch::Sender<()>,
    /// Admission is serial, as kubelet's is.
    admission: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    manager: Manager<Endpoint>,
    behaviour: Behaviour,
    registrations: u64,
    lists: u64,
    pod_lists: u64,
    /// Pods without devices, by namespace and name.
    others: BTreeSet<(String, String)>,
    /// Pods with claims: the container, and what it has of them.
    claiming: BTreeMap<(String, String), (String, Vec<DynamicResource>)>,
    running: Option<servers::Running>,
}

#[derive(Debug)]
struct Endpoint {
    client: DevicePluginClient<Channel>,
    options: DevicePluginOptions,
    stream: tokio::task::JoinHandle<()>,
    /// File name of its socket.
    socket: String,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stream.abort();
    }
}

impl Kubelet {
    /// Starts below `root` as kubelet does below its root directory: sockets of earlier runs in
    /// `device-plugins` are wiped, then `device-plugins/kubelet.sock` and `pod-resources/kubelet.sock`
    /// are served.
    pub async fn start(root: &Path) -> io::Result<Self> {
        let inner = Inner {
            device_plugins_dir: root.join("device-plugins"),
            pod_resources_socket: root.join("pod-resources").join(KUBELET_SOCKET),
            state: Mutex::default(),
            changed: watch::Sender::new(()),
            admission: tokio::sync::Mutex::default(),
        };
        std::fs::create_dir_all(&inner.device_plugins_dir)?;
        std::fs::create_dir_all(root.join("pod-resources"))?;
        let kubelet = Self(Arc::new(inner));
        kubelet.resume().await?;
        Ok(kubelet)
    }

    pub fn device_plugins_dir(&self) -> &Path {
        &self.0.device_plugins_dir
    }

    pub fn pod_resources_socket(&self) -> &Path {
        &self.0.pod_resources_socket
    }

    pub fn set_behaviour(&self, behaviour: Behaviour) {
        self.0.state().behaviour = behaviour;
    }

    /// Dies: connections end, the socket files stay, assignments are kept (its checkpoint).
    pub async fn stop(&self) {
        let running = {
            let mut state = self.0.state();
            state.manager.forget_plugins();
            state.running.take()
        };
        if let Some(running) = running {
            running.stop().await;
        }
        self.0.tick();
    }

    /// Starts again after [`Kubelet::stop`]: all sockets in the directory are wiped first.
    pub async fn resume(&self) -> io::Result<()> {
        servers::wipe_sockets(&self.0.device_plugins_dir)?;
        let running = servers::run(&self.0)?;
        self.0.state().running = Some(running);
        Ok(())
    }

    /// [`Kubelet::stop`] and [`Kubelet::resume`].
    pub async fn restart(&self) -> io::Result<()> {
        self.stop().await;
        self.resume().await
    }

    /// Ends the device stream of a resource, as a kubelet that lost the plugin does.
    pub fn drop_stream(&self, resource_name: &str) {
        self.0.state().manager.disconnect(resource_name);
        self.0.tick();
    }

    /// Takes all devices of a resource for unhealthy although its stream is open, as kubelets do that
    /// mistake the end of an older plugin's stream for the newer one's (kubernetes #121994).
    pub fn lose_devices(&self, resource_name: &str) {
        self.0.state().manager.mark_unhealthy(resource_name);
        self.0.tick();
    }

    /// All devices of a resource as last seen, sorted by id; all unhealthy once the stream has ended.
    pub fn devices(&self, resource_name: &str) -> Vec<Device> {
        self.0.state().manager.devices(resource_name)
    }

    pub fn held(&self, resource_name: &str) -> BTreeSet<String> {
        let state = self.0.state();
        let of_it = |key: &&Key| key.resource_name == resource_name;
        let assignments = state.manager.assignments().filter(|(key, _)| of_it(key));
        assignments.flat_map(|(_, assignment)| assignment.device_ids.iter().cloned()).collect()
    }

    /// How many devices the node would offer the scheduler: the healthy ones, used or not.
    pub fn allocatable(&self, resource_name: &str) -> usize {
        self.0.state().manager.healthy(resource_name).len()
    }

    pub fn registrations(&self) -> u64 {
        self.0.state().registrations
    }

    pub fn lists(&self) -> u64 {
        self.0.state().lists
    }

    pub fn pod_lists(&self) -> u64 {
        self.0.state().pod_lists
    }

    /// File name of the socket that serves a resource now.
    pub fn endpoint(&self, resource_name: &str) -> Option<String> {
        Some(self.0.state().manager.plugin(resource_name)?.socket.clone())
    }

    /// Waits until a resource has exactly `count` allocatable devices. Bound it with a timeout.
    pub async fn wait_allocatable(&self, resource_name: &str, count: usize) {
        self.wait_until(|kubelet| kubelet.allocatable(resource_name) == count).await;
    }

    /// Waits until `condition` holds; looks after every change. Bound it with a timeout.
    pub async fn wait_until(&self, mut condition: impl FnMut(&Self) -> bool) {
        let mut changed = self.0.changed.subscribe();
        while !condition(self) {
            // The sender lives as long as self.
            let _ = changed.changed().await;
        }
    }

    /// Admits a pod: init containers, then app containers, get their devices through
    /// GetPreferredAllocation and Allocate. A pod admitted before keeps what it has, and the plugin is
    /// not asked. On an error the pod has nothing, as the failed pod of a real kubelet.
    pub async fn admit(&self, pod: &Pod) -> Result<Vec<Admitted>, StandinError> {
        let _serial = self.0.admission.lock().await;
        let admitted = self.admit_containers(pod).await;
        if admitted.is_err() {
            self.remove(&pod.namespace, &pod.name);
        }
        admitted
    }

    async fn admit_containers(&self, pod: &Pod) -> Result<Vec<Admitted>, StandinError> {
        let mut reusable = BTreeMap::new();
        let mut admitted = vec![];
        for (init, container) in pod.containers() {
            for (resource_name, &count) in &container.requests {
                let key = Key::new(pod, &container.name, resource_name);
                let spare: &mut BTreeSet<String> =
                    reusable.entry(resource_name.clone()).or_default();
                let choice = self.0.state().manager.choose(&key, count, spare)?;
                let assignment = match choice {
                    Choice::Held(assignment) => assignment,
                    Choice::Settled(ids) => self.allocate(&key, init, ids).await?,
                    Choice::Ask { available, must_include } => {
                        let preferred = self.prefer(&key, &available, &must_include, count).await?;
                        let ids = settle(&preferred, &available, must_include, count);
                        self.allocate(&key, init, ids).await?
                    }
                };
                if init {
                    spare.extend(assignment.device_ids.iter().cloned());
                } else {
                    spare.retain(|id| !assignment.device_ids.contains(id));
                }
                admitted.push(Admitted {
                    container: container.name.clone(),
                    resource_name: resource_name.clone(),
                    device_ids: assignment.device_ids,
                    response: assignment.response,
                });
            }
        }
        Ok(admitted)
    }

    async fn prefer(
        &self,
        key: &Key,
        available: &BTreeSet<String>,
        must_include: &BTreeSet<String>,
        count: usize,
    ) -> Result<Vec<String>, StandinError> {
        let Some((mut client, options)) = self.plugin(&key.resource_name) else {
            return Ok(vec![]);
        };
        if !options.get_preferred_allocation_available {
            return Ok(vec![]);
        }
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: available.union(must_include).cloned().collect(),
            must_include_device_ids: must_include.iter().cloned().collect(),
            allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = client
            .get_preferred_allocation(request)
            .await
            .map_err(|status| key.failed("GetPreferredAllocation", status))?;
        let response = answer.into_inner().container_responses.into_iter().next();
        Ok(response.map(|response| response.device_ids).unwrap_or_default())
    }

    async fn allocate(
        &self,
        key: &Key,
        init: bool,
        ids: BTreeSet<String>,
    ) -> Result<Assignment, StandinError> {
        let device_ids: Vec<String> = ids.into_iter().collect();
        let (mut client, _) = self.plugin(&key.resource_name).ok_or_else(|| {
            key.failed("Allocate", tonic::Status::unavailable("the plugin is not registered"))
        })?;
        let request = ContainerAllocateRequest { device_ids: device_ids.clone() };
        let answer = client
            .allocate(AllocateRequest { container_requests: vec![request] })
            .await
            .map_err(|status| key.failed("Allocate", status))?;
        let response: ContainerAllocateResponse =
            answer.into_inner().container_responses.into_iter().next().ok_or_else(|| {
                key.failed("Allocate", tonic::Status::internal("the answer is empty"))
            })?;
        let assignment = Assignment { device_ids, response, init };
        self.0.state().manager.assign(key.clone(), assignment.clone());
        Ok(assignment)
    }

    /// Starts a container of an admitted pod, for the first time or again: PreStartContainer for each
    /// of its resources whose plugin is registered. Gives what the container runtime would get.
    pub async fn start_container(
        &self,
        pod: &Pod,
        container: &str,
    ) -> Result<RunOptions, StandinError> {
        let assignments = self.0.state().manager.container(pod, container);
        if assignments.is_empty() {
            return Err(StandinError::Unknown(format!("{}/{container}", pod.name)));
        }
        let mut options = RunOptions::default();
        for (key, assignment) in assignments {
            if let Some((mut client, plugin)) = self.plugin(&key.resource_name)
                && plugin.pre_start_required
            {
                let request =
                    PreStartContainerRequest { device_ids: assignment.device_ids.clone() };
                let call =
                    tokio::time::timeout(PRE_START_TIMEOUT, client.pre_start_container(request));
                call.await
                    .unwrap_or_else(|_| Err(tonic::Status::deadline_exceeded("no answer in 30 s")))
                    .map_err(|status| key.failed("PreStartContainer", status))?;
            }
            options.merge(&assignment.response);
        }
        Ok(options)
    }

    /// Admits a pod and starts all its containers in order.
    pub async fn run(&self, pod: &Pod) -> Result<Vec<Admitted>, StandinError> {
        let admitted = self.admit(pod).await?;
        for (_, container) in pod.containers().filter(|(_, c)| !c.requests.is_empty()) {
            self.start_container(pod, &container.name).await?;
        }
        Ok(admitted)
    }

    /// A pod without devices runs, as the plugin's own does: PodResources lists it.
    pub fn run_other(&self, namespace: &str, pod: &str) {
        self.0.state().others.insert((namespace.to_owned(), pod.to_owned()));
    }

    /// A pod runs whose container has these devices of a claim: PodResources lists it with them.
    pub fn run_claiming(
        &self,
        (namespace, pod): (&str, &str),
        container: &str,
        claim: &dra::ClaimName,
        devices: &[dra::PreparedDevice],
    ) {
        let of = |device: &dra::PreparedDevice| ClaimResource {
            cdi_devices: (device.cdi_device_ids.iter())
                .map(|name| CdiDevice { name: name.clone() })
                .collect(),
            driver_name: "gpu.tessera.dev".to_owned(),
            pool_name: device.pool_name.clone(),
            device_name: device.device_name.clone(),
            ..ClaimResource::default()
        };
        let resource = DynamicResource {
            claim_name: claim.name.clone(),
            claim_namespace: claim.namespace.clone(),
            claim_resources: devices.iter().map(of).collect(),
        };
        let key = (namespace.to_owned(), pod.to_owned());
        self.0.state().claiming.insert(key, (container.to_owned(), vec![resource]));
    }

    /// The pod is gone: its devices are free. No plugin is notified.
    pub fn remove(&self, namespace: &str, pod: &str) {
        self.0.state().claiming.remove(&(namespace.to_owned(), pod.to_owned()));
        self.0.state().manager.remove(namespace, pod);
        self.0.tick();
    }

    fn plugin(
        &self,
        resource_name: &str,
    ) -> Option<(DevicePluginClient<Channel>, DevicePluginOptions)> {
        let state = self.0.state();
        let endpoint = state.manager.plugin(resource_name)?;
        Some((endpoint.client.clone(), endpoint.options))
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn tick(&self) {
        self.changed.send_replace(());
    }
}
