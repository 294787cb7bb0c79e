//! `[health]`: when a GPU is no longer sold, and when it is again.

use std::collections::BTreeMap;
use std::time::Duration;

use super::xids::XIDS;

/// When a GPU is no longer sold, and when it is again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// How often each GPU is asked whether it answers.
    pub probe_interval: Duration,
    /// So many unanswered probes in a row mean that it is lost.
    pub probes_failed: u32,
    /// So many answered ones in a row begin its recovery.
    pub probes_passed: u32,
    /// How long it must then be quiet before it is sold again.
    pub recovery: Duration,
    /// Each relapse doubles that, up to this.
    pub recovery_max: Duration,
    /// So many suspicions …
    pub suspect_count: u32,
    /// … within this time make it unhealthy; without another for as long, it is healthy again.
    pub suspect_window: Duration,
    /// What an XID means that `xid` does not name.
    pub xid_default: XidAction,
    /// What an XID means: the built-in table ([`XIDS`]) with the file's changes.
    pub xid: BTreeMap<u32, XidAction>,
}

/// What an XID means for the GPU that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XidAction {
    /// Nothing: a program's own fault.
    Ignore,
    /// One is a warning, several within a time are not.
    Suspect,
    /// Out of service until it has been quiet.
    Unhealthy,
    /// Out of service until the driver shows that it was reset.
    UntilReset,
}

impl XidAction {
    /// Each with the word of the configuration.
    pub const WORDS: [(&'static str, XidAction); 4] = [
        ("ignore", XidAction::Ignore),
        ("suspect", XidAction::Suspect),
        ("unhealthy", XidAction::Unhealthy),
        ("until-reset", XidAction::UntilReset),
    ];
}

impl Health {
    /// What an XID means.
    #[must_use]
    pub fn action(&self, xid: u64) -> XidAction {
        let named = u32::try_from(xid).ok().and_then(|xid| self.xid.get(&xid));
        named.copied().unwrap_or(self.xid_default)
    }
}

impl Default for Health {
    fn default() -> Self {
        Health {
            probe_interval: Duration::from_secs(10),
            probes_failed: 3,
            probes_passed: 3,
            recovery: Duration::from_secs(5 * 60),
            recovery_max: Duration::from_secs(60 * 60),
            suspect_count: 3,
            suspect_window: Duration::from_secs(10 * 60),
            xid_default: XidAction::Suspect,
            xid: XIDS.iter().map(|(xid, action, _)| (*xid, *action)).collect(),
        }
    }
}
