//! What a judge of the division of GPU time reads: how long each context ran, what it completed, and
//! how long the GPU was idle between one process's work and the next one's. By unit, as of one
//! instant, from the model itself: nothing that a tenant, a shim or a plugin says is in it.

use crate::engine::NONE;
use crate::layout::{MAX_SLOTS, MAX_SWITCHES, slot_state};
use crate::session::Session;
use std::fmt::Write;
use std::sync::atomic::Ordering;

/// One GPU's account. Counters only grow; those of ended processes are in the GPU's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// CLOCK_MONOTONIC; everything below is as of then.
    pub now_ns: u64,
    /// GPU time used by all, ended processes included, switches left out.
    pub busy_ns: u64,
    pub switches: u32,
    /// How often the GPU was idle for longer than [`crate::engine::LONG_IDLE_NS`] before work began, switches left out,
    /// and by how much longer in all.
    pub long_idles: u64,
    /// See [`Self::long_idles`].
    pub long_idle_ns: u64,
    pub contexts: Vec<Context>,
    /// The switches asked for that are still remembered, oldest first.
    pub handovers: Vec<Handover>,
}

/// One process's work on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Names the process in [`Handover`]s, while it lives.
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
    /// Events and markers completed.
    pub marks: u64,
    /// Operations completed, copies between host and device, waits and host functions among them.
    pub operations: u64,
}

/// The GPU went from one process's work to another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// Counts all switches of the GPU.
    pub number: u32,
    /// Whose work ran before: a [`Context::slot`].
    pub from: u32,
    /// Whose runs next.
    pub to: u32,
    /// When work of the former last ran.
    pub idle_from_ns: u64,
    /// When the switch began. Between the two the GPU was idle.
    pub at_ns: u64,
    /// When the latter's work begins, the switch's own cost included.
    pub run_from_ns: u64,
}

impl Handover {
    /// For how long the GPU was idle, the switch itself left out.
    pub fn idle_ns(&self) -> u64 {
        self.at_ns.saturating_sub(self.idle_from_ns)
    }
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
            (account.long_idles, account.long_idle_ns) = (gpu.long_idles, gpu.long_idle_ns);
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
                    operations: c.completed - c.opened,
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
                    number,
                    from: u32::try_from(slots >> 32).unwrap_or(NONE),
                    to: u32::try_from(slots & 0xffff_ffff).unwrap_or(NONE),
                    idle_from_ns: record.idle_from_ns.load(Ordering::Relaxed),
                    at_ns: record.at_ns.load(Ordering::Relaxed),
                    run_from_ns: record.run_from_ns.load(Ordering::Relaxed),
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
    /// As one JSON object; of the switches, how many and the percentiles of the idle time.
    pub fn json(&self) -> String {
        let mut idle: Vec<u64> = self.handovers.iter().map(Handover::idle_ns).collect();
        idle.sort_unstable();
        let at = |permille: usize| {
            let last = idle.len().saturating_sub(1);
            idle.get((idle.len() * permille / 1000).min(last)).copied().unwrap_or(0)
        };
        let mut text = format!(
            "{{\"now_ns\":{},\"busy_ns\":{},\"switches\":{},\"long_idles\":{},\"long_idle_ns\":{},\"handovers\":{{\"count\":{},\
             \"idle_p50_ns\":{},\"idle_p99_ns\":{},\"idle_max_ns\":{}}},\"contexts\":[",
            self.now_ns,
            self.busy_ns,
            self.switches,
            self.long_idles,
            self.long_idle_ns,
            idle.len(),
            at(500),
            at(990),
            at(1000),
        );
        for (i, c) in self.contexts.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "{comma}{{\"pid\":{},\"name\":\"{}\",\"busy_ns\":{},\"mark_ns\":{},\"kernels\":{},\
                 \"marks\":{},\"operations\":{}}}",
                c.pid,
                escaped(&c.name),
                c.busy_ns,
                c.mark_ns,
                c.kernels,
                c.marks,
                c.operations,
            );
        }
        text + "]}"
    }
}

/// A process may call itself anything.
fn escaped(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            c if c.is_control() => text.push('?'),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_json_whatever_processes_are_called() {
        let context = Context { pid: 7, name: "a\"b\\\n".into(), ..Context::default() };
        let handover =
            Handover { number: 0, from: 1, to: 2, idle_from_ns: 5, at_ns: 9, run_from_ns: 20 };
        let account = Account {
            contexts: vec![context.clone(), context],
            handovers: vec![handover],
            ..Account::default()
        };
        let json = account.json();
        assert!(json.contains(r#""name":"a\"b\\?""#), "{json}");
        assert!(json.contains(r#""count":1,"idle_p50_ns":4,"idle_p99_ns":4"#), "{json}");
        assert_eq!(json.matches('{').count(), json.matches('}').count());
    }
}
