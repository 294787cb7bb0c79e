//! A stand-in for kubelet's DRA manager and its plugin registry: it finds drivers by their registration sockets,
//! registers them, and prepares the claims of pods, in the order and manner of the real one (Kubernetes
//! `pkg/kubelet/cm/dra`, `pkg/kubelet/pluginmanager`; 1.36).
//!
//! As the real one:
//! - A plugin whose sockets are gone is forgotten; of several plugins of one driver, the newest that is connected is
//!   called, in DRA v1.
//! - All claims of a pod that are not prepared go to the driver in one call. The pod fails at the first claim's
//!   error, and where the answer has a claim too many or too few.
//! - What is prepared is remembered until kubelet restarts; the pods of a claim are remembered longer (its
//!   checkpoint). A claim is unprepared when its last pod ends. A claim of the same name and another UID is refused
//!   while the old one is known.
//! - The health stream is opened for each plugin, again 5 s after it ended; then all devices are unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tessera_kubelet_api::deviceplugin::{ContainerAllocateResponse, Mount};
use tessera_kubelet_api::dra::v1;
use tessera_kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use tessera_system::locks::lock;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use super::RunOptions;

pub use registry::{DeviceState, Reported};
pub use tessera_kubelet_api::dra::v1::{Claim as ClaimName, Device as PreparedDevice};

mod registry;

/// Longest call, as kubelet has it.
const CALL: Duration = Duration::from_secs(45);

