//! `[compute]`: how GPU time is divided; `docs/internals/compute.md` has the reasons.

use std::time::Duration;

use crate::form::{time, whole};
use crate::parse::Checks;
use crate::table::table;
use tessera_model::duration;

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const SHORTEST: Duration = millis(1);
const LONGEST: Duration = millis(1000);

table! {
    /// How GPU time is divided among tenants that want it at the same time, where `share.compute` is not
    /// `none`.
    pub struct Leases: check {
        /// How long a lease of the GPU lasts while other tenants wait.
        quantum: Duration = millis(5), time(SHORTEST, LONGEST);
        /// Shortest lease, used where many tenants wait; at most `compute.quantum`.
        quantum_min: Duration = millis(2), time(SHORTEST, LONGEST);
        /// Longest lease, used where draining takes long; at least `compute.quantum`.
        quantum_max: Duration = millis(20), time(SHORTEST, LONGEST);
        /// Most operations (kernels, graphs) that a tenant may have in flight while its lease can end.
        window: u32 = 64, whole(2..=1 << 16);
        /// Most predicted work in flight then; two operations are always allowed. Less ends leases more
        /// precisely, more keeps the GPU busier.
        window_time: Duration = millis(1), time(SHORTEST, LONGEST);
        /// Most GPU time that is owed to a tenant that returns from a pause.
        credit: Duration = millis(20), time(SHORTEST, LONGEST);
        /// Shortest time to drain before the next tenant may use the GPU beside it; at most
        /// `compute.drain_max`.
        drain_min: Duration = millis(20), time(SHORTEST, LONGEST);
        /// Longest such time. Between the two it is three times the longest recent drain.
        drain_max: Duration = millis(200), time(SHORTEST, LONGEST);
    }
}

fn check(leases: &Leases, checks: &mut Checks<'_>) {
    for (key, shorter, other, longer) in [
        ("quantum_min", leases.quantum_min, "quantum", leases.quantum),
        ("quantum", leases.quantum, "quantum_max", leases.quantum_max),
        ("drain_min", leases.drain_min, "drain_max", leases.drain_max),
    ] {
        if shorter > longer && checks.are_sound(&[key, other]) {
            let longer = duration::format(longer);
            checks.problem(key, &format!("is longer than compute.{other} ({longer})"));
        }
    }
}
