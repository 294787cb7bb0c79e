//! The durable record: intent (which allocation has which limits) and history. Losing it costs no
//! running pod: paths are a function of the replica set, and pages can be adopted.

mod schema;
mod store;
mod unsynced;

use serde::{Deserialize, Serialize};

pub use schema::HISTORY_KEPT;
pub use store::{CommitError, Ledger, OpenError, Opened};

use crate::allocate::AllocationId;
use crate::config::Compute;
use crate::device::health;

/// Limits on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The GPU.
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold.
    pub memory_limit_bytes: u64,
    /// Bytes charged for each context before anything was observed.
    pub context_overhead_bytes: u64,
    /// Thousandths of the GPU's time.
    pub cores_millis: u32,
    /// What that share means.
    pub compute: Compute,
}

/// Where an allocation is in its life. A released one is in the history only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Allocated; no container has started with it.
    Allocated,
    /// A container has started.
    Started,
    /// Its replicas went to a newer allocation: no longer counted, kept until nothing uses its pages.
    Parked,
}

/// The container that holds an allocation, as PodResources says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Pod's namespace.
    pub namespace: String,
    /// Pod's name.
    pub pod: String,
    /// Container's name.
    pub container: String,
}

/// One allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its name.
    pub id: AllocationId,
    /// The resource its replicas belong to. Empty for an allocation adopted from its pages until
    /// kubelet names it.
    pub resource: String,
    /// Grows with every Allocate on this node.
    pub generation: u64,
    /// Replica ids, sorted. Empty for an allocation adopted from its pages until kubelet names them.
    pub replicas: Vec<String>,
    /// Limits per GPU, in the order of the pages.
    pub grants: Vec<Grant>,
    /// Where it is in its life.
    pub state: State,
    /// When Allocate was answered, Unix milliseconds.
    pub allocated_unix_ms: i64,
    /// When a container last started, Unix milliseconds; 0 for never.
    pub started_unix_ms: i64,
    /// Who holds it, once known.
    pub holder: Option<Holder>,
    /// Who held the generation before: kubelets before 1.34 may go on listing it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predecessor: Option<Holder>,
    /// Name of the shim that its containers mount; `None` where the record was lost in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shim: Option<String>,
    /// Its containers were given the name of a CDI device, whose spec must be there when they start
    /// again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cdi: bool,
}

impl Record {
    /// Whether its limits count towards capacity.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.state != State::Parked
    }

    /// Whether it holds one of these replicas of a resource.
    #[must_use]
    pub fn overlaps(&self, resource: &str, replicas: &[String]) -> bool {
        self.resource == resource && self.replicas.iter().any(|replica| replicas.contains(replica))
    }
}

/// What happened to an allocation or a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Kubelet allocated it.
    Allocated,
    /// Kubelet allocated it while a process of the generation before still used its pages.
    PagesKept,
    /// A container started with it.
    Started,
    /// Its replicas went to another allocation.
    Parked,
    /// Kubelet no longer knows it and nothing uses its pages.
    Released,
    /// Found on disk without a record.
    Adopted,
    /// A process of it holds device memory outside its account.
    Unaccounted,
    /// Another plugin sells a GPU of ours, too.
    SoldByOthers,
    /// Nobody else sells it any more.
    SoldAlone,
    /// A GPU's health went from one state to another.
    Health {
        /// Before.
        from: health::State,
        /// After.
        to: health::State,
    },
}

/// One line of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, Unix milliseconds.
    pub at_unix_ms: i64,
    /// Which allocation; none where it concerns a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<AllocationId>,
    /// Which Allocate of it.
    #[serde(default)]
    pub generation: u64,
    /// What.
    pub what: What,
    /// Which GPU, where it concerns no allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Who held it, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
}

impl Event {
    /// What happened to a GPU, at a Unix time in milliseconds.
    #[must_use]
    pub fn of_gpu(uuid: &str, what: What, reason: String, at_unix_ms: i64) -> Self {
        Event {
            at_unix_ms,
            id: None,
            generation: 0,
            what,
            gpu: Some(uuid.to_owned()),
            reason: Some(reason),
            holder: None,
        }
    }
}

/// What one transaction changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Records to write.
    pub put: Vec<Record>,
    /// Records to drop.
    pub remove: Vec<AllocationId>,
    /// Lines for the history.
    pub events: Vec<Event>,
}

impl Change {
    /// Writes `record` and notes why.
    pub fn put(&mut self, record: Record, what: What, at_unix_ms: i64) {
        self.events.push(Event {
            at_unix_ms,
            id: Some(record.id.clone()),
            generation: record.generation,
            what,
            gpu: None,
            reason: None,
            holder: record.holder.clone(),
        });
        self.put.push(record);
    }

    /// Notes what happened to a GPU.
    pub fn note_gpu(&mut self, uuid: &str, what: What, reason: String, at_unix_ms: i64) {
        self.events.push(Event::of_gpu(uuid, what, reason, at_unix_ms));
    }

    /// Nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.put.is_empty() && self.remove.is_empty() && self.events.is_empty()
    }
}
