//! Kubelet's calls, DRA v1: claims prepared and unprepared.
//!
//! What is known of a claim is in the agent's records alone, so that a restart, or a second instance, goes on where
//! this one was.

mod asked;
mod orphans;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tessera_agent::Agent;
use tessera_agent::front_end::{AllocateError, ContainerAllocateResponse};
use tessera_agent::meters::{self, Call};
use tessera_agent::status_board;
use tessera_cluster::k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_cluster::resource::{ClaimRef, ResourceClient};
use tessera_kubelet_api::dra::v1::dra_plugin_server::DraPlugin;
use tessera_kubelet_api::dra::v1::{
    self, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use tessera_model::allocation_id::AllocationId;
use tessera_model::cdi_name;
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_rules::ask::Ask;
use tessera_rules::refusal::Refusal;
use tessera_system::locks::lock;
use tokio::sync::{Notify, watch};
use tonic::{Request, Response, Status};
use tracing::{debug, info, warn};

use crate::claims::{self, Gives, Node};
use crate::names;
use asked::Asked;
pub use orphans::Sweeping;

/// In the driver's directory: claims that hold nothing.
const ASKED: &str = "asked";

/// After which kubelet lists the pods of a claim that it was told is prepared.
const LISTED: Duration = Duration::from_millis(500);

/// Why a claim was not prepared or unprepared, as it reaches the pod's events.
fn failed(claim: &ClaimRef, why: impl Display) -> String {
    printable::reason(&format!("claim {}/{}: {why}", claim.namespace, claim.name))
}

/// A claim, and what is known of it.
type Of<T> = (ClaimRef, Result<T, String>);

/// What became of each claim of a call, by UID; errors as kubelet shows them.
pub type Outcome<T> = BTreeMap<String, Result<T, String>>;

/// Prepares claims, and takes that back.
#[derive(Clone, Debug)]
pub struct Preparer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    agent: Arc<Agent>,
    api: ResourceClient,
    pool: String,
    /// Held while claims change: each is judged by what those before it left. Other instances of the driver have no
    /// part in it, because an instance begins when the one before has let go of the ledger.
    changing: Mutex<()>,
    /// Claims that hold nothing and that kubelet wants unprepared all the same.
    asked: Asked,
    /// Rung when a claim was refused what a claim that is gone may hold.
    suspicion: Notify,
}

#[tonic::async_trait]
impl DraPlugin for Preparer {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let outcome = self.prepare(once_each(request.into_inner().claims)).await?.into_iter();
        let answer = |prepared: Result<Vec<Device>, String>| match prepared {
            Ok(devices) => NodePrepareResourceResponse { devices, error: String::new() },
            Err(error) => NodePrepareResourceResponse { devices: Vec::new(), error },
        };
        let claims = outcome.map(|(uid, prepared)| (uid, answer(prepared))).collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let outcome = self.unprepare(once_each(request.into_inner().claims)).await?.into_iter();
        let answer = |unprepared: Result<(), String>| NodeUnprepareResourceResponse {
            error: unprepared.err().unwrap_or_default(),
        };
        let claims = outcome.map(|(uid, unprepared)| (uid, answer(unprepared))).collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

impl Preparer {
    /// For the devices of `pool`. All instances of the driver on this node share `dir`.
    pub fn new(agent: Arc<Agent>, api: ResourceClient, pool: &str, dir: &Path) -> Self {
        let asked = Asked::open(&dir.join(ASKED));
        let (pool, changing, suspicion) = (pool.to_owned(), Mutex::default(), Notify::new());
        Preparer { inner: Arc::new(Inner { agent, api, pool, changing, asked, suspicion }) }
    }

    /// Claims that kubelet has not had unprepared yet, by name: those that hold something, and those that it asked for
    /// in vain.
    pub fn left(&self) -> Vec<String> {
        names(&self.inner.agent, &self.inner.asked)
    }

    /// Another number of claims holds nothing.
    pub fn asked(&self) -> watch::Receiver<usize> {
        self.inner.asked.count()
    }

    /// Makes claims usable: exactly one answer a claim. A claim that is prepared already is answered as before.
    async fn prepare(&self, claims: Vec<ClaimRef>) -> Result<Outcome<Vec<Device>>, Status> {
        let began = Instant::now();
        let read = self.read(&claims).await;
        let pods = read.iter().map(|(claim, read)| (claim.uid.clone(), pods(read)));
        let pods: BTreeMap<String, Vec<String>> = pods.collect();
        let inner = Arc::clone(&self.inner);
        let outcome = blocking(move || inner.prepare_all(read)).await?;
        self.inner.count(Call::Prepare, &outcome, began);
        for claim in &claims {
            let reason = outcome.get(&claim.uid).and_then(|answer| answer.as_ref().err());
            let pods = pods.get(&claim.uid).map(Vec::as_slice).unwrap_or_default();
            let is_news = self.inner.note_refused(claim, pods, reason);
            report("prepared", claim, is_news, reason, began);
        }
        if outcome.values().any(Result::is_ok) {
            // An agent that ends meanwhile is not held up.
            let agent = Arc::downgrade(&self.inner.agent);
            tokio::spawn(async move {
                tokio::time::sleep(LISTED).await;
                if let Some(agent) = agent.upgrade() {
                    agent.allocations().expect_start();
                }
            });
        }
        Ok(outcome)
    }

