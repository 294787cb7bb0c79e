//! GPUs that another plugin sells too; see [`tessera_kubelet::foreign_plugins`].

use std::collections::BTreeMap;

use tracing::{info, warn};

use super::Inventory;
use tessera_config::SoldByOthers;
use tessera_kubelet::foreign_plugins::ForeignSale;
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;

impl Inventory {
    /// What others sell of ours, by UUID.
    pub fn sold_by_others(&self) -> BTreeMap<String, ForeignSale> {
        self.others.lock().clone()
    }

    /// Why nothing more of a GPU is given out although it is well.
    pub fn withheld(&self, uuid: &str) -> Option<String> {
        let others = self.others.lock();
        others.get(uuid).filter(|_| self.refuses_sold_by_others()).map(ToString::to_string)
    }

    fn refuses_sold_by_others(&self) -> bool {
        self.config.get().gpus.sold_by_others == SoldByOthers::Refuse
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

    /// What `status` warns of.
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
