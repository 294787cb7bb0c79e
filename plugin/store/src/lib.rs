//! The durable record: intent (which allocation has which limits) and history. Losing it costs no
//! running pod: paths are a function of the replica set, and pages can be adopted.
#![forbid(unsafe_code)]

mod history;
mod store;

use redb::TableDefinition;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_model::health::Remembered;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;

pub use history::{Lines, Trail};
pub use store::{CommitError, Commits, Ledger, Listener, OpenError, Opened};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub put: Vec<Record>,
    pub remove: Vec<AllocationId>,
    pub events: Vec<Event>,
    /// GPUs by UUID, or [`Cordon::NODE`], to cordon or with `None` to give out again.
    pub cordons: Vec<(String, Option<Cordon>)>,
    /// What is known of GPUs' trouble, by UUID; `None`: nothing any more.
    pub health: Vec<(String, Option<Remembered>)>,
}

impl Change {
    pub fn put(&mut self, record: Record, what: What, at_unix_ms: i64) {
        self.events.push(Event::of(&record, what, at_unix_ms));
        self.put.push(record);
    }

    pub fn put_because(&mut self, record: Record, what: What, reason: String, at_unix_ms: i64) {
        let event = Event { reason: Some(reason), ..Event::of(&record, what, at_unix_ms) };
        self.events.push(event);
        self.put.push(record);
    }

    pub fn release(&mut self, record: &Record, at_unix_ms: i64) {
        self.events.push(Event::of(record, What::Released, at_unix_ms));
        self.remove.push(record.id.clone());
    }

    pub fn is_empty(&self) -> bool {
        *self == Change::default()
    }
}

// The tables of the ledger file, and what has no other name there. Values are JSON: small, and readable with any redb tool.

/// Version of what the tables hold. A file with another one is kept aside, not read.
const SCHEMA: u64 = 1;

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// In [`META`]: [`SCHEMA`], written when the file is made.
const META_SCHEMA: &str = "schema";
/// In [`META`]: the highest generation ever given out, so that a release does not let one return.
const META_GENERATION: &str = "generation";
/// In [`META`]: the number of the next line of the history or the incidents.
const META_SEQUENCE: &str = "sequence";

/// [`tessera_model::record::Record`] by allocation id. Written by Allocate before kubelet is answered, by
/// PreStartContainer and by reconciling; removed by release.
const ALLOCATIONS: TableDefinition<&str, &[u8]> = TableDefinition::new("allocations");

/// [`tessera_model::steered::Cordon`] by GPU UUID, or by [`tessera_model::steered::Cordon::NODE`]. Older versions do not know this table.
const CORDONS: TableDefinition<&str, &[u8]> = TableDefinition::new("cordons");

/// [`tessera_model::health::Remembered`] by GPU UUID, of those that have had trouble. Older versions do not know this
/// table.
const HEALTH: TableDefinition<&str, &[u8]> = TableDefinition::new("health");

/// [`tessera_model::audit::Event`] by a growing number. Written with the change that it records; the oldest are dropped
/// beyond [`HISTORY_KEPT`]. What containers can cause is in [`INCIDENTS`].
const HISTORY: TableDefinition<u64, &[u8]> = TableDefinition::new("history");

pub const HISTORY_KEPT: u64 = 4096;

/// [`tessera_model::audit::Event`]s that a container can cause: by generation, kind, and the same growing number. The
/// oldest of each generation and kind are dropped beyond [`INCIDENTS_KEPT_EACH`], so that no container
/// can displace lines of another, or its own of other kinds. Older versions do not know
/// this table.
const INCIDENTS: TableDefinition<(u64, &str, u64), &[u8]> = TableDefinition::new("incidents");

/// Incidents that are kept of each kind, generation by generation.
pub const INCIDENTS_KEPT_EACH: u64 = 32;

/// Incidents that are kept in all; beyond, the oldest go, whose ever they are.
pub const INCIDENTS_KEPT: u64 = 4096;
