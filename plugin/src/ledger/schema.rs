//! The tables of the ledger file. Values are JSON: small, and readable with any redb tool.

use redb::TableDefinition;

/// Version of what the tables hold. A file with another one is kept aside, not read.
pub(super) const SCHEMA: u64 = 1;

/// Numbers by name. Written with every commit.
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// In [`META`]: [`SCHEMA`], written when the file is made.
pub(super) const META_SCHEMA: &str = "schema";
/// In [`META`]: the highest generation ever given out, so that a release does not let one return.
pub(super) const META_GENERATION: &str = "generation";

/// [`super::Record`] by allocation id. Written by Allocate before kubelet is answered, by
/// PreStartContainer and by reconciling; removed by release.
pub(super) const ALLOCATIONS: TableDefinition<&str, &[u8]> = TableDefinition::new("allocations");

/// [`super::Event`] by a growing number. Written with whatever it tells of; the oldest are dropped
/// beyond [`HISTORY_KEPT`].
pub(super) const HISTORY: TableDefinition<u64, &[u8]> = TableDefinition::new("history");

/// Lines of history that are kept.
pub const HISTORY_KEPT: u64 = 4096;
