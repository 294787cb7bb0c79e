//! The simulated GPU: one state, shared by all processes that load the simulated `libcuda.so.1` or
//! `libnvidia-ml.so.1`.
//!
//! - [`config`]: what GPUs there are and what things cost, from TOML.
//! - [`engine`]: the discrete-event model, pure; time and queues are injected.
//! - [`layout`]: the bytes of the state file.
//! - [`session`]: attaching, owning a process slot, recovering the slots of the dead.
//! - [`objects`]: device memory that processes share.
//! - [`events`]: events that processes share.
//! - [`writes`]: words that the GPU writes.
//! - [`memory`], [`channel`], [`inspect`], [`faults`]: what a process does with an attached state.
//!
//! State advances lazily: a caller that needs to know moves the model to `now` under a lock that the
//! kernel releases when its holder dies ([`lock`]). No duration depends on a sleeping thread.
//! `docs/internals/simulator.md` describes the model, its configuration and its limits.

pub mod account;
pub mod channel;
pub mod clock;
pub mod config;
pub mod engine;
pub mod events;
pub mod faults;
pub mod inspect;
pub mod layout;
pub mod links;
pub mod lock;
pub mod memory;
pub mod objects;
pub mod ofd;
pub mod session;
pub mod writes;

pub use config::{Config, GpuConfig};
pub use session::{OpenError, Session};
