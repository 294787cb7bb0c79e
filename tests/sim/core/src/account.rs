//! What observers read: NVML, `simgpu-ctl`, and a judge of the division of GPU time, who reads how long each
//! context ran, what it completed, and how long the GPU was idle between one process's work and the next
//! one's. By unit, as of one instant, from the model itself: nothing that a tenant, a shim or a plugin says
//! is in it.

pub use crate::engine::Handover;
use crate::engine::{Channel, NONE, Usage};
use crate::layout::{MAX_SLOTS, MAX_SWITCHES, MAX_XIDS, slot_state};
use crate::lock;
use crate::memory::{self, Use};
use crate::session::Session;
use serde::{Serialize, Serializer};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// One GPU's account. Counters only grow; those of ended processes are in the GPU's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// CLOCK_MONOTONIC; everything below is as of then.
    pub now_ns: u64,
    /// GPU time used by all, ended processes included, switches left out.
    pub busy_ns: u64,
    pub switches: u32,
    pub contexts: Vec<Context>,
    /// The switches asked for that are still remembered, oldest first.
    #[serde(serialize_with = "summary")]
    pub handovers: Vec<Handover>,
}

/// One process's work on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Context {
    /// Names the process in [`Handover`]s, while it lives.
    #[serde(skip)]
    pub slot: u32,
    /// Pid in the reader's namespace; 0: not visible from there.
    pub pid: i32,
    pub name: String,
    pub busy_ns: u64,
    /// Of it by events and markers.
    pub mark_ns: u64,
    /// Operations completed that needed the GPU: kernels, memsets, copies on the device. A graph's
    /// count each.
    pub kernels: u64,
    pub marks: u64,
}

impl Session {
    /// The account of a unit now, with the switches numbered `since` and later, as far as they are
    /// remembered (the last [`MAX_SWITCHES`]).
    pub fn account(&self, unit: usize, since: u32) -> Account {
        let mut account = Account::default();
        let mut slots = Vec::new();
        {
            let mut locked = self.lock();
            locked.recover_dead(true);
            account.now_ns = locked.advance();
            let state = locked.state();
            let gpu = &state.gpus[unit];
            (account.busy_ns, account.switches) = (gpu.busy.ns, gpu.switches);
            for c in &state.channels[..state.channels_used as usize] {
                if c.gpu == NONE || c.gpu as usize != unit {
                    continue;
                }
                slots.push(c.slot as usize);
                account.contexts.push(Context {
                    slot: c.slot,
                    busy_ns: c.busy.ns,
                    mark_ns: c.mark_ns,
                    kernels: c.kernels,
                    marks: c.marks,
                    ..Context::default()
                });
            }
            let newest = gpu.switches;
            let remembered = u32::try_from(MAX_SWITCHES).unwrap_or(u32::MAX);
            let first = since.max(newest.saturating_sub(remembered));
            for number in first..newest {
                let record = &self.shared().switches[unit][number as usize % MAX_SWITCHES];
                let slots = record.slots.load(Ordering::Relaxed);
                account.handovers.push(Handover {
                    from: u32::try_from(slots >> 32).unwrap_or(NONE),
                    to: u32::try_from(slots & 0xffff_ffff).unwrap_or(NONE),
                    idle_from_ns: record.idle_from_ns.load(Ordering::Relaxed),
                    at_ns: record.at_ns.load(Ordering::Relaxed),
                });
            }
        }
        // Outside the lock: the pid's lookup is a system call.
        for (context, slot) in account.contexts.iter_mut().zip(slots) {
            let owner = &self.shared().slots[slot.min(MAX_SLOTS - 1)];
            if owner.state.load(Ordering::Acquire) == slot_state::LIVE {
                context.pid = self.pid_of(slot);
                context.name = owner.name_text();
            }
        }
        account
    }
}

