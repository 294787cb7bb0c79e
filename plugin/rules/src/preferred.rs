//! `GetPreferredAllocation`: which free replicas suit best. Only a hint: kubelet may assign others.
//!
//! In this order: as few GPUs as can be, beside those that kubelet insists on, or (`split = "distinct"`) one
//! for each replica; as few suspect ones; the nearest to each other (NVLink before a common PCIe switch,
//! before a NUMA node, before the rest); the fullest (packed), so that whole GPUs stay free, or the emptiest
//! (distributed), so that neighbours are few; near GPUs that are in use, or (distributed) far from them; the
//! first by UUID.
//!
//! It runs while kubelet admits a pod and admits no other. For R replicas on G GPUs it takes
//! O(R log R + G⁵) steps, a few hundred thousand for sixteen GPUs: from each GPU as the first, the set grows
//! by the GPU or the pair of GPUs that is nearest to it, and the best of those G sets is taken. That is not
//! always the nearest of all sets, to find which would take time exponential in G.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tessera_model::replica::Replica;
use tessera_model::sharing::{Placement, Split};
use tessera_model::topology::Topology;

pub struct PlacementContext<'a> {
    pub placement: Placement,
    pub split: Split,
    pub topology: &'a Topology,
    pub suspect: &'a dyn Fn(&str) -> bool,
}

/// Chooses `size` of `available`, all of `must_include` among them. Ids that are no replica's are
/// never proposed, but kept where kubelet insists on them.
pub fn preferred(
    available: &[String],
    must_include: &[String],
    size: usize,
    context: &PlacementContext<'_>,
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
    // Replicas that each GPU gives to this container.
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for replica in chosen.iter().filter_map(|id| Replica::parse(id)) {
        *taken.entry(replica.uuid).or_default() += 1;
    }
    let gpus = Gpus::new(&free, &taken, context).choose(size - chosen.len());
    let set: Vec<String> = gpus.into_iter().map(str::to_owned).collect();
    while chosen.len() < size {
        let may_give = |uuid: &&String| {
            free.contains_key(*uuid)
                && !(context.split == Split::Distinct && taken.contains_key(*uuid))
        };
        let mut open = set.iter().filter(may_give);
        let next = match context.placement {
            // One after the other, those that must be among them first.
            Placement::Packed => open.next(),
            // The one with the least.
            Placement::Distributed => open.min_by_key(|uuid| taken.get(*uuid)),
        };
        let Some(uuid) = next else { break };
        let Some(indexes) = free.get_mut(uuid) else { break };
        let Some(index) = indexes.pop_first() else { break };
        if indexes.is_empty() {
            free.remove(uuid);
        }
        *taken.entry(uuid.clone()).or_default() += 1;
        chosen.push(Replica { uuid: uuid.clone(), index }.to_string());
    }
    chosen
}

struct Gpus<'a> {
    list: Vec<Gpu<'a>>,
    near: Vec<u32>,
    placement: Placement,
}

struct Gpu<'a> {
    uuid: &'a str,
    free: usize,
    gives: usize,
    /// Already the container's.
    must: bool,
    suspect: bool,
    /// How near it is to GPUs that others use.
    busy: u32,
}

/// What makes a GPU, or a set of them, better: the smallest is the best.
type Rank = (usize, Reverse<u64>, i128, i128);

