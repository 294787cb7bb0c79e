//! `[history]`: what was, in buckets of time; `docs/views.md` shows it.

use std::time::Duration;

use crate::MIB;
use crate::form::{boolean, bytes, time};
use crate::parse::Checks;
use crate::table::table;
use tessera_model::duration;

const HOUR: u64 = 3600;

const fn hours(hours: u64) -> Duration {
    Duration::from_secs(hours * HOUR)
}

table! {
    /// What was: memory, GPU time, waits and refusals of each tenant and GPU, in a file beside `paths.ledger`. See
    /// [views.md](views.md#history).
    pub struct History: check {
        /// Whether the history is recorded, which `tessera history`, `recommend` and `waste` need. What was
        /// recorded stays.
        enabled: bool = true, boolean();
        /// Most bytes in use in the file, which may be twice as long; the oldest of the finest buckets go first.
        size_bytes as "size": u64 = 8 * MIB,
            bytes(4 * MIB, "must be at least 4Mi; 8Mi keep 64 busy tenants");
        /// How long buckets of 10 seconds are kept.
        keep_10s: Duration = hours(6), time(hours(1), hours(7 * 24));
        /// How long buckets of 5 minutes are kept; no less than `history.keep_10s`.
        keep_5m: Duration = hours(7 * 24), time(hours(24), hours(90 * 24));
        /// How long buckets of one hour are kept; no less than `history.keep_5m`.
        keep_1h: Duration = hours(35 * 24), time(hours(7 * 24), hours(800 * 24));
    }
}

fn check(history: &History, checks: &mut Checks<'_>) {
    for (key, coarser, other, finer) in [
        ("keep_5m", history.keep_5m, "keep_10s", history.keep_10s),
        ("keep_1h", history.keep_1h, "keep_5m", history.keep_5m),
    ] {
        if coarser < finer && checks.are_sound(&[key, other]) {
            let message = format!(
                "is shorter than history.{other} ({}); coarser buckets are kept at least as long as finer ones",
                duration::format(finer)
            );
            checks.problem(key, &message);
        }
    }
}

impl History {
    /// Seconds that buckets of 10 s, 5 min and 1 h are kept.
    pub fn keep_seconds(&self) -> [u32; 3] {
        [self.keep_10s, self.keep_5m, self.keep_1h]
            .map(|keep| u32::try_from(keep.as_secs()).unwrap_or(u32::MAX))
    }
}
