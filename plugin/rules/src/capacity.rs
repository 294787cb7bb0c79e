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

use tessera_config::{Config, Problem};
use tessera_model::gpu::Gpu;
use tessera_model::quantity::{format_bytes, format_compared};
use tessera_model::record::Record;

use crate::shares::{self, FrontEnd, Share, front_end_of};

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// For each held allocation, whether its replicas may be given to another.
    pub held: Vec<bool>,
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

// === Room for claims on a GPU: memory and time ===

/// All of a GPU's time, in thousandths.
pub const WHOLE_MILLIS: u32 = 1000;
/// The least that a scheduler counts of a GPU's time, in thousandths.
pub const LEAST_MILLIS: u32 = 10;

/// A share needs both, so a GPU without one of them has no room, however much there is of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub memory_bytes: u64,
    /// Thousandths of its time.
    pub cores_millis: u32,
}

impl Left {
    /// Beside these records, which are live. Memory counts as it is held; time as the scheduler counts it: by what was
    /// allocated, whatever it was changed to since.
    pub fn beside<'a>(
        capacity: Capacity,
        uuid: &str,
        live: impl Iterator<Item = &'a Record>,
    ) -> Self {
        let all = Left { memory_bytes: capacity.sellable(), cores_millis: WHOLE_MILLIS };
        live.fold(all, |left, record| Left {
            memory_bytes: left.memory_bytes.saturating_sub(record.counted_bytes(uuid).unwrap_or(0)),
            cores_millis: left.cores_millis.saturating_sub(allocated_millis(record, uuid)),
        })
    }

    /// What is missing for any share at all: one in which a context fits, with some of the GPU's time.
    pub fn lack_of_any(self, context_bytes: u64) -> Option<&'static str> {
        match (self.memory_bytes <= context_bytes, self.cores_millis < LEAST_MILLIS) {
            (true, true) => Some("memory and GPU time"),
            (true, false) => Some("memory"),
            (false, true) => Some("GPU time"),
            (false, false) => None,
        }
    }
}

fn allocated_millis(record: &Record, uuid: &str) -> u32 {
    let granted = record.allocated().iter().filter(|grant| grant.uuid == uuid);
    granted.map(|grant| grant.cores_millis).fold(0, u32::saturating_add)
}

// === Whether a configuration is possible on these GPUs ===

const MIB: u64 = 1 << 20;

/// What of the configuration is impossible on these GPUs, by line; empty when all is well.
pub fn check(gpus: &[Gpu], config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    for alike in alike(gpus, config) {
        let (gpu, capacity) = (alike[0], Capacity::of(alike[0], config));
        let kind = Kind {
            name: called(&alike),
            sellable: capacity.sellable(),
            overhead: gpu.context_overhead(config.gpus.context_overhead_bytes),
            config,
        };
        if kind.sellable == 0 {
            let message = format!(
                "leaves nothing of {} ({}); lower it or exclude the GPU",
                kind.name,
                format_bytes(gpu.memory_bytes)
            );
            problems.push(kind.problem("gpus.reserve", message));
            continue;
        }
        let share = shares::equal(gpu, config);
        match (front_end_of(gpu, config), shares::layout_of(gpu, config)) {
            (FrontEnd::Dra, layout) => problems.extend(kind.check_dra(layout, &share)),
            (FrontEnd::DevicePlugin, Some(layout)) => {
                problems.extend(kind.check_layout(layout, &shares::cut(gpu, config)));
            }
            (FrontEnd::DevicePlugin, None) => problems.extend(kind.check_share(&share)),
        }
    }
    problems.sort_by_key(Problem::place);
    problems
}

/// GPUs of which the same is to be said, in the order of the first of each.
fn alike<'g>(gpus: &'g [Gpu], config: &Config) -> Vec<Vec<&'g Gpu>> {
    let of = |gpu: &Gpu| {
        let overhead = gpu.context_overhead(config.gpus.context_overhead_bytes);
        let seller = (front_end_of(gpu, config), shares::layout_of(gpu, config));
        (gpu.name.clone(), gpu.memory_bytes, gpu.driver_bytes, overhead, seller)
    };
    let mut groups: Vec<Vec<&Gpu>> = Vec::new();
    for gpu in gpus {
        match groups.iter_mut().find(|group| of(group[0]) == of(gpu)) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    groups
}

const NAMED: usize = 8;

/// `GPU 0 (NVIDIA L4, GPU-…)`; of several: `each of GPUs 0, 1 (NVIDIA L4)`.
fn called(alike: &[&Gpu]) -> String {
    let [first, _, ..] = alike else { return alike[0].to_string() };
    let place = |gpu: &&Gpu| match &gpu.mig {
        Some(instance) => instance.to_string(),
        None => gpu.index.to_string(),
    };
    let mut places: Vec<String> = alike.iter().take(NAMED).map(place).collect();
    if alike.len() > NAMED {
        places.push(format!("and {} more", alike.len() - NAMED));
    }
    format!("each of GPUs {} ({})", places.join(", "), first.name)
}