impl<'a> Gpus<'a> {
    fn new(
        free: &'a BTreeMap<String, BTreeSet<u32>>,
        taken: &'a BTreeMap<String, usize>,
        context: &PlacementContext<'_>,
    ) -> Self {
        let uuids: BTreeSet<&str> = free.keys().chain(taken.keys()).map(String::as_str).collect();
        let count = |uuid: &str| free.get(uuid).map_or(0, BTreeSet::len);
        // One with less left than another is in use, as is one with nothing left. GPUs that are cut
        // differently may be taken for used; it decides last.
        let most = uuids.iter().map(|uuid| count(uuid)).max().unwrap_or(0);
        let known = context.topology.uuids().iter().map(String::as_str);
        let used: Vec<&str> = known.filter(|uuid| count(uuid) < most).collect();
        let weight = |a: &str, b: &str| context.topology.nearness(a, b).weight();
        let list: Vec<Gpu<'a>> = uuids
            .iter()
            .map(|uuid| Gpu {
                uuid,
                free: count(uuid),
                gives: match (context.split, taken.contains_key(*uuid)) {
                    (Split::Distinct, true) => 0,
                    (Split::Distinct, false) => count(uuid).min(1),
                    (Split::Reject | Split::Spread, _) => count(uuid),
                },
                must: taken.contains_key(*uuid),
                suspect: (context.suspect)(uuid),
                busy: used.iter().map(|other| weight(uuid, other)).sum(),
            })
            .collect();
        let near = list.iter().flat_map(|a| list.iter().map(|b| weight(a.uuid, b.uuid))).collect();
        Gpus { list, near, placement: context.placement }
    }

