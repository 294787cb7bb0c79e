//! Device memory and GPU time by the driver's own account: NVML, asked by a process that no shim is loaded into. The
//! shim's pages have no say here.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::unistd::{Pid, getpgid};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::{Deserialize, Serialize};
use tessera_system::locks::lock;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::node::Node;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(4);
/// Looks between two at GPU time, which is an average over a second.
const BUSY_EVERY: u32 = 20;

/// A pod's container: the process group that all its processes are in.
pub type Group = i32;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Look {
    /// Bytes in use of each GPU, in the order of `gpus`.
    used: Vec<u64>,
    /// Bytes by process group.
    bytes: BTreeMap<Group, u64>,
    /// Percent of the last second in which a process group kept a GPU busy; not in each look.
    busy: Option<BTreeMap<Group, u32>>,
    /// How much later than asked the look was, microseconds: what a machine whose CPUs are busy does to everybody.
    late_us: u64,
}

/// Looks again and again, and prints each look as a line of JSON, until nobody reads.
pub fn main(library: &Path, gpus: &[String]) -> anyhow::Result<()> {
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().context("no NVML")?;
    for turn in 0u32.. {
        let begun = Instant::now();
        std::thread::sleep(INTERVAL);
        let late = begun.elapsed().saturating_sub(INTERVAL);
        let mut look = Look { late_us: micros(late), ..Look::default() };
        let mut busy = BTreeMap::new();
        for uuid in gpus {
            let device = nvml.device_by_uuid(uuid.as_str())?;
            look.used.push(device.memory_info()?.used);
            for process in device.running_compute_processes()? {
                let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else {
                    anyhow::bail!("NVML does not tell the memory of processes here");
                };
                // One that has ended since holds what the driver is tearing down.
                let Some(group) = group_of(process.pid) else { continue };
                *look.bytes.entry(group).or_default() += bytes;
            }
            // A driver that does not tell says that nothing was busy.
            for sample in device.process_utilization_stats(None).unwrap_or_default() {
                if let Some(group) = group_of(sample.pid) {
                    *busy.entry(group).or_default() += sample.sm_util;
                }
            }
        }
        look.busy = turn.is_multiple_of(BUSY_EVERY).then_some(busy);
        let line = format!("{}\n", serde_json::to_string(&look)?);
        if std::io::stdout().write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    Ok(())
}

fn group_of(pid: u32) -> Option<Group> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?);
    getpgid(Some(pid)).ok().map(Pid::as_raw)
}

/// A duration in microseconds.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What the looks have shown so far.
#[derive(Debug, Default)]
pub struct Seen {
    /// Bytes in use of each GPU.
    pub used: Vec<u64>,
    /// Percent of the last second in which a process group kept a GPU busy.
    pub busy: BTreeMap<Group, u32>,
    now: BTreeMap<Group, u64>,
    peaks: BTreeMap<Group, u64>,
    late_us: Vec<u64>,
}

impl Seen {
    fn take(&mut self, look: Look) {
        for (group, bytes) in &look.bytes {
            // One look lists processes one after the other, and could count bytes twice that moved from one to the
            // next: two looks in a row must agree.
            let sure = (*bytes).min(self.now.get(group).copied().unwrap_or(0));
            let peak = self.peaks.entry(*group).or_default();
            *peak = (*peak).max(sure);
        }
        (self.used, self.now) = (look.used, look.bytes);
        self.late_us.push(look.late_us);
        if let Some(busy) = look.busy {
            self.busy = busy;
        }
    }

    /// The most that a process group ever held, bytes.
    pub fn peak(&self, group: Group) -> u64 {
        self.peaks.get(&group).copied().unwrap_or(0)
    }

    /// The 99th percentile of how late a look was since the last call, microseconds.
    pub fn late_us(&mut self) -> u64 {
        let mut all = std::mem::take(&mut self.late_us);
        all.sort_unstable();
        let rank = (all.len() * 99).div_ceil(100);
        rank.checked_sub(1).and_then(|at| all.get(at)).copied().unwrap_or(0)
    }
}

/// An account that is kept until this is dropped.
#[derive(Debug)]
pub struct Account {
    seen: Arc<Mutex<Seen>>,
    child: Child,
}

impl Account {
    pub fn of(node: &Node, library: &Path, gpus: &[String]) -> anyhow::Result<Self> {
        let mut command = node.command(&["in-sandbox", "account"])?;
        command.arg(library).args(gpus).stdout(Stdio::piped());
        let mut child = Command::from(command).kill_on_drop(true).spawn()?;
        let out = child.stdout.take().context("an account without output")?;
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let taken = Arc::clone(&seen);
        tokio::spawn(async move {
            let mut lines = BufReader::new(out).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(look) = serde_json::from_str(&line) {
                    lock(&taken).take(look);
                }
            }
        });
        Ok(Self { seen, child })
    }

    pub fn seen(&mut self) -> anyhow::Result<MutexGuard<'_, Seen>> {
        let ended = self.child.try_wait()?;
        anyhow::ensure!(ended.is_none(), "nothing can be judged here: NVML does not answer");
        Ok(lock(&self.seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_what_two_looks_in_a_row_agree_on() {
        let mut seen = Seen::default();
        for bytes in [10, 50, 20, 30, 30, 0] {
            seen.take(Look { bytes: [(7, bytes)].into(), ..Look::default() });
        }
        assert_eq!((seen.peak(7), seen.peak(8)), (30, 0));
    }

    #[test]
    fn one_look_of_a_hundred_may_be_later() {
        let mut seen = Seen { late_us: (1..=100).rev().collect(), ..Seen::default() };
        assert_eq!((seen.late_us(), seen.late_us()), (99, 0));
    }
}
