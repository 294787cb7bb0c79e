//! What an observer (NVML, `simgpu-ctl`) reads from the state. Memory, processes and time are by unit,
//! health by NVML index.

use crate::engine::{Channel, NONE, Usage};
use crate::layout::{MAX_SLOTS, MAX_XIDS, slot_state};
use crate::lock;
use crate::memory::Use;
use crate::objects;
use crate::session::Session;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Utilisation is over this many of the engine's buckets: a second.
const WINDOW: usize = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessOnGpu {
    /// Pid in the observer's namespace; 0: not visible from there.
    pub pid: i32,
    pub name: String,
    /// Bytes in use as NVML counts them: without managed memory, which is a kernel module's (UVM), and with what it
    /// has imported, both unless the configuration says otherwise.
    pub used_bytes: u64,
    /// The same by use; those of 0 bytes are left out.
    pub by_use: Vec<(Use, u64)>,
    pub busy_ns: u64,
    /// Percent of the last second in which it kept the GPU busy.
    pub percent: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XidEvent {
    pub gpu: u32,
    pub code: u32,
    /// The GPU instance that it is attributed to.
    pub gpu_instance: Option<u32>,
    pub at_ns: u64,
}

impl Session {
    /// The processes that have memory of the GPU, those among them that are dead and being torn down. One
    /// that executed another program is one process, with what is left of the former one's memory.
    pub fn processes(&self, gpu: usize) -> Vec<ProcessOnGpu> {
        let mut found = Vec::new();
        {
            let mut locked = self.lock();
            locked.recover_dead(true);
            let now = locked.advance();
            let used = self.shared().slots_used.load(Ordering::Acquire) as usize;
            for i in 0..used.min(MAX_SLOTS) {
                let slot = &self.shared().slots[i];
                let memory = &slot.memory[gpu];
                let state = slot.state.load(Ordering::Acquire);
                if !matches!(state, slot_state::LIVE | slot_state::DYING) {
                    continue;
                }
                let shared = objects::by_use_of(self.shared(), i, gpu);
                if memory.total() == 0 && shared.is_empty() {
                    continue;
                }
                let mine =
                    |c: &&Channel| c.gpu != NONE && c.gpu as usize == gpu && c.slot as usize == i;
                let busy = locked.state().channels.iter().find(mine).map(|c| c.busy);
                let busy = busy.unwrap_or(Usage::NONE);
                let mut by_use = memory.by_use();
                add_up(&mut by_use, shared);
                let imported = match self.config().memory.imports_are_both_processes {
                    true => objects::imported_by(self.shared(), i, gpu),
                    false => 0,
                };
                found.push((i, by_use, imported, busy.ns, busy.percent(now, WINDOW)));
            }
        }
        let mut processes: Vec<ProcessOnGpu> = Vec::new();
        for (i, by_use, imported, busy_ns, percent) in found {
            let pid = self.pid_of(i);
            match processes.iter_mut().find(|process| pid > 0 && process.pid == pid) {
                Some(same) => {
                    add_up(&mut same.by_use, by_use);
                    same.used_bytes += imported;
                    same.busy_ns += busy_ns;
                    same.percent = (same.percent + percent).min(100);
                }
                None => processes.push(ProcessOnGpu {
                    pid,
                    name: self.shared().slots[i].name_text(),
                    used_bytes: imported,
                    by_use,
                    busy_ns,
                    percent,
                }),
            }
        }
        for process in &mut processes {
            let shows =
                |kind: Use| kind != Use::Managed || self.config().memory.managed_is_its_processes;
            process.used_bytes +=
                process.by_use.iter().filter(|(kind, _)| shows(*kind)).map(|(_, n)| n).sum::<u64>();
        }
        processes
    }

    /// Percent of the last second in which the GPU was busy.
    pub fn utilisation_percent(&self, gpu: usize) -> u32 {
        let mut locked = self.lock();
        let now = locked.advance();
        locked.state().gpus[gpu].busy.percent(now, WINDOW)
    }

    /// GPU time used by all processes, dead ones included, and switches between processes.
    pub fn gpu_busy(&self, gpu: usize) -> (u64, u32) {
        let mut locked = self.lock();
        locked.advance();
        let g = &locked.state().gpus[gpu];
        (g.busy.ns, g.switches)
    }

    pub fn is_lost(&self, gpu: usize) -> bool {
        self.shared().gpus[gpu].lost.load(Ordering::Acquire) != 0
    }

    pub fn xids_written(&self) -> u64 {
        self.shared().xids_written.load(Ordering::Acquire)
    }

    /// Sleeps until there were more than `seen` XID events, at most `timeout`. May return early.
    pub fn wait_for_xid(&self, seen: u64, timeout: Duration) {
        if self.xids_written() != seen {
            return;
        }
        lock::wait(&self.shared().xid_bell, low_half(seen), timeout);
    }

    /// XID event number `n`; overwritten since or not yet written: `None`.
    pub fn xid(&self, n: u64) -> Option<XidEvent> {
        let written = self.xids_written();
        if n >= written || written - n > MAX_XIDS as u64 {
            return None;
        }
        #[allow(clippy::cast_possible_truncation, reason = "a remainder below MAX_XIDS")]
        let record = &self.shared().xids[(n % MAX_XIDS as u64) as usize];
        Some(XidEvent {
            gpu: record.gpu.load(Ordering::Relaxed),
            code: record.code.load(Ordering::Relaxed),
            gpu_instance: Some(record.gpu_instance.load(Ordering::Relaxed))
                .filter(|id| *id != u32::MAX),
            at_ns: record.at_ns.load(Ordering::Relaxed),
        })
    }
}

fn add_up(sums: &mut Vec<(Use, u64)>, more: Vec<(Use, u64)>) {
    for (kind, bytes) in more {
        match sums.iter_mut().find(|(k, _)| *k == kind) {
            Some((_, sum)) => *sum += bytes,
            None => sums.push((kind, bytes)),
        }
    }
}

/// The bell's value after `n` events.
pub(crate) fn low_half(n: u64) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "the low half is meant")]
    let low = n as u32;
    low
}
