//! `futex(2)`, not private: the gate word is in a page that the arbiter maps too.

use core::ffi::c_int;
use core::sync::atomic::AtomicU32;

const WAIT: c_int = 0;
const WAKE: c_int = 1;

/// Sleeps while `word` is `value`, at most `ns` (below a second). Whether somebody woke it.
pub(super) fn wait(word: &AtomicU32, value: u32, ns: u64) -> bool {
    let ns = libc::c_long::try_from(ns.min(999_999_999)).unwrap_or(0);
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: ns };
    // By number: no point where a thread may be cancelled.
    // SAFETY: a valid word and timeout. The page may be mapped read-only; waiting only reads.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAIT, value, &raw const timeout) == 0 }
}

/// Wakes all who sleep at `word`.
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: a valid word, which is not written.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAKE, c_int::MAX) };
}
