//! The records in memory, and beside them by what Allocate asks for: the GPU and the resource. What an Allocate costs
//! then does not grow with the node.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_model::replica::Replica;

/// All records by id; read it as the map that it is.
#[derive(Debug, Default)]
pub(crate) struct Records {
    by_id: BTreeMap<AllocationId, Arc<Record>>,
    by_gpu: BTreeMap<String, OnGpu>,
    by_resource: BTreeMap<String, usize>,
    changes: u64,
}

#[derive(Debug, Default)]
struct OnGpu {
    live: BTreeMap<AllocationId, Arc<Record>>,
    version: u64,
}

impl Records {
    pub(crate) fn all(&self) -> BTreeMap<AllocationId, Arc<Record>> {
        self.by_id.clone()
    }

    /// Adds a record, in the place of an older one of its id.
    pub(crate) fn insert(&mut self, record: Arc<Record>) {
        self.remove(&record.id);
        let id = &record.id;
        if record.is_live() {
            self.changes += 1;
            for uuid in gpus(&record) {
                let on = self.by_gpu.entry(uuid.to_owned()).or_default();
                on.live.insert(id.clone(), Arc::clone(&record));
                on.version = self.changes;
            }
        }
        if !record.resource.is_empty() {
            *self.by_resource.entry(record.resource.clone()).or_default() += 1;
        }
        self.by_id.insert(id.clone(), record);
    }

    pub(crate) fn remove(&mut self, id: &AllocationId) {
        let Some(record) = self.by_id.remove(id) else { return };
        if record.is_live() {
            self.changes += 1;
            for uuid in gpus(&record) {
                if let Some(on) = self.by_gpu.get_mut(uuid) {
                    on.live.remove(id);
                    on.version = self.changes;
                }
            }
        }
        if let Some(count) = self.by_resource.get_mut(&record.resource) {
            *count -= 1;
            if *count == 0 {
                self.by_resource.remove(&record.resource);
            }
        }
    }

    /// Live records with a limit or a replica on a GPU, in the order of ids.
    pub(crate) fn on(&self, uuid: &str) -> impl Iterator<Item = &Arc<Record>> {
        self.by_gpu.get(uuid).into_iter().flat_map(|on| on.live.values())
    }

    /// Live records that share a GPU with `record`, itself among them; in the order of ids.
    pub(crate) fn beside(&self, record: &Record) -> impl Iterator<Item = &Arc<Record>> {
        let near: BTreeMap<_, _> =
            gpus(record).flat_map(|uuid| self.on(uuid)).map(|other| (&other.id, other)).collect();
        near.into_values()
    }

    /// Another number after every change of what [`Records::on`] gives for a GPU.
    pub(crate) fn version(&self, uuid: &str) -> u64 {
        self.by_gpu.get(uuid).map_or(0, |on| on.version)
    }

    pub(crate) fn gpus(&self) -> impl Iterator<Item = &str> {
        self.by_gpu.iter().filter(|(_, on)| !on.live.is_empty()).map(|(uuid, _)| uuid.as_str())
    }

    pub(crate) fn resources(&self) -> impl Iterator<Item = &String> {
        self.by_resource.keys()
    }

    pub(crate) fn latest(&self) -> u64 {
        self.by_id.values().map(|record| record.generation).max().unwrap_or(0)
    }
}

/// The GPUs that a record has a limit or a replica on, each once.
fn gpus(record: &Record) -> impl Iterator<Item = &str> {
    let granted = record.grants.iter().map(|grant| grant.uuid.as_str());
    let held = record.replicas.iter().filter_map(|id| Replica::split(id)).map(|(uuid, _)| uuid);
    granted.chain(held).collect::<BTreeSet<_>>().into_iter()
}

