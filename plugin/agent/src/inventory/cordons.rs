//! Cordoned GPUs: nothing of them is allocated until they are uncordoned.

use std::collections::BTreeSet;

use tracing::info;

use super::Inventory;
use super::Withheld;
use crate::steer_error::SteerError;
use tessera_model::audit::{By, Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::steered::Cordon;
use tessera_rules::allocate::{Plan, Refusal};
use tessera_store::Change;

/// What a change of cordons is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CordonChange {
    /// UUIDs that it was about; [`Cordon::NODE`] for the whole node.
    pub changed: Vec<String>,
    /// All that is cordoned now.
    pub cordoned: Vec<String>,
}

impl Inventory {
    /// Gives out nothing more of what `gpu` names, or of the whole node. Blocking.
    ///
    /// # Errors
    /// No such GPU, or the disk.
    pub(crate) fn cordon(
        &self,
        gpu: Option<&str>,
        reason: Option<String>,
        by: By,
    ) -> Result<CordonChange, SteerError> {
        let uuids = match gpu {
            None => vec![Cordon::NODE.to_owned()],
            Some(name) => self.named(name)?,
        };
        let cordon = Cordon { at_unix_ms: unix_ms(), by, reason };
        self.change_cordons(&uuids, Some(&cordon))
    }

    /// Gives out again what `gpu` names, or all. Blocking.
    ///
    /// # Errors
    /// No such GPU, the node as a whole is cordoned, or the disk.
    pub(crate) fn uncordon(
        &self,
        gpu: Option<&str>,
        reason: Option<String>,
        by: By,
    ) -> Result<CordonChange, SteerError> {
        let cordoned: Vec<String> = self.cordons.lock().keys().cloned().collect();
        let uuids = match gpu {
            None => cordoned,
            Some(_) if cordoned.iter().any(|uuid| uuid == Cordon::NODE) => {
                return Err(SteerError::Refused(
                    "the node is cordoned as a whole; `tessera uncordon --all` ends that, and \
                     `tessera cordon` then cordons single GPUs"
                        .to_owned(),
                ));
            }
            // Also one that is gone since.
            Some(name) => match cordoned.iter().find(|uuid| *uuid == name) {
                Some(uuid) => vec![uuid.clone()],
                None => self.named(name)?,
            },
        };
        let uuids: Vec<String> =
            uuids.into_iter().filter(|uuid| self.cordons.lock().contains_key(uuid)).collect();
        self.change_cordons_by(&uuids, None, Some(by), reason)
    }

    fn change_cordons(
        &self,
        uuids: &[String],
        cordon: Option<&Cordon>,
    ) -> Result<CordonChange, SteerError> {
        self.change_cordons_by(uuids, cordon, None, None)
    }

    fn change_cordons_by(
        &self,
        uuids: &[String],
        cordon: Option<&Cordon>,
        by: Option<By>,
        reason: Option<String>,
    ) -> Result<CordonChange, SteerError> {
        let mut change = Change::default();
        for uuid in uuids {
            let what = if cordon.is_some() { What::Cordoned } else { What::Uncordoned };
            let mut event = Event::of_node(what, unix_ms());
            event.gpu = (uuid != Cordon::NODE).then(|| uuid.clone());
            event.by = cordon.map(|cordon| cordon.by.clone()).or_else(|| by.clone());
            event.reason = cordon.and_then(|cordon| cordon.reason.clone()).or(reason.clone());
            info!(gpu = uuid, by = ?event.by, reason = ?event.reason, "{}", event.what.name());
            change.events.push(event);
            change.cordons.push((uuid.clone(), cordon.cloned()));
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
        let cordoned = self.cordons.lock().keys().cloned().collect();
        Ok(CordonChange { changed: uuids.to_vec(), cordoned })
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
    #[must_use]
    pub fn cordon_of(&self, uuid: &str) -> Option<String> {
        let cordons = self.cordons.lock();
        cordons.get(uuid).or_else(|| cordons.get(Cordon::NODE)).map(ToString::to_string)
    }

    /// What is not offered of a GPU that is well.
    pub(crate) fn withheld_of(&self, uuid: &str) -> Withheld {
        let cordons = self.cordons.lock();
        let is_cordoned = cordons.contains_key(uuid) || cordons.contains_key(Cordon::NODE);
        drop(cordons);
        match is_cordoned {
            true => Withheld::All,
            false if self.is_withheld(uuid) => Withheld::Free,
            false => Withheld::Nothing,
        }
    }

    /// Refuses what kubelet asks for before it has heard of a cordon.
    pub(crate) fn check_cordons(&self, plan: &Plan) -> Result<(), Refusal> {
        for grant in &plan.grants {
            if let Some(reason) = self.cordon_of(&grant.uuid) {
                return Err(Refusal::Cordoned { uuid: grant.uuid.clone(), reason });
            }
        }
        Ok(())
    }
}
