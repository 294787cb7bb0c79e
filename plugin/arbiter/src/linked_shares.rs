//! Shares that one process has together are one tenant. Pure.
//!
//! A process with several shares keeps to the gate of one of them and joins the others: their GPU time is the
//! first one's, and their GPUs are its gang's, for as long as such a process lives. A share that others use
//! as well (its own processes, or those of another gate) is divided evenly among those that use it, so that
//! none of it counts twice.

use std::collections::{BTreeMap, BTreeSet};

use super::policy::{GpuIndex, Share, ShareKind};

/// Gates that one process has joined, by its token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Joined {
    /// Connections by the tenant whose gate it is, and whether it keeps to that gate.
    gates: BTreeMap<(u32, u32), bool>,
}

impl Joined {
    fn leads(&self) -> impl Iterator<Item = u32> + '_ {
        self.gates.iter().filter(|(_, leads)| **leads).map(|((tenant, _), _)| *tenant)
    }
}

/// Which processes have which shares.
#[derive(Debug, Default)]
pub(super) struct LinkedShares {
    processes: BTreeMap<u64, Joined>,
}

/// A share, as its own page has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnShare {
    pub gpus: Vec<GpuIndex>,
    pub share: Share,
    /// Whether any process keeps to its gate.
    pub is_used: bool,
}

impl LinkedShares {
    /// A process has joined a tenant's gate on this connection. False if that is known.
    pub fn join(&mut self, token: u64, tenant: u32, connection: u32, leads: bool) -> bool {
        let gates = &mut self.processes.entry(token).or_default().gates;
        gates.insert((tenant, connection), leads) != Some(leads)
    }

    /// A connection has ended. Whether a process had joined there.
    pub fn left(&mut self, tenant: u32, connection: u32) -> bool {
        let mut any = false;
        self.processes.retain(|_, joined| {
            any |= joined.gates.remove(&(tenant, connection)).is_some();
            !joined.gates.is_empty()
        });
        any
    }

    /// A tenant is no more. Whether any process had joined there.
    pub fn released(&mut self, tenant: u32) -> bool {
        let mut any = false;
        self.processes.retain(|_, joined| {
            let before = joined.gates.len();
            joined.gates.retain(|(of, _), _| *of != tenant);
            any |= joined.gates.len() != before;
            !joined.gates.is_empty()
        });
        any
    }

    /// Whether nobody has several shares.
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// For each tenant, the GPUs that it is to hold together and its share of them.
    pub fn divide(&self, own: &BTreeMap<u32, OwnShare>) -> BTreeMap<u32, (Vec<GpuIndex>, Share)> {
        let users = self.users(own);
        let part = |of: u32| {
            let users = users.get(&of).map_or(1, BTreeSet::len).max(1);
            own[&of].share.millis / u32::try_from(users).unwrap_or(u32::MAX)
        };
        own.keys()
            .map(|&tenant| {
                let uses =
                    |of: &u32| *of == tenant || users.get(of).is_some_and(|u| u.contains(&tenant));
                let shares: Vec<u32> = own.keys().copied().filter(uses).collect();
                (tenant, together(&shares, own, part))
            })
            .collect()
    }

    /// The tenants that use each tenant's share, where it is not itself alone.
    fn users(&self, own: &BTreeMap<u32, OwnShare>) -> BTreeMap<u32, BTreeSet<u32>> {
        let mut users: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for joined in self.processes.values() {
            for lead in joined.leads().filter(|lead| own.contains_key(lead)) {
                for (tenant, _) in
                    joined.gates.keys().filter(|(tenant, _)| own.contains_key(tenant))
                {
                    users.entry(*tenant).or_default().insert(lead);
                }
            }
        }
        for (tenant, users) in &mut users {
            if own[tenant].is_used {
                users.insert(*tenant);
            }
        }
        users
    }
}

