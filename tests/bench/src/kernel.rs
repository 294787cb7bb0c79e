//! Clocks in nanoseconds, and what the kernel reports about another process.

use std::fs;

use anyhow::Context;

/// `CLOCK_MONOTONIC`, which all processes of a machine share.
pub fn now_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// A clock by its id, of this process or another.
fn read(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live out-parameter; a clock that does not exist leaves it 0.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// A process by its pid.
#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

impl Process {
    /// Resident memory, KiB: in all, and what is its own (neither file nor shared).
    ///
    /// # Errors
    /// It has ended.
    pub fn rss_kib(self) -> anyhow::Result<(u64, u64)> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let read = || Some((field("VmRSS:")?, field("RssAnon:")?));
        read().context("the kernel does not tell the resident set (proc_pid_status(5))")
    }

    /// CPU time of all threads so far, nanoseconds, those that have ended among them.
    ///
    /// # Errors
    /// It has ended.
    pub fn cpu_ns(self) -> anyhow::Result<u64> {
        let mut clock = 0;
        let pid = libc::pid_t::try_from(self.0)?;
        // SAFETY: `clock` is a live out-parameter.
        let failed = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
        anyhow::ensure!(failed == 0, "process {pid} has no CPU clock: {failed}");
        Ok(read(clock))
    }
}
