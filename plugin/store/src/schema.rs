//! The tables of the ledger file, and what has no other name there. Values are JSON: small, and readable with any redb tool.

use redb::TableDefinition;

/// Version of what the tables hold. A file with another one is kept aside, not read.
pub(super) const SCHEMA: u64 = 1;

/// Numbers by name. Written with every commit.
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// In [`META`]: [`SCHEMA`], written when the file is made.
pub(super) const META_SCHEMA: &str = "schema";
/// In [`META`]: the highest generation ever given out, so that a release does not let one return.
pub(super) const META_GENERATION: &str = "generation";
/// In [`META`]: the number of the next line of the history or the incidents.
pub(super) const META_SEQUENCE: &str = "sequence";
/// In [`META`]: how often something was committed, and when last, Unix seconds. Versions before do not write it.
pub(super) const META_COMMITS: &str = "commits";
pub(super) const META_UNTIL: &str = "until";
// In META also, as `context/DRIVER/PRODUCT`: bytes of a bare context, see [`super::MeasuredContext`].

/// [`tessera_model::record::Record`] by allocation id. Written by Allocate before kubelet is answered, by
/// PreStartContainer and by reconciling; removed by release.
pub(super) const ALLOCATIONS: TableDefinition<&str, &[u8]> = TableDefinition::new("allocations");

/// [`tessera_model::steered::Cordon`] by GPU UUID, or by [`tessera_model::steered::Cordon::NODE`]. Older versions do not know this table.
pub(super) const CORDONS: TableDefinition<&str, &[u8]> = TableDefinition::new("cordons");

/// [`tessera_model::health::Remembered`] by GPU UUID, of those that have had trouble. Older versions do not know this
/// table.
pub(super) const HEALTH: TableDefinition<&str, &[u8]> = TableDefinition::new("health");

/// [`tessera_model::audit::Event`] by a growing number. Written with the change that it records; the oldest are dropped
/// beyond [`HISTORY_KEPT`]. What containers can cause is in [`INCIDENTS`].
pub(super) const HISTORY: TableDefinition<u64, &[u8]> = TableDefinition::new("history");

pub const HISTORY_KEPT: u64 = 4096;

/// [`tessera_model::audit::Event`]s that a container can cause: by generation, kind, and the same growing number. The
/// oldest of each generation and kind are dropped beyond [`INCIDENTS_KEPT_EACH`], so that no container
/// can displace lines of another, or its own of other kinds. Older versions do not know
/// this table.
pub(super) const INCIDENTS: TableDefinition<(u64, &str, u64), &[u8]> =
    TableDefinition::new("incidents");

/// Incidents that are kept of each kind, generation by generation.
pub const INCIDENTS_KEPT_EACH: u64 = 32;

/// Incidents that are kept in all; beyond, the oldest go, whose ever they are.
pub const INCIDENTS_KEPT: u64 = 4096;

/// What a bare context was measured to take on this node, kept for the next start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredContext {
    pub driver: String,
    pub product: String,
    pub bytes: u64,
}

impl MeasuredContext {
    pub(super) fn key(&self) -> String {
        format!("{}{}", Self::prefix(&self.driver), self.product)
    }

    /// What the names of all entries of one driver begin with.
    pub(super) fn prefix(driver: &str) -> String {
        format!("context/{driver}/")
    }
}
