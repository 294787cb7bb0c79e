//! Device memory by process, by the driver's own account: NVML, asked by a process that no
//! shim is loaded into. The shim's ledger has no say here.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use nix::unistd::{Pid, getpgid};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use tessera_system::locks::lock;

/// A tenant: the process group that all its processes are in.
pub(super) type Group = i32;

/// One look at one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Bytes in use on the whole GPU.
    pub used: u64,
    /// Bytes by process group.
    pub groups: BTreeMap<Group, u64>,
}

/// NVML on the demo's GPUs.
pub(super) struct Account {
    nvml: Nvml,
    uuids: Vec<String>,
}

impl Account {
    /// Opens NVML.
    ///
    /// # Errors
    /// No library, or no answer.
    pub fn open(library: Option<&Path>, uuids: Vec<String>) -> anyhow::Result<Self> {
        let library = library.unwrap_or(Path::new("libnvidia-ml.so.1"));
        let nvml = Nvml::builder()
            .lib_path(library.as_os_str())
            .init()
            .context("the demo judges by NVML, which does not answer")?;
        Ok(Self { nvml, uuids })
    }

    /// Looks at every GPU, in the order of their UUIDs.
    ///
    /// # Errors
    /// What NVML does not tell on this machine; without it nothing can be judged.
    pub fn look(&self) -> anyhow::Result<Vec<Look>> {
        self.uuids
            .iter()
            .map(|uuid| {
                let device = self.nvml.device_by_uuid(uuid.as_str())?;
                let mut look = Look { used: device.memory_info()?.used, ..Look::default() };
                for process in device.running_compute_processes()? {
                    let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else {
                        anyhow::bail!("NVML does not tell the memory of processes here");
                    };
                    // Gone since NVML looked: no tenant holds what the driver is tearing down.
                    let Some(group) = group_of(process.pid) else { continue };
                    *look.groups.entry(group).or_default() += bytes;
                }
                Ok(look)
            })
            .collect()
    }
}

impl Account {
    /// Percent of the last second in which each process group kept each GPU busy, where the driver
    /// tells.
    pub fn busy(&self) -> Vec<BTreeMap<Group, u32>> {
        let of = |uuid: &String| {
            let mut busy = BTreeMap::new();
            let samples = self.nvml.device_by_uuid(uuid.as_str()).ok()?;
            for sample in samples.process_utilization_stats(None).ok()? {
                if let Some(group) = group_of(sample.pid) {
                    *busy.entry(group).or_default() += sample.sm_util;
                }
            }
            Some(busy)
        };
        self.uuids.iter().map(|uuid| of(uuid).unwrap_or_default()).collect()
    }
}

fn group_of(pid: u32) -> Option<Group> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?);
    getpgid(Some(pid)).ok().map(Pid::as_raw)
}

/// What repeated looks have shown.
#[derive(Clone, Debug, Default)]
pub(super) struct Observed {
    /// Bytes in use per GPU at the last look.
    pub used: Vec<u64>,
    /// Bytes of each tenant at the last look.
    pub now: Vec<u64>,
    /// The most that any two looks in a row agree each tenant held. One look lists processes one
    /// after the other, and could count bytes that moved from one to the next twice.
    pub peaks: Vec<u64>,
    /// Percent of the last second in which each tenant kept a GPU busy.
    pub busy: Vec<u32>,
    /// Why looks fail, while they do.
    pub failure: Option<String>,
    /// Looks so far.
    pub looks: u64,
    groups: Vec<(Group, usize)>,
}

impl Observed {
    /// Counts a process group to a tenant from now on.
    pub fn enrol(&mut self, group: Group, tenant: usize) {
        let tenants = self.now.len().max(tenant + 1);
        self.now.resize(tenants, 0);
        self.peaks.resize(tenants, 0);
        self.busy.resize(tenants, 0);
        self.groups.push((group, tenant));
    }