impl Account {
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Of switches, how many and the percentiles of the idle time.
fn summary<S: Serializer>(handovers: &[Handover], to: S) -> Result<S::Ok, S::Error> {
    let mut idle: Vec<u64> = handovers.iter().map(Handover::idle_ns).collect();
    idle.sort_unstable();
    let at = |permille: usize| {
        let last = idle.len().saturating_sub(1);
        idle.get((idle.len() * permille / 1000).min(last)).copied().unwrap_or(0)
    };
    let figures = [
        ("count", idle.len() as u64),
        ("idle_p50_ns", at(500)),
        ("idle_p99_ns", at(990)),
        ("idle_max_ns", at(1000)),
    ];
    to.collect_map(figures)
}

// Memory, processes and health, as NVML and `simgpu-ctl` show them: memory, processes and time by unit, health by
// NVML index.

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
    pub busy_ns: u64,
    /// Percent of the last second in which it kept the GPU busy.
    pub percent: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XidEvent {
    pub gpu: u32,
    pub code: u32,
    pub gpu_instance: Option<u32>,
}

impl Session {
    /// The processes that have memory of the GPU, those among them that are dead and being torn down. One
    /// that executed another program is one process, with what is left of the former one's memory.
    pub fn processes(&self, gpu: usize) -> Vec<ProcessOnGpu> {
        let mut found = Vec::new();
        let config = self.config().memory;
        {
            let mut locked = self.lock();
            locked.recover_dead(true);
            let now = locked.advance();
            let used = self.shared().slots_used.load(Ordering::Acquire) as usize;
            for i in 0..used.min(MAX_SLOTS) {
                let slot = &self.shared().slots[i];
                let state = slot.state.load(Ordering::Acquire);
                if !matches!(state, slot_state::LIVE | slot_state::DYING) {
                    continue;
                }
                let (shared, imported) = memory::bytes_of(self.shared(), i, gpu);
                let [own, managed] = [Use::Own, Use::Managed].map(|u| slot.memory[gpu].bytes(u));
                if own + managed + shared == 0 {
                    continue;
                }
                let managed = if config.managed_is_its_processes { managed } else { 0 };
                let imported = if config.imports_are_both_processes { imported } else { 0 };
                let used_bytes = own + shared + managed + imported;
                let mine =
                    |c: &&Channel| c.gpu != NONE && c.gpu as usize == gpu && c.slot as usize == i;
                let busy = locked.state().channels.iter().find(mine).map(|c| c.busy);
                let busy = busy.unwrap_or(Usage::NONE);
                found.push((i, used_bytes, busy.ns, busy.percent(now, WINDOW)));
            }
        }
        let mut processes: Vec<ProcessOnGpu> = Vec::new();
        for (i, used_bytes, busy_ns, percent) in found {
            let pid = self.pid_of(i);
            match processes.iter_mut().find(|process| pid > 0 && process.pid == pid) {
                Some(same) => {
                    same.used_bytes += used_bytes;
                    same.busy_ns += busy_ns;
                    same.percent = (same.percent + percent).min(100);
                }
                None => processes.push(ProcessOnGpu {
                    pid,
                    name: self.shared().slots[i].name_text(),
                    used_bytes,
                    busy_ns,
                    percent,
                }),
            }
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
        self.shared().lost[gpu].load(Ordering::Acquire) != 0
    }

    pub fn xids_written(&self) -> u32 {
        self.shared().xids_written.load(Ordering::Acquire)
    }

    /// Sleeps until there were more than `seen` XID events, at most `timeout`. May return early.
    pub fn wait_for_xid(&self, seen: u32, timeout: Duration) {
        lock::wait(&self.shared().xids_written, seen, timeout);
    }

    /// XID event number `n`; overwritten since or not yet written: `None`.
    pub fn xid(&self, n: u32) -> Option<XidEvent> {
        let written = self.xids_written();
        if n >= written || (written - n) as usize > MAX_XIDS {
            return None;
        }
        let record = &self.shared().xids[n as usize % MAX_XIDS];
        Some(XidEvent {
            gpu: record.gpu.load(Ordering::Relaxed),
            code: record.code.load(Ordering::Relaxed),
            gpu_instance: Some(record.gpu_instance.load(Ordering::Relaxed))
                .filter(|id| *id != u32::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accounts_json_has_percentiles_of_the_idle_time() {
        let handover = Handover { from: 1, to: 2, idle_from_ns: 5, at_ns: 9 };
        let account = Account { handovers: vec![handover], ..Account::default() };
        let json = account.json();
        assert!(json.contains(r#""count":1,"idle_p50_ns":4,"idle_p99_ns":4"#), "{json}");
    }
}
