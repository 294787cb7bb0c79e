//! Lines on standard error, without allocation, locks or stdio, and seldom.
//!
//! The shim is silent unless it refuses something; then it says so once per reason, and again at
//! most once a minute.

use crate::thread::Deferred;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering};
pub(crate) use tessera_region::monotonic_ns as now_ns;

/// Longest line; the rest is cut.
const LINE: usize = 512;
/// Least time between two lines for the same reason.
const QUIET_NS: u64 = 60_000_000_000;

/// Lets something happen at most once per interval.
#[derive(Debug, Default)]
pub struct Throttle {
    /// When it happened last; 0 is never.
    last_ns: AtomicU64,
}

impl Throttle {
    pub const fn new() -> Self {
        Self { last_ns: AtomicU64::new(0) }
    }

    /// Whether it may happen now; if so, counts it as happened.
    pub fn allows(&self, now_ns: u64, interval_ns: u64) -> bool {
        let last = self.last_ns.load(Ordering::Relaxed);
        let now_ns = now_ns.max(1);
        (last == 0 || now_ns.saturating_sub(last) >= interval_ns)
            && self
                .last_ns
                .compare_exchange(last, now_ns, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

#[derive(Debug, Default)]
pub struct Reason(Throttle);

impl Reason {
    pub const fn new() -> Self {
        Self(Throttle::new())
    }

    /// Says it, unless it was said within the last minute.
    pub fn say(&self, line: fmt::Arguments<'_>) {
        if self.0.allows(now_ns(), QUIET_NS) {
            write_line(line);
        }
    }
}

/// Writes `tessera: line` to standard error in one write.
pub fn write_line(line: fmt::Arguments<'_>) {
    let mut buffer = Buffer { bytes: [0; LINE], len: 0 };
    // Errors mean that the line was cut, which is fine.
    let _ = write!(buffer, "tessera: {line}");
    buffer.len = buffer.len.min(LINE - 1);
    buffer.bytes[buffer.len] = b'\n';
    let errno = errno();
    let _deferred = Deferred::new();
    // SAFETY: `len + 1` initialised bytes. A closed or full standard error is the host's affair.
    unsafe {
        libc::write(libc::STDERR_FILENO, buffer.bytes.as_ptr().cast(), buffer.len + 1);
    }
    set_errno(errno);
}

/// The host's errno: hooks leave it as they found it.
pub(crate) fn errno() -> i32 {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(value: i32) {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() = value }
}

struct Buffer {
    bytes: [u8; LINE],
    len: usize,
}

impl Write for Buffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..LINE - 1];
        let taken = text.len().min(room.len());
        room[..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.len += taken;
        if taken == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_cut_not_lost() {
        let mut buffer = Buffer { bytes: [0; LINE], len: 0 };
        assert!(buffer.write_str(&"x".repeat(2 * LINE)).is_err());
        assert_eq!(buffer.len, LINE - 1);
    }
}
