//! The order of locks, as ranks of [`tessera_system::locks::Ranked`]: the ledger's writer, what is advertised,
//! records, health, the catalogue, housekeeping's memory, and then one of the rest.
//!
//! The writer is held while the disk is waited for, so only on blocking threads; all others briefly; none across
//! an await. Debug builds panic where the order is broken.

/// The ledger's one writer. Whatever changes allocations, cordons or the catalogue holds it.
pub(crate) const WRITER: u8 = 0;
pub(crate) const ADVERTISED: u8 = 1;
pub(crate) const RECORDS: u8 = 2;
pub(crate) const HEALTH: u8 = 3;
pub(crate) const CATALOGUE: u8 = 4;
/// What housekeeping remembers from round to round.
pub(crate) const HOUSEKEEPING: u8 = 5;
/// Nothing else is taken while one of these is held.
pub(crate) const LEAF: u8 = 6;
