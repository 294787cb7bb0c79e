//! This process's metrics, by the names of Prometheus' own clients.

use nix::sys::resource::{Resource, getrlimit};
use nix::time::{ClockId, clock_gettime};

/// What the kernel says of it; `None` where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Process {
    pub cpu_seconds: Option<f64>,
    pub resident_bytes: Option<u64>,
    pub virtual_bytes: Option<u64>,
    pub threads: Option<u64>,
    pub open_fds: Option<u64>,
    pub max_fds: Option<u64>,
}

impl Process {
    /// As it is now.
    pub fn read() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
        };
        let kib = |name: &str| field(name).map(|kib| kib.saturating_mul(1024));
        let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok();
        // One of them reads the directory.
        let entries = std::fs::read_dir("/proc/self/fd").ok();
        let open = entries.and_then(|entries| u64::try_from(entries.count()).ok());
        Process {
            cpu_seconds: cpu.map(|cpu| std::time::Duration::from(cpu).as_secs_f64()),
            resident_bytes: kib("VmRSS"),
            virtual_bytes: kib("VmSize"),
            threads: field("Threads"),
            open_fds: open.map(|open| open.saturating_sub(1)),
            max_fds: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_all_of_it() {
        let process = Process::read();
        assert!(process.cpu_seconds.unwrap() > 0.0);
        assert!(process.resident_bytes.unwrap() > 1 << 20);
        assert!(process.virtual_bytes.unwrap() >= process.resident_bytes.unwrap());
        assert!(process.threads.unwrap() >= 1);
        assert!((3..process.max_fds.unwrap()).contains(&process.open_fds.unwrap()));
    }
}
