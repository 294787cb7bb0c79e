//! [`Node`] as kubelet's device plugin.

use std::sync::Arc;

use tessera_kubelet::deviceplugin::ContainerAllocateResponse;
use tokio::sync::watch;
use tonic::Status;
use tracing::warn;

use super::{AllocateError, Node, lock};
use crate::device::topology::Topology;
use crate::kubelet::{Device, DevicePlugin};
use crate::preferred::{Ground, preferred};

/// What kubelet talks to. Blocking work goes to the runtime's small pool.
#[derive(Clone, Debug)]
pub struct Service(pub Arc<Node>);

impl Service {
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Node) -> Result<T, AllocateError> + Send + 'static,
    ) -> Result<T, Status> {
        let node = Arc::clone(&self.0);
        let result = tokio::task::spawn_blocking(move || work(&node)).await;
        let result = result.map_err(|error| Status::internal(error.to_string()))?;
        result.map_err(|error| {
            warn!(%error, "kubelet's request failed");
            status(&error)
        })
    }
}

fn status(error: &AllocateError) -> Status {
    use crate::allocate::Refusal;
    let text = error.to_string();
    match error {
        AllocateError::Refused(Refusal::Unknown(_) | Refusal::Retired { .. }) => {
            Status::not_found(text)
        }
        AllocateError::Refused(Refusal::Dead { .. }) => Status::unavailable(text),
        AllocateError::Refused(_) => Status::invalid_argument(text),
        AllocateError::Ledger(_) | AllocateError::Pages(_) => Status::resource_exhausted(text),
        AllocateError::Shim { .. } => Status::failed_precondition(text),
    }
}

impl DevicePlugin for Service {
    fn devices(&self) -> watch::Receiver<Vec<Device>> {
        self.0.devices.subscribe()
    }

    fn preferred(
        &self,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Result<Vec<String>, Status> {
        let health = lock(&self.0.health);
        let ground = Ground {
            placement: self.0.config.share.placement,
            topology: self.0.topology.get_or_init(Topology::default),
            suspect: &|uuid| health.is_suspect(uuid),
        };
        Ok(preferred(available, must_include, size, &ground))
    }

    async fn allocate(
        &self,
        containers: Vec<Vec<String>>,
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        self.blocking(move |node| node.allocate(&containers)).await
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), Status> {
        self.blocking(move |node| node.pre_start(&ids)).await
    }
}
