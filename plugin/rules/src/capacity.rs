//! The one capacity rule. Per GPU, over all its resources:
//!
//! > limits of live allocations + limits of the free replicas advertised Healthy ≤ memory − reserve
//!
//! [`judge`] is the rule. The check of the configuration, kubelet's device list, Allocate and later
//! changes of limits ask it and nothing else.
//!
//! **A held replica** counts with the limit of its allocation. Kubelet may assign it to another pod at
//! any moment without notice, and then it counts with today's limit. So where today's is
//! larger (the configuration has changed), the difference is kept free as well; where there is no
//! room for it, the replica is Unhealthy: its holder goes on, and no other pod gets it. So an Allocate
//! that kubelet bases on its device list is never refused.
//!
//! **What goes first** where there is no room for all free replicas: the largest, and among equals the
//! highest index of the resource that stands last in the configuration. Smallest first keeps as many
//! replicas as can be kept; it wastes nothing, because what is larger than one that does not fit does
//! not fit either; and it is monotone: more room never takes a replica away, so that kubelet sees none
//! flap while a GPU empties.

mod check;

pub use check::{check, check_all, remarks};

use tessera_config::Config;
use tessera_model::gpu::Gpu;

/// What one replica of a GPU gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaLimit {
    pub memory_bytes: u64,
    /// Thousandths of the GPU's time.
    pub cores_millis: u32,
}

/// A GPU's memory as the rule sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    pub(crate) memory_bytes: u64,
    pub(crate) reserve_bytes: u64,
}

/// A live allocation's part of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub granted_bytes: u64,
    /// Bytes that a new allocation of the same replicas would get; 0 where they are retired.
    pub regrant_bytes: u64,
}

/// What may be advertised Healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// For each held allocation, whether its replicas may be given to another.
    pub held: Vec<bool>,
    /// For each free replica, whether it may be given away.
    pub free: Vec<bool>,
}

impl Capacity {
    pub fn of(gpu: &Gpu, config: &Config) -> Self {
        Capacity::within(gpu, config.gpus.reserve_bytes)
    }

    /// Of a GPU where `gpus.reserve` is `setting`, bytes.
    pub fn within(gpu: &Gpu, setting: u64) -> Self {
        Capacity { memory_bytes: gpu.memory_bytes, reserve_bytes: gpu.reserve(setting) }
    }

    /// Bytes that limits may add up to.
    pub fn sellable(self) -> u64 {
        self.memory_bytes.saturating_sub(self.reserve_bytes)
    }

    /// Whether an allocation may be given `new_bytes` beside `others_bytes` of live limits, where all
    /// live limits were `before_bytes`. Limits that exceed the GPU already, because the reserve was
    /// raised, may be replaced by less; nothing may make it worse.
    pub fn grants(self, before_bytes: u64, others_bytes: u64, new_bytes: u64) -> bool {
        let others = Held { granted_bytes: others_bytes, regrant_bytes: 0 };
        judge(self.sellable(), &[others], &[new_bytes]).free[0]
            || others_bytes.saturating_add(new_bytes) <= before_bytes
    }
}

/// The rule; see the module. `free` are the limits of the free replicas in the configuration's order.
pub fn judge(sellable: u64, held: &[Held], free: &[u64]) -> Verdict {
    let mut used: u128 = held.iter().map(|held| u128::from(held.granted_bytes)).sum();
    let mut keep = |demands: Vec<u64>| {
        let mut order: Vec<usize> = (0..demands.len()).collect();
        // Stable: among equals the first stays longest.
        order.sort_by_key(|i| demands[*i]);
        let mut kept = vec![false; demands.len()];
        for i in order {
            let after = used + u128::from(demands[i]);
            if demands[i] > 0 && after > u128::from(sellable) {
                break;
            }
            used = after;
            kept[i] = true;
        }
        kept
    };
    let growth = |held: &Held| held.regrant_bytes.saturating_sub(held.granted_bytes);
    let held = keep(held.iter().map(growth).collect());
    let free = keep(free.to_vec());
    Verdict { held, free }
}

#[cfg(test)]
mod tests;
