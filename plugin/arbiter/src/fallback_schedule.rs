//! GPU time without an arbiter: each tenant's part of a cycle. Parts do not overlap. Pure.
//!
//! A tenant has one part, also where it has several GPUs: its processes read the first GPU's gate only, and
//! a gang runs on all at once. As long as the shares of every GPU sum to at most a GPU there is a place for
//! every tenant, but after many changes the free time may be in pieces. Parts move only if a tenant finds no
//! room otherwise, because a process that rations itself while its part moves may run beside another for a
//! cycle.

use super::policy::GpuIndex;

/// Thousandths of a cycle.
const WHOLE: u32 = 1000;

/// One tenant's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part<'a> {
    /// Its GPUs.
    pub gpus: &'a [GpuIndex],
    /// How much of the cycle it may use.
    pub millis: u32,
    /// Where it begins now.
    pub phase: u32,
}

/// The phases of all parts, in their order. A part keeps its phase if it can; of two that collide the
/// earlier does.
pub(super) fn place(parts: &[Part<'_>]) -> Vec<u32> {
    let mut placed: Vec<Option<u32>> = vec![None; parts.len()];
    // Parts that stay, as long as they do not collide: shares may have grown since.
    for (index, part) in parts.iter().enumerate() {
        let phase = part.phase;
        placed[index] = is_free(parts, &placed, index, phase).then_some(phase);
    }
    let mut newcomers: Vec<usize> = (0..parts.len()).filter(|i| placed[*i].is_none()).collect();
    // The largest first: small parts fit into what is left.
    newcomers.sort_by_key(|index| std::cmp::Reverse(parts[*index].millis));
    let staying = placed.clone();
    if fill(parts, &mut placed, &newcomers) {
        return placed.into_iter().flatten().collect();
    }
    // The free time is in pieces: place all parts afresh, gangs first, because they need the same place on
    // several GPUs.
    let mut fresh = vec![None; parts.len()];
    let mut everybody: Vec<usize> = (0..parts.len()).collect();
    everybody.sort_by_key(|i| std::cmp::Reverse((parts[*i].gpus.len(), parts[*i].millis)));
    if fill(parts, &mut fresh, &everybody) {
        return fresh.into_iter().flatten().collect();
    }
    // More than a GPU's worth, or gangs that interlock: some parts overlap.
    let mut placed = staying;
    for index in newcomers {
        let phase = starts(parts, &placed, index)
            .find(|phase| is_free(parts, &placed, index, *phase))
            .unwrap_or_else(|| least_crowded(parts, &placed, index));
        placed[index] = Some(phase);
    }
    placed.into_iter().flatten().collect()
}

/// Places `order` one after the other, each as early as it fits. False if one does not fit.
fn fill(parts: &[Part<'_>], placed: &mut [Option<u32>], order: &[usize]) -> bool {
    order.iter().all(|&index| {
        let phase =
            starts(parts, placed, index).find(|phase| is_free(parts, placed, index, *phase));
        placed[index] = phase;
        phase.is_some()
    })
}

/// The earliest possible beginnings of a part: 0, or the end of another part.
fn starts(parts: &[Part<'_>], placed: &[Option<u32>], index: usize) -> impl Iterator<Item = u32> {
    let mut ends: Vec<u32> =
        neighbours(parts, placed, index).map(|(begin, end)| end.max(begin)).collect();
    ends.push(0);
    ends.sort_unstable();
    ends.dedup();
    ends.into_iter().filter(|end| *end < WHOLE)
}

fn neighbours<'a>(
    parts: &'a [Part<'a>],
    placed: &'a [Option<u32>],
    index: usize,
) -> impl Iterator<Item = (u32, u32)> + 'a {
    let common = move |other: &Part<'_>| other.gpus.iter().any(|g| parts[index].gpus.contains(g));
    parts.iter().zip(placed).enumerate().filter_map(move |(at, (other, phase))| {
        let phase = (*phase).filter(|_| at != index && common(other))?;
        Some((phase, phase + other.millis))
    })
}

