//! Front ends: the device plugin, which is here, and DRA. Each asks [`Agent::grant`] and [`Agent::release`]; nothing behind
//! them knows which front end asked, but for a record's [`origin`](tessera_model::origin::Origin).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_kubelet::pod_resources::PodResources;
use tessera_kubelet::{Device, DevicePlugin};
pub use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_model::holding::Holding;
use tessera_model::printable;
use tessera_rules::allocate::Refusal;
use tessera_store::CommitError;
use tessera_tenant::delivery::cdi::FileError;
use tessera_tenant::delivery::driver::DriverError;
use tessera_tenant::shim_install::ShimError;

use tokio::sync::watch;
use tonic::Status;
use tracing::warn;

use crate::Agent;
use crate::engines::EngineError;
use crate::meters::{Call, Outcome};
use crate::status_board;

#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("request {request}: {refusal}")]
    Request { request: String, refusal: Refusal },
    #[error(transparent)]
    Ledger(#[from] CommitError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    SpecFile(#[from] FileError),
    #[error("the shim is gone from {path} and cannot be restored: {error}")]
    Shim { path: PathBuf, error: ShimError },
}

impl AllocateError {
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            AllocateError::Refused(refusal) | AllocateError::Request { refusal, .. } => {
                Some(refusal)
            }
            _ => None,
        }
    }
}

/// What kubelet talks to about one resource. Blocking work goes to the runtime's small pool.
#[derive(Clone, Debug)]
pub struct Service {
    agent: Arc<Agent>,
    resource: Arc<str>,
    pod_resources: Arc<PodResources>,
}

/// Longest wait for PodResources.
const PATIENCE: Duration = Duration::from_secs(3);

impl Service {
    pub fn new(agent: Arc<Agent>, resource: &str, pod_resources: Arc<PodResources>) -> Self {
        Service { agent, resource: resource.into(), pod_resources }
    }

    /// Notes a refused start with its pod's name. Of a pod that kubelet does not name, its event alone says why.
    async fn note_refused(self, id: AllocationId, reason: String) {
        let asking = self.pod_resources.census(Duration::ZERO);
        let Ok(Ok(census)) = tokio::time::timeout(PATIENCE, asking).await else { return };
        let is_it = |holding: &&Holding| {
            let ids = holding.device_ids.iter().map(String::as_str);
            *holding.resource_name == *self.resource && AllocationId::of(&self.resource, ids) == id
        };
        let Some(holding) = census.holdings.iter().find(is_it) else { return };
        self.agent.board.refuse(status_board::Refusal {
            subject: id.to_string(),
            namespace: holding.namespace.clone(),
            pods: vec![holding.pod.clone()],
            reason,
            ..status_board::Refusal::default()
        });
    }

    async fn blocking<T: Send + 'static>(
        &self,
        (call, began): (Call, Instant),
        work: impl FnOnce(&Agent, &str) -> Result<T, AllocateError> + Send + 'static,
    ) -> Result<T, Status> {
        let (agent, resource) = (Arc::clone(&self.agent), Arc::clone(&self.resource));
        let result = tokio::task::spawn_blocking(move || work(&agent, &resource)).await;
        let outcome = match &result {
            Ok(Ok(_)) => Outcome::Ok,
            Ok(Err(AllocateError::Refused(_))) => Outcome::Refused,
            Ok(Err(_)) | Err(_) => Outcome::Failed,
        };
        self.agent.meters.observe(call, &self.resource, outcome, began.elapsed());
        let result = result.map_err(|error| Status::internal(printable::reason(&error)))?;
        result.map_err(|error| {
            warn!(%error, "kubelet's request failed");
            status(&error)
        })
    }
}

fn status(error: &AllocateError) -> Status {
    let text = printable::reason(error);
    match error {
        AllocateError::Refused(Refusal::Unknown(_) | Refusal::Retired { .. }) => {
            Status::not_found(text)
        }
        AllocateError::Refused(
            Refusal::Dead { .. } | Refusal::Cordoned { .. } | Refusal::Moving { .. },
        ) => Status::unavailable(text),
        AllocateError::Refused(Refusal::NoRoom { .. } | Refusal::RoomTaken { .. })
        | AllocateError::Ledger(_)
        | AllocateError::Engine(_) => Status::resource_exhausted(text),
        AllocateError::Refused(_) | AllocateError::Request { .. } => Status::invalid_argument(text),
        AllocateError::Shim { .. } | AllocateError::Driver(_) | AllocateError::SpecFile(_) => {
            Status::failed_precondition(text)
        }
    }
}

impl DevicePlugin for Service {
    fn devices(&self) -> watch::Receiver<Vec<Device>> {
        self.agent.advertised.devices(&self.resource)
    }

    fn preferred(
        &self,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Result<Vec<String>, Status> {
        Ok(self.agent.prefer(&self.resource, available, must_include, size))
    }

    async fn allocate(
        &self,
        containers: Vec<Vec<String>>,
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        let call = (Call::Allocate, Instant::now());
        self.blocking(call, move |agent, resource| agent.allocate(resource, &containers)).await
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), Status> {
        let call = (Call::PreStart, Instant::now());
        let id = AllocationId::of(&self.resource, ids.iter().map(String::as_str));
        let started =
            self.blocking(call, move |agent, resource| agent.pre_start(resource, &ids)).await;
        match &started {
            Ok(()) => self.agent.board.grant(id.as_str()),
            // Kubelet does not wait for it.
            Err(refused) => {
                drop(tokio::spawn(self.clone().note_refused(id, refused.message().to_owned())));
            }
        }
        started
    }
}
