//! Shares that one process has together are one tenant. Pure.
//!
//! A process with several shares keeps to the gate of one of them and joins the others: their GPU time is the
//! first one's, and their GPUs are its gang's, for as long as such a process lives. A share that others use
//! as well (its own processes, or those of another gate) is divided evenly among those that use it, so that
//! none of it counts twice.
//!
//! Each connection says once of which process it is, so there is at most one entry for each; a process has at
//! most [`MAX_SHARES`] shares, so an entry costs no more than that. Only shares that processes link, directly or
//! through others, are ever looked at together.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use tessera_region::share::MAX_SHARES;

use super::policy::{GpuIndex, Share, ShareKind};

/// Connections of one process at one gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Gate {
    connections: u32,
    /// Those on which it said that it keeps to this gate.
    leads: u32,
}

/// Which processes have which shares.
#[derive(Debug, Default)]
pub(super) struct LinkedShares {
    /// What the process of each connection, by tenant and number, is called, and whether it keeps to that gate.
    connections: BTreeMap<(u32, u32), (u64, bool)>,
    /// The gates of each process, by tenant.
    processes: BTreeMap<u64, BTreeMap<u32, Gate>>,
    /// How many processes keep to the gate of the first tenant and have the share of the second.
    uses: BTreeMap<(u32, u32), u32>,
    /// The same pairs, the second tenant first.
    used_by: BTreeSet<(u32, u32)>,
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
    /// A process has joined a tenant's gate on this connection, which has said nothing of the kind before. Adds
    /// the tenants whose parts that may change to `moved`. False, and nothing else, if it cannot be: the
    /// connection has joined, or the process has as many shares as it can have.
    pub fn join(
        &mut self,
        token: u64,
        tenant: u32,
        connection: u32,
        leads: bool,
        moved: &mut BTreeSet<u32>,
    ) -> bool {
        let gates = self.processes.get(&token);
        let is_full =
            gates.is_some_and(|gates| gates.len() >= MAX_SHARES && !gates.contains_key(&tenant));
        let Entry::Vacant(entry) = self.connections.entry((tenant, connection)) else {
            return false;
        };
        if is_full {
            return false;
        }
        entry.insert((token, leads));
        let gate = self.gate(token, tenant);
        let now = Gate { connections: gate.connections + 1, leads: gate.leads + u32::from(leads) };
        self.set_gate(token, tenant, now, moved);
        true
    }

    /// A connection has ended. Adds the tenants whose parts that may change to `moved`.
    pub fn left(&mut self, tenant: u32, connection: u32, moved: &mut BTreeSet<u32>) {
        let Some((token, leads)) = self.connections.remove(&(tenant, connection)) else { return };
        let gate = self.gate(token, tenant);
        let now = Gate {
            connections: gate.connections.saturating_sub(1),
            leads: gate.leads.saturating_sub(u32::from(leads)),
        };
        self.set_gate(token, tenant, now, moved);
    }

    /// A tenant is no more. Adds the tenants whose parts that may change to `moved`.
    pub fn released(&mut self, tenant: u32, moved: &mut BTreeSet<u32>) {
        let of = self.connections.range((tenant, 0)..=(tenant, u32::MAX));
        let ended: Vec<u32> = of.map(|((_, connection), _)| *connection).collect();
        for connection in ended {
            self.left(tenant, connection, moved);
        }
    }

    /// Whether processes link this share to another, or keep to its gate among others.
    pub fn has(&self, tenant: u32) -> bool {
        self.of(tenant).next().is_some() || self.users_of(tenant).next().is_some()
    }

    /// This tenant and all that are linked to it, directly or through others.
    pub fn with(&self, tenant: u32) -> BTreeSet<u32> {
        let (mut found, mut new) = (BTreeSet::from([tenant]), vec![tenant]);
        while let Some(tenant) = new.pop() {
            let near = self.of(tenant).chain(self.users_of(tenant));
            new.extend(near.filter(|other| found.insert(*other)));
        }
        found
    }

