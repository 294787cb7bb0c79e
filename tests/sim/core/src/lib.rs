//! The simulated GPU: one state, shared by all processes that load the simulated `libcuda.so.1` or
//! `libnvidia-ml.so.1`.
//!
//! - [`config`]: what GPUs there are and what things cost, from TOML.
//! - [`engine`]: the discrete-event model, pure; time and queues are injected.
//! - [`layout`]: the bytes of the state file.
//! - [`session`]: attaching, owning a process slot, recovering the slots of the dead.
//! - [`memory`], [`channel`], [`account`], [`faults`]: what a process does with an attached state.
//!
//! State advances lazily: a caller that needs to know moves the model to `now` under a lock that the
//! kernel releases when its holder dies ([`lock`]). No duration depends on a sleeping thread.
//! `docs/internals/simulator.md` describes the model, its configuration and its limits.

pub mod account;
pub mod channel;
pub mod clock;
pub mod config;
pub mod engine;
pub mod faults;
pub mod layout;
pub mod lock;
pub mod memory;
pub mod session;

pub use config::{Config, GpuConfig};
pub use session::{OpenError, Session};

/// Defines `put`, `get` and `cstr`, which follow pointers that a C function's caller hands in: promised to be null or
/// valid for what the manual says is read or written. Null is refused with this error.
#[macro_export]
macro_rules! pointers {
    ($invalid:ident) => {
        pub(crate) fn put<T>(to: *mut T, value: T) -> Result<()> {
            if to.is_null() {
                return Err($invalid);
            }
            // SAFETY: not null, and the caller promises that it is writable; it may be unaligned in
            // packed structures.
            unsafe { to.write_unaligned(value) };
            Ok(())
        }

        pub(crate) fn get<T: Copy>(from: *const T) -> Result<T> {
            if from.is_null() {
                return Err($invalid);
            }
            // SAFETY: not null, and the caller promises that it is readable.
            Ok(unsafe { from.read_unaligned() })
        }

        pub(crate) fn cstr<'a>(text: *const std::ffi::c_char) -> Result<&'a str> {
            if text.is_null() {
                return Err($invalid);
            }
            // SAFETY: not null, and the caller promises a terminated string that lives for the call.
            unsafe { std::ffi::CStr::from_ptr(text) }.to_str().map_err(|_| $invalid)
        }
    };
}