/// Why a pod's claims are not prepared, or not unprepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DraError {
    #[error("DRA driver {0} is not registered")]
    NotRegistered(String),
    #[error("{call}: {message}")]
    Call { call: &'static str, message: String },
    #[error("{call} failed for ResourceClaim {claim}: {error}")]
    Claim { call: &'static str, claim: String, error: String },
    /// The answer names a claim that was not asked for, or leaves one out.
    #[error("{call}: the answer has other claims than were asked for: {uids:?}")]
    OtherClaims { call: &'static str, uids: BTreeSet<String> },
    /// Another claim of that name is still known.
    #[error("old ResourceClaim with same name {0} and different UID {1} still exists")]
    OldClaim(String, String),
}

#[derive(Clone, Debug)]
pub struct DraBehaviour {
    /// Registration is refused with these words.
    pub reject: Option<String>,
    /// The health service that it calls; 1.36 calls v1alpha1.
    pub health: Option<&'static str>,
    /// Pause before a health stream is opened again.
    pub health_retry: Duration,
}

impl Default for DraBehaviour {
    fn default() -> Self {
        DraBehaviour {
            reject: None,
            health: Some("v1alpha1.DRAResourceHealth"),
            health_retry: Duration::from_secs(5),
        }
    }
}

/// The stand-in; clones are handles on the same one.
#[derive(Clone, Debug)]
pub struct DraKubelet(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: String,
    registry: PathBuf,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    /// Calls to the driver are one at a time, as each pod worker's are for its claims.
    calls: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    behaviour: DraBehaviour,
    /// By registration socket, with the order in which they came.
    plugins: BTreeMap<PathBuf, Plugin>,
    registrations: u64,
    /// By namespace and name.
    claims: BTreeMap<(String, String), ClaimInfo>,
    health: registry::Health,
    watching: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Plugin {
    order: u64,
    /// Device, inode and birth of its registration socket.
    identity: registry::Identity,
    channel: Channel,
    endpoint: PathBuf,
    health: Option<JoinHandle<()>>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if let Some(health) = &self.health {
            health.abort();
        }
    }
}

#[derive(Clone, Debug, Default)]
struct ClaimInfo {
    uid: String,
    pods: BTreeSet<String>,
    prepared: Option<Vec<PreparedDevice>>,
}

impl DraKubelet {
    /// Starts for one driver, below `root` as kubelet does below its root directory.
    pub fn start(root: &Path, driver: &str) -> io::Result<Self> {
        let registry = root.join("plugins_registry");
        std::fs::create_dir_all(&registry)?;
        let inner = Inner {
            driver: driver.to_owned(),
            registry,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
            calls: tokio::sync::Mutex::default(),
        };
        let kubelet = Self(Arc::new(inner));
        kubelet.resume();
        Ok(kubelet)
    }

    pub fn registry(&self) -> &Path {
        &self.0.registry
    }

    pub fn set_behaviour(&self, behaviour: DraBehaviour) {
        self.0.state().behaviour = behaviour;
    }

    /// Dies: connections end, what is prepared is forgotten, pods of claims are kept.
    pub fn stop(&self) {
        let mut state = self.0.state();
        if let Some(watching) = state.watching.take() {
            watching.abort();
        }
        state.plugins.clear();
        state.health.all_unknown();
        for claim in state.claims.values_mut() {
            claim.prepared = None;
        }
        drop(state);
        self.0.tick();
    }

    pub fn resume(&self) {
        let watching = tokio::spawn(registry::watch(Arc::downgrade(&self.0)));
        if let Some(before) = self.0.state().watching.replace(watching) {
            before.abort();
        }
    }

    /// [`DraKubelet::stop`] and [`DraKubelet::resume`]: pods go on, and their claims are prepared again when
    /// [`DraKubelet::prepare`] is called for them.
    pub fn restart(&self) {
        self.stop();
        self.resume();
    }

    /// Loses its checkpoint: what pods hold is forgotten without being unprepared.
    pub fn forget(&self) {
        self.0.state().claims.clear();
    }

    pub fn registrations(&self) -> u64 {
        self.0.state().registrations
    }

    /// Registration sockets of the plugins that it knows, in the order in which they came.
    pub fn plugins(&self) -> Vec<PathBuf> {
        let state = self.0.state();
        let mut plugins: Vec<_> = state.plugins.iter().collect();
        plugins.sort_by_key(|(_, plugin)| plugin.order);
        plugins.into_iter().map(|(path, _)| path.clone()).collect()
    }

    pub fn endpoint(&self) -> Option<PathBuf> {
        let state = self.0.state();
        let newest = state.plugins.values().max_by_key(|plugin| plugin.order)?;
        Some(newest.endpoint.clone())
    }

    /// Waits until a plugin is registered. Bound it with a timeout.
    pub async fn wait_registered(&self) {
        self.wait_until(|kubelet| kubelet.0.channel().is_some()).await;
    }

    /// Waits until `condition` holds; looks after every change. Bound it with a timeout.
    pub async fn wait_until(&self, mut condition: impl FnMut(&Self) -> bool) {
        let mut changed = self.0.changed.subscribe();
        while !condition(self) {
            // The sender lives as long as self.
            let _ = changed.changed().await;
        }
    }

    /// The health of devices as the driver last said it, by pool and name.
    pub fn health(&self) -> BTreeMap<(String, String), Reported> {
        self.0.state().health.all()
    }

    pub fn health_messages(&self) -> u64 {
        self.0.state().health.messages()
    }

    /// Prepares the claims of a pod, those that are not prepared in one call. The devices of each claim.
    /// Errors: See [`DraError`]; the pod stays noted at its claims, and may be removed or tried again.
    pub async fn prepare(
        &self,
        pod: &str,
        claims: &[ClaimName],
    ) -> Result<Vec<Vec<PreparedDevice>>, DraError> {
        let _one = self.0.calls.lock().await;
        let channel = self.0.channel().ok_or_else(|| self.0.not_registered())?;
        let batch = self.0.note(pod, claims)?;
        if !batch.is_empty() {
            let answer = in_time("NodePrepareResources", prepare(channel, batch.clone())).await?;
            self.0.take_prepared(&batch, answer)?;
        }
        let state = self.0.state();
        let devices = |claim: &ClaimName| {
            let info = state.claims.get(&key(claim));
            info.and_then(|info| info.prepared.clone()).unwrap_or_default()
        };
        Ok(claims.iter().map(devices).collect())
    }

    /// A pod has ended: claims that no other pod uses are unprepared, in one call.
    /// Errors: See [`DraError`]; the pod stays noted, and this may be tried again.
    pub async fn unprepare(&self, pod: &str) -> Result<(), DraError> {
        let _one = self.0.calls.lock().await;
        let batch = self.0.last_of(pod);
        if batch.is_empty() {
            return Ok(());
        }
        let channel = self.0.channel().ok_or_else(|| self.0.not_registered())?;
        let call = "NodeUnprepareResources";
        let answer = in_time(call, unprepare(channel, batch.clone())).await?;
        same_claims(call, &batch, answer.keys())?;
        for claim in &batch {
            match answer.get(&claim.uid).map(String::as_str) {
                Some("") | None => {}
                Some(error) => {
                    let (claim, error) = (claim.name.clone(), error.to_owned());
                    return Err(DraError::Claim { call, claim, error });
                }
            }
        }
        let mut state = self.0.state();
        for claim in &batch {
            state.claims.remove(&key(claim));
        }
        Ok(())
    }

    /// One call of NodePrepareResources with exactly these claims, without kubelet's memory: the answer by UID.
    pub async fn call_prepare(
        &self,
        claims: &[ClaimName],
    ) -> Result<BTreeMap<String, Result<Vec<PreparedDevice>, String>>, DraError> {
        let channel = self.0.channel().ok_or_else(|| self.0.not_registered())?;
        in_time("NodePrepareResources", prepare(channel, claims.to_vec())).await
    }

    /// One call of NodeUnprepareResources with exactly these claims: the errors by UID.
    pub async fn call_unprepare(
        &self,
        claims: &[ClaimName],
    ) -> Result<BTreeMap<String, String>, DraError> {
        let channel = self.0.channel().ok_or_else(|| self.0.not_registered())?;
        in_time("NodeUnprepareResources", unprepare(channel, claims.to_vec())).await
    }
}

fn key(claim: &ClaimName) -> (String, String) {
    (claim.namespace.clone(), claim.name.clone())
}

async fn in_time<T>(
    call: &'static str,
    work: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, DraError> {
    let answer = tokio::time::timeout(CALL, work).await;
    let answer =
        answer.unwrap_or_else(|_| Err(tonic::Status::deadline_exceeded("no answer in 45 s")));
    answer.map_err(|status| DraError::Call { call, message: status.message().to_owned() })
}

fn same_claims<'a>(
    call: &'static str,
    asked: &[ClaimName],
    answered: impl Iterator<Item = &'a String>,
) -> Result<(), DraError> {
    let uids: BTreeSet<String> = answered.cloned().collect();
    let asked: BTreeSet<String> = asked.iter().map(|claim| claim.uid.clone()).collect();
    if uids == asked { Ok(()) } else { Err(DraError::OtherClaims { call, uids }) }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn tick(&self) {
        self.changed.send_replace(());
    }

    fn not_registered(&self) -> DraError {
        DraError::NotRegistered(self.driver.clone())
    }

    fn channel(&self) -> Option<Channel> {
        let state = self.state();
        let newest = state.plugins.values().max_by_key(|plugin| plugin.order)?;
        Some(newest.channel.clone())
    }

    /// Notes the pod at its claims; those that are to be prepared.
    fn note(&self, pod: &str, claims: &[ClaimName]) -> Result<Vec<ClaimName>, DraError> {
        let mut state = self.state();
        let mut batch = Vec::new();
        for claim in claims {
            let info = state
                .claims
                .entry(key(claim))
                .or_insert_with(|| ClaimInfo { uid: claim.uid.clone(), ..ClaimInfo::default() });
            if info.uid != claim.uid {
                return Err(DraError::OldClaim(claim.name.clone(), info.uid.clone()));
            }
            info.pods.insert(pod.to_owned());
            if info.prepared.is_none() && !batch.contains(claim) {
                batch.push(claim.clone());
            }
        }
        Ok(batch)
    }

    fn take_prepared(
        &self,
        batch: &[ClaimName],
        mut answer: BTreeMap<String, Result<Vec<PreparedDevice>, String>>,
    ) -> Result<(), DraError> {
        let call = "NodePrepareResources";
        same_claims(call, batch, answer.keys())?;
        let mut prepared = Vec::new();
        for claim in batch {
            match answer.remove(&claim.uid) {
                Some(Ok(devices)) => prepared.push((key(claim), devices)),
                Some(Err(error)) => {
                    return Err(DraError::Claim { call, claim: claim.name.clone(), error });
                }
                None => {}
            }
        }
        let mut state = self.state();
        for (key, devices) in prepared {
            if let Some(info) = state.claims.get_mut(&key) {
                info.prepared = Some(devices);
            }
        }
        Ok(())
    }

    /// Takes the pod off claims that others use too; those that nobody else uses.
    fn last_of(&self, pod: &str) -> Vec<ClaimName> {
        let mut batch = Vec::new();
        for ((namespace, name), info) in &mut self.state().claims {
            if !info.pods.contains(pod) {
                continue;
            }
            if info.pods.len() > 1 {
                info.pods.remove(pod);
                continue;
            }
            let (namespace, name, uid) = (namespace.clone(), name.clone(), info.uid.clone());
            batch.push(ClaimName { namespace, name, uid });
        }
        batch
    }
}

// === Kubelet's calls, DRA v1 ===

/// By UID: the devices, or the driver's words.
type PrepareAnswer = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

async fn prepare(channel: Channel, names: Vec<ClaimName>) -> Result<PrepareAnswer, tonic::Status> {
    let request = v1::NodePrepareResourcesRequest { claims: names };
    let answer = DraPluginClient::new(channel).node_prepare_resources(request).await?.into_inner();
    let one = |answer: v1::NodePrepareResourceResponse| match answer.error.is_empty() {
        true => Ok(answer.devices),
        false => Err(answer.error),
    };
    Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, one(answer))).collect())
}

