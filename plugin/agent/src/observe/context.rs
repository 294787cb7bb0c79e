//! What a bare context takes, as processes show it that have one and nothing else. Pure.
//!
//! A process is bare if its slot was charged one context's constant and nothing before or since, and it
//! has launched nothing. What the driver shows of it then is its context, and modules if it has loaded
//! some: so it is no less than the context, and the least of many comes near it. Slots are the container's
//! word: one that lies makes other memory look like a context. The user of the figure knows what is
//! plausible.

use tessera_region::layout::Kind;
use tessera_region::usage::SlotView;

use super::sample::{Member, Sample};

/// Looks at one bare process, at most. Two that agree are enough.
const LOOKS: u32 = 4;

type Who = (u32, u64, u64);

#[derive(Clone, Debug, Default)]
pub struct ContextEstimator {
    seen: Vec<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    who: Who,
    bytes: u64,
    looks: u32,
    agreed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Bytes of a bare one, seen alike twice.
    pub bytes: Option<u64>,
    /// One was seen once: another look should follow soon.
    pub pending: bool,
}

impl ContextEstimator {
    /// Takes a look, with the slots that it found last. `constant` is what the tenant is charged for each
    /// context on its `gpu`-th GPU. `wants` says what is worth a second look.
    pub fn see(
        &mut self,
        sample: &Sample,
        slots: &[SlotView],
        (gpu, constant): (usize, u64),
        wants: impl Fn(u64) -> bool,
    ) -> Shown {
        let mut shown = Shown::default();
        if !sample.quiet {
            return shown;
        }
        let bare: Vec<(Who, u64)> = sample
            .members
            .iter()
            .filter_map(|(member, _)| {
                let slot = slot_of(member, sample, slots)?;
                is_bare(slot, gpu, constant).then_some(())?;
                Some(((member.pid, member.start, slot.claimed_ns), member.used_bytes?))
            })
            .collect();
        self.seen.retain(|seen| bare.iter().any(|(who, _)| *who == seen.who));
        for (who, bytes) in bare {
            let known = self.seen.iter_mut().find(|seen| seen.who == who);
            let Some(seen) = known else {
                self.seen.push(Seen { who, bytes, looks: 1, agreed: false });
                shown.pending |= wants(bytes);
                continue;
            };
            if seen.agreed || seen.looks >= LOOKS {
                continue;
            }
            seen.looks += 1;
            seen.agreed = seen.bytes == bytes;
            seen.bytes = bytes;
            match seen.agreed {
                true if wants(bytes) => {
                    shown.bytes = Some(shown.bytes.map_or(bytes, |least| least.min(bytes)));
                }
                true => {}
                false => shown.pending |= seen.looks < LOOKS && wants(bytes),
            }
        }
        shown
    }
}

/// The slot of a process that shares it with nobody, and has no other.
fn slot_of<'s>(member: &Member, sample: &Sample, slots: &'s [SlotView]) -> Option<&'s SlotView> {
    let index = member.slot?;
    let near = |(other, _): &&(Member, u64)| other.slot == Some(index) || other.pid == member.pid;
    (sample.members.iter().filter(near).count() == 1).then_some(())?;
    slots.iter().find(|slot| slot.index == index)
}

