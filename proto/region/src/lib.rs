//! What a container and the plugin share: the quota page, the usage page and the session messages.
//!
//! - **quota page** (`quota`, one 4 KiB page): written by the plugin only, read-only to the tenant.
//! - **usage page** (`usage`): written by the tenant's processes. The plugin never maps it; it reads
//!   with `pread` and believes nothing.
//! - **session socket** (`session.sock`, `SOCK_SEQPACKET`): fixed 64-byte messages.
//!
//! [`usage`] describes the life of a slot, [`ledger`] how processes share a limit without a lock, and why
//! that is right; [`account`] is what the shim calls. `docs/internals/pages.md` has the orderings and why.
//!
//! Both pages carry magic and ABI version; the magic is published last with `Release`. Offsets are
//! asserted at compile time in [`layout`]. This crate depends on `libc` alone, because the shim
//! links it into strangers' processes. For the same reason the tenant's side does without std (feature
//! `std` off): the printer of backtraces alone would be a third of the shim.
#![warn(missing_docs)]
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

/// `alloc::format!` is compiled with unwinding, which the shim has nobody to do for it.
macro_rules! text {
    ($($part:tt)*) => {{
        let mut text = alloc::string::String::new();
        let _ = core::fmt::Write::write_fmt(&mut text, format_args!($($part)*));
        text
    }};
}

pub mod abi;
pub mod account;
mod attach;
#[cfg(feature = "std")]
pub mod error;
#[cfg(feature = "std")]
mod files;
pub mod flight;
pub mod layout;
pub mod ledger;
mod os;
pub mod quota;
pub mod session;
pub mod share;
mod size;
pub mod spin;
pub mod usage;

pub use attach::{AttachError, in_dir};
#[cfg(feature = "std")]
pub use error::{PageError, PageFault};
#[cfg(feature = "std")]
pub use files::{PAIR_BYTES, Spares, is_open, prepare_dir, remove_pages};
pub use os::{monotonic_ns, pid};
pub use size::Size;
