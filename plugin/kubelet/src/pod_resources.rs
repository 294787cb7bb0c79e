//! The holders of devices, from kubelet's pod resources service.
//!
//! It needs no API server, but it knows no pod UIDs, leaves ordinary init containers out, and before
//! Kubernetes 1.34 lists finished pods too, so that one device can appear twice. After a kubelet
//! restart an empty list means "unknown", not "free".

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tessera_model::cdi_name::SHARE_KIND;
use tessera_model::holding::{Census, Holding};

use tessera_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use tessera_kubelet_api::podresources::{
    AllocatableResourcesRequest, DynamicResource, ListPodResourcesRequest,
};
use tessera_model::printable::causes;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::driver::connect;
use crate::foreign_plugins::Offer;

type Client = PodResourcesListerClient<Channel>;

/// Shortest time between two List calls: each makes kubelet walk all its pods.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer; a node of 500 pods with many devices stays below 1 MiB.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

#[derive(Clone, Debug, thiserror::Error)]
pub enum PodResourcesError {
    #[error(
        "kubelet's pod resources socket {0} does not exist: is kubelet down, its root directory \
         another one, or the socket's directory not mounted into this container?"
    )]
    Absent(PathBuf),
    /// This kubelet has no such call (GetAllocatableResources: Kubernetes 1.21 and later), or has it
    /// switched off (the default before 1.23).
    #[error("this kubelet's pod resources service does not support the call")]
    Unsupported,
    /// It cannot be reached, is too slow, or refuses.
    #[error("{0}")]
    Failed(String),
}

#[derive(Debug)]
pub struct PodResources {
    socket: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    asked: Option<Instant>,
    /// The last good answer and when it was given.
    answer: Option<(Instant, Arc<Census>)>,
}

