//! One look at what a tenant holds on one GPU: its ledger before and after, and between the two what
//! the driver says. Pure.

use tessera_region::layout::{IMPORTED, Kind};
use tessera_region::usage::SlotView;

/// A living process of the tenant that the driver lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub pid: u32,
    /// Its start time, clock ticks since boot: distinguishes it from a namesake.
    pub start: u64,
    /// What the driver says it uses; `None` where it does not tell.
    pub used_bytes: Option<u64>,
    pub slot: Option<usize>,
}

/// Adds a process that the driver lists, with the departing slots that were its own: it is ending, or has
/// executed another program. What departs stays charged, so it counts on both sides.
pub fn join(members: &mut Vec<Member>, member: Member, departing: impl IntoIterator<Item = usize>) {
    let mut departing = departing.into_iter();
    let slot = member.slot.or_else(|| departing.next());
    members.push(Member { slot, ..member });
    let rest = |slot| Member { used_bytes: Some(0), slot: Some(slot), ..member };
    members.extend(departing.map(rest));
}

/// Divides what the driver says of one process among its shares of the GPU, each with what it is granted
/// there and the share's limit: to each what it is granted, and what is beyond that to the largest, which has
/// the most room for it.
pub fn divide(used: Option<u64>, shares: &[(u64, u64)]) -> Vec<Option<u64>> {
    let largest = (0..shares.len()).rev().max_by_key(|&at| shares[at].1);
    let all = shares.iter().fold(0, |sum: u64, (granted, _)| sum.saturating_add(*granted));
    let part = |(at, (granted, _)): (usize, &(u64, u64))| {
        let others = all - granted;
        used.map(|used| match Some(at) == largest {
            true => used.saturating_sub(others),
            false => *granted,
        })
    };
    shares.iter().enumerate().map(part).collect()
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Nothing of the ledger moved during the look, so the figures are of one moment.
    pub quiet: bool,
    /// Something was given back during the look: while the driver was asked, less may have been granted than
    /// before and after.
    pub freed: bool,
    /// Bytes granted to the processes that the driver lists, contexts' constants included and managed memory not
    /// ([`SlotView::shown`]): before the driver was asked or after, where there were less. A slot
    /// whose process it does not list says nothing of those it does, unless one of these has no slot
    /// that is known to be its own: then it may be this.
    pub granted: u64,
    /// Bytes of other processes that these have imported by 64-byte handles.
    pub imported: u64,
    /// Bytes of the tenant's living processes as the driver says; `None` where it does not tell.
    pub used: Option<u64>,
    /// Whom that is made of, sorted, each with the bytes of its contexts' constants.
    pub members: Vec<(Member, u64)>,
    /// Bytes granted to each of them, as its own slot says, in the same order.
    pub own: Vec<u64>,
}

impl Sample {
    /// What the driver shows beyond everything charged, if this look can tell.
    pub fn overhead(&self) -> Option<u64> {
        self.most().filter(|_| self.quiet)
    }

    /// The most that the driver shows beyond everything charged, also where the ledger grew meanwhile. Where it
    /// also shrank ([`Sample::freed`]), this is a guess.
    pub fn most(&self) -> Option<u64> {
        // Pools are settled late, pages freed lazily: less than the ledger is no overhead.
        let beyond = self.used?.saturating_sub(self.granted);
        // Whether the driver counts imports for their maker alone is not public. Where less shows than nearly all of
        // them would be, it does.
        let counted = self.imported > 0 && beyond >= self.imported - self.imported / 8;
        Some(if counted { beyond.saturating_sub(self.imported) } else { beyond })
    }

    /// The pid of the process that holds most beyond what its own slot says; 0 if none is known.
    pub fn most_beyond(&self) -> u32 {
        let own = self.own.iter().copied().chain(std::iter::repeat(0));
        let beyond = self.members.iter().zip(own).map(|((member, _), own)| {
            (member.used_bytes.unwrap_or(0).saturating_sub(own), member.pid)
        });
        beyond.max().map_or(0, |(_, pid)| pid)
    }
}

