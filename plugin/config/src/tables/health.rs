//! `[health]`: when a GPU is no longer sold, and when it is again.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::form::{mapping, quoted, time, whole, word};
use crate::parse::Checks;
use crate::table::table;
use crate::xids::{XIDS, XidAction};
use tessera_model::duration;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const SHORTEST: Duration = Duration::from_millis(100);
const DAY: Duration = seconds(24 * 60 * 60);

table! {
    /// When a GPU is no longer sold, and when it is again.
    pub struct Health: check {
        /// How often each GPU is asked whether it answers.
        probe_interval: Duration = seconds(10), time(SHORTEST, DAY);
        /// Unanswered probes in a row after which a GPU counts as lost.
        probes_failed: u32 = 3, whole(1..=100);
        /// Answered probes in a row after which its recovery begins.
        probes_passed: u32 = 3, whole(1..=100);
        /// How long a recovering GPU must be without trouble before it is sold again. Each relapse doubles it.
        recovery: Duration = seconds(5 * 60), time(SHORTEST, DAY);
        /// Longest recovery time; at least `health.recovery`.
        recovery_max: Duration = seconds(60 * 60), time(SHORTEST, DAY);
        /// Suspicions within `health.suspect_window` that make a GPU unhealthy.
        suspect_count: u32 = 3, whole(1..=100);
        /// How long a suspicion counts. A suspect GPU is sold, but preferred last.
        suspect_window: Duration = seconds(10 * 60), time(SHORTEST, DAY);
        /// What an XID means that `health.xid` does not name: nothing, a suspicion, unhealthy until the GPU has
        /// been quiet, or until the driver shows a reset.
        xid_default: XidAction = XidAction::Suspect, word();
        /// What single XIDs mean: changes rows of the [built-in table](health.md#xids).
        xid: BTreeMap<u32, XidAction> = XIDS.iter().map(|(xid, action, _)| (*xid, *action)).collect(),
            mapping((number, r"^\+?[0-9]+$"), word(), wrong, "table: XID = as `health.xid_default`", true);
    }
}

fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("\"{text}\" is no XID; write 79 = …"))
}

fn wrong(xid: &str, _: &str) -> String {
    format!("{xid}: must be one of {}", quoted::<XidAction>())
}

fn check(health: &Health, checks: &mut Checks<'_>) {
    if health.recovery_max < health.recovery && checks.are_sound(&["recovery", "recovery_max"]) {
        let message = format!(
            "is shorter than health.recovery ({}); a relapse would recover sooner than a first fault",
            duration::format(health.recovery)
        );
        checks.problem("recovery_max", &message);
    }
}

impl Health {
    /// What an XID means.
    pub fn action(&self, xid: u64) -> XidAction {
        let named = u32::try_from(xid).ok().and_then(|xid| self.xid.get(&xid));
        named.copied().unwrap_or(self.xid_default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn the_file_changes_single_xids_and_the_table_stays() {
        let text = "[health]\nxid = { 94 = \"unhealthy\", 999 = \"ignore\" }\nrecovery = \"2m\"";
        let health = Config::parse(text).unwrap().health;
        assert_eq!(health.action(94), XidAction::Unhealthy);
        assert_eq!(health.action(999), XidAction::Ignore);
        assert_eq!(health.action(79), XidAction::UntilReset);
        assert_eq!(health.action(31), XidAction::Ignore);
        assert_eq!(health.action(1 << 40), XidAction::Suspect);
        assert_eq!(health.recovery, Duration::from_secs(120));
    }
}
