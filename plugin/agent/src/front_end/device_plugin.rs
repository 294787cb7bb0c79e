//! The device plugin, as a front end: what kubelet asks of one resource.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tokio::sync::watch;
use tonic::Status;
use tracing::warn;

use super::{AllocateError, FrontDoor};
use crate::Agent;
use crate::meters::{Call, Outcome};
use crate::status_board::Refused;
use tessera_kubelet::pod_resources::PodResources;
use tessera_kubelet::{Device, DevicePlugin};
use tessera_model::allocation_id::AllocationId;
use tessera_model::holding::Holding;
use tessera_model::printable;
use tessera_rules::ask::Ask;
use tessera_rules::multi_resource;
use tessera_rules::refusal::Refusal;

/// What kubelet talks to about one resource. Blocking work goes to the runtime's small pool.
#[derive(Clone, Debug)]
pub struct Service {
    agent: Arc<Agent>,
    resource: Arc<str>,
    pod_resources: Arc<PodResources>,
}

/// Longest wait for PodResources before a container starts. Kubelet waits 30 s in all.
const PATIENCE: Duration = Duration::from_secs(3);

impl Service {
    /// For `resource`.
    pub fn new(agent: Arc<Agent>, resource: &str, pod_resources: Arc<PodResources>) -> Self {
        Service { agent, resource: resource.into(), pod_resources }
    }

    /// Refuses a container that holds another of our resources too. What PodResources does not say
    /// refuses nobody.
    async fn refuse_double(&self, ids: &[String]) -> Result<(), Status> {
        let siblings = self.agent.siblings(&self.resource, ids);
        if siblings.is_empty() {
            return Ok(());
        }
        // Asked now: an answer from before the last Allocate would know one resource only.
        let asking = self.pod_resources.census(Duration::ZERO);
        let Ok(Ok(census)) = tokio::time::timeout(PATIENCE, asking).await else { return Ok(()) };
        let id = AllocationId::of(&self.resource, ids.iter().map(String::as_str));
        match multi_resource::find(&id, &siblings, &census.holdings) {
            Some(double) => {
                warn!(%id, "{double}");
                Err(Status::failed_precondition(printable::reason(&double)))
            }
            None => Ok(()),
        }
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
        self.agent.board().refuse(Refused {
            subject: id.to_string(),
            namespace: holding.namespace.clone(),
            pods: vec![holding.pod.clone()],
            reason,
            ..Refused::default()
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
        self.agent.meters().observe(call, &self.resource, outcome, began.elapsed());
        let result = result.map_err(|error| Status::internal(printable::reason(&error)))?;
        result.map_err(|error| {
            warn!(%error, "kubelet's request failed");
            status(&error)
        })
    }
}

/// `Allocate` of a resource: all containers of the request or none. Blocking.
///
/// # Errors
/// See [`AllocateError`]; nothing was granted then.
pub fn allocate(
    door: &dyn FrontDoor,
    resource: &str,
    containers: &[Vec<String>],
) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
    let ask = |ids: &Vec<String>| Ask::Replicas { resource: resource.to_owned(), ids: ids.clone() };
    let asks: Vec<Ask> = containers.iter().map(ask).collect();
    let delivered = super::grant(door, &asks)?;
    Ok(delivered.into_iter().map(|given| given.response).collect())
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
        AllocateError::Refused(_) => Status::invalid_argument(text),
        AllocateError::Shim { .. }
        | AllocateError::Driver(_)
        | AllocateError::Spec(_)
        | AllocateError::SpecFile(_) => Status::failed_precondition(text),
    }
}

impl DevicePlugin for Service {
    fn devices(&self) -> watch::Receiver<Vec<Device>> {
        self.agent.advertised().devices(&self.resource)
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
        self.blocking(call, move |agent, resource| allocate(agent, resource, &containers)).await
    }

