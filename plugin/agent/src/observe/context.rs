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

/// A process, by pid, start time, and time of its slot's claim.
type Who = (u32, u64, u64);

/// One tenant's bare processes on one GPU.
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

/// What a look showed of contexts.
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
#[path = "context_tests.rs"]
mod tests;