    /// For each of these tenants, the GPUs that it is to hold together and its share of them. They are all that
    /// are linked to each other.
    pub fn divide(&self, own: &BTreeMap<u32, OwnShare>) -> BTreeMap<u32, (Vec<GpuIndex>, Share)> {
        let part = |of: u32| {
            let leads = self.users_of(of).filter(|lead| *lead != of && own.contains_key(lead));
            let itself = own[&of].is_used || self.uses.contains_key(&(of, of));
            let users = leads.count() + usize::from(itself);
            own[&of].share.millis / u32::try_from(users.max(1)).unwrap_or(u32::MAX)
        };
        own.keys()
            .map(|&tenant| {
                let mut shares: BTreeSet<u32> =
                    self.of(tenant).filter(|share| own.contains_key(share)).collect();
                shares.insert(tenant);
                let shares: Vec<u32> = shares.into_iter().collect();
                (tenant, together(&shares, own, part))
            })
            .collect()
    }

    /// The shares that processes at this tenant's gate have.
    fn of(&self, tenant: u32) -> impl Iterator<Item = u32> + '_ {
        self.uses.range((tenant, 0)..=(tenant, u32::MAX)).map(|((_, of), _)| *of)
    }

    /// The tenants to whose gates processes with this share keep.
    fn users_of(&self, tenant: u32) -> impl Iterator<Item = u32> + '_ {
        self.used_by.range((tenant, 0)..=(tenant, u32::MAX)).map(|(_, lead)| *lead)
    }

    fn gate(&self, token: u64, tenant: u32) -> Gate {
        let gates = self.processes.get(&token);
        gates.and_then(|gates| gates.get(&tenant)).copied().unwrap_or_default()
    }

    /// Changes the connections of a process at a gate, and with them which shares it links.
    fn set_gate(&mut self, token: u64, tenant: u32, now: Gate, moved: &mut BTreeSet<u32>) {
        let links = |gate: Gate| (gate.connections > 0, gate.leads > 0);
        let changes = links(self.gate(token, tenant)) != links(now);
        if changes {
            self.count_uses(token, false, moved);
        }
        let gates = self.processes.entry(token).or_default();
        if now == Gate::default() {
            gates.remove(&tenant);
        } else {
            gates.insert(tenant, now);
        }
        if gates.is_empty() {
            self.processes.remove(&token);
        }
        if changes {
            self.count_uses(token, true, moved);
        }
    }

    /// A process counts once for each pair of a gate that it keeps to and a share that it has: from now on, or no more.
    fn count_uses(&mut self, token: u64, counts: bool, moved: &mut BTreeSet<u32>) {
        let Some(gates) = self.processes.get(&token) else { return };
        for (lead, _) in gates.iter().filter(|(_, gate)| gate.leads > 0) {
            for share in gates.keys() {
                moved.extend([*lead, *share]);
                let count = self.uses.entry((*lead, *share)).or_default();
                *count = if counts { *count + 1 } else { count.saturating_sub(1) };
                if *count == 0 {
                    self.uses.remove(&(*lead, *share));
                    self.used_by.remove(&(*share, *lead));
                } else {
                    self.used_by.insert((*share, *lead));
                }
            }
        }
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
                assert!(joins(&mut links, token, *gate, u32::try_from(token).unwrap(), at == 0).0);
            }
        }
        links
    }

    /// Whether it joined, and who moved.
    fn joins(
        links: &mut LinkedShares,
        token: u64,
        tenant: u32,
        connection: u32,
        leads: bool,
    ) -> (bool, Vec<u32>) {
        let mut moved = BTreeSet::new();
        let joined = links.join(token, tenant, connection, leads, &mut moved);
        (joined, moved.into_iter().collect())
    }

    fn leaves(links: &mut LinkedShares, tenant: u32, connection: u32) -> Vec<u32> {
        let mut moved = BTreeSet::new();
        links.left(tenant, connection, &mut moved);
        moved.into_iter().collect()
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
        assert_eq!(leaves(&mut links, 1, 1), [0, 1]);
        assert!(leaves(&mut links, 1, 1).is_empty());
        assert_eq!(of(&links, &own, 0).1, 300);
        leaves(&mut links, 0, 1);
        assert!(links.connections.is_empty() && links.processes.is_empty());
        assert!(links.uses.is_empty() && links.used_by.is_empty());
        let mut links = linked(&[&[0, 1]]);
        links.released(1, &mut BTreeSet::new());
        assert_eq!(of(&links, &own, 0).1, 300);
    }

    #[test]
    fn a_connection_is_of_one_process_and_a_process_has_so_many_shares() {
        let mut links = linked(&[&[0, 1]]);
        assert!(!joins(&mut links, 7, 0, 1, true).0, "it is the first one's");
        assert_eq!(joins(&mut links, 1, 1, 2, false), (true, vec![]), "nothing new");
        assert!(leaves(&mut links, 1, 1).is_empty(), "the other connection is left");
        for tenant in 2..40 {
            assert_eq!(joins(&mut links, 1, tenant, 1, false).0, tenant < 16, "{tenant}");
        }
        assert_eq!(links.processes[&1].len(), MAX_SHARES);
        assert_eq!(links.with(15), (0..16).collect());
        assert_eq!(links.with(16), BTreeSet::from([16]));
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
                for (at, gate) in (0..).zip(gates) {
                    let connection = 10 * u32::try_from(token).unwrap() + at;
                    joins(&mut links, token, *gate, connection, at == 0);
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

        /// After any joining and leaving each tenant has what follows from what is left, and only those that
        /// were named have moved.
        #[test]
        fn what_is_kept_is_what_follows_from_the_connections(
            steps in prop::collection::vec((any::<bool>(), 0u64..4, 0u32..5, 0u32..4, any::<bool>()), 0..60),
            used in prop::collection::vec(any::<bool>(), 5),
        ) {
            let one = |(at, is_used): (u32, &bool)| {
                let share = Share { millis: 100 * (at + 1), kind: BURST };
                (at, OwnShare { gpus: vec![u8::try_from(at % 2).unwrap()], share, is_used: *is_used })
            };
            let own: BTreeMap<u32, OwnShare> = (0..).zip(&used).map(one).collect();
            let mut links = LinkedShares::default();
            let mut said: BTreeMap<(u32, u32), (u64, bool)> = BTreeMap::new();
            for (comes, token, tenant, connection, leads) in steps {
                let before = links.divide(&own);
                let mut moved = BTreeSet::new();
                if comes {
                    if links.join(token, tenant, connection, leads, &mut moved) {
                        prop_assert!(said.insert((tenant, connection), (token, leads)).is_none());
                    }
                } else {
                    links.left(tenant, connection, &mut moved);
                    said.remove(&(tenant, connection));
                }
                let all = links.divide(&own);
                // Everybody whose part has changed is told of, or linked to somebody who is.
                let told: BTreeSet<u32> = moved.iter().flat_map(|at| links.with(*at)).collect();
                for (tenant, now) in &all {
                    prop_assert!(told.contains(tenant) || before[tenant] == *now, "{tenant}");
                }
                // Those that are linked, alone, come to the same as all.
                for tenant in own.keys() {
                    let linked = links.with(*tenant);
                    let some = own.iter().filter(|(at, _)| linked.contains(at));
                    let some = links.divide(&some.map(|(at, own)| (*at, own.clone())).collect());
                    prop_assert_eq!(&some[tenant], &all[tenant]);
                }
                prop_assert_eq!(&links.connections, &said);
                let mut anew = LinkedShares::default();
                for (&(tenant, connection), &(token, leads)) in &said {
                    anew.join(token, tenant, connection, leads, &mut BTreeSet::new());
                }
                prop_assert_eq!(format!("{links:?}"), format!("{anew:?}"));
            }
        }
    }
}
