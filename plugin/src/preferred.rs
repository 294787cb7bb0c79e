//! `GetPreferredAllocation`: which free replicas suit best. Only a hint: kubelet may hand out others.
//!
//! One GPU if it can be. Among those that can: the fullest (packed), so that whole GPUs stay free,
//! or the emptiest (distributed), so that neighbours are few. Where several GPUs are needed: those on
//! the NUMA nodes already in use first, then as few as possible (packed) or as even as possible
//! (distributed).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::config::Placement;
use crate::replica::Replica;

/// Chooses `size` of `available`, all of `must_include` among them. Ids that are no replica's are
/// never proposed, but kept where kubelet insists on them. `numa` gives a GPU's NUMA node.
#[must_use]
pub fn preferred(
    available: &[String],
    must_include: &[String],
    size: usize,
    placement: Placement,
    numa: &dyn Fn(&str) -> Option<u32>,
) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::with_capacity(size.min(available.len()));
    let mut seen = BTreeSet::new();
    for id in must_include {
        if chosen.len() < size && seen.insert(id.as_str()) {
            chosen.push(id.clone());
        }
    }
    let mut free: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for replica in available.iter().filter_map(|id| Replica::parse(id)) {
        if !seen.contains(replica.to_string().as_str()) {
            free.entry(replica.uuid).or_default().insert(replica.index);
        }
    }
    let mut used: BTreeMap<String, usize> = BTreeMap::new();
    for replica in chosen.iter().filter_map(|id| Replica::parse(id)) {
        *used.entry(replica.uuid).or_default() += 1;
    }
    while chosen.len() < size {
        let Some(uuid) = next_gpu(&free, &used, size - chosen.len(), placement, numa) else {
            break;
        };
        let Some(indexes) = free.get_mut(&uuid) else { break };
        let Some(index) = indexes.pop_first() else { break };
        if indexes.is_empty() {
            free.remove(&uuid);
        }
        *used.entry(uuid.clone()).or_default() += 1;
        chosen.push(Replica { uuid, index }.to_string());
    }
    chosen
}

