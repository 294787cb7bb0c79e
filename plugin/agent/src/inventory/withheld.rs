//! GPUs that are withheld although they are well: cordoned ones, of which nothing is allocated until they are uncordoned,
//! and GPUs that another plugin sells too; see [`tessera_kubelet::foreign_plugins`]. Kubelet is asked periodically which other
//! plugins advertise which devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_config::SoldByOthers;
use tessera_kubelet::foreign_plugins::{CurrentFindings, ForeignSale, Offer, judge};
use tessera_kubelet::pod_resources::{PodResources, PodResourcesError};
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;
use tessera_rules::allocate::Refusal;
use tessera_store::Change;
use tessera_view::API_VERSION;
use tessera_view::change::{CordonResponse, StandingCordon};
use tracing::{info, warn};

use super::{Inventory, Withheld};
use crate::Agent;
use crate::allocations::steer::SteerError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lift<'a> {
    Gpu(&'a str),
    Node,
    /// The node's own and that of every GPU.
    Each,
}

impl Inventory {
    pub(crate) fn cordon(
        &self,
        gpu: Option<&str>,
        reason: Option<String>,
        actor: Actor,
    ) -> Result<CordonResponse, SteerError> {
        let uuids = match gpu {
            None => vec![Cordon::NODE.to_owned()],
            Some(name) => self.named(name)?,
        };
        self.change_cordons(uuids, true, reason, actor)
    }

    /// Lifts cordons. A GPU is given out again once neither it nor the node is cordoned. Blocking.
    pub(crate) fn uncordon(
        &self,
        lift: Lift<'_>,
        reason: Option<String>,
        actor: Actor,
    ) -> Result<CordonResponse, SteerError> {
        let cordoned: Vec<String> = self.cordons.lock().keys().cloned().collect();
        let is_cordoned = |uuid: &str| cordoned.iter().any(|cordoned| cordoned == uuid);
        let uuids = match lift {
            Lift::Each => cordoned.clone(),
            Lift::Node => vec![Cordon::NODE.to_owned()],
            // Also one that is gone since.
            Lift::Gpu(name) if name != Cordon::NODE && is_cordoned(name) => vec![name.to_owned()],
            Lift::Gpu(name) => {
                let named = self.named(name)?;
                if is_cordoned(Cordon::NODE) && !named.iter().any(|uuid| is_cordoned(uuid)) {
                    return Err(SteerError::Refused(format!(
                        "{name} is cordoned with the node, and not by itself: `tessera uncordon --all` ends \
                         that, and `tessera cordon` then cordons single GPUs"
                    )));
                }
                named
            }
        };
        let uuids: Vec<String> = uuids.into_iter().filter(|uuid| is_cordoned(uuid)).collect();
        self.change_cordons(uuids, false, reason, actor)
    }

    fn change_cordons(
        &self,
        uuids: Vec<String>,
        is_set: bool,
        reason: Option<String>,
        actor: Actor,
    ) -> Result<CordonResponse, SteerError> {
        let mut change = Change::default();
        let cordon = Cordon { at_unix_ms: unix_ms(), by: actor, reason };
        for uuid in &uuids {
            let what = if is_set { What::Cordoned } else { What::Uncordoned };
            let event = Event {
                gpu: (uuid != Cordon::NODE).then(|| uuid.clone()),
                by: Some(cordon.by.clone()),
                reason: cordon.reason.clone(),
                ..Event::of_node(what, cordon.at_unix_ms)
            };
            info!(gpu = uuid, by = ?event.by, reason = event.detail(), "{}", event.sentence("it"));
            change.events.push(event);
            change.cordons.push((uuid.clone(), is_set.then(|| cordon.clone())));
        }
        if !change.is_empty() {
            let mut writer = self.journal.writer();
            writer.ledger.commit(&change)?;
            let mut cordons = self.cordons.lock();
            for (uuid, cordon) in change.cordons {
                match cordon {
                    Some(cordon) => cordons.insert(uuid, cordon),
                    None => cordons.remove(&uuid),
                };
            }
        }
        let cordons = self.cordons.lock().clone();
        let catalogue = self.catalogue();
        let standing = cordons.iter().map(|(uuid, cordon)| StandingCordon {
            gpu_uuid: uuid.clone(),
            gpu_index: catalogue.gpus.get(uuid).map(|sold| sold.gpu.index),
            since_unix_ms: cordon.at_unix_ms,
            by: cordon.by.who(),
            reason: cordon.reason.clone().unwrap_or_default(),
        });
        Ok(CordonResponse {
            api_version: API_VERSION.to_owned(),
            changed: uuids,
            cordoned: cordons.keys().cloned().collect(),
            running: 0,
            standing: standing.collect(),
        })
    }

