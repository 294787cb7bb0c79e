//! What the suites under `tests/tests` share: the built artefacts, a simulated machine, an
//! allocation's pages, C programs compiled on demand, and child processes that cannot outlive
//! their test.
//!
//! A test reads like this:
//!
//! ```no_run
//! use tessera_tests::{Pages, Preloaded, SimGpu, compile_c};
//!
//! let sim = SimGpu::start_default();
//! let pages = Pages::create(&[(sim.uuid(0), 1 << 30)]);
//! let out = Preloaded::new(compile_c("calls")).sim(&sim).pages(&pages).run();
//! assert!(out.success(), "{out}");
//! ```

mod arbiter;
mod artefacts;
mod child;
mod compile;
mod conversation;
pub mod external;
pub mod foreign;
pub mod freezer;
pub mod gate;
mod pages;
pub mod routing;
mod settles;
mod simgpu;

pub use arbiter::{Arbiter, Heard, monotonic_ns};
pub use artefacts::{Artefacts, artefacts, target_dir, workspace};
pub use child::{Output, Preloaded, Running, can_contain};
pub use compile::{CProgram, compile_c};
pub use conversation::{Conversation, Reply};
pub use pages::Pages;
pub use settles::settles;
pub use simgpu::{SimGpu, Worked};

/// Bytes of a mebibyte, the unit that most suites count in.
pub const MIB: u64 = 1 << 20;
/// Bytes of a gibibyte.
pub const GIB: u64 = 1 << 30;
