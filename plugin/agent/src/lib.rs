//! The node's agent: who holds what on this node, and the jobs that keep it true.
//!
//! **For**: [`node`] holds allocations, inventory and what is withheld, and is asked by front ends; the jobs
//! beside it observe processes ([`observe`]), judge who keeps to its quota ([`trust`]), read the configuration
//! again ([`reload`]), watch other device plugins ([`foreign_watch`]), and tell the cluster ([`kubernetes`],
//! [`labels`]). What a job finds amiss goes to the [`status_board`].
//!
//! **May use**: everything below it: rules, store, gpu, tenant, arbiter, kubelet. **Must not**: know a view
//! (admin API, metrics, command line), nor start itself: `daemon` wires it.
#![forbid(unsafe_code)]

pub mod foreign_watch;
pub mod histogram;
pub mod incidents;
pub mod kubernetes;
pub mod labels;
pub mod messages;
pub mod meters;
pub mod node;
pub mod observe;
pub mod reload;
pub mod status_board;
pub mod trust;
