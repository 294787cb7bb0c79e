//! The results of a simulation.

use tessera_arbiter::policy::Share;

/// One tenant, by the simulated GPU's own account.
#[derive(Clone, Debug, Default)]
pub struct TenantFigures {
    /// Its share at the end.
    pub share: Option<Share>,
    /// GPU time its operations got, nanoseconds.
    pub used_ns: u64,
    /// The same per whole second.
    pub used_by_second: Vec<u64>,
    /// What the policy charged it, nanoseconds.
    pub charged_ns: u64,
    /// Leases granted.
    pub leases: u64,
    /// Drains past the deadline.
    pub overlaps: u64,
    /// From `want` to an open gate, nanoseconds, each.
    pub waits: Vec<u64>,
    /// How long each of its batches took, from when it had the work to its last completion, nanoseconds.
    pub batches: Vec<u64>,
    /// Longest time that it had work and an operation of it neither ran nor ended, nanoseconds.
    pub starved_ns: u64,
}

/// See [`super::simulate`].
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// In the order of the loads.
    pub tenants: Vec<TenantFigures>,
    /// Nanoseconds simulated.
    pub elapsed_ns: u64,
    /// Per GPU: time that nothing ran although a tenant waited, nanoseconds.
    pub idle_wanted_ns: Vec<u64>,
    /// Each time that nothing ran on a GPU although a tenant waited, nanoseconds.
    pub idle_runs: Vec<u64>,
    /// Per GPU: time that something ran.
    pub busy_ns: Vec<u64>,
    /// Grants of a GPU that another still held within its drain deadline.
    pub double_grants: u64,
}

impl Figures {
    /// Largest difference, in percentage points, between what a tenant got of all that was got in a
    /// window of whole seconds and its part of the shares. For tenants that are all backlogged.
    #[must_use]
    pub fn share_error_pp(&self, seconds: usize) -> f64 {
        let shares: f64 = self.tenants.iter().map(millis).sum();
        let whole = self.tenants.iter().map(|t| t.used_by_second.len()).min().unwrap_or(0);
        let mut worst = 0_f64;
        // The first second is for beginning.
        for from in 1..(whole + 1).saturating_sub(seconds) {
            let got = |t: &TenantFigures| -> f64 {
                t.used_by_second[from..from + seconds].iter().map(|&ns| float(ns)).sum()
            };
            let all: f64 = self.tenants.iter().map(got).sum();
            for tenant in &self.tenants {
                worst = worst.max((got(tenant) / all - millis(tenant) / shares).abs() * 100.0);
            }
        }
        worst
    }
}

fn millis(tenant: &TenantFigures) -> f64 {
    tenant.share.map_or(1.0, |share| f64::from(share.millis))
}

#[allow(clippy::cast_precision_loss, reason = "figures for people")]
fn float(ns: u64) -> f64 {
    ns as f64
}
