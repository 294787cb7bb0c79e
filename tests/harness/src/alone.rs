//! Tests that must not share the machine, or not even a process, with others.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Owned, PATIENCE};

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

/// A thread. Dropping this tells it to end, and waits for that.
#[derive(Debug)]
pub struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Does this until the flag is set.
    pub fn new(run: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, thread: Some(std::thread::spawn(move || run(&stopped))) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // One that has panicked has said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Processes that use all the CPU that they get; ended when dropped.
#[derive(Debug)]
pub struct Spinners {
    _all: Vec<Owned>,
}

impl Spinners {
    pub fn start(count: usize) -> Self {
        let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
        Self { _all: (0..count).map(|_| Owned(spin().expect("there is a shell"))).collect() }
    }
}

/// A CPU limit stops what has used its part, for the rest of each of these (kernel documentation, "CFS Bandwidth
/// Control").
const PERIOD: Duration = Duration::from_millis(100);

/// Lets a process run for a part of each period and stops it for the rest, until dropped. Its owner waits for it after
/// that; a negative number is a group's, as for kill(2).
pub fn throttled(pid: i32, part: f64) -> Background {
    Background::new(move |stop| {
        while !stop.load(Ordering::Relaxed) {
            for (signal, part) in [(libc::SIGSTOP, 1.0 - part), (libc::SIGCONT, part)] {
                // SAFETY: kill has no memory effects; the process was not waited for, so the pid is its.
                unsafe { libc::kill(pid, signal) };
                std::thread::sleep(PERIOD.mul_f64(part));
            }
        }
    })
}

/// Awaits a condition that follows from an event elsewhere; the deadline only ends a failing test.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

// Shares of time, judged on a machine that has other things to do.

/// Looks per judgement.
const LOOKS: usize = 8;
/// Asserts that one of several looks lies within `expected`. A second in which this machine's CPUs were
/// elsewhere says nothing of what is tested, and does not count as one of them; what is wrong stays wrong.
/// How exact shares are, the benches measure.
#[track_caller]
pub fn settles(what: &str, expected: &RangeInclusive<u64>, mut look: impl FnMut() -> u64) -> u64 {
    let mut seen = Vec::with_capacity(LOOKS);
    let (begin, mut judged) = (Instant::now(), 0);
    while judged < LOOKS && begin.elapsed() < PATIENCE {
        let (began, waited) = (Instant::now(), waited_for_cpus());
        let found = look();
        if expected.contains(&found) {
            return found;
        }
        seen.push(found);
        let waited = waited_for_cpus().saturating_sub(waited);
        judged += usize::from(waited < began.elapsed() / 10);
    }
    panic!("{what}: {seen:?}, none of them in {expected:?}");
}

/// How long processes of this machine have waited for a CPU in all; 0 where the kernel does not tell
/// (Documentation/accounting/psi.rst).
fn waited_for_cpus() -> Duration {
    let text = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("some "));
    let total = line.and_then(|line| line.split("total=").nth(1)?.trim().parse().ok());
    Duration::from_micros(total.unwrap_or(0))
}