/// Puts a look together. `before` and `after` are the slots of the usage page around the driver's
/// answer, dead owners' recovered; a page that cannot be believed has none, and then all that the
/// driver shows is beyond the ledger, which is what its tenant made of it.
pub fn compose(
    before: &[SlotView],
    after: &[SlotView],
    gpu: usize,
    mut members: Vec<Member>,
) -> Sample {
    members.sort_by_key(|member| (member.pid, member.start));
    let used = members.iter().try_fold(0u64, |sum, m| Some(sum.saturating_add(m.used_bytes?)));
    let all_known = members.iter().all(|member| member.slot.is_some());
    let is_member = |slot: &SlotView| members.iter().any(|m| m.slot == Some(slot.index));
    let counts = |slot: &&SlotView| is_member(slot) || !all_known && !slot.is_departing();
    let granted = |slots: &[SlotView]| {
        let granted = slots.iter().filter(counts).map(|slot| slot.shown(gpu));
        granted.fold(0, u64::saturating_add)
    };
    let imported = |slots: &[SlotView]| {
        let imported = slots.iter().filter(counts).map(|slot| slot.kinds[IMPORTED]);
        imported.fold(0, u64::saturating_add)
    };
    // What nobody owns any more is not the tenant's doing.
    let owned = |slots: &[SlotView]| -> Vec<SlotView> {
        slots.iter().filter(|slot| !slot.is_departing()).cloned().collect()
    };
    let (owned_before, owned_after) = (owned(before), owned(after));
    let slot_of = |member: &Member| {
        member.slot.and_then(|index| before.iter().find(|slot| slot.index == index))
    };
    let contexts =
        |member: &Member| slot_of(member).map_or(0, |slot| slot.kinds[Kind::Overhead as usize]);
    let own = |member: &Member| slot_of(member).map_or(0, |slot| slot.shown(gpu));
    Sample {
        quiet: owned_before.len() == owned_after.len()
            && owned_before.iter().zip(&owned_after).all(|(a, b)| unmoved(a, b, gpu)),
        freed: !owned_before.iter().all(|slot| owned_after.iter().any(|after| kept(slot, after))),
        granted: granted(before).min(granted(after)),
        imported: imported(before).max(imported(after)),
        used,
        own: members.iter().map(own).collect(),
        members: members.iter().map(|member| (*member, contexts(member))).collect(),
    }
}

/// Whether a slot's owner neither got nor gave back anything between two reads, and is in no driver
/// call that might: counters of both kinds only grow, so equal ones mean that nothing happened.
fn unmoved(before: &SlotView, after: &SlotView, gpu: usize) -> bool {
    let epoch = |s: &SlotView| (s.index, s.claimed_ns, s.frees, s.allocations);
    let bytes = |s: &SlotView| (s.charged[gpu], s.granted[gpu]);
    epoch(before) == epoch(after)
        && bytes(before) == bytes(after)
        && before.charged[gpu] == before.granted[gpu]
}

/// Whether it is the same owner's slot, which gave nothing back between two reads.
fn kept(before: &SlotView, after: &SlotView) -> bool {
    let epoch = |s: &SlotView| (s.index, s.claimed_ns, s.frees);
    epoch(before) == epoch(after)
}