/// Layouts that count for none of these GPUs, a sentence each. No error: one configuration often
/// serves nodes with different GPUs.
pub fn remarks(gpus: &[Gpu], config: &Config) -> Vec<String> {
    let used: Vec<usize> = gpus.iter().filter_map(|gpu| shares::layout_of(gpu, config)).collect();
    let sentence = |i: usize| {
        let named = &config.layouts[i].gpus;
        let taken = gpus.iter().any(|gpu| named.iter().any(|entry| gpu.is_named(entry)));
        let message = if taken {
            "an earlier layout counts for every GPU that this one names; remove it or put it first"
                .to_owned()
        } else {
            format!(
                "names none of this node's shared GPUs ({}); it is not used here",
                gpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            )
        };
        config.source.remark(&format!("layout[{i}].gpus"), message)
    };
    (0..config.layouts.len()).filter(|i| !used.contains(i)).map(sentence).collect()
}

/// GPUs that are alike.
struct Kind<'c> {
    name: String,
    sellable: u64,
    /// What a context takes of each.
    overhead: u64,
    config: &'c Config,
}

impl Kind<'_> {
    fn problem(&self, key: &str, message: String) -> Problem {
        self.config.source.problem(key, message)
    }

    fn fits(&self, cut: &[Share]) -> bool {
        let each = |share: &Share| {
            std::iter::repeat_n(share.memory_bytes, usize::try_from(share.count).unwrap_or(0))
        };
        let all: Vec<u64> = cut.iter().flat_map(each).collect();
        judge(self.sellable, &[], &all).free.into_iter().all(|fits| fits)
    }

    fn check_share(&self, share: &Share) -> Option<Problem> {
        let Kind { name, sellable, overhead, .. } = self;
        let (each, count) = (share.memory_bytes, share.count);
        if each <= *overhead {
            let [each, takes] = format_compared(each, *overhead);
            let message = format!(
                "{count} replicas of {name} get {each} each, which is not more than gpus.context_overhead \
                 ({takes}): not one CUDA context would fit; use at most {} replicas",
                sellable / (overhead + MIB),
            );
            return Some(self.problem("share.replicas", message));
        }
        if self.fits(std::slice::from_ref(share)) {
            return None;
        }
        let fewer = match sellable / each {
            0 => String::new(),
            1 => ", or 1 replica".to_owned(),
            fewer => format!(", or {fewer} replicas"),
        };
        let message = format!(
            "{count} replicas of {} need {}, but {name} has {} beside the reserve; use at most {} \
             each{fewer}",
            format_bytes(each),
            format_bytes(each.saturating_mul(u64::from(count))),
            format_bytes(*sellable),
            format_bytes(sellable / u64::from(count) / MIB * MIB),
        );
        Some(self.problem("share.memory", message))
    }

    fn check_dra(&self, layout: Option<usize>, share: &Share) -> Option<Problem> {
        let name = &self.name;
        if let Some(layout) = layout {
            let message = format!(
                "names {name}, which layout[{layout}] cuts for the device plugin; a GPU has one seller: take it \
                 out of dra.gpus or out of the layout"
            );
            return Some(self.problem("dra.gpus", message));
        }
        let problem = self.check_share(share);
        let (step, each) = (self.config.dra.memory_step_bytes, share.memory_bytes);
        if problem.is_some() || step <= each {
            return problem;
        }
        let [step, each] = format_compared(step, each);
        let message = format!(
            "{step} is more than one share of {name} ({each}); lower the step, or share.replicas"
        );
        Some(self.problem("dra.memory_step", message))
    }

    fn check_layout(&self, layout: usize, cut: &[Share]) -> Vec<Problem> {
        let name = &self.name;
        let mut problems = Vec::new();
        for (i, share) in cut.iter().enumerate() {
            let each = share.memory_bytes;
            if each <= self.overhead {
                let [each, takes] = format_compared(each, self.overhead);
                let message = format!(
                    "each {} of {name} gets {each}, which is not more than gpus.context_overhead \
                     ({takes}): not one CUDA context would fit; give it more, or lower the count",
                    share.resource,
                );
                let key = format!("layout[{layout}].shares[{i}].memory");
                problems.push(self.problem(&key, message));
            }
        }
        if problems.is_empty() && !self.fits(cut) {
            let all = |share: &Share| share.memory_bytes.saturating_mul(share.count.into());
            let needed = cut.iter().map(all).fold(0, u64::saturating_add);
            let list: Vec<String> = cut
                .iter()
                .map(|s| format!("{} × {}", s.count, format_bytes(s.memory_bytes)))
                .collect();
            let message = format!(
                "the shares need {} ({}), but {name} has {} beside the reserve; lower memory or count, \
                 or write percentages, which fit GPUs of any size",
                format_bytes(needed),
                list.join(", "),
                format_bytes(self.sellable),
            );
            problems.push(self.problem(&format!("layout[{layout}].shares"), message));
        }
        problems
    }
}

#[cfg(test)]
mod tests;
