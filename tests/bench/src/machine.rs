//! What the figures were measured on, and what the kernel reports about another process.

use std::fs;

use anyhow::Context;
use serde_json::{Value, json};

use crate::world::SIMULATION;

/// For the summary's `metadata`.
pub fn metadata() -> Value {
    json!({
        "driver": "simulated (tests/sim), not a GPU",
        "simulation": SIMULATION,
        "cpu": cpu(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "kernel": kernel(),
        "realtime": goes_first(),
        "unix_time": std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        "tessera": env!("CARGO_PKG_VERSION"),
    })
}

/// Puts this process, and all that it starts from now on, before everything else on the machine
/// (`SCHED_RR`): what others do there is then not in the figures.
pub fn go_first() -> std::io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 1 };
    // SAFETY: a valid parameter, for this process.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameter) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Whether [`go_first`] holds.
pub fn goes_first() -> bool {
    // SAFETY: a query about this process.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_RR }
}

/// One line for people.
pub fn describe() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let first = if goes_first() { ", with real-time priority" } else { "" };
    format!("simulated driver, {cores} cores of {}, Linux {}{first}", cpu(), kernel())
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| "an unknown CPU".into(), |(_, name)| name.trim().to_owned())
}

fn kernel() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

impl Process {
    /// Resident memory, KiB: in all, and what is its own (neither file nor shared).
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
    pub fn cpu_ns(self) -> anyhow::Result<u64> {
        let mut clock = 0;
        let pid = libc::pid_t::try_from(self.0)?;
        // SAFETY: `clock` is a live out-parameter.
        let failed = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
        anyhow::ensure!(failed == 0, "process {pid} has no CPU clock: {failed}");
        let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `used` is a live out-parameter; the clock of a process that has ended leaves it 0.
        unsafe { libc::clock_gettime(clock, &raw mut used) };
        Ok(u64::try_from(used.tv_sec)? * 1_000_000_000 + u64::try_from(used.tv_nsec)?)
    }
}