impl PodResources {
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_path_buf(), state: Mutex::default() }
    }

    /// All containers that hold devices of any plugin, from an answer no older than `max_age`. Calls
    /// to kubelet are at least half a second apart; asking sooner waits.
    pub async fn list(&self, max_age: Duration) -> Result<Vec<Holding>, PodResourcesError> {
        Ok(self.census(max_age).await?.holdings.clone())
    }

    /// As [`PodResources::list`], with the number of pods that kubelet knows at all: 0 means that it
    /// has just started, and that nobody's absence means anything.
    pub async fn census(&self, max_age: Duration) -> Result<Arc<Census>, PodResourcesError> {
        // An answer given after this call was made is fresh, whatever `max_age`.
        let since = Instant::now().checked_sub(max_age);
        let mut state = self.state.lock().await;
        if let Some((at, census)) = &state.answer
            && since.is_none_or(|since| *at >= since)
        {
            return Ok(Arc::clone(census));
        }
        if let Some(asked) = state.asked {
            tokio::time::sleep_until(asked + MIN_INTERVAL).await;
        }
        let asked = Instant::now();
        state.asked = Some(asked);
        let call =
            |mut client: Client| async move { client.list(ListPodResourcesRequest {}).await };
        let answer = self.call(call).await?;
        let pods = answer.pod_resources.len();
        let mut holdings: Vec<_> = answer
            .pod_resources
            .into_iter()
            .flat_map(|pod| {
                pod.containers.into_iter().flat_map(move |container| {
                    let (namespace, pod) = (pod.namespace.clone(), pod.name.clone());
                    let devices = by_resource(&container.devices).into_iter();
                    let devices = devices.map(|(name, ids)| (name, ids.into_iter().collect()));
                    let claimed = shares(&container.dynamic_resources);
                    let claimed = claimed.map(|id| (SHARE_KIND.to_owned(), vec![id]));
                    let held: Vec<(String, Vec<String>)> = devices.chain(claimed).collect();
                    held.into_iter().map(move |(resource_name, device_ids)| Holding {
                        namespace: namespace.clone(),
                        pod: pod.clone(),
                        container: container.name.clone(),
                        resource_name,
                        device_ids,
                    })
                })
            })
            .collect();
        holdings.sort();
        let census = Arc::new(Census { pods, holdings, asked: asked.into_std() });
        state.answer = Some((Instant::now(), Arc::clone(&census)));
        Ok(census)
    }

    /// The devices of `resource_name` that kubelet offers: healthy ones of a connected plugin, used or
    /// not.
    pub async fn allocatable(
        &self,
        resource_name: &str,
    ) -> Result<BTreeSet<String>, PodResourcesError> {
        let offers = self.offers().await?;
        let offered = offers.into_iter().find(|offer| offer.resource == resource_name);
        Ok(offered.map(|offer| offer.device_ids.into_iter().collect()).unwrap_or_default())
    }

    /// What every connected plugin offers, used or not.
    pub async fn offers(&self) -> Result<Vec<Offer>, PodResourcesError> {
        let call = |mut client: Client| async move {
            client.get_allocatable_resources(AllocatableResourcesRequest {}).await
        };
        let answer = self.call(call).await?;
        let offers = by_resource(&answer.devices).into_iter().map(|(resource, ids)| Offer {
            resource,
            device_ids: ids.into_iter().collect(),
            holder: None,
        });
        Ok(offers.collect())
    }

    /// Over a connection of its own: calls are rare, and kubelet restarts.
    async fn call<T, F: Future<Output = Result<tonic::Response<T>, Status>>>(
        &self,
        call: impl FnOnce(Client) -> F,
    ) -> Result<T, PodResourcesError> {
        if !self.socket.exists() {
            return Err(PodResourcesError::Absent(self.socket.clone()));
        }
        let asked = async {
            let channel = connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
            let answer = call(Client::new(channel).max_decoding_message_size(MAX_MESSAGE)).await;
            let answer = answer.map_err(|status| match status.code() {
                Code::Unimplemented => PodResourcesError::Unsupported,
                // Kubelets from 1.21 to 1.22, and later ones with KubeletPodResourcesGetAllocatable=false:
                // "Pod Resources API GetAllocatableResources disabled".
                _ if status.message().ends_with(" disabled") => PodResourcesError::Unsupported,
                // Only what tonic itself says has a source.
                _ if std::error::Error::source(&status).is_some() => self.unreachable(&status),
                _ => PodResourcesError::Failed(format!(
                    "kubelet's pod resources: {}",
                    status.message()
                )),
            })?;
            Ok(answer.into_inner())
        };
        let answer = tokio::time::timeout(TIMEOUT, asked).await;
        answer.unwrap_or_else(|_| {
            let text = format!("kubelet's pod resources did not answer within {TIMEOUT:?}");
            Err(PodResourcesError::Failed(text))
        })
    }

    fn unreachable(&self, error: &(dyn std::error::Error + 'static)) -> PodResourcesError {
        let (path, reason) = (self.socket.display(), causes(error));
        PodResourcesError::Failed(format!(
            "cannot reach kubelet's pod resources at {path}: {reason}"
        ))
    }
}

/// The allocations that a container has by claims: the names of our CDI devices among all that it has.
fn shares(claims: &[DynamicResource]) -> impl Iterator<Item = String> {
    let resources = claims.iter().flat_map(|claim| &claim.claim_resources);
    let devices = resources.flat_map(|resource| &resource.cdi_devices);
    let of_share = |name: &str| {
        name.strip_prefix(SHARE_KIND).and_then(|rest| rest.strip_prefix('=')).map(str::to_owned)
    };
    // A device of a request that has several is named by each.
    devices.filter_map(|device| of_share(&device.name)).collect::<BTreeSet<_>>().into_iter()
}

fn by_resource(
    devices: &[tessera_kubelet_api::podresources::ContainerDevices],
) -> std::collections::BTreeMap<String, BTreeSet<String>> {
    let mut resources = std::collections::BTreeMap::<String, BTreeSet<String>>::new();
    for entry in devices {
        let ids = resources.entry(entry.resource_name.clone()).or_default();
        ids.extend(entry.device_ids.iter().cloned());
    }
    resources
}
