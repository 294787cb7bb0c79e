//! The durable record: intent (which allocation has which limits) and history. Losing it costs no
//! running pod: paths are a function of the replica set, and pages can be adopted.
#![forbid(unsafe_code)]

mod filter;
mod history;
mod schema;
mod store;
mod unsynced;

use tessera_model::audit::Event;
use tessera_model::audit::What;
use tessera_model::health::Remembered;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;

pub use filter::Filter;
pub use history::{Lines, Trail};
pub use schema::{HISTORY_KEPT, INCIDENTS_KEPT, INCIDENTS_KEPT_EACH, MeasuredContext};
pub use store::{CommitError, Commits, Ledger, Listener, OpenError, Opened};
pub use tessera_system::noted::Lost;
pub use unsynced::Unsynced;

use tessera_model::allocation_id::AllocationId;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub put: Vec<Record>,
    pub remove: Vec<AllocationId>,
    pub events: Vec<Event>,
    /// GPUs by UUID, or [`Cordon::NODE`], to cordon or with `None` to give out again.
    pub cordons: Vec<(String, Option<Cordon>)>,
    /// What contexts were seen to take; each in place of what its GPU and driver had before.
    pub contexts: Vec<MeasuredContext>,
    /// What is known of GPUs' trouble, by UUID; `None`: nothing any more.
    pub health: Vec<(String, Option<Remembered>)>,
}

impl Change {
    /// Writes `record` and notes why.
    pub fn put(&mut self, record: Record, what: What, at_unix_ms: i64) {
        self.events.push(Event::of(&record, what, at_unix_ms));
        self.put.push(record);
    }

    /// As [`Change::put`], with a reason in the audit trail.
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