/// NodeUnprepareResources; the errors by UID.
async fn unprepare(
    channel: Channel,
    names: Vec<ClaimName>,
) -> Result<BTreeMap<String, String>, tonic::Status> {
    let request = v1::NodeUnprepareResourcesRequest { claims: names };
    let answer =
        DraPluginClient::new(channel).node_unprepare_resources(request).await?.into_inner();
    Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, answer.error)).collect())
}

/// A claim as the scheduler leaves it, being put together.
#[derive(Clone, Debug)]
pub struct AllocatedClaim {
    name: ClaimName,
    driver: &'static str,
    node: String,
    requests: Vec<Value>,
    results: Vec<Value>,
}

impl AllocatedClaim {
    /// Without a request, of devices of this driver on this node.
    pub fn new(name: ClaimName, driver: &'static str, node: &str) -> Self {
        Self { name, driver, node: node.to_owned(), requests: Vec::new(), results: Vec::new() }
    }

    #[must_use]
    pub fn asking(mut self, request: &str, device: &str, memory: &str, cores: &str) -> Self {
        let capacity = json!({ "memory": memory, "cores": cores });
        self.requests.push(json!({
            "name": request,
            "exactly": {
                "deviceClassName": self.driver, "count": 1, "capacity": { "requests": capacity },
            },
        }));
        let share = format!("{}-{}", self.name.uid, self.results.len());
        self.results.push(json!({
            "request": request, "driver": self.driver, "pool": self.node, "device": device,
            "shareID": share, "consumedCapacity": capacity,
        }));
        self
    }

