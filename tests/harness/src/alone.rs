//! Tests that must not share the machine, or not even a process, with others.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::again;

/// A test that failed has left nothing behind that others use: poison means nothing.
static MACHINE: RwLock<()> = RwLock::new(());

/// While it lives, no other test of this process has one, nor a [`Beside`].
#[must_use]
#[derive(Debug)]
pub struct Alone {
    _guard: RwLockWriteGuard<'static, ()>,
}

/// While it lives, no other test of this process is [`alone`].
#[must_use]
#[derive(Debug)]
pub struct Beside {
    _guard: RwLockReadGuard<'static, ()>,
}

/// Waits until no other test of this process is alone or beside others, and keeps such tests away.
///
/// Tests that flood or measure are in a test program of their own (`tests/suites/*/alone`), where each begins
/// with this or with [`beside`]: Cargo runs test programs one after the other, and this runs the tests of one so.
pub fn alone() -> Alone {
    Alone { _guard: MACHINE.write().unwrap_or_else(PoisonError::into_inner) }
}

/// Waits until no other test of this process is [`alone`]: for tests that bear each other, and no flood.
pub fn beside() -> Beside {
    Beside { _guard: MACHINE.read().unwrap_or_else(PoisonError::into_inner) }
}

/// Set in the process of a test that has one of its own.
const OWN_PROCESS: &str = "TESSERA_TEST_OWN_PROCESS";

/// For tests that count what their process has, or change what all of it has. Returns true in a process in which
/// nothing but `test` runs; elsewhere starts that process, and returns false once it has passed.
///
/// `test` is the name that libtest has for the caller, modules included.
///
/// # Panics
///
/// If the test fails there, or has another name.
pub fn in_own_process(test: &str) -> bool {
    if std::env::var_os(OWN_PROCESS).is_some() {
        return true;
    }
    let _alone = alone();
    let output = again(&[], test).env(OWN_PROCESS, "1").output().expect("it was started before");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    print!("{said}");
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{test} failed in a process of its own"
    );
    false
}

/// Processes that use all the CPU that they get; ended when dropped.
#[derive(Debug)]
pub struct Spinners(Vec<std::process::Child>);

impl Spinners {
    /// Starts so many.
    pub fn start(count: usize) -> Self {
        let spin = || std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
        Self((0..count).map(|_| spin().expect("there is a shell")).collect())
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
