//! Tests that must not share the machine, or not even a process, with others.

use std::ffi::OsString;
use std::process::Command;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A test that failed has left nothing behind that others use: poison means nothing.
static MACHINE: RwLock<()> = RwLock::new(());

/// Waits until no other test of this process is alone or beside others, and keeps such tests away.
///
/// Tests that flood or measure are in a test program of their own (`tests/suites/*/alone`), where each begins
/// with this or with [`beside`]: Cargo runs test programs one after the other, and this runs the tests of one so.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no other test of this process is [`alone`]: for tests that bear each other, and no flood.
pub fn beside() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(PoisonError::into_inner)
}

/// A command that runs `test` of this program, and nothing else. `prefix` is what starts it, such as `setpriv`
/// and its arguments. `test` is the name that libtest has, modules included.
pub fn again(prefix: &[&str], test: &str) -> Command {
    let program = std::env::current_exe().expect("/proc is mounted");
    let mut words: Vec<OsString> = prefix.iter().map(OsString::from).collect();
    words.push(program.into());
    let flags = [test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"];
    words.extend(flags.map(OsString::from));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// Set in the process of a test that has one of its own.
const OWN_PROCESS: &str = "TESSERA_TEST_OWN_PROCESS";

/// For tests that count what their process has, or change what all of it has. Returns true in a process in which
/// nothing but `test` runs; elsewhere starts that process, and returns false once it has passed.
///
/// `test` is the name that libtest has for the caller, modules included.
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
    pub fn start(count: usize) -> Self {
        let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
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
