//! What the driver has of dead processes still. Pure.
//!
//! The kernel ends a process before the driver has its memory back, and until then the driver lists it. So
//! a departing slot ([`tessera_region::layout::is_departing`]) whose process is listed stays charged, with
//! what the driver says of it; one whose process is not listed has departed. An `exec` ends a slot and not
//! its pid: then what its process uses beyond what it was granted since is the most that may be left. And
//! where a slot's process is unknown, it has departed when no process is listed that is ending and
//! could be it; until then a bound in time goes by.

use tessera_region::usage::{Fate, SlotView};

/// A process that the driver lists, as far as a tenant's departing slots depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    pub pid: u32,
    /// What the driver says it uses; `None` where it does not tell.
    pub used_bytes: Option<u64>,
    pub owner: ProcessOwner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessOwner {
    /// Dead, or about to be.
    Ending,
    /// The tenant's, living, with so many bytes granted at the least while the driver was asked.
    Own(u64),
    /// Somebody else's, living.
    Others,
}

/// The fates of those of a tenant's departing slots, each with its process's pid on the host as far as that is
/// known, that hold bytes of a GPU (as the page counts). `is_others`: whether a pid on the host is known to
/// be, or to have been, another tenant's.
pub fn fates(
    departing: &[(&SlotView, Option<u32>)],
    gpu: usize,
    listed: &[ListedProcess],
    is_others: impl Fn(u32) -> bool,
) -> Vec<Fate> {
    let holds = |(slot, _): &&(&SlotView, Option<u32>)| slot.charged[gpu] > 0;
    let fate = |(slot, pid): &(&SlotView, Option<u32>)| {
        let (left, seen) = match pid {
            Some(pid) => of_known(listed, *pid)?,
            None => of_unknown(listed, departing, &is_others)?,
        };
        Some(Fate { slot: slot.index, claimed_ns: slot.claimed_ns, gpu, left, seen })
    };
    departing.iter().filter(holds).filter_map(fate).collect()
}

/// The most that is left of a slot whose process had this pid, and whether it is seen for certain.
fn of_known(listed: &[ListedProcess], pid: u32) -> Option<(u64, bool)> {
    let Some(process) = listed.iter().find(|process| process.pid == pid) else {
        return Some((0, false));
    };
    match process.owner {
        ProcessOwner::Ending => Some((process.used_bytes.unwrap_or(u64::MAX), true)),
        ProcessOwner::Own(granted) => Some((process.used_bytes?.saturating_sub(granted), false)),
        // A pid that came again.
        ProcessOwner::Others => None,
    }
}

fn of_unknown(
    listed: &[ListedProcess],
    departing: &[(&SlotView, Option<u32>)],
    is_others: &impl Fn(u32) -> bool,
) -> Option<(u64, bool)> {
    let is_known = |pid: u32| departing.iter().any(|(_, known)| *known == Some(pid));
    let may_be_it = |process: &&ListedProcess| match process.owner {
        ProcessOwner::Ending => !is_known(process.pid) && !is_others(process.pid),
        ProcessOwner::Own(granted) => process.used_bytes.is_none_or(|used| used > granted),
        ProcessOwner::Others => false,
    };
    listed.iter().find(may_be_it).is_none().then_some((0, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(index: usize, charged: u64) -> SlotView {
        let mut slot = SlotView { index, claimed_ns: 7, departing_ns: 9, ..SlotView::default() };
        slot.charged[0] = charged;
        slot
    }

    fn listed(pid: u32, used: u64, owner: ProcessOwner) -> ListedProcess {
        ListedProcess { pid, used_bytes: Some(used), owner }
    }

    fn fate(pid: Option<u32>, listed: &[ListedProcess]) -> Option<(u64, bool)> {
        let slot = slot(3, 100);
        let fates = fates(&[(&slot, pid)], 0, listed, |pid| pid == 66);
        let fate = fates.first()?;
        assert_eq!((fate.slot, fate.claimed_ns, fate.gpu), (3, 7, 0));
        Some((fate.left, fate.seen))
    }

    #[test]
    fn what_is_not_listed_has_departed() {
        assert_eq!(fate(Some(5), &[]), Some((0, false)));
        assert_eq!(fate(Some(5), &[listed(6, 100, ProcessOwner::Ending)]), Some((0, false)));
    }

    #[test]
    fn an_ending_process_has_what_the_driver_says() {
        assert_eq!(fate(Some(5), &[listed(5, 90, ProcessOwner::Ending)]), Some((90, true)));
        let withheld = ListedProcess { used_bytes: None, ..listed(5, 0, ProcessOwner::Ending) };
        assert_eq!(fate(Some(5), &[withheld]), Some((u64::MAX, true)));
    }

    #[test]
    fn after_an_exec_it_is_what_the_new_program_was_not_granted() {
        assert_eq!(fate(Some(5), &[listed(5, 130, ProcessOwner::Own(20))]), Some((110, false)));
        assert_eq!(fate(Some(5), &[listed(5, 20, ProcessOwner::Own(20))]), Some((0, false)));
        let withheld = ListedProcess { used_bytes: None, ..listed(5, 0, ProcessOwner::Own(20)) };
        assert_eq!(fate(Some(5), &[withheld]), None);
    }

    #[test]
    fn a_pid_that_came_again_tells_nothing() {
        assert_eq!(fate(Some(5), &[listed(5, 130, ProcessOwner::Others)]), None);
    }

    #[test]
    fn who_nobody_knows_has_departed_when_nobody_listed_could_be_it() {
        assert_eq!(fate(None, &[]), Some((0, false)));
        let clear = [
            listed(1, 50, ProcessOwner::Own(50)),
            listed(2, 50, ProcessOwner::Others),
            listed(66, 50, ProcessOwner::Ending),
        ];
        assert_eq!(fate(None, &clear), Some((0, false)));
        assert_eq!(fate(None, &[listed(5, 50, ProcessOwner::Ending)]), None);
        assert_eq!(fate(None, &[listed(1, 51, ProcessOwner::Own(50))]), None);
    }

    #[test]
    fn who_is_known_to_be_another_dead_process_is_not_it() {
        let (known, unknown) = (slot(1, 10), slot(2, 20));
        let departing = [(&known, Some(5)), (&unknown, None)];
        let fates = fates(&departing, 0, &[listed(5, 10, ProcessOwner::Ending)], |_| false);
        let fates: Vec<_> = fates.iter().map(|fate| (fate.slot, fate.left, fate.seen)).collect();
        assert_eq!(fates, [(1, 10, true), (2, 0, false)]);
    }

    #[test]
    fn slots_without_bytes_of_the_gpu_are_left_alone() {
        let slot = slot(1, 0);
        assert_eq!(fates(&[(&slot, Some(5))], 0, &[], |_| false), []);
    }
}
