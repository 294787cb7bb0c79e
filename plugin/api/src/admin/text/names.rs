//! Ids as short as is unambiguous: any command that takes an id takes its beginning.

use std::collections::BTreeMap;

use tessera_view::status::{Allocation, Status};

/// Fewest characters of an id, and of a GPU's UUID behind its kind.
const LEAST: usize = 8;
const LEAST_UUID: usize = 4;

/// What ids and GPUs are called on this page.
#[derive(Debug)]
pub struct Names {
    short: BTreeMap<String, String>,
    indexes: BTreeMap<String, u32>,
    pods: BTreeMap<String, String>,
}

impl Names {
    /// Of everything that a status names; `whole`: nothing is shortened.
    pub fn of(status: &Status, whole: bool) -> Self {
        let uses = status.allocations.iter().flat_map(|allocation| &allocation.gpus);
        let uuids = status.gpus.iter().map(|gpu| gpu.uuid.as_str());
        let uuids: Vec<&str> = uuids.chain(uses.map(|used| used.gpu_uuid.as_str())).collect();
        let ids: Vec<&str> = status.allocations.iter().map(|a| a.id.as_str()).collect();
        let mut short = BTreeMap::new();
        if !whole {
            shorten(uuids, &mut short, |uuid| {
                uuid.find('-').map_or(LEAST, |at| at + 1 + LEAST_UUID)
            });
            shorten(ids, &mut short, |_| LEAST);
        }
        let pod = |a: &Allocation| {
            let holder = a.holder.as_ref()?;
            Some((a.id.clone(), format!("{}/{}", holder.namespace, holder.pod)))
        };
        Names {
            short,
            indexes: status.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.index)).collect(),
            pods: status.allocations.iter().filter_map(pod).collect(),
        }
    }

    /// An id or a UUID.
    pub fn id<'a>(&'a self, id: &'a str) -> &'a str {
        self.short.get(id).map_or(id, String::as_str)
    }

    /// The pod of an allocation; its id where kubelet has not named it.
    pub fn pod<'a>(&'a self, id: &'a str) -> &'a str {
        self.pods.get(id).map_or_else(|| self.id(id), String::as_str)
    }

    /// A GPU's index; where that is not known, or several have it, its UUID.
    pub fn gpu(&self, uuid: &str) -> String {
        let Some(index) = self.indexes.get(uuid) else { return self.id(uuid).to_owned() };
        match self.indexes.values().filter(|other| *other == index).count() {
            1 => index.to_string(),
            // Instances of one GPU.
            _ => self.id(uuid).to_owned(),
        }
    }
}

/// Unambiguous beginnings: an id differs most from those beside it in order.
fn shorten(
    mut ids: Vec<&str>,
    short: &mut BTreeMap<String, String>,
    least: impl Fn(&str) -> usize,
) {
    ids.sort_unstable();
    ids.dedup();
    let common = |a: &str, b: &str| a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    for (at, id) in ids.iter().enumerate() {
        let before = at.checked_sub(1).map_or(0, |before| common(ids[before], id));
        let after = ids.get(at + 1).map_or(0, |after| common(after, id));
        let length = (before.max(after) + 1).max(least(id));
        short.insert((*id).to_owned(), id.chars().take(length).collect());
    }
}
