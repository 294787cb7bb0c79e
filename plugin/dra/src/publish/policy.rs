//! What a claim may ask of a GPU's memory and time, and what it gets where it says nothing.
//!
//! The scheduler rounds by these policies: less than `min` becomes `min`, what is between two steps is rounded up,
//! what is not said becomes `default`, and more than `max` or the value finds no device. What is counted then is
//! what is enforced, so a share never gets less than it asked for.

use tessera_cluster::k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, DeviceCapacity,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tessera_config::Config;

use super::Published;

/// Hundredths in a GPU: the unit of the capacity `cores`.
pub const WHOLE_CORES: u64 = 100;

/// A capacity and what may be asked of it, in bytes or hundredths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// All that can be had.
    pub value: u64,
    /// What a request gets that does not say.
    pub default: u64,
    /// The least that a request gets.
    pub min: u64,
    /// Requests are rounded up to `min` and a multiple of this.
    pub step: u64,
}

impl Policy {
    /// Memory of a GPU; `None` where there is less than one step of it.
    pub fn memory(gpu: &Published, config: &Config) -> Option<Self> {
        let step = config.dra.memory_step_bytes;
        let floor = |bytes: u64| bytes - bytes % step;
        let whole = floor(gpu.memory_bytes);
        let value = floor(gpu.memory_bytes.saturating_sub(gpu.grown_bytes));
        if value == 0 {
            return None;
        }
        let default = floor(gpu.sold.default_share.limit.memory_bytes).clamp(step, whole);
        // One context, and something to use it for.
        let min = gpu
            .sold
            .context_overhead_bytes
            .saturating_add(step)
            .div_ceil(step)
            .saturating_mul(step)
            .min(default);
        Some(Policy { value, default, min, step })
    }

    /// Time of a GPU.
    pub fn cores(gpu: &Published) -> Self {
        let default =
            u64::from(gpu.sold.default_share.limit.cores_millis / 10).clamp(1, WHOLE_CORES);
        Policy { value: WHOLE_CORES, default, min: 1, step: 1 }
    }

    /// As a slice says it.
    pub fn capacity(self, unit: Unit) -> DeviceCapacity {
        let policy = if self.value < self.min + self.step {
            // A range must have room for one step.
            CapacityRequestPolicy {
                default: Some(unit.quantity(self.value)),
                valid_values: Some(vec![unit.quantity(self.value)]),
                valid_range: None,
            }
        } else {
            CapacityRequestPolicy {
                default: Some(unit.quantity(self.default.min(self.most()))),
                valid_range: Some(CapacityRequestPolicyRange {
                    min: unit.quantity(self.min),
                    max: Some(unit.quantity(self.most())),
                    step: Some(unit.quantity(self.step)),
                }),
                valid_values: None,
            }
        };
        DeviceCapacity { value: unit.quantity(self.value), request_policy: Some(policy) }
    }

    /// The most that one request may ask: the last multiple of a step above `min`.
    fn most(self) -> u64 {
        self.value - (self.value - self.min) % self.step
    }
}

/// How a capacity is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// With a suffix.
    Bytes,
    /// As a whole number.
    Hundredths,
}

