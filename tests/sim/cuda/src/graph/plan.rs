//! The pure part of executable graphs: how much memory a launch needs.

/// What a step means for graph memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    None,
    /// Obtains so many bytes at an address.
    Alloc(u64, u64),
    /// Gives back what is at an address.
    Free(u64),
}

/// Bytes of physical memory that the steps need together. Memory freed by a step serves an
/// allocation that depends on it ("Optimized Memory Reuse"), never one that might run beside it.
pub(crate) fn footprint(effects: &[Effect], after: &[Vec<usize>]) -> u64 {
    /// Physical memory that allocations use one after another.
    struct Slot {
        bytes: u64,
        at: u64,
        free_since: Option<usize>,
    }
    let mut slots = Vec::<Slot>::new();
    for (step, effect) in effects.iter().enumerate() {
        match *effect {
            Effect::None => {}
            Effect::Free(at) => {
                if let Some(slot) = slots.iter_mut().find(|s| s.at == at && s.free_since.is_none())
                {
                    slot.free_since = Some(step);
                }
            }
            Effect::Alloc(at, bytes) => {
                let ancestors = slots.iter().any(|s| s.free_since.is_some()).then(|| {
                    let mut seen = vec![false; step];
                    let mut look = after[step].clone();
                    while let Some(next) = look.pop() {
                        if next < step && !std::mem::replace(&mut seen[next], true) {
                            look.extend(&after[next]);
                        }
                    }
                    seen
                });
                let usable = |s: &&mut Slot| {
                    s.bytes >= bytes
                        && s.free_since
                            .is_some_and(|free| ancestors.as_ref().is_some_and(|seen| seen[free]))
                };
                match slots.iter_mut().filter(usable).min_by_key(|s| s.bytes) {
                    Some(slot) => (slot.at, slot.free_since) = (at, None),
                    None => slots.push(Slot { bytes, at, free_since: None }),
                }
            }
        }
    }
    slots.iter().map(|s| s.bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::Effect::{Alloc, Free};
    use super::*;

    #[test]
    fn freed_memory_serves_what_depends_on_the_free() {
        let effects = [Alloc(1, 10), Free(1), Alloc(2, 8), Free(2)];
        let chain = [vec![], vec![0], vec![1], vec![2]];
        assert_eq!(footprint(&effects, &chain), 10);
        // The second allocation is independent of the free: both may exist at once.
        let beside = [vec![], vec![0], vec![0], vec![2]];
        assert_eq!(footprint(&effects, &beside), 18);
        // Too small to be used again.
        let larger = [Alloc(1, 10), Free(1), Alloc(2, 11), Free(2)];
        assert_eq!(footprint(&larger, &chain), 21);
    }

    #[test]
    fn what_is_not_freed_is_not_used_again() {
        let effects = [Alloc(1, 10), Alloc(2, 10), Effect::None];
        assert_eq!(footprint(&effects, &[vec![], vec![0], vec![1]]), 20);
    }
}