    /// Takes back what [`Preparer::prepare`] did. Claims that are unknown are unprepared already. Needs no API
    /// server: the claims may be gone.
    async fn unprepare(&self, claims: Vec<ClaimRef>) -> Result<Outcome<()>, Status> {
        let began = Instant::now();
        let inner = Arc::clone(&self.inner);
        let all = claims.clone();
        let outcome = blocking(move || inner.unprepare_all(all)).await?;
        self.inner.count(Call::Unprepare, &outcome, began);
        for claim in &claims {
            self.inner.note_refused(claim, &[], None);
            let reason = outcome.get(&claim.uid).and_then(|answer| answer.as_ref().err());
            report("unprepared", claim, true, reason, began);
        }
        Ok(outcome)
    }

    /// Releases what claims hold that are gone, for as long as it is polled.
    pub async fn sweep_orphans(&self, sweeping: Sweeping) {
        orphans::keep(&self.inner, sweeping).await;
    }

    /// The claims as the API server has them, all asked for at once, in kubelet's order.
    async fn read(&self, claims: &[ClaimRef]) -> Vec<Of<Option<ResourceClaim>>> {
        let ask = |claim: ClaimRef| {
            let api = self.inner.api.clone();
            tokio::spawn(async move {
                let answer = api.claim(&claim.namespace, &claim.name).await;
                let again = |error| failed(&claim, format!("{error}; kubelet tries again"));
                let answer = answer.map_err(again);
                (claim, answer)
            })
        };
        let asking: Vec<_> = claims.iter().cloned().map(ask).collect();
        let mut read = Vec::with_capacity(asking.len());
        for asked in asking {
            // One that panics has been reported, and has no answer.
            read.extend(asked.await);
        }
        read
    }
}

/// Runs `work` on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Vec<Of<T>> + Send + 'static,
) -> Result<Outcome<T>, Status> {
    let answers = tokio::task::spawn_blocking(work).await.map_err(|error| {
        warn!(%error, "a call of kubelet's failed");
        Status::internal("the plugin failed while it worked on the claims; its log says how")
    })?;
    Ok(answers.into_iter().map(|(claim, answer)| (claim.uid, answer)).collect())
}

/// [`Preparer::left`] before there is one; `dir` is the driver's.
pub fn left(agent: &Agent, dir: &Path) -> Vec<String> {
    names(agent, &Asked::open(&dir.join(ASKED)))
}