impl Unit {
    /// In Kubernetes' canonical form, so that the server keeps it as it is.
    fn quantity(self, units: u64) -> Quantity {
        let suffixes = [(60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
        let fits = |(bits, _): &&(u32, &str)| units > 0 && units.trailing_zeros() >= *bits;
        let found = suffixes.iter().find(fits).filter(|_| self == Unit::Bytes);
        Quantity(
            found.map_or(units.to_string(), |(bits, suffix)| format!("{}{suffix}", units >> bits)),
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures::{MIB, consumed, gpu_of};

    fn text(capacity: &DeviceCapacity) -> [String; 5] {
        let policy = capacity.request_policy.as_ref().unwrap();
        let range = policy.valid_range.as_ref().unwrap();
        let quantity = |quantity: Option<&Quantity>| quantity.unwrap().0.clone();
        [
            capacity.value.0.clone(),
            quantity(policy.default.as_ref()),
            range.min.0.clone(),
            quantity(range.max.as_ref()),
            quantity(range.step.as_ref()),
        ]
    }

    #[test]
    fn the_default_is_one_replicas_share_and_memory_comes_in_steps() {
        let config = Config::default();
        let gpu = gpu_of(79_900 * MIB, 19_975 * MIB);
        let memory = Policy::memory(&gpu, &config).unwrap().capacity(Unit::Bytes);
        // 512 MiB for a context of a GPU that does not tell, and a step.
        assert_eq!(text(&memory), ["78Gi", "19968Mi", "576Mi", "78Gi", "64Mi"]);
        let cores = Policy::cores(&gpu).capacity(Unit::Hundredths);
        assert_eq!(text(&cores), ["100", "25", "1", "100", "1"]);
    }

    #[test]
    fn a_share_that_is_no_larger_than_a_context_is_the_least() {
        let config = Config::parse("[dra]\nmemory_step = \"256Mi\"").unwrap();
        let small = gpu_of(1024 * MIB, 600 * MIB);
        let memory = Policy::memory(&small, &config).unwrap();
        assert_eq!(
            memory,
            Policy { value: 1024 * MIB, default: 512 * MIB, min: 512 * MIB, step: 256 * MIB }
        );
        // No room for two steps: all or nothing.
        let tiny = Published { memory_bytes: 300 * MIB, ..small.clone() };
        let policy = Policy::memory(&tiny, &config).unwrap().capacity(Unit::Bytes).request_policy;
        assert_eq!(policy.unwrap().valid_values, Some(vec![Quantity("256Mi".to_owned())]));
        assert_eq!(Policy::memory(&Published { memory_bytes: 100 * MIB, ..small }, &config), None);
    }

    /// Below the least, between two steps, nothing said, too much.
    #[test]
    fn requests_are_rounded_as_the_scheduler_rounds_them() {
        let config = Config::default();
        let gpu = gpu_of(16 * 1024 * MIB, 4096 * MIB);
        let memory = Policy::memory(&gpu, &config).unwrap().capacity(Unit::Bytes);
        let cores = Policy::cores(&gpu).capacity(Unit::Hundredths);
        for (capacity, asked, counted) in [
            (&memory, None, Some(4096 * MIB)),
            (&memory, Some(1), Some(576 * MIB)),
            (&memory, Some(576 * MIB), Some(576 * MIB)),
            (&memory, Some(576 * MIB + 1), Some(640 * MIB)),
            (&memory, Some(1500 * MIB), Some(1536 * MIB)),
            (&memory, Some(16 * 1024 * MIB), Some(16 * 1024 * MIB)),
            (&memory, Some(16 * 1024 * MIB + 1), None),
            (&cores, None, Some(25)),
            (&cores, Some(0), Some(1)),
            (&cores, Some(30), Some(30)),
            (&cores, Some(100), Some(100)),
            (&cores, Some(101), None),
        ] {
            assert_eq!(consumed(capacity, asked), counted, "{asked:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_counted_is_enough_and_sums_fit(
            memory in MIB..200 * 1024 * MIB,
            replicas in 1u64..16,
            step in 1u64..2048,
            asks in prop::collection::vec(prop::option::of(0u64..100 * 1024 * MIB), 1..40),
        ) {
            let config = Config::parse(&format!("[dra]\nmemory_step = \"{step}Mi\"")).unwrap();
            let gpu = gpu_of(memory, memory / replicas);
            let Some(policy) = Policy::memory(&gpu, &config) else {
                prop_assert!(memory < step * MIB);
                return Ok(());
            };
            let capacity = policy.capacity(Unit::Bytes);
            prop_assert!(policy.value <= memory);
            let mut free = policy.value;
            for ask in asks {
                let Some(bytes) = consumed(&capacity, ask) else {
                    prop_assert!(ask.unwrap() > policy.value - step * MIB);
                    continue;
                };
                prop_assert!(bytes >= ask.unwrap_or(policy.default.min(bytes)));
                prop_assert_eq!(bytes % (step * MIB), 0);
                free = free.checked_sub(bytes).unwrap_or(free);
            }
        }
    }
}