    async fn pre_start(&self, ids: Vec<String>) -> Result<(), Status> {
        let began = Instant::now();
        let id = AllocationId::of(&self.resource, ids.iter().map(String::as_str));
        let started = match self.refuse_double(&ids).await {
            Err(refused) => {
                let (call, outcome) = (Call::PreStart, Outcome::Refused);
                self.agent.meters().observe(call, &self.resource, outcome, began.elapsed());
                Err(refused)
            }
            Ok(()) => {
                let call = (Call::PreStart, began);
                self.blocking(call, move |agent, resource| agent.pre_start(resource, &ids)).await
            }
        };
        match &started {
            Ok(()) => self.agent.board().grant(id.as_str()),
            // Kubelet does not wait for it.
            Err(refused) => {
                drop(tokio::spawn(self.clone().note_refused(id, refused.message().to_owned())));
            }
        }
        started
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::{Committed, Delivered, Transaction};
    use super::*;
    use tessera_model::record::Record;
    use tessera_rules::ask::Plan;

    /// A core that notes its calls; it refuses `bad` replicas and cannot make `unmade` ones.
    #[derive(Default)]
    struct FakeCore {
        calls: Mutex<Vec<String>>,
    }

    impl FakeCore {
        fn note(&self, call: String) {
            self.calls.lock().unwrap().push(call);
        }
    }

    struct FakeTransaction<'a> {
        core: &'a FakeCore,
        committed: Vec<Committed>,
    }

    impl Transaction for FakeTransaction<'_> {
        fn committed(&self) -> &[Committed] {
            &self.committed
        }

        fn materialise(self: Box<Self>) -> Result<Vec<Delivered>, AllocateError> {
            self.core.note(format!("materialise {}", self.committed.len()));
            let deliver = |one: &Committed| {
                let mut given = Delivered::default();
                for id in &one.record.replicas {
                    if id == "unmade" {
                        return Err(Refusal::Ended(one.record.id.clone()).into());
                    }
                    given.response.envs.insert(id.clone(), String::new());
                }
                Ok(given)
            };
            self.committed.iter().map(deliver).collect()
        }
    }

    impl FrontDoor for FakeCore {
        fn plan(&self, ask: &Ask) -> Result<Plan, Refusal> {
            let Ask::Replicas { resource, ids } = ask else { panic!("{ask:?}") };
            self.note(format!("plan {resource} {}", ids.join(" ")));
            if ids.iter().any(|id| id == "bad") {
                return Err(Refusal::Unknown("bad".to_owned()));
            }
            let (resource, replicas) = (resource.clone(), ids.clone());
            let id = AllocationId::of(&resource, replicas.iter().map(String::as_str));
            let origin = tessera_model::origin::Origin::DevicePlugin;
            Ok(Plan { id, resource, replicas, grants: Vec::new(), origin })
        }

        fn commit(&self, plans: &[Plan]) -> Result<Box<dyn Transaction + '_>, AllocateError> {
            self.note(format!("commit {}", plans.len()));
            let record = |plan: &Plan| Record {
                replicas: plan.replicas.clone(),
                ..Record::new(plan.id.clone(), 1, Vec::new())
            };
            let committed = |plan| Committed { record: Arc::new(record(plan)), is_new: true };
            let committed = plans.iter().map(committed).collect();
            Ok(Box::new(FakeTransaction { core: self, committed }))
        }

        fn release(&self, _ids: &[AllocationId]) -> Result<(), AllocateError> {
            panic!("kubelet releases nothing")
        }

        fn events(&self) -> watch::Receiver<u64> {
            watch::Sender::default().subscribe()
        }
    }

    fn ask(core: &FakeCore, containers: &[&[&str]]) -> Result<Vec<Vec<String>>, String> {
        let owned = |ids: &&[&str]| ids.iter().map(ToString::to_string).collect();
        let containers: Vec<Vec<String>> = containers.iter().map(owned).collect();
        let answers = allocate(core, "x.dev/r", &containers).map_err(|error| error.to_string())?;
        Ok(answers.into_iter().map(|answer| answer.envs.into_keys().collect()).collect())
    }

    #[test]
    fn all_containers_are_planned_before_one_is_committed() {
        let core = FakeCore::default();
        let answers = ask(&core, &[&["a"], &["b"]]).unwrap();
        assert_eq!(answers, [["a".to_owned()], ["b".to_owned()]]);
        let calls = core.calls.into_inner().unwrap();
        assert_eq!(calls, ["plan x.dev/r a", "plan x.dev/r b", "commit 2", "materialise 2"]);
    }

    #[test]
    fn nothing_is_committed_where_one_container_is_refused() {
        let core = FakeCore::default();
        let error = ask(&core, &[&["a"], &["bad"]]).unwrap_err();
        assert!(error.contains("unknown replica bad"), "{error}");
        assert_eq!(core.calls.into_inner().unwrap().len(), 2);
    }

    #[test]
    fn kubelet_is_refused_with_the_cores_own_words() {
        let error = ask(&FakeCore::default(), &[&["unmade"]]).unwrap_err();
        assert!(error.contains("has ended"), "{error}");
    }
}
