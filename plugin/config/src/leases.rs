//! `[compute]`: how GPU time is divided; `docs/compute.md` has the reasons.

use std::time::Duration;

/// How GPU time is divided among tenants that want it at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leases {
    /// How long a lease lasts while others wait.
    pub quantum: Duration,
    /// Shortest quantum, where many wait.
    pub quantum_min: Duration,
    /// Longest quantum, where draining takes long.
    pub quantum_max: Duration,
    /// Operations of a tenant that may be in flight while it holds a lease that can end.
    pub window: u32,
    /// Predicted work of a tenant that may be in flight; two operations always may.
    pub window_time: Duration,
    /// GPU time that is owed at most to a tenant that begins to want.
    pub credit: Duration,
    /// Least time to drain before the next tenant is let in beside the late one.
    pub drain_min: Duration,
    /// Most.
    pub drain_max: Duration,
}

impl Default for Leases {
    fn default() -> Self {
        Leases {
            quantum: Duration::from_millis(5),
            quantum_min: Duration::from_millis(2),
            quantum_max: Duration::from_millis(20),
            window: 64,
            window_time: Duration::from_millis(1),
            credit: Duration::from_millis(20),
            drain_min: Duration::from_millis(20),
            drain_max: Duration::from_millis(200),
        }
    }
}
