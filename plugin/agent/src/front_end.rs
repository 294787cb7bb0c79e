//! Front ends: the device plugin, which is here, and DRA. Each asks [`Agent::grant`] and [`Agent::release`]; nothing behind
//! them knows which front end asked, but for a record's [`origin`](tessera_model::origin::Origin). And how kubelet's calls
//! went, counted where they end.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use strum::IntoStaticStr;
use tessera_kubelet::pod_resources::PodResources;
use tessera_kubelet::{Device, DevicePlugin};
pub use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_model::holding::Holding;
use tessera_model::printable;
use tessera_rules::allocate::Refusal;
use tessera_store::CommitError;
use tessera_system::locks::lock;
use tessera_tenant::delivery::cdi::FileError;
use tessera_tenant::delivery::driver::DriverError;
use tessera_tenant::shim_install::ShimError;

use tokio::sync::watch;
use tonic::Status;
use tracing::warn;

use crate::Agent;
use crate::engines::EngineError;
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    Allocate,
    PreStart,
    Prepare,
    Unprepare,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Outcome {
    Ok,
    /// Refused, because of what was asked for.
    Refused,
    Failed,
}

type Key = (Call, Arc<str>, Outcome);

#[derive(Debug, Default)]
pub struct Meters(Mutex<BTreeMap<Key, Counts>>);

impl Meters {
    pub fn observe(&self, call: Call, resource: &Arc<str>, outcome: Outcome, length: Duration) {
        let key = (call, Arc::clone(resource), outcome);
        lock(&self.0).entry(key).or_default().observe(length);
    }

    pub fn calls(&self, call: Call) -> Vec<(Arc<str>, Outcome, Counts)> {
        let calls = lock(&self.0);
        let of_it = calls.iter().filter(|((kind, ..), _)| *kind == call);
        of_it.map(|((_, name, outcome), h)| (Arc::clone(name), *outcome, h.clone())).collect()
    }
}

/// Upper bounds of the buckets of kubelet's calls, seconds.
const BOUNDS: [f64; 13] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, f64::INFINITY];

/// Durations, counted in buckets that never change.
#[derive(Clone, Debug)]
pub struct Counts {
    /// Upper bound in seconds and how many were not larger, but larger than the bound before.
    pub buckets: Vec<(f64, u64)>,
    pub sum: f64,
}

impl Default for Counts {
    fn default() -> Self {
        Counts { buckets: BOUNDS.map(|bound| (bound, 0)).to_vec(), sum: 0.0 }
    }
}

impl Counts {
    fn observe(&mut self, length: Duration) {
        let seconds = length.as_secs_f64();
        if let Some((_, count)) = self.buckets.iter_mut().find(|(bound, _)| seconds <= *bound) {
            *count += 1;
        }
        self.sum += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_kept_apart_by_resource_and_outcome() {
        let meters = Meters::default();
        let name: Arc<str> = "tessera.dev/gpu".into();
        meters.observe(Call::Allocate, &name, Outcome::Ok, Duration::from_millis(1));
        meters.observe(Call::Allocate, &name, Outcome::Ok, Duration::from_millis(1));
        meters.observe(Call::Allocate, &name, Outcome::Refused, Duration::from_millis(1));
        meters.observe(Call::PreStart, &name, Outcome::Ok, Duration::from_millis(1));
        let counted: Vec<(Outcome, u64)> = meters
            .calls(Call::Allocate)
            .into_iter()
            .map(|(_, outcome, counts)| (outcome, counts.buckets.iter().map(|(_, n)| n).sum()))
            .collect();
        assert_eq!(counted, [(Outcome::Ok, 2), (Outcome::Refused, 1)]);
    }

    #[test]
    fn a_duration_counts_in_the_first_bucket_that_holds_it() {
        let mut counts = Counts::default();
        for ms in [0, 1, 1, 3, 60_000] {
            counts.observe(Duration::from_millis(ms));
        }
        let of = |bound: f64| counts.buckets.iter().find(|(le, _)| *le == bound).unwrap().1;
        assert_eq!([of(0.0005), of(0.001), of(0.005), of(f64::INFINITY)], [1, 2, 1, 1]);
        assert_eq!(counts.buckets.iter().map(|(_, n)| n).sum::<u64>(), 5);
        assert!((counts.sum - 60.005).abs() < 1e-9);
    }
}
