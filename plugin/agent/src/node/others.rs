//! GPUs that another plugin sells too; see [`tessera_kubelet::foreign_plugins`].

use std::collections::{BTreeMap, BTreeSet};

use tracing::{info, warn};

use super::Node;
use tessera_config::SoldByOthers;
use tessera_kubelet::foreign_plugins::Finding;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::clock::unix_ms;
use tessera_model::holding::Holding;
use tessera_store::Change;
use tessera_system::locks::lock;

impl Node {
    /// What others sell of ours, by UUID.
    #[must_use]
    pub fn sold_by_others(&self) -> BTreeMap<String, Finding> {
        lock(&self.others).clone()
    }

    /// Why nothing more of a GPU is given out although it is well.
    #[must_use]
    pub fn withheld(&self, uuid: &str) -> Option<String> {
        let others = lock(&self.others);
        others.get(uuid).filter(|_| self.refuses_sold_by_others()).map(ToString::to_string)
    }

    /// Whether [`Node::withheld`] gives a reason.
    pub(super) fn is_withheld(&self, uuid: &str) -> bool {
        self.refuses_sold_by_others() && lock(&self.others).contains_key(uuid)
    }

    fn refuses_sold_by_others(&self) -> bool {
        self.config().gpus.sold_by_others == SoldByOthers::Refuse
    }

    /// Takes what others sell: to the log, the history, `status`, and by `gpus.sold_by_others` to
    /// kubelet. Blocking.
    pub fn set_sold_by_others(&self, found: BTreeMap<String, Finding>) {
        let before = std::mem::replace(&mut *lock(&self.others), found.clone());
        let mut change = Change::default();
        for (uuid, finding) in &found {
            if before.get(uuid) == Some(finding) {
                continue;
            }
            warn!(gpu = %uuid, "{finding}; {}", self.consequence());
            change.note_gpu(uuid, What::SoldByOthers, finding.to_string(), unix_ms());
        }
        for (uuid, finding) in before.iter().filter(|(uuid, _)| !found.contains_key(*uuid)) {
            info!(gpu = %uuid, resource = finding.resource, "no other plugin sells it any more");
            change.note_gpu(uuid, What::SoldAlone, finding.resource.clone(), unix_ms());
        }
        if !change.is_empty()
            && let Err(error) = lock(&self.writer).ledger.commit(&change)
        {
            warn!(%error, "the event is not recorded");
        }
        self.refresh_devices();
    }

    /// What `status` warns of.
    #[must_use]
    pub fn others_warnings(&self) -> Vec<String> {
        let consequence = self.consequence();
        lock(&self.others)
            .iter()
            .map(|(uuid, finding)| format!("GPU {uuid}: {finding}; {consequence}"))
            .collect()
    }

    fn consequence(&self) -> &'static str {
        match self.config().gpus.sold_by_others {
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

    /// Whether what a container holds is an allocation of ours. The resources of pages without a record
    /// are not known otherwise.
    #[must_use]
    pub fn knows(&self, holding: &Holding) -> bool {
        let ids = holding.device_ids.iter().map(String::as_str);
        lock(&self.records).contains_key(&AllocationId::of(&holding.resource_name, ids))
    }

    /// Resources that are ours, now or when an allocation was made.
    #[must_use]
    pub fn own_resources(&self) -> BTreeSet<String> {
        let mut names: BTreeSet<String> =
            lock(&self.records).values().map(|record| record.resource.clone()).collect();
        let config = self.config();
        let layouts = config.layouts.iter().flat_map(|layout| &layout.shares);
        names.extend(layouts.map(|share| share.resource.clone()));
        names.insert(config.resource.name.clone());
        names
    }
}