/// These shares as one: their GPUs, and what they have of all of them at the same time.
fn together(
    shares: &[u32],
    own: &BTreeMap<u32, OwnShare>,
    part: impl Fn(u32) -> u32,
) -> (Vec<GpuIndex>, Share) {
    let gpus: BTreeSet<GpuIndex> =
        shares.iter().flat_map(|share| own[share].gpus.iter().copied()).collect();
    let of_gpu = |gpu: &GpuIndex| {
        let here = || shares.iter().filter(|share| own[share].gpus.contains(gpu));
        let millis = here().fold(0u32, |sum, share| sum.saturating_add(part(*share)));
        // What is no cap may use what others leave idle, and so may the sum.
        (millis, here().all(|share| own[share].share.kind == ShareKind::Strict))
    };
    let each: Vec<_> = gpus.iter().map(of_gpu).collect();
    // A gang's GPUs are leased together, so it gets the least that it has of any.
    let millis = each.iter().map(|(millis, _)| *millis).min().unwrap_or(0).max(1);
    let is_cap = each.iter().any(|(_, is_cap)| *is_cap);
    let kind = if is_cap { ShareKind::Strict } else { ShareKind::Burst };
    (gpus.into_iter().collect(), Share { millis, kind })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn own(shares: &[(&[GpuIndex], u32, ShareKind, bool)]) -> BTreeMap<u32, OwnShare> {
        let one = |&(gpus, millis, kind, is_used): &(&[GpuIndex], u32, ShareKind, bool)| OwnShare {
            gpus: gpus.to_vec(),
            share: Share { millis, kind },
            is_used,
        };
        (0..).zip(shares.iter().map(one)).collect()
    }

    fn linked(processes: &[&[u32]]) -> LinkedShares {
        let mut links = LinkedShares::default();
        for (token, gates) in (1..).zip(processes) {
            for (at, gate) in gates.iter().enumerate() {
                assert!(links.join(token, *gate, 1, at == 0));
            }
        }
        links
    }

    const STRICT: ShareKind = ShareKind::Strict;
    const BURST: ShareKind = ShareKind::Burst;

    fn of(links: &LinkedShares, own: &BTreeMap<u32, OwnShare>, at: u32) -> (Vec<u8>, u32, bool) {
        let (gpus, share) = links.divide(own).remove(&at).unwrap();
        (gpus, share.millis, share.kind == STRICT)
    }

    #[test]
    fn without_links_a_share_is_its_pages() {
        let own = own(&[(&[0, 1], 300, STRICT, true), (&[0], 200, BURST, false)]);
        let links = LinkedShares::default();
        assert_eq!(of(&links, &own, 0), (vec![0, 1], 300, true));
        assert_eq!(of(&links, &own, 1), (vec![0], 200, false));
    }

    #[test]
    fn shares_of_one_gpu_add_up_and_one_that_is_no_cap_lifts_the_others() {
        let links = linked(&[&[0, 1]]);
        let strict = own(&[(&[0], 300, STRICT, true), (&[0], 200, STRICT, false)]);
        assert_eq!(of(&links, &strict, 0), (vec![0], 500, true));
        let mixed = own(&[(&[0], 300, STRICT, true), (&[0], 200, BURST, false)]);
        assert_eq!(of(&links, &mixed, 0), (vec![0], 500, false));
    }

    #[test]
    fn shares_of_two_gpus_are_a_gang_with_the_least_of_them() {
        let links = linked(&[&[0, 1]]);
        let own = own(&[(&[0], 300, BURST, true), (&[3], 200, STRICT, false)]);
        assert_eq!(of(&links, &own, 0), (vec![0, 3], 200, true));
    }

    #[test]
    fn a_share_that_others_use_as_well_is_divided_among_them() {
        // One process with the first and the third, one with the second and the third, some with the third.
        let links = linked(&[&[0, 2], &[1, 2]]);
        let shares: [(&[GpuIndex], u32, ShareKind, bool); 3] =
            [(&[0], 100, STRICT, true), (&[0], 200, STRICT, true), (&[0], 300, STRICT, true)];
        let all: Vec<u32> = (0..3).map(|at| of(&links, &own(&shares), at).1).collect();
        assert_eq!(all, [200, 300, 100]);
    }

    #[test]
    fn what_has_ended_counts_no_more() {
        let own = own(&[(&[0], 300, BURST, true), (&[0], 200, BURST, false)]);
        let mut links = linked(&[&[0, 1]]);
        assert!(!links.join(1, 1, 1, false), "said again");
        assert!(links.left(1, 1) && !links.left(1, 1));
        assert_eq!(of(&links, &own, 0).1, 300);
        assert!(links.left(0, 1) && links.is_empty());
        let mut links = linked(&[&[0, 1]]);
        assert!(links.released(1));
        assert_eq!(of(&links, &own, 0).1, 300);
    }

    proptest! {
        #[test]
        fn no_share_counts_twice(
            shares in prop::collection::vec((0u8..3, 1u32..500, any::<bool>()), 1..6),
            processes in prop::collection::vec(prop::collection::vec(0u32..6, 1..4), 0..6),
        ) {
            let mut own: BTreeMap<u32, OwnShare> = (0..)
                .zip(&shares)
                .map(|(at, &(gpu, millis, _))| {
                    let share = Share { millis, kind: STRICT };
                    (at, OwnShare { gpus: vec![gpu], share, is_used: shares[usize::try_from(at).unwrap()].2 })
                })
                .collect();
            let mut links = LinkedShares::default();
            for (token, gates) in (1..).zip(&processes) {
                for (connection, gate) in (0..).zip(gates) {
                    links.join(token, *gate, connection, connection == 0);
                }
                // The leader is used.
                if let Some(lead) = own.get_mut(&gates[0]) {
                    lead.is_used = true;
                }
            }
            let divided = links.divide(&own);
            for gpu in 0..3u8 {
                let all: u32 = shares.iter().filter(|s| s.0 == gpu).map(|s| s.1).sum();
                let users = |tenant: &u32| own[tenant].is_used;
                let got: u32 = divided
                    .iter()
                    .filter(|(tenant, (gpus, _))| users(tenant) && gpus.contains(&gpu))
                    .map(|(_, (_, share))| share.millis)
                    .sum();
                // A share of less than one for each is one all the same.
                prop_assert!(got <= all + u32::try_from(shares.len()).unwrap(), "{got} of {all}");
            }
        }
    }
}