    fn named(&self, name: &str) -> Result<Vec<String>, SteerError> {
        let catalogue = self.catalogue();
        let gpus = || catalogue.gpus.values().map(|sold| &sold.gpu);
        let found: BTreeSet<String> =
            gpus().filter(|gpu| gpu.is_named(name)).map(|gpu| gpu.uuid.clone()).collect();
        if found.is_empty() {
            let all: Vec<String> =
                gpus().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
            return Err(SteerError::NotFound(format!(
                "no GPU {name} is shared on this node; there are {}",
                all.join(", ")
            )));
        }
        Ok(found.into_iter().collect())
    }

    pub fn cordon_of(&self, uuid: &str) -> Option<String> {
        let cordons = self.cordons.lock();
        cordons.get(uuid).or_else(|| cordons.get(Cordon::NODE)).map(ToString::to_string)
    }

    pub(crate) fn withheld_of(&self, uuid: &str) -> Withheld {
        Withheld::by(self.cordon_of(uuid).is_some(), self.withheld(uuid).is_some())
    }

    /// Refuses what kubelet asks for before it has heard of a cordon.
    pub(crate) fn check_cordons(&self, planned: &Record) -> Result<(), Refusal> {
        for grant in &planned.grants {
            if let Some(reason) = self.cordon_of(&grant.uuid) {
                return Err(Refusal::Cordoned { uuid: grant.uuid.clone(), reason });
            }
        }
        Ok(())
    }
}

const LOOKING: &str = "coexistence";
/// How long the first look may hold up the start.
const FIRST: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct ForeignWatch {
    agent: Arc<Agent>,
    /// Shared with housekeeping, so that one List serves both.
    holdings: Arc<PodResources>,
    /// Its own, so that nobody waits for a slow answer to a question of ours.
    offered: PodResources,
    interval: Duration,
    others: CurrentFindings,
}

impl ForeignWatch {
    /// A watch that looks every `interval`, and takes a GPU for sold by others for `grace` after it was
    /// last seen so.
    pub fn new(
        agent: Arc<Agent>,
        holdings: Arc<PodResources>,
        interval: Duration,
        grace: Duration,
    ) -> Self {
        let offered = PodResources::new(&agent.config().paths.pod_resources);
        let others = CurrentFindings::new(grace);
        ForeignWatch { agent, holdings, offered, interval, others }
    }

    /// The look before kubelet is served, so that nothing is offered that is refused a moment later.
    /// Without an answer the start goes on.
    pub async fn first(&mut self) {
        if tokio::time::timeout(FIRST, self.look()).await.is_err() {
            warn!("kubelet does not say in time what other plugins sell; asking again later");
        }
    }

    pub async fn run(mut self) {
        loop {
            tokio::time::sleep(self.interval).await;
            self.look().await;
        }
    }

