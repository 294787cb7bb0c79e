//! The lock on the shared state: a robust process-shared mutex (pthread_mutexattr_setrobust(3)).
//!
//! The kernel marks it when its holder dies, so a killed process never wedges the others. Waiters
//! do not block inside `pthread_mutex_lock`: the kernel's robust list compares thread ids as each
//! namespace numbers them, so a waiter killed while it is *pending* on a lock held by a namesake
//! in another container would wrongly mark that lock free. Waiting outside with `trylock` shrinks
//! that window to nanoseconds, and a namesake is not even tried.
//!
//! And byte-range locks on the state file (fcntl(2)), which the kernel drops at death.

use crate::layout::Shared;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub struct Guard<'a> {
    shared: &'a Shared,
}

/// Initialises the mutex in a fresh state file.
///
/// # Safety
/// `shared.lock` must not be in use by anyone.
pub unsafe fn initialise(shared: &Shared) -> bool {
    let mut attr = std::mem::MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
    // SAFETY: attr is initialised before use and destroyed after; the mutex is unused (caller).
    unsafe {
        let a = attr.as_mut_ptr();
        libc::pthread_mutexattr_init(a) == 0
            && libc::pthread_mutexattr_setpshared(a, libc::PTHREAD_PROCESS_SHARED) == 0
            && libc::pthread_mutexattr_setrobust(a, libc::PTHREAD_MUTEX_ROBUST) == 0
            && libc::pthread_mutex_init(shared.lock.get(), a) == 0
            && libc::pthread_mutexattr_destroy(a) == 0
    }
}

pub fn lock(shared: &Shared) -> Guard<'_> {
    let mut tries = 0u32;
    loop {
        if !held_by_namesake(shared, tries) {
            // SAFETY: the mutex was initialised before the file's magic was published.
            let rc = unsafe { libc::pthread_mutex_trylock(shared.lock.get()) };
            match rc {
                0 => return Guard { shared },
                libc::EOWNERDEAD => {
                    // The committed state is whole whatever its holder was doing; see `layout`.
                    // SAFETY: EOWNERDEAD means that we hold the mutex.
                    unsafe { libc::pthread_mutex_consistent(shared.lock.get()) };
                    return Guard { shared };
                }
                _ => {}
            }
        }
        tries += 1;
        back_off(tries);
    }
}

/// Whether the lock's word carries our own thread id: this thread does not hold it, so it is
/// another's with the same number in another pid namespace. Looked at only after a failure.
fn held_by_namesake(shared: &Shared, tries: u32) -> bool {
    const TID_MASK: u32 = 0x3fff_ffff;
    if tries == 0 {
        return false;
    }
    // SAFETY: glibc's pthread_mutex_t begins with the futex word `__lock`, aligned to 4.
    let word = unsafe { &*shared.lock.get().cast::<AtomicU32>() }.load(Ordering::Relaxed);
    // SAFETY: gettid has no preconditions.
    let me = unsafe { libc::gettid() };
    word & TID_MASK == u32::try_from(me).unwrap_or(0)
}

/// Sections are microseconds: spin a little, then yield, then nap.
fn back_off(tries: u32) {
    match tries {
        0..=20 => std::hint::spin_loop(),
        // SAFETY: sched_yield has no preconditions.
        21..=60 => unsafe {
            libc::sched_yield();
        },
        _ => {
            let nap = libc::timespec { tv_sec: 0, tv_nsec: 20_000 };
            // SAFETY: `nap` is valid; a null remainder is allowed.
            unsafe { libc::nanosleep(&raw const nap, std::ptr::null_mut()) };
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the mutex, as the guard is neither Send nor copied.
        unsafe { libc::pthread_mutex_unlock(self.shared.lock.get()) };
    }
}

/// Sleeps while a `word` of the shared state is `expected`, at most `timeout` (futex(2), not private:
/// across processes). May return early.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let ts = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
    };
    // SAFETY: `word` is a mapped, aligned word and `ts` a valid relative timeout.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            std::ptr::from_ref(word),
            libc::FUTEX_WAIT,
            expected,
            &raw const ts,
        )
    };
}

