//! Kubelet's calls, DRA v1: claims prepared and unprepared.
//!
//! What is known of a claim is in the agent's records alone, so that a restart, or a second instance, goes on where
//! this one was.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tessera_agent::front_end::{AllocateError, Call, ContainerAllocateResponse, Outcome};
use tessera_agent::{Agent, status_board};
use tessera_cluster::k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_cluster::resource::{ClaimRef, ResourceClient};
use tessera_kubelet_api::dra::v1;
use tessera_kubelet_api::dra::v1::dra_plugin_server::DraPlugin;
use tessera_kubelet_api::dra::v1::{
    Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::unix_ms;
use tessera_model::{cdi_name, printable};
use tessera_rules::allocate::{Ask, Refusal};
use tessera_system::files;
use tessera_system::files::Dir;
use tessera_system::locks::lock;
use tokio::sync::{Notify, watch};
use tonic::{Request, Response, Status};
use tracing::{debug, info, warn};

use crate::claims::{Gives, Node};
use crate::{claims, names};

pub use orphans::Sweeping;

mod orphans;

/// In the driver's directory: claims that hold nothing.
const ASKED: &str = "asked";

/// After which kubelet lists the pods of a claim that it was told is prepared.
const LISTED: Duration = Duration::from_millis(500);

/// Why a claim was not prepared or unprepared, as it reaches the pod's events.
fn failed(claim: &ClaimRef, why: impl Display) -> String {
    printable::reason(&format!("claim {}/{}: {why}", claim.namespace, claim.name))
}

/// A claim, and what is known or became of it; errors as kubelet shows them.
type Of<T> = (ClaimRef, Result<T, String>);

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
        let prepared = self.prepare(once_each(request.into_inner().claims)).await?.into_iter();
        let answer = |(claim, prepared): Of<Vec<Device>>| {
            let (devices, error) = match prepared {
                Ok(devices) => (devices, String::new()),
                Err(error) => (Vec::new(), error),
            };
            (claim.uid, NodePrepareResourceResponse { devices, error })
        };
        Ok(Response::new(NodePrepareResourcesResponse { claims: prepared.map(answer).collect() }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let ended = self.unprepare(once_each(request.into_inner().claims)).await?.into_iter();
        let answer = |(claim, ended): Of<()>| {
            (claim.uid, NodeUnprepareResourceResponse { error: ended.err().unwrap_or_default() })
        };
        Ok(Response::new(NodeUnprepareResourcesResponse { claims: ended.map(answer).collect() }))
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
    async fn prepare(&self, claims: Vec<ClaimRef>) -> Result<Vec<Of<Vec<Device>>>, Status> {
        let began = Instant::now();
        let read = self.read(claims).await;
        let pods: Vec<Vec<String>> = read.iter().map(|(_, read)| pods(read)).collect();
        let inner = Arc::clone(&self.inner);
        let prepared = blocking(move || inner.prepare_all(read)).await?;
        self.inner.count(Call::Prepare, &prepared, began);
        for ((claim, answer), pods) in prepared.iter().zip(&pods) {
            let reason = answer.as_ref().err();
            let is_news = self.inner.note_refused(claim, pods, reason);
            report("prepared", claim, is_news, reason, began);
        }
        if prepared.iter().any(|(_, answer)| answer.is_ok()) {
            // An agent that ends meanwhile is not held up.
            let agent = Arc::downgrade(&self.inner.agent);
            tokio::spawn(async move {
                tokio::time::sleep(LISTED).await;
                if let Some(agent) = agent.upgrade() {
                    agent.allocations.expect_start();
                }
            });
        }
        Ok(prepared)
    }

    /// Takes back what [`Preparer::prepare`] did. Claims that are unknown are unprepared already. Needs no API
    /// server: the claims may be gone.
    async fn unprepare(&self, claims: Vec<ClaimRef>) -> Result<Vec<Of<()>>, Status> {
        let began = Instant::now();
        let inner = Arc::clone(&self.inner);
        let ended = blocking(move || inner.unprepare_all(claims)).await?;
        self.inner.count(Call::Unprepare, &ended, began);
        for (claim, answer) in &ended {
            self.inner.note_refused(claim, &[], None);
            report("unprepared", claim, true, answer.as_ref().err(), began);
        }
        Ok(ended)
    }

    /// Releases what claims hold that are gone, for as long as it is polled.
    pub async fn sweep_orphans(&self, sweeping: Sweeping) {
        orphans::keep(&self.inner, sweeping).await;
    }

    /// The claims as the API server has them, all asked for at once, in kubelet's order.
    async fn read(&self, claims: Vec<ClaimRef>) -> Vec<Of<Option<ResourceClaim>>> {
        let ask = |claim: ClaimRef| {
            let api = self.inner.api.clone();
            tokio::spawn(async move {
                let answer = api.claim(&claim.namespace, &claim.name).await;
                let again = |error| failed(&claim, format!("{error}; kubelet tries again"));
                let answer = answer.map_err(again);
                (claim, answer)
            })
        };
        let asking: Vec<_> = claims.into_iter().map(ask).collect();
        let mut read = Vec::with_capacity(asking.len());
        for asked in asking {
            // One that panics has been reported, and has no answer.
            read.extend(asked.await);
        }
        read
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Vec<Of<T>> + Send + 'static,
) -> Result<Vec<Of<T>>, Status> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        warn!(%error, "a call of kubelet's failed");
        Status::internal("the plugin failed while it worked on the claims; its log says how")
    })
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
    fn count<T>(&self, call: Call, all: &[Of<T>], began: Instant) {
        for (_, answer) in all {
            let ended = if answer.is_ok() { Outcome::Ok } else { Outcome::Refused };
            self.agent.meters.observe(call, &names::DRIVER.into(), ended, began.elapsed());
        }
    }

    /// Notes for `status` that the pods of a claim were refused, or with a reason of `None` that the refusal is over.
    /// Whether it was not refused for this reason before.
    fn note_refused(&self, claim: &ClaimRef, pods: &[String], reason: Option<&String>) -> bool {
        let board = &self.agent.board;
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
        let (catalogue, records) = (self.agent.inventory.catalogue(), self.agent.claims());
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

/// Most of them; kubelet has no more pods on a node.
const MOST: usize = 4096;
/// Longest UID; Kubernetes' have 36 bytes.
const LONGEST_UID: usize = 64;

/// Claims that kubelet asked for and that hold nothing: refused ones, and those of monitors. Kubelet wants each of them
/// unprepared before its pod can end, so the driver may not leave before that; a file each says so to the next start.
#[derive(Debug)]
struct Asked {
    dir: PathBuf,
    claims: Mutex<BTreeMap<String, ClaimRef>>,
    count: watch::Sender<usize>,
}

impl Asked {
    /// Those that the directory names; it need not be there.
    pub(super) fn open(dir: &Path) -> Self {
        let claims = read(dir);
        let count = watch::Sender::new(claims.len());
        Asked { dir: dir.to_owned(), claims: Mutex::new(claims), count }
    }

    pub(super) fn all(&self) -> Vec<ClaimRef> {
        lock(&self.claims).values().cloned().collect()
    }

    pub(super) fn count(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }

    pub(super) fn note(&self, claim: &ClaimRef) {
        let mut claims = lock(&self.claims);
        if claims.contains_key(&claim.uid) || claims.len() >= MOST {
            return;
        }
        // What is no file's name is remembered until the next start.
        if is_name(&claim.uid) {
            let text = format!("{}/{}\n", claim.namespace, claim.name);
            let written = Dir::make(&self.dir)
                .and_then(|dir| dir.replace(claim.uid.as_ref(), text.as_bytes(), 0o600, false));
            if let Err(error) = written {
                warn!(dir = %self.dir.display(), %error, "a claim that was asked for is not noted");
            }
        }
        claims.insert(claim.uid.clone(), claim.clone());
        self.count.send_replace(claims.len());
    }

    /// It holds something by now, is unprepared, or is no more.
    pub(super) fn forget(&self, uid: &str) {
        let mut claims = lock(&self.claims);
        if claims.remove(uid).is_none() {
            return;
        }
        if is_name(uid)
            && let Err(error) = Dir::open_trusted(&self.dir).and_then(|dir| dir.remove(uid))
        {
            warn!(dir = %self.dir.display(), %error, "a claim that has ended stays noted");
        }
        self.count.send_replace(claims.len());
    }
}

/// What the directory names; nothing where it cannot be read.
fn read(path: &Path) -> BTreeMap<String, ClaimRef> {
    let Ok(dir) = Dir::open_trusted(path) else { return BTreeMap::new() };
    let names = dir.names().unwrap_or_default();
    let uids = names.iter().filter_map(|name| name.to_str()).filter(|name| is_name(name));
    let claim = |uid: &str| {
        let text = files::read(&path.join(uid), files::SMALL).ok()?;
        let text = String::from_utf8(text).ok()?;
        let (namespace, name) = text.trim_end().split_once('/')?;
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Some((uid.to_owned(), ClaimRef { namespace, name, uid: uid.to_owned() }))
    };
    uids.take(MOST).filter_map(claim).collect()
}

fn is_name(uid: &str) -> bool {
    (1..=LONGEST_UID).contains(&uid.len())
        && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(uid: &str) -> ClaimRef {
        ClaimRef { namespace: "team".into(), name: "chat".into(), uid: uid.into() }
    }

    #[test]
    fn what_kubelet_asked_for_is_known_after_a_restart_until_it_is_unprepared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("asked");
        let asked = Asked::open(&path);
        let mut count = asked.count();
        asked.note(&claim("u-1"));
        asked.note(&claim("u-1"));
        // No path leads out of the directory.
        asked.note(&claim("../u-2"));
        assert_eq!(*count.borrow_and_update(), 2);
        assert_eq!(Asked::open(&path).all(), [claim("u-1")]);
        asked.forget("u-1");
        asked.forget("../u-2");
        asked.forget("never");
        assert_eq!(*count.borrow_and_update(), 0);
        assert_eq!(Asked::open(&path).all(), []);
    }

    #[test]
    fn what_is_no_note_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("u-1"), "no claim").unwrap();
        std::fs::write(dir.path().join(".u-2"), "team/chat").unwrap();
        std::fs::create_dir(dir.path().join("u-3")).unwrap();
        assert_eq!(Asked::open(dir.path()).all(), []);
        // Where nothing can be kept, it is known until the end.
        let nowhere = Asked::open(&dir.path().join("u-1"));
        nowhere.note(&claim("u-4"));
        assert_eq!(nowhere.all(), [claim("u-4")]);
    }
}