    /// The GPUs to take `wanted` replicas from: those that must be, then the others.
    fn choose(&self, wanted: usize) -> Vec<&'a str> {
        let base: Vec<usize> = (0..self.list.len()).filter(|&i| self.list[i].must).collect();
        let missing = wanted.saturating_sub(base.iter().map(|&i| self.list[i].gives).sum());
        let others = |suspects: bool| -> Vec<usize> {
            let open = |gpu: &Gpu<'_>| !gpu.must && gpu.gives > 0 && (suspects || !gpu.suspect);
            (0..self.list.len()).filter(|&i| open(&self.list[i])).collect()
        };
        let all = others(true);
        let (pool, count) = match (self.fewest(&all, missing), self.fewest(&others(false), missing))
        {
            (Some(few), Some(sound)) if sound == few => (others(false), few),
            (Some(few), _) => (all, few),
            // Not enough anywhere: all there is.
            (None, _) => {
                let count = all.len();
                (all, count)
            }
        };
        let mut best: Option<(Rank, Vec<usize>)> = None;
        let firsts = if count == 0 { vec![None] } else { pool.iter().copied().map(Some).collect() };
        for first in firsts {
            let Some(set) = self.grow(&base, &pool, first, count, missing) else { continue };
            let rank = self.rank(&set);
            if best.as_ref().is_none_or(|(known, _)| rank < *known) {
                best = Some((rank, set));
            }
        }
        let set = best.map_or(base, |(_, set)| set);
        set.into_iter().map(|i| self.list[i].uuid).collect()
    }

    /// How many of the pool it takes at least to have `missing` replicas.
    fn fewest(&self, pool: &[usize], missing: usize) -> Option<usize> {
        let mut counts: Vec<usize> = pool.iter().map(|&i| self.list[i].gives).collect();
        counts.sort_unstable_by_key(|&count| Reverse(count));
        let mut sum = 0;
        (0..=counts.len()).find(|&n| {
            sum += if n > 0 { counts[n - 1] } else { 0 };
            sum >= missing
        })
    }

    /// `base` and `count` of the pool, `first` the first of them, then each time the best that leaves
    /// the rest enough.
    fn grow(
        &self,
        base: &[usize],
        pool: &[usize],
        first: Option<usize>,
        count: usize,
        missing: usize,
    ) -> Option<Vec<usize>> {
        let total: usize = pool.iter().map(|&i| self.list[i].gives).sum();
        let missing = missing.min(total);
        // Who gives least last, so that sums of the most need no sorting.
        let mut left: Vec<usize> = pool.to_vec();
        left.sort_by_key(|&i| Reverse(self.list[i].gives));
        let (mut set, mut have, mut still) = (base.to_vec(), 0, count);
        while still > 0 {
            // One GPU, or two: a pair may be worth more together than each alone.
            let size = |(i, j): (usize, usize)| if i == j { 1 } else { 2 };
            let gives = |(i, j): (usize, usize)| {
                self.list[i].gives + if i == j { 0 } else { self.list[j].gives }
            };
            let enough = |&next: &(usize, usize)| {
                let others = left.iter().filter(|&&k| k != next.0 && k != next.1);
                let rest: usize =
                    others.take(still - size(next)).map(|&k| self.list[k].gives).sum();
                have + gives(next) + rest >= missing
            };
            let next = match first {
                Some(first) if set.len() == base.len() => {
                    Some((first, first)).filter(|next| enough(next))?
                }
                _ => {
                    let gains: Vec<u64> = (0..self.list.len())
                        .map(|i| set.iter().map(|&j| u64::from(self.between(i, j))).sum())
                        .collect();
                    let pairs = left.iter().flat_map(|&i| left.iter().map(move |&j| (i, j)));
                    pairs
                        .filter(|&(i, j)| i == j || (i < j && still > 1))
                        .filter(enough)
                        // One counts twice, to be compared with two.
                        .min_by_key(|&(i, j)| {
                            let both = if i == j { 0 } else { u64::from(self.between(i, j)) };
                            (self.cost(&[i, j], gains[i] + gains[j] + both), i, j)
                        })?
                }
            };
            left.retain(|&k| k != next.0 && k != next.1);
            have += gives(next);
            still -= size(next);
            set.push(next.0);
            if next.0 != next.1 {
                set.push(next.1);
            }
        }
        Some(set)
    }

    fn between(&self, a: usize, b: usize) -> u32 {
        self.near[a * self.list.len() + b]
    }

    fn rank(&self, set: &[usize]) -> Rank {
        let pairs = set
            .iter()
            .enumerate()
            .flat_map(|(n, &i)| set[..n].iter().map(move |&j| u64::from(self.between(i, j))));
        self.cost(set, pairs.sum())
    }

    fn cost(&self, set: &[usize], near: u64) -> Rank {
        let gpus = || set.iter().map(|&i| &self.list[i]);
        let suspects = gpus().filter(|gpu| gpu.suspect).count();
        let free: i128 = gpus().map(|gpu| gpu.free as i128).sum();
        let busy: i128 = gpus().map(|gpu| i128::from(gpu.busy)).sum();
        match self.placement {
            Placement::Packed => (suspects, Reverse(near), free, -busy),
            Placement::Distributed => (suspects, Reverse(near), -free, busy),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tessera_model::topology::Nearness;

    fn ids(list: &[(&str, std::ops::Range<u32>)]) -> Vec<String> {
        list.iter()
            .flat_map(|(uuid, range)| range.clone().map(move |n| format!("{uuid}::{n}")))
            .collect()
    }

    /// A node, and how it is asked.
    struct Node {
        topology: Topology,
        placement: Placement,
        split: Split,
        suspects: BTreeSet<String>,
    }

    impl Default for Node {
        fn default() -> Self {
            Node {
                topology: Topology::default(),
                placement: Placement::Packed,
                split: Split::Spread,
                suspects: BTreeSet::new(),
            }
        }
    }

    impl Node {
        fn choose(&self, available: &[String], must: &[String], size: usize) -> Vec<String> {
            let Node { placement, split, topology, suspects } = self;
            let suspect = |uuid: &str| suspects.contains(uuid);
            let (placement, split) = (*placement, *split);
            let context = PlacementContext { placement, split, topology, suspect: &suspect };
            preferred(available, must, size, &context)
        }
    }

    fn choose(
        available: &[String],
        must: &[String],
        size: usize,
        placement: Placement,
    ) -> Vec<String> {
        Node { placement, ..Node::default() }.choose(available, must, size)
    }

    /// GPU-a, GPU-b, … with the nearness that `pair` gives to their numbers.
    fn machine(gpus: u32, pair: impl Fn(u32, u32) -> Nearness) -> Topology {
        let letter = |n: u32| char::from(b'a' + u8::try_from(n).unwrap());
        let gpus: Vec<_> = (0..gpus)
            .map(|n| tessera_model::gpu::Gpu::example(&format!("GPU-{}", letter(n)), n))
            .collect();
        Topology::of(&gpus, |a, b| pair(a.index, b.index))
    }

    fn gpus_of(ids: &[String]) -> String {
        let mut letters: Vec<&str> = ids.iter().map(|id| &id[4..5]).collect();
        letters.dedup();
        letters.concat()
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
        assert_eq!(even, ["GPU-a::0", "GPU-b::0", "GPU-a::1", "GPU-b::1"]);
    }

    #[test]
    fn a_second_gpu_is_sought_on_the_same_numa_node() {
        let available = ids(&[("GPU-a", 0..2), ("GPU-b", 0..2), ("GPU-c", 0..2)]);
        let node = |n| if n == 1 { 1 } else { 0 };
        let topology = machine(3, |a, b| match node(a) == node(b) {
            true => Nearness::Node,
            false => Nearness::System,
        });
        let chosen = Node { topology, ..Node::default() }.choose(&available, &[], 4);
        assert_eq!(chosen, ids(&[("GPU-a", 0..2), ("GPU-c", 0..2)]));
    }

    /// Eight GPUs: two NUMA nodes, NVLink between neighbours (ab cd ef gh), a switch for four.
    fn pairs_of_links() -> Topology {
        machine(8, |a, b| match (a / 2 == b / 2, a / 4 == b / 4) {
            (true, _) => Nearness::NvLink(4),
            (_, true) => Nearness::Switch,
            _ => Nearness::System,
        })
    }

    fn all(gpus: &str, count: u32) -> Vec<String> {
        gpus.chars().flat_map(|gpu| (0..count).map(move |n| format!("GPU-{gpu}::{n}"))).collect()
    }

    #[test]
    fn linked_gpus_go_before_switched_and_those_before_the_rest() {
        for placement in [Placement::Packed, Placement::Distributed] {
            let node = Node { topology: pairs_of_links(), placement, ..Node::default() };
            let choose = |gpus, size| {
                let chosen = node.choose(&all(gpus, 1), &[], size);
                let sorted: BTreeSet<String> = chosen.into_iter().collect();
                gpus_of(&sorted.into_iter().collect::<Vec<_>>())
            };
            assert_eq!(choose("abcdefgh", 2), "ab");
            assert_eq!(choose("acdefg", 2), "cd");
            assert_eq!(choose("acefg", 2), "ef");
            assert_eq!(choose("aceg", 2), "ac");
            assert_eq!(choose("ae", 2), "ae");
            assert_eq!(choose("abcdefgh", 4), "abcd");
            assert_eq!(choose("abefgh", 4), "efgh");
            assert_eq!(choose("acdefg", 3), "acd");
            assert_eq!(choose("abgh", 4), "abgh");
            assert_eq!(choose("acefgh", 4), "efgh");
            assert_eq!(choose("abceghd", 4), "abcd");
            // Two linked pairs, before three that are near and a fourth.
            assert_eq!(choose("abcegh", 4), "abgh");
        }
    }

    #[test]
    fn distinct_gpus_are_near_to_each_other_and_chosen_by_placement() {
        let choose = |topology, available: &[String], size, placement| {
            let node = Node { topology, placement, split: Split::Distinct, ..Node::default() };
            let mut chosen = node.choose(available, &[], size);
            chosen.sort_unstable();
            gpus_of(&chosen)
        };
        for how in [Placement::Packed, Placement::Distributed] {
            assert_eq!(choose(pairs_of_links(), &all("acdefg", 4), 2, how), "cd");
            assert_eq!(choose(pairs_of_links(), &all("abefgh", 4), 4, how), "efgh");
        }
        let available = ids(&[("GPU-a", 0..4), ("GPU-b", 1..4), ("GPU-c", 2..4)]);
        assert_eq!(choose(Topology::default(), &available, 2, Placement::Packed), "bc");
        assert_eq!(choose(Topology::default(), &available, 2, Placement::Distributed), "ab");
    }

    #[test]
    fn what_must_be_included_draws_its_neighbour() {
        let node = Node { topology: pairs_of_links(), ..Node::default() };
        assert_eq!(gpus_of(&node.choose(&all("abcdefgh", 1), &all("f", 1), 2)), "fe");
    }

    #[test]
    fn a_suspect_gpu_is_the_last_of_its_kind_but_before_a_split() {
        let suspects = ["GPU-a".to_owned()].into();
        let node = Node { topology: pairs_of_links(), suspects, ..Node::default() };
        let choose = |available: &[String], size| gpus_of(&node.choose(available, &[], size));
        assert_eq!(choose(&all("abcdefgh", 2), 1), "b");
        assert_eq!(choose(&all("a", 2), 1), "a");
        assert_eq!(choose(&all("abcd", 2), 4), "cd", "a and b would be as near");
        assert_eq!(choose(&[all("a", 2), all("bc", 1)].concat(), 2), "a");
    }

    #[test]
    fn packed_stays_near_to_what_is_in_use_and_distributed_goes_away() {
        // b is full, so its neighbour a is next, and the other pairs stay whole.
        let available = all("acdefgh", 2);
        let choose = |placement| {
            let node = Node { topology: pairs_of_links(), placement, ..Node::default() };
            gpus_of(&node.choose(&available, &[], 2))
        };
        assert_eq!(choose(Placement::Packed), "a");
        assert_eq!(choose(Placement::Distributed), "e");
    }

    #[test]
    fn a_large_node_is_no_trouble() {
        let topology = machine(16, |a, b| match a / 8 == b / 8 {
            true => Nearness::NvLink(18),
            false => Nearness::System,
        });
        let (node, available) = (Node { topology, ..Node::default() }, all("abcdefghijklmnop", 64));
        for size in [1, 64, 65, 300, 1024] {
            assert_eq!(node.choose(&available, &[], size).len(), size);
        }
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

        /// Whatever is free and whatever kubelet insists on: each on another GPU where that can be, and never two
        /// on one.
        #[test]
        fn distinct_replicas_are_of_as_many_gpus(
            offered in prop::collection::btree_set((0u8..6, 0u32..4), 0..20),
            held in prop::collection::btree_map(0u8..6, 0u32..4, 0..4),
            extra in 0usize..8,
            packed: bool,
            suspects in prop::collection::btree_set(0u8..6, 0..6),
        ) {
            let name = |(gpu, n): (u8, u32)| format!("GPU-{gpu}::{n}");
            let must: Vec<String> = held.iter().map(|(gpu, n)| name((*gpu, *n))).collect();
            // Kubelet lists among the available those on which it insists.
            let all: BTreeSet<(u8, u32)> =
                offered.iter().copied().chain(held.iter().map(|(gpu, n)| (*gpu, *n))).collect();
            let available: Vec<String> = all.iter().copied().map(name).collect();
            let size = must.len() + extra;
            let node = Node {
                placement: if packed { Placement::Packed } else { Placement::Distributed },
                split: Split::Distinct,
                suspects: suspects.iter().map(|gpu| format!("GPU-{gpu}")).collect(),
                ..Node::default()
            };
            let chosen = node.choose(&available, &must, size);
            let gpus: BTreeSet<_> = chosen.iter().map(|id| id.split("::").next()).collect();
            prop_assert_eq!(gpus.len(), chosen.len(), "{:?}", chosen);
            let possible = all.iter().map(|(gpu, _)| gpu).collect::<BTreeSet<_>>().len();
            prop_assert_eq!(chosen.len(), size.min(possible), "{:?}", chosen);
            prop_assert!(must.iter().all(|id| chosen.contains(id)));
            prop_assert!(chosen.iter().all(|id| available.contains(id)));
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
