//! The domain: what an allocation, a share, a GPU and a line of the audit trail are.
//!
//! **For**: types that several crates share, each in the file of its own name, with what can be said of a value
//! by itself (parsing, printing, comparing). [`clock`] reads the two clocks; nothing else here does I/O.
//!
//! **May use**: `proto/` and pure libraries. **Must not**: know the configuration file, a database, the driver,
//! kubelet's sockets or a runtime. A type that only one crate needs lives there.
#![forbid(unsafe_code)]

pub mod allocation_id;
pub mod audit;
pub mod cdi_name;
pub mod clock;
pub mod counted;
pub mod duration;
mod fixtures;
pub mod gpu;
pub mod health;
pub mod holding;
pub mod mig;
pub mod origin;
pub mod percent;
pub mod placement_reason;
pub mod printable;
pub mod quantity;
pub mod record;
pub mod replica;
pub mod sharing;
pub mod short_name;
pub mod steered;
pub mod subject;
pub mod time_format;
pub mod topology;
pub mod written_name;