/// Wakes everybody who sleeps on `word`.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: `word` is a mapped, aligned word.
    unsafe { libc::syscall(libc::SYS_futex, std::ptr::from_ref(word), libc::FUTEX_WAKE, i32::MAX) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: libc::c_int = 1;

/// While it lives, this thread cannot be cancelled: it keeps a thread's cancellation out of the
/// simulated libraries.
///
/// No function of theirs is a cancellation point (POSIX, "Thread Cancellation"): a thread that somebody
/// cancelled would end inside, in the middle of a nap or a `fcntl`, with locks held that all others
/// wait for. It ends at its own next cancellation point instead.
#[derive(Debug)]
pub struct Deferred {
    before: libc::c_int,
}

impl Deferred {
    /// From now on.
    #[inline]
    #[allow(clippy::new_without_default, reason = "it is a guard, not a value")]
    pub fn new() -> Deferred {
        let mut before = DISABLE;
        // SAFETY: a valid state and a place for the one before. It cannot fail.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Deferred { before }
    }
}

impl Drop for Deferred {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the state that this thread had; nobody else changes it.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

fn flock(kind: i32, start: i64) -> libc::flock {
    #[allow(clippy::cast_possible_truncation, reason = "F_RDLCK and SEEK_SET are small constants")]
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    }
}

fn set(fd: RawFd, command: i32, kind: i32, start: i64) -> bool {
    let lock = flock(kind, start);
    loop {
        // SAFETY: `lock` is a valid flock for these commands.
        if unsafe { libc::fcntl(fd, command, &raw const lock) } == 0 {
            return true;
        }
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return false;
        }
    }
}

/// Locks one byte for this open file description, exclusively, without waiting.
#[must_use]
pub fn try_exclusive(fd: RawFd, at: i64) -> bool {
    set(fd, libc::F_OFD_SETLK, libc::F_WRLCK, at)
}

/// Locks one byte for this description, shared, waiting for an exclusive holder.
#[must_use]
pub fn share(fd: RawFd, at: i64) -> bool {
    set(fd, libc::F_OFD_SETLKW, libc::F_RDLCK, at)
}

pub fn unlock(fd: RawFd, at: i64) {
    set(fd, libc::F_OFD_SETLK, libc::F_UNLCK, at);
}

/// Whether another description holds the byte exclusively. Errors read as "held": nobody is
/// declared dead on a doubt.
#[must_use]
pub fn is_held(fd: RawFd, at: i64) -> bool {
    let mut lock = flock(libc::F_RDLCK, at);
    // SAFETY: `lock` is a valid flock to be filled in; F_OFD_GETLK wants l_pid 0.
    let rc = unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) };
    rc != 0 || i32::from(lock.l_type) != libc::F_UNLCK
}

/// Takes a traditional (per-process) lock, which carries the pid.
pub fn sign_pid(fd: RawFd, at: i64) {
    set(fd, libc::F_SETLK, libc::F_WRLCK, at);
}

/// Drops the traditional lock.
pub fn unsign_pid(fd: RawFd, at: i64) {
    set(fd, libc::F_SETLK, libc::F_UNLCK, at);
}

/// The pid, in the caller's namespace, of the process that signed the byte. 0: it is not visible
/// from here; `None`: nobody holds it.
#[must_use]
pub fn signer_pid(fd: RawFd, at: i64) -> Option<i32> {
    let mut lock = flock(libc::F_WRLCK, at);
    // SAFETY: `lock` is a valid flock to be filled in.
    let rc = unsafe { libc::fcntl(fd, libc::F_GETLK, &raw mut lock) };
    (rc == 0 && i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid.max(0))
}