    async fn look(&mut self) {
        if self.agent.config().gpus.sold_by_others == SoldByOthers::Allow {
            self.agent.board.set_condition(LOOKING, None);
            self.agent.board.publish(|facts| facts.others_seen_by = "");
            return self.tell(BTreeMap::new()).await;
        }
        let (mut offers, how) = match self.offered.offers().await {
            Ok(offers) => (offers, "GetAllocatableResources"),
            Err(PodResourcesError::Unsupported) => (Vec::new(), "what pods hold"),
            Err(error) => return self.note_silence(&error),
        };
        let held = match self.holdings.list(self.interval / 2).await {
            Err(error) if offers.is_empty() => return self.note_silence(&error),
            held => held.unwrap_or_default().into_iter(),
        };
        self.agent.board.set_condition(LOOKING, None);
        self.agent.board.publish(|facts| facts.others_seen_by = how);
        let foreign = held.filter(|holding| !self.agent.allocations.knows(holding));
        offers.extend(foreign.map(|holding| Offer {
            holder: Some(format!("{}/{}", holding.namespace, holding.pod)),
            resource: holding.resource_name,
            device_ids: holding.device_ids,
        }));
        let gpus = self.agent.inventory.catalogue().devices();
        let findings = judge(&offers, &self.agent.allocations.own_resources(), &gpus);
        self.others.observe(findings, Instant::now());
        self.tell(self.others.current()).await;
    }

    /// What was found stands. Housekeeping reports a missing socket.
    fn note_silence(&self, error: &PodResourcesError) {
        let text = format!("it is not known what other plugins sell: {error}");
        let text = (!matches!(error, PodResourcesError::Absent(_))).then_some(text);
        self.agent.board.set_condition(LOOKING, text);
    }

    async fn tell(&self, findings: BTreeMap<String, ForeignSale>) {
        if self.agent.inventory.sold_by_others() == findings {
            return;
        }
        let agent = Arc::clone(&self.agent);
        // The history is written to disk.
        let result = tokio::task::spawn_blocking(move || agent.set_sold_by_others(findings)).await;
        if let Err(error) = result {
            warn!(%error, "what other plugins sell");
        }
        if self.agent.inventory.sold_by_others().is_empty() {
            info!("no other plugin sells a GPU of ours");
        }
    }
}

impl Inventory {
    pub fn sold_by_others(&self) -> BTreeMap<String, ForeignSale> {
        self.others.lock().clone()
    }

    /// Why nothing more of a GPU is given out although it is well.
    pub fn withheld(&self, uuid: &str) -> Option<String> {
        let others = self.others.lock();
        let refuses = self.config.get().gpus.sold_by_others == SoldByOthers::Refuse;
        others.get(uuid).filter(|_| refuses).map(ToString::to_string)
    }

    /// Takes what others sell: to the log, the history and `status`. Blocking.
    pub(crate) fn set_sold_by_others(&self, found: BTreeMap<String, ForeignSale>) {
        let before = std::mem::replace(&mut *self.others.lock(), found.clone());
        let mut events = Vec::new();
        let mut note = |uuid: &str, what, reason: String| {
            events.push(Event::of_gpu(uuid, what, reason, unix_ms()));
        };
        for (uuid, finding) in &found {
            if before.get(uuid) == Some(finding) {
                continue;
            }
            warn!(gpu = %uuid, "{finding}; {}", self.consequence());
            note(uuid, What::SoldByOthers, finding.to_string());
        }
        for (uuid, finding) in before.iter().filter(|(uuid, _)| !found.contains_key(*uuid)) {
            info!(gpu = %uuid, resource = finding.resource, "no other plugin sells it any more");
            note(uuid, What::SoldAlone, finding.resource.clone());
        }
        self.journal.audit(events);
    }

    pub fn others_warnings(&self) -> Vec<String> {
        let consequence = self.consequence();
        self.others
            .lock()
            .iter()
            .map(|(uuid, finding)| format!("GPU {uuid}: {finding}; {consequence}"))
            .collect()
    }

    fn consequence(&self) -> &'static str {
        match self.config.get().gpus.sold_by_others {
            SoldByOthers::Refuse => {
                "nothing more of it is given out here until that ends, running pods go on; leave it \
                 to one of the two (gpus.exclude, or the other plugin's configuration), or set \
                 gpus.sold_by_others"
            }
            SoldByOthers::Warn | SoldByOthers::Allow => {
                "its pods have no quota and may take the memory that others were promised \
                 (gpus.sold_by_others)"
            }
        }
    }
}