/// Whether all that a slot was ever charged is one context's constant, on this GPU, and nothing ran.
fn is_bare(slot: &SlotView, gpu: usize, constant: u64) -> bool {
    let of_gpu = |bytes: &[u64]| {
        bytes.iter().enumerate().all(|(at, bytes)| *bytes == if at == gpu { constant } else { 0 })
    };
    let of_kind = |(kind, bytes): (usize, &u64)| {
        *bytes == if kind == Kind::Overhead as usize { constant } else { 0 }
    };
    constant > 0
        && !slot.is_departing()
        && (slot.did.launches, slot.allocations, slot.frees) == (0, 1, 0)
        && of_gpu(&slot.granted)
        && of_gpu(&slot.charged)
        && slot.kinds.iter().enumerate().all(of_kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::sample::compose;

    const MIB: u64 = 1 << 20;
    const CONSTANT: u64 = 400 * MIB;

    fn bare(index: usize) -> SlotView {
        let mut slot = SlotView { index, claimed_ns: 9, allocations: 1, ..SlotView::default() };
        (slot.granted[0], slot.charged[0]) = (CONSTANT, CONSTANT);
        slot.kinds[Kind::Overhead as usize] = CONSTANT;
        slot
    }

    fn member(pid: u32, slot: usize, bytes: u64) -> Member {
        Member { pid, start: 1, used_bytes: Some(bytes), slot: Some(slot) }
    }

    fn look(bare: &mut ContextEstimator, slots: &[SlotView], members: &[Member]) -> Shown {
        let sample = compose(slots, slots, 0, members.to_vec());
        bare.see(&sample, slots, (0, CONSTANT), |bytes| bytes < 600 * MIB)
    }

    const NOTHING: Shown = Shown { bytes: None, pending: false };
    const PENDING: Shown = Shown { bytes: None, pending: true };

    fn seen(bytes: u64) -> Shown {
        Shown { bytes: Some(bytes), pending: false }
    }

    #[test]
    fn two_looks_that_agree_measure_a_context_once() {
        let (mut state, slots) = (ContextEstimator::default(), [bare(3)]);
        let members = [member(7, 3, 450 * MIB)];
        assert_eq!(look(&mut state, &slots, &members), PENDING);
        assert_eq!(look(&mut state, &slots, &members), seen(450 * MIB));
        assert_eq!(look(&mut state, &slots, &members), NOTHING, "once is enough");
        // Another process in the same slot is another.
        let next = [SlotView { claimed_ns: 10, ..bare(3) }];
        assert_eq!(look(&mut state, &next, &members), PENDING);
    }

    #[test]
    fn looks_that_disagree_are_repeated_and_then_left() {
        let (mut state, slots) = (ContextEstimator::default(), [bare(0)]);
        let at = |mib: u64| [member(7, 0, mib * MIB)];
        assert_eq!(look(&mut state, &slots, &at(100)), PENDING, "it is coming up");
        assert_eq!(look(&mut state, &slots, &at(450)), PENDING);
        assert_eq!(look(&mut state, &slots, &at(450)), seen(450 * MIB));
        let mut state = ContextEstimator::default();
        let restless = (0..100).filter(|n| look(&mut state, &slots, &at(400 + n)).pending).count();
        assert!(restless < 4, "{restless}: a figure that never rests costs some looks and no more");
    }

    #[test]
    fn the_least_of_several_counts_and_what_nobody_wants_is_left() {
        let (mut state, slots) = (ContextEstimator::default(), [bare(0), bare(1), bare(2)]);
        let members = [member(7, 0, 460 * MIB), member(8, 1, 450 * MIB), member(9, 2, 700 * MIB)];
        assert_eq!(look(&mut state, &slots, &members), PENDING);
        assert_eq!(look(&mut state, &slots, &members), seen(450 * MIB));
        let unwanted = [member(7, 0, 700 * MIB)];
        let mut state = ContextEstimator::default();
        assert_eq!(look(&mut state, &slots, &unwanted), NOTHING);
        assert_eq!(look(&mut state, &slots, &unwanted), NOTHING);
    }

    #[test]
    fn whoever_has_more_than_a_context_tells_nothing() {
        type Change = fn(&mut SlotView);
        let changed: [(&str, Change); 10] = [
            ("launched", |s| s.did.launches = 1),
            ("freed", |s| s.frees = 1),
            ("allocated", |s| s.allocations = 2),
            ("a ruined page", |s| s.allocations = 0),
            ("two contexts", |s| {
                (s.granted[0], s.charged[0]) = (2 * CONSTANT, 2 * CONSTANT);
                s.kinds[Kind::Overhead as usize] = 2 * CONSTANT;
            }),
            ("another GPU's too", |s| (s.granted[1], s.charged[1]) = (MIB, MIB)),
            ("a call under way there", |s| s.charged[1] = MIB),
            ("of another kind", |s| s.kinds[Kind::Plain as usize] = 1),
            ("nothing", |s| (s.granted[0], s.charged[0]) = (0, 0)),
            ("dead", |s| s.departing_ns = 1),
        ];
        for (what, change) in changed {
            let (mut state, mut slot) = (ContextEstimator::default(), bare(0));
            change(&mut slot);
            for _ in 0..3 {
                let shown = look(&mut state, &[slot.clone()], &[member(7, 0, 450 * MIB)]);
                assert_eq!(shown, NOTHING, "{what}");
            }
        }
    }

    #[test]
    fn processes_that_cannot_be_distinguished_show_nothing() {
        let slots = [bare(0), bare(1)];
        for members in [
            // Two in one slot, a forked child say.
            vec![member(7, 0, 450 * MIB), member(8, 0, 450 * MIB)],
            // One with what an exec left.
            vec![member(7, 0, 450 * MIB), Member { used_bytes: Some(0), ..member(7, 1, 0) }],
            vec![Member { slot: None, ..member(7, 0, 450 * MIB) }],
            vec![Member { used_bytes: None, ..member(7, 0, 0) }],
            vec![member(7, 9, 450 * MIB)],
        ] {
            let mut state = ContextEstimator::default();
            for _ in 0..3 {
                assert_eq!(look(&mut state, &slots, &members), NOTHING, "{members:?}");
            }
        }
    }

    #[test]
    fn what_moves_is_not_measured_and_no_constant_is_no_context() {
        let (mut state, before) = (ContextEstimator::default(), [bare(0)]);
        let members = vec![member(7, 0, 450 * MIB)];
        let mut after = before.clone();
        after[0].charged[0] += 1;
        for _ in 0..3 {
            let sample = compose(&before, &after, 0, members.clone());
            assert_eq!(state.see(&sample, &after, (0, CONSTANT), |_| true), NOTHING);
        }
        let empty = [SlotView { claimed_ns: 9, allocations: 1, ..SlotView::default() }];
        let sample = compose(&empty, &empty, 0, members);
        assert_eq!(state.see(&sample, &empty, (0, 0), |_| true), NOTHING);
    }
}