/// The GPU to take the next replica from, `wanted` of which are still to come.
fn next_gpu(
    free: &BTreeMap<String, BTreeSet<u32>>,
    used: &BTreeMap<String, usize>,
    wanted: usize,
    placement: Placement,
    numa: &dyn Fn(&str) -> Option<u32>,
) -> Option<String> {
    let nodes: BTreeSet<u32> = used.keys().filter_map(|uuid| numa(uuid)).collect();
    let rank = |uuid: &String, count: usize| {
        let enough = count >= wanted;
        // One GPU: the one in use if it is the only one, else any that has enough by itself.
        let alone = enough && (used.is_empty() || (used.len() == 1 && used.contains_key(uuid)));
        let near = numa(uuid).is_some_and(|node| nodes.contains(&node));
        let size = match placement {
            // Fullest GPU that has enough; where none has, the one that covers most.
            Placement::Packed if enough => count,
            Placement::Packed => usize::MAX - count,
            Placement::Distributed => usize::MAX - count,
        };
        // A GPU already in use adds no neighbour GPU; distributed prefers evenness instead, once
        // one GPU is not enough.
        let share = match placement {
            Placement::Packed => usize::from(!used.contains_key(uuid)),
            Placement::Distributed => used.get(uuid).copied().unwrap_or(0),
        };
        (Reverse(alone), share, Reverse(near), size)
    };
    free.iter()
        .min_by_key(|(uuid, indexes)| (rank(uuid, indexes.len()), (*uuid).clone()))
        .map(|(uuid, _)| uuid.clone())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(list: &[(&str, std::ops::Range<u32>)]) -> Vec<String> {
        list.iter()
            .flat_map(|(uuid, range)| range.clone().map(move |n| format!("{uuid}::{n}")))
            .collect()
    }

    fn choose(available: &[String], must: &[String], size: usize, how: Placement) -> Vec<String> {
        preferred(available, must, size, how, &|_| None)
    }

    #[test]
    fn packed_fills_the_fullest_gpu_that_has_room() {
        let available = ids(&[("GPU-a", 0..4), ("GPU-b", 2..4), ("GPU-c", 3..4)]);
        assert_eq!(choose(&available, &[], 1, Placement::Packed), ["GPU-c::3"]);
        assert_eq!(choose(&available, &[], 2, Placement::Packed), ["GPU-b::2", "GPU-b::3"]);
    }

    #[test]
    fn distributed_takes_the_emptiest_gpu() {
        let available = ids(&[("GPU-a", 2..4), ("GPU-b", 0..4), ("GPU-c", 3..4)]);
        assert_eq!(choose(&available, &[], 1, Placement::Distributed), ["GPU-b::0"]);
        assert_eq!(choose(&available, &[], 2, Placement::Distributed), ["GPU-b::0", "GPU-b::1"]);
    }

    #[test]
    fn what_must_be_included_draws_the_rest_to_its_gpu() {
        let available = ids(&[("GPU-a", 0..4), ("GPU-b", 1..4)]);
        let must = ids(&[("GPU-b", 1..2)]);
        for how in [Placement::Packed, Placement::Distributed] {
            assert_eq!(choose(&available, &must, 2, how), ["GPU-b::1", "GPU-b::2"]);
        }
    }

    #[test]
    fn several_gpus_are_as_few_or_as_even_as_can_be() {
        let available = ids(&[("GPU-a", 0..3), ("GPU-b", 0..3), ("GPU-c", 0..3)]);
        let packed = choose(&available, &[], 4, Placement::Packed);
        assert_eq!(packed, ["GPU-a::0", "GPU-a::1", "GPU-a::2", "GPU-b::0"]);
        let even = choose(&available, &[], 4, Placement::Distributed);
        let gpus: BTreeSet<_> = even.iter().map(|id| &id[..5]).collect();
        assert_eq!(gpus.len(), 3, "{even:?}");
    }

    #[test]
    fn a_second_gpu_is_sought_on_the_same_numa_node() {
        let available = ids(&[("GPU-a", 0..2), ("GPU-b", 0..2), ("GPU-c", 0..2)]);
        let numa = |uuid: &str| Some(u32::from(uuid == "GPU-b"));
        let chosen = preferred(&available, &[], 4, Placement::Packed, &numa);
        assert_eq!(chosen, ids(&[("GPU-a", 0..2), ("GPU-c", 0..2)]));
    }

    proptest! {
        #[test]
        fn a_choice_is_a_set_of_what_was_offered(
            offered in prop::collection::btree_set((0u8..4, 0u32..6), 0..20),
            must_count in 0usize..4,
            extra in 0usize..8,
            packed: bool,
        ) {
            let available: Vec<String> =
                offered.iter().map(|(gpu, n)| format!("GPU-{gpu}::{n}")).collect();
            let must: Vec<String> = available.iter().take(must_count).cloned().collect();
            let size = must.len() + extra;
            let how = if packed { Placement::Packed } else { Placement::Distributed };
            let chosen = choose(&available, &must, size, how);

            prop_assert_eq!(chosen.len(), size.min(available.len()));
            let set: BTreeSet<_> = chosen.iter().collect();
            prop_assert_eq!(set.len(), chosen.len(), "no replica twice");
            prop_assert!(chosen.iter().all(|id| available.contains(id)));
            prop_assert!(must.iter().all(|id| chosen.contains(id)));
        }

        #[test]
        fn one_gpu_if_it_can_be(
            offered in prop::collection::btree_set((0u8..4, 0u32..6), 1..20),
            size in 1usize..6,
            packed: bool,
        ) {
            let available: Vec<String> =
                offered.iter().map(|(gpu, n)| format!("GPU-{gpu}::{n}")).collect();
            let can = (0..4).any(|gpu| offered.iter().filter(|(g, _)| *g == gpu).count() >= size);
            let how = if packed { Placement::Packed } else { Placement::Distributed };
            let chosen = choose(&available, &[], size, how);
            let gpus: BTreeSet<_> = chosen.iter().map(|id| id.split("::").next()).collect();
            prop_assert!(!can || gpus.len() == 1, "{chosen:?}");
        }

        #[test]
        fn no_input_panics(
            available in prop::collection::vec("[a-c:0-9]{0,8}", 0..6),
            must in prop::collection::vec("[a-c:0-9]{0,8}", 0..6),
            size in 0usize..9,
        ) {
            let _ = choose(&available, &must, size, Placement::Packed);
        }
    }
}
