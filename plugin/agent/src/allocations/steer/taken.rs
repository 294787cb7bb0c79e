//! What other limits take from a GPU that is sold by claims, and what they give back: the scheduler learns of it by the
//! ResourceSlice.

use tessera_model::quantity::format_bytes;
use tessera_model::record::Record;
use tessera_rules::capacity::Capacity;
use tessera_rules::front_end::FrontEnd;

use crate::allocations::Allocations;
use crate::allocations::records::Records;

/// What a GPU has for new claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    /// Bytes that count for no share.
    free: u64,
    /// Bytes of the slice's capacity.
    published: u64,
}

impl Room {
    fn of(records: &Records, uuid: &str, capacity: Capacity, step: u64, own: &Record) -> Self {
        let others = || records.on(uuid).map(AsRef::as_ref).filter(|other| other.id != own.id);
        let all = || others().chain([own]);
        let sellable = capacity.sellable();
        let sum = |bytes: &dyn Fn(&Record) -> u64| all().map(bytes).fold(0, u64::saturating_add);
        let counted = sum(&|record| record.counted_bytes(uuid).unwrap_or(0));
        let left = sellable.saturating_sub(sum(&|record| record.grown_bytes(uuid)));
        Room { free: sellable.saturating_sub(counted), published: left - left % step.max(1) }
    }
}

impl Allocations {
    /// A sentence for each GPU whose room for claims is another.
    pub(super) fn taken(&self, before: &Record, after: &Record) -> Vec<String> {
        let (catalogue, config) = (self.inventory.catalogue(), self.config.get());
        let step = config.dra.memory_step_bytes;
        let records = self.records.lock();
        let claimed = after.grants.iter().filter_map(|grant| catalogue.gpus.get(&grant.uuid));
        let claimed = claimed.filter(|sold| sold.seller == FrontEnd::Dra);
        let sentence = |sold: &tessera_rules::allocate::AdvertisedGpu| {
            let capacity = Capacity::of(&sold.gpu, &config);
            let room = |own| Room::of(&records, &sold.gpu.uuid, capacity, step, own);
            let (was, is) = (room(before), room(after));
            let slice = match was.published == is.published {
                true => String::new(),
                false => format!(
                    "; the memory in its ResourceSlice goes from {} to {}",
                    format_bytes(was.published),
                    format_bytes(is.published)
                ),
            };
            let (taken, given) =
                (was.free.saturating_sub(is.free), is.free.saturating_sub(was.free));
            match (taken, given) {
                (0, 0) => None,
                (0, given) => Some(format!(
                    "{} has {} more for new claims, {} in all{slice}",
                    sold.gpu,
                    format_bytes(given),
                    format_bytes(is.free)
                )),
                (taken, _) => Some(format!(
                    "it takes {} of the {} that {} has for new claims: none of more than {} finds room there{slice}. A \
                     claim that is allocated and not prepared yet is not known here: where it does not fit any more, \
                     its pod is refused until these limits are lowered",
                    format_bytes(taken),
                    format_bytes(was.free),
                    sold.gpu,
                    format_bytes(is.free)
                )),
            }
        };
        claimed.filter_map(sentence).collect()
    }
}