fn names(agent: &Agent, asked: &Asked) -> Vec<String> {
    let (records, asked) = (agent.claims(), asked.all());
    // A claim may have several shares.
    let held = records.iter().filter_map(|record| Some((claims::uid(record)?, record.name())));
    let asked = asked.iter().map(|claim| {
        let name = format!("claim {}/{}", claim.namespace, claim.name);
        (claim.uid.as_str(), name)
    });
    held.chain(asked).collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Logs what became of a claim. Kubelet repeats what fails every few seconds, for as long as the pod waits: only what is
/// news is a warning, and `status` counts the rest.
fn report(
    what: &'static str,
    claim: &ClaimRef,
    is_news: bool,
    error: Option<&String>,
    began: Instant,
) {
    let ClaimRef { namespace, name, uid } = claim;
    match error {
        Some(error) if is_news => warn!(namespace, name, uid, "not {what}: {error}"),
        Some(error) => debug!(namespace, name, uid, "still not {what}: {error}"),
        None => info!(namespace, name, uid, ms = began.elapsed().as_millis(), "{what}"),
    }
}

/// The pods that a claim is reserved for.
fn pods(read: &Result<Option<ResourceClaim>, String>) -> Vec<String> {
    let claim = read.as_ref().ok().and_then(Option::as_ref);
    let consumers = claim.into_iter().flat_map(claims::reserved_for);
    consumers.filter(|one| one.resource == "pods").map(|one| one.name.clone()).collect()
}

/// Kubelet takes an answer for one claim alone.
fn once_each(claims: Vec<v1::Claim>) -> Vec<ClaimRef> {
    let mut seen = BTreeSet::new();
    let once = claims.into_iter().filter(|claim| seen.insert(claim.uid.clone()));
    once.map(|v1::Claim { namespace, name, uid }| ClaimRef { namespace, name, uid }).collect()
}

impl Inner {
    /// Counts what became of each claim of a batch, all of them with the batch's length.
    fn count<T>(&self, call: Call, outcome: &Outcome<T>, began: Instant) {
        for answer in outcome.values() {
            let ended = if answer.is_ok() { meters::Outcome::Ok } else { meters::Outcome::Refused };
            self.agent.meters().observe(call, &names::DRIVER.into(), ended, began.elapsed());
        }
    }

    /// Notes for `status` that the pods of a claim were refused, or with a reason of `None` that the refusal is over.
    /// Whether it was not refused for this reason before.
    fn note_refused(&self, claim: &ClaimRef, pods: &[String], reason: Option<&String>) -> bool {
        let board = self.agent.board();
        let Some(reason) = reason else {
            board.grant(&claim.uid);
            return false;
        };
        let is_it = |one: &status_board::Refusal| one.subject == claim.uid && one.reason == *reason;
        let is_news = !board.refused(unix_ms()).iter().any(is_it);
        board.refuse(status_board::Refusal {
            subject: claim.uid.clone(),
            namespace: claim.namespace.clone(),
            pods: pods.to_vec(),
            claim: claim.name.clone(),
            reason: reason.clone(),
            ..status_board::Refusal::default()
        });
        is_news
    }

    fn prepare_all(&self, read: Vec<Of<Option<ResourceClaim>>>) -> Vec<Of<Vec<Device>>> {
        let _changing = lock(&self.changing);
        let one = |(claim, read): Of<Option<ResourceClaim>>| {
            let answer = read.and_then(|found| self.prepare_one(&claim, found.as_ref()));
            (claim, answer)
        };
        let answers: Vec<_> = read.into_iter().map(one).collect();
        let records = self.agent.claims();
        let holding: BTreeSet<&str> =
            records.iter().filter_map(|record| claims::uid(record)).collect();
        for (claim, _) in &answers {
            match holding.contains(claim.uid.as_str()) {
                true => self.asked.forget(&claim.uid),
                false => self.asked.note(claim),
            }
        }
        answers
    }

    fn prepare_one(
        &self,
        asked: &ClaimRef,
        found: Option<&ResourceClaim>,
    ) -> Result<Vec<Device>, String> {
        let (catalogue, records) = (self.agent.inventory().catalogue(), self.agent.claims());
        let is_on = self.agent.config().dra.enabled;
        let node = Node { pool: &self.pool, catalogue: &catalogue, records: &records, is_on };
        let decision = claims::decide(asked, found, node).map_err(|fault| failed(asked, fault))?;
        let failed = |error: AllocateError| failed(asked, error);
        if !decision.stale.is_empty() {
            info!(claim = asked.name, "the scheduler allocated it again: its shares of before end");
            self.agent.release(&decision.stale).map_err(failed)?;
        }
        let delivered = self.deliver(&decision.asks).map_err(failed)?;
        let mut prepared = Vec::with_capacity(decision.devices.len());
        for (mut device, gives) in decision.devices {
            device.cdi_device_ids = match &gives {
                Gives::Share(at) => {
                    let given = delivered.get(*at).into_iter().flat_map(|given| &given.cdi_devices);
                    given.map(|device| device.name.clone()).collect()
                }
                Gives::Nothing => Vec::new(),
                Gives::View(uuid) => self.agent.view(uuid).map_err(failed)?,
            };
            // Kubelet shows the first name in the pod's status: that of the share, not of the GPU.
            device.cdi_device_ids.sort_by_key(|name| !name.starts_with(cdi_name::SHARE_KIND));
            prepared.push(device);
        }
        Ok(prepared)
    }

    /// Shares of a claim, in their order: what is recorded as it is, and the rest all or none.
    fn deliver(&self, asks: &[Ask]) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        if asks.is_empty() {
            return Ok(Vec::new());
        }
        let delivered = self.agent.grant(asks);
        let refusal = delivered.as_ref().err().and_then(AllocateError::refusal);
        if refusal.is_some_and(|refusal| {
            matches!(refusal, Refusal::MemoryOversold { .. } | Refusal::CoresOversold { .. })
        }) {
            self.suspicion.notify_one();
        }
        delivered
    }

    fn unprepare_all(&self, claims: Vec<ClaimRef>) -> Vec<Of<()>> {
        let _changing = lock(&self.changing);
        let one = |claim: ClaimRef| {
            let answer = self.release(&claim.uid).map_err(|error| failed(&claim, error));
            (claim, answer)
        };
        claims.into_iter().map(one).collect()
    }

    /// Ends all that a claim holds.
    fn release(&self, uid: &str) -> Result<(), AllocateError> {
        let records = self.agent.claims();
        let of_it = records.iter().filter(|record| claims::uid(record) == Some(uid));
        let ids: Vec<AllocationId> = of_it.map(|record| record.id.clone()).collect();
        if !ids.is_empty() {
            self.agent.release(&ids)?;
        }
        self.asked.forget(uid);
        Ok(())
    }
}
