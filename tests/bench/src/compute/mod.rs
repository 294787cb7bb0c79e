//! How GPU time is divided, with Tessera and without, judged by the simulator's own account.
//!
//! Tenants are `tessera-tenant load`s on a simulated machine of their own ([`machine`]), under the shim
//! and the plugin's arbiter, which this process hosts ([`host`]), or without both. What each got is
//! read from the simulator ([`judge`]); of the shim and the arbiter only what they counted is read.
//! [`suite`] measures its goals; [`command`] runs one scenario by name.

mod command;
mod host;
mod judge;
mod machine;
mod scenario;
mod suite;
mod sweep;
mod tenant;
mod view;

pub use command::run as command;
pub use suite::open::launch_each;
pub use suite::run;