    /// Starts again, with other tenants.
    pub fn forget(&mut self) {
        *self = Self { used: std::mem::take(&mut self.used), looks: self.looks, ..Self::default() };
    }

    /// Takes GPU time into account.
    pub fn take_busy(&mut self, gpus: &[BTreeMap<Group, u32>]) {
        self.busy.fill(0);
        for (group, percent) in gpus.iter().flatten() {
            if let Some((_, tenant)) = self.groups.iter().rev().find(|(g, _)| g == group) {
                self.busy[*tenant] += percent;
            }
        }
    }

    /// Takes a look into account.
    pub fn take(&mut self, looks: &[Look]) {
        let mut now = vec![0u64; self.now.len()];
        for look in looks {
            for (group, bytes) in &look.groups {
                if let Some((_, tenant)) = self.groups.iter().rev().find(|(g, _)| g == group) {
                    now[*tenant] = now[*tenant].saturating_add(*bytes);
                }
            }
        }
        for (tenant, peak) in self.peaks.iter_mut().enumerate() {
            *peak = (*peak).max(now[tenant].min(self.now[tenant]));
        }
        self.now = now;
        self.used = looks.iter().map(|look| look.used).collect();
        self.looks += 1;
    }
}

/// Looks again and again on a thread of its own until dropped.
pub(super) struct Watch {
    /// What was seen.
    pub observed: Arc<Mutex<Observed>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Time between looks.
const INTERVAL: Duration = Duration::from_millis(4);
/// Looks between two at GPU time, which is an average over a second.
const BUSY_EVERY: u32 = 20;

impl Watch {
    /// Starts looking.
    pub fn start(account: Account) -> Self {
        let observed = Arc::new(Mutex::new(Observed::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, end) = (Arc::clone(&observed), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for turn in 0u32.. {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                let look = account.look();
                let busy = turn.is_multiple_of(BUSY_EVERY).then(|| account.busy());
                let mut seen = lock(&seen);
                match look {
                    Ok(looks) => {
                        seen.take(&looks);
                        seen.failure = None;
                    }
                    Err(error) => seen.failure = Some(format!("{error:#}")),
                }
                if let Some(busy) = busy {
                    seen.take_busy(&busy);
                }
                drop(seen);
                std::thread::sleep(INTERVAL);
            }
        });
        Self { observed, stop, thread: Some(thread) }
    }

    /// What was seen so far.
    pub fn seen(&self) -> MutexGuard<'_, Observed> {
        lock(&self.observed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(groups: &[(Group, u64)]) -> Vec<Look> {
        vec![Look { used: 9, groups: groups.iter().copied().collect() }]
    }

    #[test]
    fn a_tenant_is_all_its_process_groups() {
        let mut seen = Observed::default();
        seen.enrol(7, 0);
        seen.enrol(8, 1);
        seen.enrol(9, 1);
        seen.take(&look(&[(7, 10), (8, 20), (9, 5), (1, 99)]));
        assert_eq!(seen.now, [10, 25]);
        assert_eq!(seen.used, [9]);
    }

    #[test]
    fn gpu_time_is_that_of_all_processes_of_a_tenant() {
        let mut seen = Observed::default();
        seen.enrol(7, 0);
        seen.enrol(8, 1);
        seen.take_busy(&[BTreeMap::from([(7, 60), (8, 30)]), BTreeMap::from([(8, 5), (1, 99)])]);
        assert_eq!(seen.busy, [60, 35]);
        seen.take_busy(&[]);
        assert_eq!(seen.busy, [0, 0]);
    }

    #[test]
    fn a_peak_is_what_two_looks_in_a_row_agree_on() {
        let mut seen = Observed::default();
        seen.enrol(7, 0);
        for bytes in [10, 50, 20, 30, 30, 0] {
            seen.take(&look(&[(7, bytes)]));
        }
        assert_eq!(seen.peaks, [30]);
        assert_eq!(seen.now, [0]);
    }
}