/// The slot of a process: the one its session named, else the one that carries its pid in its own
/// pid namespace. Both are the tenant's words; a false one hides no bytes, because sums are over
/// the tenant.
pub fn slot_of(slots: &[SlotView], named: Option<u32>, namespace_pid: u32) -> Option<usize> {
    let named = named.and_then(|named| usize::try_from(named).ok());
    // What is departing was the same pid's before an exec.
    let mut owned = slots.iter().filter(|slot| slot.claimed_ns != 0 && !slot.is_departing());
    let by_name = owned.clone().find(|slot| Some(slot.index) == named);
    let by_pid = || owned.find(|slot| slot.pid_hint == namespace_pid);
    by_name.or_else(by_pid).map(|slot| slot.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: usize, granted: u64) -> SlotView {
        let mut slot = SlotView { index, claimed_ns: 1, pid_hint: 40, ..SlotView::default() };
        (slot.granted[0], slot.charged[0]) = (granted, granted);
        slot
    }

    fn member(pid: u32, used_bytes: Option<u64>) -> Member {
        Member { pid, start: 1, used_bytes, slot: None }
    }

    #[test]
    fn what_a_process_has_beyond_its_shares_is_the_largest_ones() {
        assert_eq!(divide(Some(170), &[(50, 100), (100, 200)]), [Some(50), Some(120)]);
        assert_eq!(divide(Some(170), &[(50, 100), (100, 100)]), [Some(70), Some(100)]);
        assert_eq!(divide(Some(90), &[(90, 10)]), [Some(90)]);
        assert_eq!(divide(Some(10), &[(50, 100), (100, 200)]), [Some(50), Some(0)]);
        assert_eq!(divide(None, &[(1, 1), (1, 1)]), [None, None]);
        assert_eq!(divide(Some(1), &[]), []);
    }

    #[test]
    fn overhead_is_what_the_driver_shows_beyond_the_charges() {
        let slots = [slot(0, 10), slot(3, 5)];
        let members = vec![member(2, Some(12)), member(1, Some(9))];
        let sample = compose(&slots, &slots, 0, members);
        assert_eq!((sample.granted, sample.used, sample.overhead()), (15, Some(21), Some(6)));
        assert_eq!(sample.members[0].0.pid, 1, "sorted");
        assert_eq!(sample.most_beyond(), 2);
        let sample = compose(&slots, &slots, 0, vec![member(1, Some(14))]);
        assert_eq!(sample.overhead(), Some(0), "a ledger ahead of the driver is no overhead");
    }

    #[test]
    fn managed_memory_is_not_expected_in_the_drivers_figure() {
        let mut one = slot(0, 100);
        one.kinds[Kind::Managed as usize] = 60;
        let own = Member { slot: Some(0), ..member(1, Some(45)) };
        let sample = compose(&[one.clone()], &[one.clone()], 0, vec![own]);
        assert_eq!((sample.granted, sample.overhead(), &sample.own[..]), (40, Some(5), &[40][..]));
        // Some of it may be on another GPU.
        one.granted[1] = 50;
        let sample = compose(&[one.clone()], &[one], 0, vec![own]);
        assert_eq!((sample.granted, sample.overhead()), (90, Some(0)));
    }

    #[test]
    fn what_is_imported_is_no_overhead_whether_the_driver_counts_it_or_not() {
        let mut one = slot(0, 100);
        one.kinds[IMPORTED] = 1000;
        for used in [130, 1130] {
            let own = Member { slot: Some(0), ..member(1, Some(used)) };
            let sample = compose(&[one.clone()], &[one.clone()], 0, vec![own]);
            assert_eq!(sample.overhead(), Some(30));
        }
    }

    #[test]
    fn what_departs_of_a_process_that_executed_another_program_is_no_overhead() {
        let dead = SlotView { departing_ns: 2, ..slot(0, 1000) };
        for (own, granted) in [(None, 0), (Some(3), 20)] {
            let slots: Vec<_> =
                std::iter::once(dead.clone()).chain(own.map(|own| slot(own, granted))).collect();
            let mut members = Vec::new();
            join(&mut members, Member { slot: own, ..member(1, Some(1007 + granted)) }, [0]);
            let sample = compose(&slots, &slots, 0, members.clone());
            assert_eq!((sample.quiet, sample.overhead()), (true, Some(7)));
            assert!(members.iter().all(|member| member.slot.is_some()), "nobody is without a slot");
            // What departs goes meanwhile.
            let after = &slots[1..];
            let sample = compose(&slots, after, 0, members);
            assert_eq!((sample.quiet, sample.overhead()), (true, Some(1007)));
        }
        // One whose process is not known covers nothing.
        let slots = [dead];
        let sample = compose(&slots, &slots, 0, vec![member(1, Some(30))]);
        assert_eq!(sample.overhead(), Some(30));
    }

    #[test]
    fn a_slot_whose_process_is_not_listed_covers_nobody_elses_overhead() {
        let slots = [slot(0, 10), slot(3, 1000)];
        let known = Member { slot: Some(0), ..member(1, Some(12)) };
        let sample = compose(&slots, &slots, 0, vec![known]);
        assert_eq!((sample.granted, sample.overhead()), (10, Some(2)));
        // One that looks the same keeps it in the sum.
        let sample = compose(&slots, &slots, 0, vec![known, member(2, Some(1003))]);
        assert_eq!((sample.granted, sample.overhead()), (1010, Some(5)));
    }

    #[test]
    fn a_figure_that_the_driver_withholds_makes_no_sum() {
        let members = vec![member(1, Some(9)), member(2, None)];
        assert_eq!(compose(&[], &[], 0, members).overhead(), None);
        assert_eq!(compose(&[], &[], 0, vec![]).overhead(), Some(0));
    }

    #[test]
    fn whatever_moves_in_the_ledger_makes_a_look_unquiet() {
        let before = [slot(0, 10)];
        let changed: [fn(&mut SlotView); 7] = [
            |s| s.index = 1,
            |s| s.claimed_ns = 2,
            |s| s.frees = 1,
            |s| s.allocations = 1,
            |s| (s.charged[0], s.granted[0]) = (11, 11),
            |s| s.charged[0] = 11,
            |s| s.granted[0] = 9,
        ];
        for change in changed {
            let mut after = before.clone();
            change(&mut after[0]);
            assert!(!compose(&before, &after, 0, vec![]).quiet, "{after:?}");
        }
        let freed = changed.map(|change| {
            let mut after = before.clone();
            change(&mut after[0]);
            compose(&before, &after, 0, vec![]).freed
        });
        assert_eq!(freed, [true, true, true, false, false, false, false]);
        assert!(compose(&before, &[], 0, vec![]).freed);
        assert!(!compose(&before, &[], 0, vec![]).quiet);
        // A driver call under way all the time.
        let mut reserved = before.clone();
        reserved[0].charged[0] = 12;
        assert!(!compose(&reserved, &reserved, 0, vec![]).quiet);
        assert!(compose(&reserved, &reserved, 1, vec![]).quiet, "another GPU's");
    }

    #[test]
    fn a_process_is_found_by_its_session_and_else_by_its_pid() {
        let mut slots = [slot(0, 1), slot(5, 1)];
        slots[1].pid_hint = 41;
        assert_eq!(slot_of(&slots, Some(5), 40), Some(5));
        assert_eq!(slot_of(&slots, None, 41), Some(5));
        assert_eq!(slot_of(&slots, Some(9), 41), Some(5), "a slot that is gone");
        assert_eq!(slot_of(&slots, None, 77), None);
        slots[1].claimed_ns = 0;
        assert_eq!(slot_of(&slots, Some(5), 41), None);
    }
}
