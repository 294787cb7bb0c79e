//! The one capacity rule. Per GPU: limits of live allocations + limits of the free replicas that are
//! advertised Healthy ≤ memory − reserve. Configuration check, health and allocation all ask here.

use crate::config::quantity::format_bytes;
use crate::config::{Config, Problem};
use crate::device::Gpu;

/// `auto` limits are whole multiples of this, so that they read well.
const GRAIN_BYTES: u64 = 1 << 20;

/// What one replica of a GPU gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaLimit {
    /// Bytes of GPU memory.
    pub memory_bytes: u64,
    /// Thousandths of the GPU's time.
    pub cores_millis: u32,
}

/// A GPU's memory as the rule sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes on the device.
    pub memory_bytes: u64,
    /// Bytes never sold.
    pub reserve_bytes: u64,
}

impl Capacity {
    /// Bytes that limits may add up to.
    #[must_use]
    pub fn sellable(self) -> u64 {
        self.memory_bytes.saturating_sub(self.reserve_bytes)
    }

    /// The rule: whether `live_bytes` of limits leave room for `free` replicas of `replica_bytes`.
    #[must_use]
    pub fn holds(self, live_bytes: u64, free: u32, replica_bytes: u64) -> bool {
        u128::from(live_bytes) + u128::from(free) * u128::from(replica_bytes)
            <= u128::from(self.sellable())
    }

    /// The most free replicas that may be advertised Healthy beside `live_bytes` of limits.
    #[must_use]
    pub fn healthy_free(self, live_bytes: u64, free: u32, replica_bytes: u64) -> u32 {
        let room = self.sellable().saturating_sub(live_bytes);
        let fits =
            room.checked_div(replica_bytes).map_or(free, |n| u32::try_from(n).unwrap_or(free));
        let healthy = fits.min(free);
        debug_assert!(healthy == 0 || self.holds(live_bytes, healthy, replica_bytes));
        healthy
    }
}

/// The limit of one replica of a GPU with `memory_bytes`.
#[must_use]
pub fn replica_limit(memory_bytes: u64, config: &Config) -> ReplicaLimit {
    let capacity = Capacity { memory_bytes, reserve_bytes: config.gpus.reserve_bytes };
    let even = capacity.sellable() / u64::from(config.share.replicas);
    ReplicaLimit {
        memory_bytes: config.share.memory_bytes.unwrap_or(even - even % GRAIN_BYTES),
        cores_millis: config.share.cores_millis.unwrap_or(1000 / config.share.replicas),
    }
}

/// What of the configuration is impossible on these GPUs; empty when all is well.
#[must_use]
pub fn check(gpus: &[Gpu], config: &Config) -> Vec<Problem> {
    let source = &config.source;
    let replicas = config.share.replicas;
    let overhead = config.gpus.context_overhead_bytes;
    let mut problems = Vec::new();
    for gpu in gpus {
        let capacity =
            Capacity { memory_bytes: gpu.memory_bytes, reserve_bytes: config.gpus.reserve_bytes };
        let limit = replica_limit(gpu.memory_bytes, config);
        if capacity.sellable() == 0 {
            let message = format!(
                "leaves nothing of {gpu} ({}); lower it or exclude the GPU",
                format_bytes(gpu.memory_bytes)
            );
            problems.push(source.problem("gpus.reserve", message));
        } else if limit.memory_bytes <= overhead {
            let message = format!(
                "{replicas} replicas of {gpu} get {} each, which is not more than \
                 gpus.context_overhead ({}): not one CUDA context would fit; use at most {} \
                 replicas",
                format_bytes(limit.memory_bytes),
                format_bytes(overhead),
                capacity.sellable() / (overhead + GRAIN_BYTES),
            );
            problems.push(source.problem("share.replicas", message));
        } else if !capacity.holds(0, replicas, limit.memory_bytes) {
            let message = format!(
                "{replicas} replicas of {} need {}, but {gpu} has {} beside the reserve; use at \
                 most {} each, or {} replicas",
                format_bytes(limit.memory_bytes),
                format_bytes(limit.memory_bytes.saturating_mul(u64::from(replicas))),
                format_bytes(capacity.sellable()),
                format_bytes(capacity.sellable() / u64::from(replicas) / GRAIN_BYTES * GRAIN_BYTES),
                capacity.sellable() / limit.memory_bytes,
            );
            problems.push(source.problem("share.memory", message));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn gpu(memory_bytes: u64) -> Gpu {
        Gpu { memory_bytes, ..Gpu::example("GPU-a", 0) }
    }

    #[test]
    fn auto_divides_what_the_reserve_leaves() {
        let config = Config::default();
        let limit = replica_limit(80 * GIB, &config);
        assert_eq!(limit.memory_bytes, (80 * GIB - (512 << 20)) / 4);
        assert_eq!(limit.cores_millis, 250);
    }

    #[test]
    fn defaults_are_possible_on_common_gpus() {
        let gpus: Vec<Gpu> = [16, 24, 40, 48, 80, 141].map(|gib| gpu(gib * GIB)).to_vec();
        assert_eq!(check(&gpus, &Config::default()), []);
    }

    #[test]
    fn impossible_quotas_are_told_for_every_gpu_with_what_would_fit() {
        let config = Config::parse("[share]\nreplicas = 4\nmemory = \"8Gi\"\n").unwrap();
        let problems = check(&[gpu(80 * GIB), gpu(16 * GIB), gpu(24 * GIB)], &config);
        assert_eq!(problems.len(), 2);
        assert!(problems.iter().all(|p| p.key == "share.memory" && p.line == Some(3)));
        assert!(problems[0].message.contains("need 32 GiB"), "{}", problems[0].message);
        assert!(problems[0].message.contains("or 1 replicas"), "{}", problems[0].message);
    }

    #[test]
    fn replicas_smaller_than_a_context_are_impossible() {
        let config = Config::parse("[share]\nreplicas = 64\n").unwrap();
        let problems = check(&[gpu(16 * GIB)], &config);
        assert_eq!(problems.len(), 1);
        assert_eq!((problems[0].key.as_str(), problems[0].line), ("share.replicas", Some(2)));
    }

    proptest! {
        #[test]
        fn what_is_advertised_never_breaks_the_rule(
            memory in 0..200 * GIB, reserve in 0..4 * GIB,
            live in 0..200 * GIB, free in 0u32..256, replica in 0..64 * GIB,
        ) {
            let capacity = Capacity { memory_bytes: memory, reserve_bytes: reserve };
            let healthy = capacity.healthy_free(live, free, replica);
            prop_assert!(healthy <= free);
            prop_assert!(healthy == 0 || capacity.holds(live, healthy, replica));
            // And no more is withheld than must be.
            prop_assert!(healthy == free || !capacity.holds(live, healthy + 1, replica));
        }
    }
}
