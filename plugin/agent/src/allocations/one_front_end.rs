//! A GPU is sold by one front end at a time: by the one that the configuration names, once nothing of the other is
//! live there any more.

use tessera_model::origin::Origin;
use tessera_rules::allocate::{AdvertisedGpu, Catalogue};
use tessera_rules::ask::Plan;
use tessera_rules::front_end::FrontEnd;
use tessera_rules::refusal::Refusal;

use super::Allocations;
use super::records::Records;

/// The front end that sells what has this origin; the agent's ledger has no runs.
fn of_origin(origin: &Origin) -> FrontEnd {
    match origin.is_device_plugin() {
        true => FrontEnd::DevicePlugin,
        false => FrontEnd::Dra,
    }
}

/// How many allocations the other front end still has on a GPU, and which one that is; `None` where there are none.
fn left_by_other(records: &Records, uuid: &str, seller: FrontEnd) -> Option<(FrontEnd, usize)> {
    let others = records.on(uuid).map(|record| of_origin(&record.origin));
    let mut others = others.filter(|front_end| *front_end != seller);
    let other = others.next()?;
    Some((other, 1 + others.count()))
}

impl Allocations {
    /// Refuses what another front end sells, or has not let go of.
    pub(super) fn check_front_end(
        &self,
        catalogue: &Catalogue,
        plan: &Plan,
    ) -> Result<(), Refusal> {
        let asks = of_origin(&plan.origin);
        let records = self.records.lock();
        for grant in &plan.grants {
            let Some(sold) = catalogue.gpus.get(&grant.uuid) else { continue };
            if sold.seller != asks {
                let (uuid, seller) = (grant.uuid.clone(), sold.seller.as_str());
                return Err(Refusal::OtherFrontEnd { uuid, seller });
            }
            if let Some((from, count)) = left_by_other(&records, &grant.uuid, sold.seller) {
                let live = match count {
                    1 => "1 share".to_owned(),
                    several => format!("{several} shares"),
                };
                let (uuid, from) = (grant.uuid.clone(), from.as_str());
                return Err(Refusal::Moving { uuid, from, live });
            }
        }
        Ok(())
    }

    /// Whether the front end that does not sell a GPU still has something of it.
    #[must_use]
    pub fn is_moving(&self, sold: &AdvertisedGpu) -> bool {
        left_by_other(&self.records.lock(), &sold.gpu.uuid, sold.seller).is_some()
    }
}
