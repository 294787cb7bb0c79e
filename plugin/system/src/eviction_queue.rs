//! Connections without a request under way: which of them is closed when there is no room for another.
//! Pure; the listener defines connections and their owners.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Connections in the order in which they came, each with whom it is from and what ends it.
#[derive(Debug)]
pub struct EvictionQueue<P, H> {
    order: BTreeMap<u64, (P, H)>,
    of: HashMap<P, usize>,
    next: u64,
}

impl<P, H> Default for EvictionQueue<P, H> {
    fn default() -> Self {
        EvictionQueue { order: BTreeMap::new(), of: HashMap::new(), next: 0 }
    }
}

impl<P: Clone + Eq + Hash, H> EvictionQueue<P, H> {
    /// One waits from now on.
    pub fn enter(&mut self, peer: P, handle: H) -> u64 {
        let id = self.next;
        self.next += 1;
        *self.of.entry(peer.clone()).or_default() += 1;
        self.order.insert(id, (peer, handle));
        id
    }

    /// One waits no longer. `None` if it was shed before.
    pub fn leave(&mut self, id: u64) -> Option<H> {
        let (peer, handle) = self.order.remove(&id)?;
        if let Some(count) = self.of.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.of.remove(&peer);
            }
        }
        Some(handle)
    }

    /// Takes out the one that has waited longest of those whose peer has most: who floods makes the room
    /// itself.
    pub fn shed(&mut self) -> Option<H> {
        let most = *self.of.values().max()?;
        let heaviest = |peer: &P| self.of.get(peer).is_some_and(|count| *count == most);
        let (id, _) = self.order.iter().find(|(_, (peer, _))| heaviest(peer))?;
        let id = *id;
        self.leave(id)
    }

    /// Connections that wait.
    #[expect(clippy::len_without_is_empty, reason = "only compared with a limit")]
    pub fn len(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_oldest_of_the_peer_with_most_goes_first() {
        let mut waiting = EvictionQueue::default();
        let kubelet = waiting.enter("kubelet", 0);
        for n in 1..4 {
            waiting.enter("pod", n);
        }
        assert_eq!((waiting.shed(), waiting.shed()), (Some(1), Some(2)));
        // One each: the older of the two.
        assert_eq!(waiting.leave(kubelet), Some(0));
        assert_eq!(waiting.leave(kubelet), None);
        assert_eq!((waiting.shed(), waiting.shed(), waiting.len()), (Some(3), None, 0));
    }

    proptest! {
        #[test]
        fn a_peer_with_fewer_than_another_loses_nothing(
            steps in prop::collection::vec((0u8..3, 0u8..5), 1..200),
        ) {
            let mut waiting = EvictionQueue::default();
            let mut model: Vec<(u64, u8)> = Vec::new();
            for (step, peer) in steps {
                match step {
                    0 | 1 => model.push((waiting.enter(peer, (peer, model.len())), peer)),
                    _ => {
                        let count = |peer: u8| model.iter().filter(|(_, p)| *p == peer).count();
                        let most = model.iter().map(|(_, peer)| count(*peer)).max().unwrap_or(0);
                        let first = model.iter().position(|(_, peer)| count(*peer) == most);
                        let shed = waiting.shed().map(|(peer, _)| peer);
                        prop_assert_eq!(shed, first.map(|at| model.remove(at).1));
                    }
                }
                prop_assert_eq!(waiting.len(), model.len());
            }
        }
    }
}
