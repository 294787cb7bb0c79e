//! What the suites under `tests/suites` share: the built artefacts, a simulated machine, an
//! allocation's pages, C programs compiled on demand, and child processes that cannot outlive
//! their test.
//!
//! A test reads like this:
//!
//! ```ignore
//! use tessera_harness::{Pages, Preloaded, SimGpu, compile_c};
//!
//! let sim = SimGpu::start_default();
//! let pages = Pages::create(&[(sim.uuid(0), 1 << 30)]);
//! let out = Preloaded::new(compile_c("calls")).sim(&sim).pages(&pages).run();
//! assert!(out.success(), "{out}");
//! ```
//!
//! The feature `plugin` adds what tests of the plugin need:
//!
//! | Module | What |
//! |---|---|
//! | `plugin` | the plugin beside a fake kubelet, in the test's process ([`plugin::TestNode`]) or in its own ([`plugin::Simulated`]); tenants that hold memory |
//! | [`metrics`], [`exposition`] | an HTTP client for metrics and probes, and a strict reader of what it gets |
//! | [`scripted`], [`http2`] | a device plugin that the test scripts, and a gRPC client that need not be right |
//! | [`gate_tenants`] | the arbiter's thread beside scripted tenants |

mod alone;
mod arbiter;
mod artefacts;
mod child;
pub mod corpus;
pub mod external;
pub mod foreign;
pub mod gate;
mod pages;
pub mod routing;
mod simgpu;

#[cfg(feature = "plugin")]
pub mod exposition;
#[cfg(feature = "plugin")]
pub mod gate_tenants;
#[cfg(feature = "plugin")]
pub mod http2;
#[cfg(feature = "plugin")]
pub mod metrics;
#[cfg(feature = "plugin")]
pub mod plugin;
#[cfg(feature = "plugin")]
pub mod scripted;

pub use alone::{
    Background, Spinners, again, alone, beside, in_own_process, settles, throttled, until,
};
pub use arbiter::{Arbiter, Heard, monotonic_ns};
pub use artefacts::{Artefacts, CProgram, artefacts, compile_c, copy, target_dir, workspace};
pub use child::{Conversation, Output, Owned, Preloaded, Reply, Running, can_contain, stop};
pub use fastrand::Rng;
pub use pages::{Pages, own_paths};
pub use simgpu::{SimGpu, Worked};

/// How long a test waits for what must come, also on a machine that is busy with others; what never comes fails then.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(180);
/// Bytes of a mebibyte, the unit that most suites count in.
pub const MIB: u64 = 1 << 20;
/// Bytes of a gibibyte.
pub const GIB: u64 = 1 << 30;
