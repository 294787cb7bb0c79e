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
pub mod foreign_watch;
pub mod front_end;
pub mod incidents;
pub mod inventory;
pub mod journal;
pub mod kubernetes;
pub mod labels;
mod lock_order;
pub mod meters;
pub mod observe;
pub mod reload;
pub mod status_board;
mod steer_error;
pub mod trust;

pub use agent::Agent;
pub use allocations::mend;
pub use allocations::room::{kept_by_other, list};
pub use front_end::device_plugin::Service;
pub use inventory::{Cordons, Lift};