impl Deref for Records {
    type Target = BTreeMap<AllocationId, Arc<Record>>;

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

impl FromIterator<Arc<Record>> for Records {
    fn from_iter<I: IntoIterator<Item = Arc<Record>>>(records: I) -> Self {
        let mut all = Records::default();
        records.into_iter().for_each(|record| all.insert(record));
        all
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use tessera_model::record::{Grant, State};
    use tessera_model::sharing::Compute;

    /// Two GPUs that are sold and one that is gone; a resource that is sold, one that is not, and none;
    /// more replicas than are sold.
    fn record() -> impl Strategy<Value = Record> {
        let resource = prop_oneof![Just("x.dev/r"), Just("x.dev/old"), Just("")];
        let replicas = prop::collection::btree_set("GPU-[abz]::[0-5]", 0..4);
        let grants = prop::collection::btree_map("GPU-[abz]", 0u64..40, 0..3);
        let state = prop_oneof![Just(State::Allocated), Just(State::Started), Just(State::Parked)];
        (resource, replicas, grants, state, 0u64..20).prop_map(
            |(resource, replicas, grants, state, generation)| {
                let id = AllocationId::of(resource, replicas.iter().map(String::as_str));
                let grants = grants.into_iter().map(|(uuid, gib)| grant(uuid, gib << 30)).collect();
                let (resource, replicas) = (resource.into(), replicas.into_iter().collect());
                Record { resource, replicas, state, ..Record::new(id, generation, grants) }
            },
        )
    }

    fn grant(uuid: String, memory_limit_bytes: u64) -> Grant {
        let compute = Compute::Burst;
        let (context_overhead_bytes, cores_millis) = (0, 250);
        Grant { uuid, memory_limit_bytes, context_overhead_bytes, cores_millis, compute }
    }

    #[derive(Clone, Debug)]
    pub(in crate::allocations) enum Step {
        Put(Arc<Record>),
        /// The n-th of those there are.
        Remove(prop::sample::Index),
    }

    pub(in crate::allocations) fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => record().prop_map(|record| Step::Put(Arc::new(record))),
            1 => any::<prop::sample::Index>().prop_map(Step::Remove),
        ];
        prop::collection::vec(step, 1..40)
    }

    impl Records {
        pub(in crate::allocations) fn take(&mut self, step: Step) {
            match step {
                Step::Put(record) => self.insert(record),
                Step::Remove(which) if !self.is_empty() => {
                    let id = which.get(&self.keys().cloned().collect::<Vec<_>>()).clone();
                    self.remove(&id);
                }
                Step::Remove(_) => {}
            }
        }
    }

    fn ids<'a>(records: impl Iterator<Item = &'a Arc<Record>>) -> BTreeSet<&'a AllocationId> {
        records.map(|record| &record.id).collect()
    }

    proptest! {
        // Each is forty steps.
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_index_says_what_a_look_at_all_records_says(steps in steps()) {
            let mut records = Records::default();
            for step in steps {
                let versions = ["GPU-a", "GPU-b", "GPU-z"].map(|uuid| records.version(uuid));
                let before = ["GPU-a", "GPU-b", "GPU-z"]
                    .map(|uuid| records.on(uuid).cloned().collect::<Vec<_>>());
                records.take(step);
                let live = || records.values().filter(|record| record.is_live());
                for (i, uuid) in ["GPU-a", "GPU-b", "GPU-z"].into_iter().enumerate() {
                    let on = live().filter(|record| gpus(record).any(|gpu| gpu == uuid));
                    prop_assert_eq!(ids(records.on(uuid)), ids(on));
                    let after: Vec<_> = records.on(uuid).cloned().collect();
                    prop_assert!(before[i] == after || versions[i] != records.version(uuid));
                    prop_assert_eq!(records.gpus().any(|gpu| gpu == uuid), !after.is_empty());
                }
                for record in records.values() {
                    let shares =
                        |other: &&Arc<Record>| gpus(other).any(|gpu| gpus(record).any(|g| g == gpu));
                    prop_assert_eq!(ids(records.beside(record)), ids(live().filter(shares)));
                }
                let named: BTreeSet<_> = records.values().map(|record| &record.resource)
                    .filter(|name| !name.is_empty()).collect();
                prop_assert_eq!(records.resources().collect::<BTreeSet<_>>(), named);
            }
        }
    }
}
