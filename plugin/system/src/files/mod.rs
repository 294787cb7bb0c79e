//! Files and directories at configured paths: read and written so that nothing which lies there instead
//! can hold up the process, take its memory, or lead it elsewhere.
//!
//! All that reads or writes a file whose path comes from the configuration, the command line or the
//! environment does so through here. What the kernel itself serves (`/proc`, `/sys`) needs none of this.

mod copy;
mod dir;
mod identity;
mod own;
mod patience;
mod private;
mod read;
mod socket;
mod space;

pub use copy::{Copied, CopyError};
pub use dir::{Dir, is_directory, open_directory};
pub use identity::Identity;
pub use own::{base, check_peer};
pub use patience::{Unresponsive, in_time};
pub use private::{open_lock, open_private};
pub use read::{FileError, file_or_nothing, open, read, read_from, text, utf8};
pub use socket::{SocketFile, remove_stale};
pub use space::available_bytes;

/// Most bytes of a configuration: what a ConfigMap can hold.
pub const CONFIGURATION: u64 = 1 << 20;
/// Most bytes of a small file that a program writes for another: a token, a certificate, a line of state.
pub const SMALL: u64 = 1 << 20;
/// Most bytes of a library that is installed.
pub const LIBRARY: u64 = 64 << 20;
/// Most bytes of a ledger that is copied to be looked at.
pub const LEDGER: u64 = 1 << 30;
