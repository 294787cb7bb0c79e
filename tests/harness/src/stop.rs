//! Processes that are stopped for certain.

use std::fs;
use std::time::{Duration, Instant};

use crate::PATIENCE;

/// Sends SIGSTOP to a child of this test's, and waits until its last thread has stopped: kill(2) returns before, and on
/// another CPU a thread goes on for a moment.
///
/// # Panics
/// It has no such child, or it runs on.
pub fn stop(pid: u32) {
    let target = libc::pid_t::try_from(pid).expect("pids are small");
    // SAFETY: a child of this test's that it has not reaped.
    assert_eq!(unsafe { libc::kill(target, libc::SIGSTOP) }, 0);
    let is_stopped = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in parentheses.
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    };
    let tasks = || fs::read_dir(format!("/proc/{pid}/task")).expect("it is not reaped");
    let begun = Instant::now();
    while !tasks().flatten().all(is_stopped) {
        assert!(begun.elapsed() < PATIENCE, "process {pid} runs on");
        std::thread::sleep(Duration::from_millis(1));
    }
}
