//! What was: figures of tenants and GPUs in buckets of time, bounded, crash-safe, off the hot path.
//!
//! **For**: folding looks into buckets of 10 s, 5 min and 1 h, their storage in a redb database of their own, and
//! what follows from them: advice and waste. Folding and judging are pure; one module does I/O.
//!
//! **May use**: the view, the configuration. **Must not**: know the agent; it is handed looks.
#![forbid(unsafe_code)]

mod backend;
mod cell;
mod chunk;
mod fold;
mod history;
mod level;
mod look;
mod open;
mod query;
mod room;
mod series;
mod store;
mod subject;
mod wire;

pub use history::{FlushError, History, beside};
pub use level::Level;
pub use look::{GpuLook, Look, TenantLook, UseLook};
pub use open::{Found, Options, Trouble};
pub use query::{Context, QueryError};
pub use series::{Key, Series};
pub use tessera_system::noted::Lost;