fn is_free(parts: &[Part<'_>], placed: &[Option<u32>], index: usize, phase: u32) -> bool {
    let end = phase.saturating_add(parts[index].millis.min(WHOLE));
    let meets = |(begin, other_end): (u32, u32)| begin < end && phase < other_end;
    end <= WHOLE && !neighbours(parts, placed, index).any(meets)
}

/// The beginning with the least overlap.
fn least_crowded(parts: &[Part<'_>], placed: &[Option<u32>], index: usize) -> u32 {
    let millis = parts[index].millis.min(WHOLE);
    let met = |phase: &u32| {
        neighbours(parts, placed, index)
            .map(|(begin, end)| end.min(phase + millis).saturating_sub(begin.max(*phase)))
            .sum::<u32>()
    };
    starts(parts, placed, index).map(|start| start.min(WHOLE - millis)).min_by_key(met).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(gpus: &[GpuIndex], millis: u32, phase: u32) -> Part<'_> {
        Part { gpus, millis, phase }
    }

    #[test]
    fn parts_follow_one_another_and_who_has_one_keeps_it() {
        assert_eq!(place(&[part(&[0], 250, 0), part(&[0], 750, 0)]), [0, 250]);
        assert_eq!(place(&[part(&[0], 250, 300), part(&[0], 250, 0)]), [300, 0]);
        assert_eq!(place(&[part(&[0], 250, 300), part(&[0], 400, 0)]), [300, 550]);
        assert_eq!(place(&[part(&[0], 900, 0), part(&[1], 900, 0)]), [0, 0], "other GPUs");
    }

    #[test]
    fn parts_move_only_if_there_is_no_room_otherwise() {
        assert_eq!(place(&[part(&[0], 400, 300), part(&[0], 600, 0)]), [600, 0]);
        let grown = [part(&[0], 500, 0), part(&[0], 500, 400)];
        assert_eq!(place(&grown), [0, 500]);
    }

    #[test]
    fn a_gang_has_the_same_part_on_all_its_gpus() {
        let parts = [part(&[0], 500, 0), part(&[1], 500, 500), part(&[0, 1], 500, 0)];
        let phases = place(&parts);
        assert_eq!(phases[2], 0, "{phases:?}");
        assert_eq!(phases[..2], [500, 500], "both had to go where the gang is not: {phases:?}");
    }

    #[test]
    fn more_than_a_gpu_overlaps_as_little_as_it_can() {
        assert_eq!(place(&[part(&[0], 1000, 0), part(&[0], 1000, 0)]), [0, 0]);
        assert_eq!(place(&[part(&[0], 600, 0), part(&[0], 600, 0)]), [0, 400]);
    }

    proptest! {
        #[test]
        fn shares_that_sum_to_a_gpu_never_overlap(
            millis in prop::collection::vec(1u32..300, 1..20),
            phases in prop::collection::vec(0u32..1000, 20),
        ) {
            let mut sum = 0;
            let fit = |m: &u32| { sum += m; sum <= WHOLE };
            let millis: Vec<u32> = millis.into_iter().take_while(fit).collect();
            let parts: Vec<Part<'_>> =
                millis.iter().zip(&phases).map(|(m, p)| part(&[0], *m, *p)).collect();
            let placed = place(&parts);
            let mut spans: Vec<(u32, u32)> =
                placed.iter().zip(&millis).map(|(p, m)| (*p, p + m)).collect();
            spans.sort_unstable();
            prop_assert!(spans.iter().all(|(_, end)| *end <= WHOLE), "{spans:?}");
            prop_assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0), "{spans:?}");
            // No part moves twice.
            let again: Vec<Part<'_>> =
                millis.iter().zip(&placed).map(|(m, p)| part(&[0], *m, *p)).collect();
            prop_assert_eq!(place(&again), placed);
        }

        #[test]
        fn there_is_a_phase_for_everybody_whatever_they_want(
            wanted in prop::collection::vec(
                (0u32..1200, prop::collection::vec(0u8..3, 1..3), 0u32..5000), 0..20),
        ) {
            let parts: Vec<Part<'_>> = wanted.iter().map(|(m, g, p)| part(g, *m, *p)).collect();
            let placed = place(&parts);
            prop_assert_eq!(placed.len(), parts.len());
            prop_assert!(placed.iter().all(|phase| *phase <= WHOLE));
        }
    }
}
