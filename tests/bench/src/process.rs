//! What the kernel reports about another process.

use std::fs;

use anyhow::Context;

/// By its pid.
#[derive(Clone, Copy, Debug)]
pub struct Process(pub u32);

/// CPU time, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    /// Of all threads, those that have ended among them.
    pub all: u64,
    /// Of the thread that observes memory.
    pub observing: u64,
}

impl Process {
    /// Resident memory, KiB: in all, and what is its own (neither file nor shared).
    ///
    /// # Errors
    /// It has ended.
    pub fn rss_kib(self) -> anyhow::Result<(u64, u64)> {
        let status = fs::read_to_string(self.file("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let read = || Some((field("VmRSS:")?, field("RssAnon:")?));
        read().context("the kernel does not tell the resident set (proc_pid_status(5))")
    }

    /// Open descriptors.
    ///
    /// # Errors
    /// It has ended.
    pub fn descriptors(self) -> anyhow::Result<usize> {
        Ok(fs::read_dir(self.file("fd"))?.count())
    }

    /// Threads.
    ///
    /// # Errors
    /// It has ended.
    pub fn threads(self) -> anyhow::Result<usize> {
        Ok(fs::read_dir(self.file("task"))?.count())
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
        Ok(crate::clock::read(clock))
    }

    /// CPU time used so far.
    ///
    /// # Errors
    /// It has ended.
    pub fn cpu(self) -> anyhow::Result<Cpu> {
        let all = self.cpu_ns()?;
        let mut observing = 0;
        for task in fs::read_dir(self.file("task"))?.flatten() {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            if read("comm").trim() == "observe" {
                // The first field: nanoseconds on a CPU.
                let schedstat = read("schedstat");
                let field = schedstat.split_whitespace().next().and_then(|text| text.parse().ok());
                observing = field.unwrap_or(0);
            }
        }
        Ok(Cpu { all, observing })
    }

    fn file(self, name: &str) -> String {
        format!("/proc/{}/{name}", self.0)
    }
}

impl Cpu {
    /// What was used since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            all: self.all.saturating_sub(before.all),
            observing: self.observing.saturating_sub(before.observing),
        }
    }
}
