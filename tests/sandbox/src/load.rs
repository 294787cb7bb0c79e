//! What a pod's container does: a load of `tessera-tenant`.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
/// Times the quota's memory that a greedy one would take where nothing held it.
const GREED: u64 = 256 * MIB;
/// Processes of a greedy one, and of one that floods.
const PROCESSES: u64 = 3;
/// GPU time of one kernel of those that need no memory, microseconds.
const KERNEL_US: u32 = 500;

/// Kinds of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Load {
    /// Serves requests, 50 a second, and checks every byte that it reads back
    Serve,
    /// One step after the other without a pause, on weights that fill half of its quota
    Train,
    /// Holds memory and computes nothing
    Idle,
    /// Asks for more than its quota by every API from three processes, again and again
    Greedy,
    /// Steps of 4 ms (8 kernels), each after the last: the tokens of an answer
    Steps,
    /// Launches without end from three processes
    Flood,
}

/// A number of bytes as devices have it: whole chunks of 2 MiB.
fn whole(bytes: u64) -> u64 {
    bytes / (2 * MIB) * (2 * MIB)
}

impl Load {
    /// Processes that say that they are at work.
    pub fn processes(self) -> u64 {
        if matches!(self, Self::Greedy | Self::Flood) { PROCESSES } else { 1 }
    }

    /// Arguments of `tessera-tenant` under a quota of `quota` bytes on the GPU `device`, of which each context is
    /// charged `overhead`. `memory` is what it takes, contexts aside, where that is not left to it.
    pub fn arguments(
        self,
        quota: u64,
        overhead: u64,
        device: &str,
        memory: Option<u64>,
    ) -> Vec<String> {
        let usable = quota.saturating_sub(overhead);
        let activations = whole((usable / 32).clamp(2 * MIB, 64 * MIB));
        let takes = |part: u64| memory.map_or(whole(part), whole);
        let infer = |weights: u64, rate: u32, kernel_us: u32| {
            vec![
                "infer".to_owned(),
                format!("--weights={weights}"),
                format!("--activations={activations}"),
                format!("--rate={rate}"),
                format!("--kernel-us={kernel_us}"),
            ]
        };
        let own = match self {
            Self::Serve => infer(takes(usable / 4), 50, 2000),
            Self::Train => infer(takes(usable / 2), 0, 5000),
            Self::Idle => vec!["hold".into(), format!("--bytes={}", takes(usable / 2))],
            Self::Greedy => vec![
                format!("--processes={PROCESSES}"),
                "greedy".into(),
                format!("--chunk={}", whole((quota / 64).max(2 * MIB))),
                format!("--min-chunk={}", 2 * MIB),
                "--retry-ms=50".into(),
                "--for=0".into(),
                // Where nothing holds it, it must not take a machine's whole GPU.
                format!("--at-most={}", quota + GREED),
            ],
            Self::Steps => vec![
                "load".into(),
                "--closed".into(),
                format!("--kernel-us={KERNEL_US}"),
                "--kernels=8".into(),
            ],
            Self::Flood => vec![
                format!("--processes={PROCESSES}"),
                "load".into(),
                format!("--kernel-us={KERNEL_US}"),
            ],
        };
        [vec![format!("--device={device}")], own].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_fits_its_quota_but_the_greedy_one() {
        let (quota, overhead) = (4 << 30, 128 << 20);
        for load in [Load::Serve, Load::Train, Load::Idle] {
            let arguments = load.arguments(quota, overhead, "GPU-0", None);
            let takes = |name: &str| {
                let found = arguments.iter().find_map(|a| a.strip_prefix(name));
                found.map_or(0, |bytes| bytes.parse::<u64>().unwrap())
            };
            let sum = takes("--weights=") + takes("--activations=") + takes("--bytes=");
            assert!(sum > 0 && sum + overhead < quota, "{load:?}: {sum}");
        }
    }

    #[test]
    fn what_it_takes_can_be_said() {
        let arguments = Load::Idle.arguments(4 << 30, 0, "GPU-0", Some(1 << 30));
        assert!(arguments.contains(&format!("--bytes={}", 1 << 30)), "{arguments:?}");
    }
}
