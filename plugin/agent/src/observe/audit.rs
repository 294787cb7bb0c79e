//! Memory outside the account: a state machine per tenant and GPU, pure. It reports and stops nobody.

use super::sample::Sample;
use crate::trust::FindingKind;

/// A finding for people. Each is reported once, until it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A process of the container holds memory and is in no slot of the usage page: it does not load
    /// the shim, or the page was emptied under it.
    NoSlot {
        pid: u32,
        /// What the driver says it uses.
        bytes: u64,
    },
    /// Its processes together hold far more than is charged.
    Beyond {
        /// How much more.
        bytes: u64,
        /// The process that holds most beyond its own slot, by its pid on the host; 0 if none is known.
        pid: u32,
    },
}

impl Finding {
    pub fn kind(self) -> FindingKind {
        match self {
            Finding::NoSlot { .. } => FindingKind::Bypass,
            Finding::Beyond { .. } => FindingKind::Unaccounted,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// Processes without a slot, pid and start, at the look before.
    strays: Vec<(u32, u64)>,
    reported: Vec<(u32, u64)>,
    /// Looks in a row that showed too much.
    beyond: u32,
}

impl Audit {
    /// Takes a look; what it confirms of the look before. `slack`: bytes beyond the charges that are nothing unusual.
    pub fn see(&mut self, sample: &Sample, slack: u64) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut strays = Vec::new();
        for (member, _) in &sample.members {
            let Some(bytes) = member.used_bytes.filter(|bytes| *bytes > 0) else { continue };
            if member.slot.is_some() {
                continue;
            }
            let who = (member.pid, member.start);
            if self.strays.contains(&who) && !self.reported.contains(&who) {
                self.reported.push(who);
                findings.push(Finding::NoSlot { pid: member.pid, bytes });
            }
            strays.push(who);
        }
        self.reported.retain(|who| strays.contains(who));
        self.strays = strays;
        if let Some(bytes) = sample.overhead() {
            if bytes > slack {
                self.beyond = self.beyond.saturating_add(1);
                if self.beyond == 2 {
                    findings.push(Finding::Beyond { bytes, pid: sample.most_beyond() });
                }
            } else if bytes <= slack / 2 || self.beyond < 2 {
                // Reported again only after it was clearly over.
                self.beyond = 0;
            }
        }
        findings
    }

    /// Whether the next look may confirm something.
    pub fn is_open(&self) -> bool {
        self.beyond == 1 || self.strays.iter().any(|who| !self.reported.contains(who))
    }

    pub fn stands(&self) -> bool {
        self.beyond >= 2 || !self.reported.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::sample::Member;

    const SLACK: u64 = 1000;

    fn look(overhead: u64, strays: &[u32]) -> Sample {
        let stray = |&pid| (Member { pid, start: 1, used_bytes: Some(5), slot: None }, 0);
        let one = Member { pid: 1, start: 1, used_bytes: Some(overhead), slot: Some(0) };
        let members = std::iter::once((one, 0)).chain(strays.iter().map(stray)).collect();
        Sample { quiet: true, granted: 0, used: Some(overhead), members, ..Sample::default() }
    }

    #[test]
    fn far_more_than_is_charged_is_reported_once_until_it_is_over() {
        let mut audit = Audit::default();
        assert_eq!(audit.see(&look(SLACK, &[]), SLACK), []);
        assert_eq!(audit.see(&look(SLACK + 1, &[]), SLACK), [], "not confirmed");
        assert_eq!(audit.see(&look(SLACK, &[]), SLACK), []);
        assert_eq!(audit.see(&look(SLACK + 1, &[]), SLACK), []);
        assert_eq!(
            audit.see(&look(SLACK + 9, &[]), SLACK),
            [Finding::Beyond { bytes: SLACK + 9, pid: 1 }]
        );
        for overhead in [SLACK + 5, SLACK, SLACK - 1, SLACK + 5, SLACK + 5] {
            assert_eq!(audit.see(&look(overhead, &[]), SLACK), [], "{overhead}");
            assert!(audit.stands());
        }
        assert_eq!(audit.see(&look(SLACK / 2, &[]), SLACK), []);
        assert!(!audit.stands());
        audit.see(&look(SLACK + 1, &[]), SLACK);
        assert_eq!(audit.see(&look(SLACK + 1, &[]), SLACK).len(), 1);
    }

    #[test]
    fn looks_that_cannot_tell_find_nothing_beyond() {
        let mut audit = Audit::default();
        for _ in 0..9 {
            assert_eq!(audit.see(&Sample { quiet: false, ..look(9 * SLACK, &[]) }, SLACK), []);
        }
    }

    #[test]
    fn a_process_without_a_slot_is_reported_once() {
        let mut audit = Audit::default();
        assert_eq!(audit.see(&look(0, &[7]), SLACK), [], "it may be taking one");
        assert_eq!(audit.see(&look(0, &[7]), SLACK), [Finding::NoSlot { pid: 7, bytes: 5 }]);
        assert_eq!(audit.see(&look(0, &[7, 8]), SLACK), []);
        assert_eq!(audit.see(&look(0, &[8]), SLACK), [Finding::NoSlot { pid: 8, bytes: 5 }]);
        assert!(audit.stands());
        audit.see(&look(0, &[]), SLACK);
        assert!(!audit.stands());
    }
}
