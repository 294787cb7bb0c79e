//! The rules: what a GPU is cut into, what fits, which replicas suit best, what is released. Pure.
//!
//! **For**: every decision that a front end or the agent takes from a configuration, GPUs and records. There is
//! one capacity rule ([`capacity`]), and every front end asks it.
//!
//! **May use**: [`tessera_model`] and the validated configuration. **Must not**: read a clock, open a file, take
//! a lock, or know which front end asks.
#![forbid(unsafe_code)]

pub mod allocate;
pub mod capacity;
pub mod preferred;
pub mod reconcile;
pub mod shares;
