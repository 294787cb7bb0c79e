//! The node's agent: the allocations of this node, and the jobs that keep them true.
//!
//! **For**: [`Agent`] joins [`allocations`] (records and pages), [`inventory`] (GPUs and health), [`journal`] (the durable
//! side) and [`advertised`] (device lists), and is asked by front ends; the jobs
//! beside it observe processes ([`observe`]), find processes past their quota ([`trust`]), read the configuration
//! again ([`reload`]), watch other device plugins ([`foreign_watch`]), and inform the cluster ([`kubernetes`],
//! [`labels`]). A job's conditions go to the [`status_board`].
//!
//! **May use**: everything below it: rules, store, gpu, tenant, arbiter, kubelet. **Must not**: know a view
//! (admin API, metrics, command line), nor start itself: `daemon` wires it.
#![forbid(unsafe_code)]

pub mod advertised;
mod agent;
pub mod allocations;
pub mod engines;
pub mod fixtures;
pub mod front_end;
pub mod incidents;
pub mod inventory;
pub mod journal;
pub mod kubernetes;
pub mod labels;
pub mod observe;
pub mod reload;
pub mod status_board;
pub mod trust;

pub use agent::Agent;
pub use allocations::mend;
pub use allocations::room::{kept_by_other, list};
pub use front_end::Service;
pub use inventory::Lift;
pub use inventory::withheld::ForeignWatch;

mod lock_order {
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
}
