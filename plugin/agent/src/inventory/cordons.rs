//! Cordoned GPUs: nothing of them is allocated until they are uncordoned.

use std::collections::BTreeSet;

use tracing::info;

use super::Inventory;
use super::Withheld;
use crate::allocations::steer::SteerError;
use tessera_model::audit::{Actor, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;
use tessera_rules::refusal::Refusal;
use tessera_store::Change;
use tessera_view::API_VERSION;
use tessera_view::change::{CordonResponse, StandingCordon};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lift<'a> {
    /// Those of the GPUs that are named so.
    Gpu(&'a str),
    /// The node's own, and no GPU's.
    Node,
    /// The node's own and that of every GPU.
    Each,
}

impl Inventory {
    /// Gives out nothing more of what `gpu` names, or of the whole node. Blocking.
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

    /// UUIDs of the GPUs that somebody means.
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

    /// What keeps a GPU from being given out, where it is cordoned.
    pub fn cordon_of(&self, uuid: &str) -> Option<String> {
        let cordons = self.cordons.lock();
        cordons.get(uuid).or_else(|| cordons.get(Cordon::NODE)).map(ToString::to_string)
    }

    /// What is not offered of a GPU that is well.
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