    /// As kubelet names it.
    pub fn name(&self) -> ClaimName {
        self.name.clone()
    }

    /// As the API server has it, reserved for this pod.
    pub fn object(&self, pod: &str) -> Value {
        let ClaimName { namespace, name, uid } = &self.name;
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "namespace": namespace, "name": name, "uid": uid },
            "spec": { "devices": { "requests": self.requests } },
            "status": {
                "reservedFor": [{ "resource": "pods", "name": pod, "uid": format!("pod-{uid}") }],
                "allocation": { "devices": { "results": self.results } },
            },
        })
    }
}

/// What a container runtime makes of these devices: the edits of their CDI specs, which are in `dir`.
pub fn run_options(dir: &Path, devices: &[PreparedDevice]) -> io::Result<RunOptions> {
    let mut options = RunOptions::default();
    let named: Vec<&String> = devices.iter().flat_map(|device| &device.cdi_device_ids).collect();
    for entry in std::fs::read_dir(dir)? {
        let file = entry?.path();
        if file.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let spec: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        let kind = spec["kind"].as_str().unwrap_or_default();
        let is_named = |device: &&Value| {
            let name = device["name"].as_str().unwrap_or_default();
            named.iter().any(|named| **named == format!("{kind}={name}"))
        };
        let devices: Vec<_> =
            spec["devices"].as_array().into_iter().flatten().filter(is_named).collect();
        let whole = (!devices.is_empty()).then_some(&spec);
        for edited in devices.into_iter().chain(whole) {
            options.merge(&edits(&edited["containerEdits"]));
        }
    }
    Ok(options)
}

fn edits(edits: &Value) -> ContainerAllocateResponse {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = |of: &str| edits[of].as_array().cloned().unwrap_or_default();
    let pair = |pair: Value| {
        let (name, value) = pair.as_str()?.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    let mount = |mount: Value| Mount {
        host_path: text(&mount["hostPath"]),
        container_path: text(&mount["containerPath"]),
        read_only: mount["options"].as_array().into_iter().flatten().any(|one| one == "ro"),
    };
    ContainerAllocateResponse {
        envs: all("env").into_iter().filter_map(pair).collect(),
        mounts: all("mounts").into_iter().map(mount).collect(),
        ..ContainerAllocateResponse::default()
    }
}
