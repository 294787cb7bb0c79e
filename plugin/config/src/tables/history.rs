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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn what_is_given_counts_and_the_rest_stays() {
        let config = Config::parse("[history]\nsize = \"16Mi\"\nkeep_10s = \"12h\"").unwrap();
        let want = History { size_bytes: 16 * MIB, keep_10s: hours(12), ..History::default() };
        assert_eq!(config.history, want);
        assert_eq!(want.keep_seconds(), [12 * 3600, 7 * 86400, 35 * 86400]);
    }

    #[test]
    fn each_mistake_says_what_to_do() {
        for (text, part) in [
            ("enabled = 1", "history.enabled: must be true or false"),
            ("size = \"1Mi\"", "history.size: must be at least 4Mi"),
            ("keep_10s = \"10m\"", "history.keep_10s: \"10m\" is not from 1h to 168h"),
            (
                "keep_10s = \"48h\"\nkeep_5m = \"24h\"",
                "history.keep_5m: is shorter than history.keep_10s (48h)",
            ),
            (
                "keep_1h = \"168h\"\nkeep_5m = \"200h\"",
                "history.keep_1h: is shorter than history.keep_5m (200h)",
            ),
            ("keep = \"1h\"", "unknown key"),
        ] {
            let error = Config::parse(&format!("[history]\n{text}")).unwrap_err();
            let found: Vec<String> =
                error.problems.iter().map(|p| format!("{}: {}", p.key, p.message)).collect();
            assert!(found.iter().any(|problem| problem.contains(part)), "{text}: {found:?}");
        }
    }
}
