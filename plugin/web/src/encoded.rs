//! A fleet as a reader may see it, in JSON: made once for all readers with equal rights, and shared by their answers. A
//! fleet is large, and many readers may read slowly.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use axum::body::Bytes;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::narrow::{self, Rights};

/// Encodings of the present fleet that are kept: of so many sets of rights.
const KEPT: usize = 8;

/// What is remembered of a fleet that was sent, to know later what has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Digest {
    pub name: String,
    /// Each node, and a hash of all but its clocks.
    pub nodes: Vec<(String, u64)>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub digest: Arc<Digest>,
    /// All before the nodes.
    head: Bytes,
    /// In the order of the digest.
    nodes: Vec<Bytes>,
}

impl Encoded {
    fn new(
        fleet: &Fleet,
        rights: &Rights,
        node: &str,
        state: &RandomState,
    ) -> serde_json::Result<Self> {
        let (mut digests, mut nodes) = (Vec::new(), Vec::new());
        for entry in fleet.nodes.iter().filter(|entry| node.is_empty() || entry.node == node) {
            let entry = narrow::entry(entry.clone(), rights);
            digests.push((entry.node.clone(), hash(&entry, state)?));
            nodes.push(serde_json::to_vec(&entry)?.into());
        }
        let api_version = serde_json::to_string(&fleet.api_version)?;
        let name = serde_json::to_string(&fleet.name)?;
        let at = fleet.at_unix_ms;
        let head =
            format!(r#"{{"api_version":{api_version},"name":{name},"at_unix_ms":{at},"nodes":["#);
        let digest = Digest { name: fleet.name.clone(), nodes: digests };
        Ok(Encoded { digest: Arc::new(digest), head: head.into(), nodes })
    }

    /// The JSON of the fleet, in pieces.
    pub fn whole(&self) -> Vec<Bytes> {
        let all = (0..self.nodes.len()).collect::<Vec<_>>();
        let mut pieces = vec![self.head.clone()];
        pieces.extend(self.listed(&all));
        pieces.push(Bytes::from_static(b"]}"));
        pieces
    }

    /// The JSON of an array of some nodes, by their places, in pieces.
    pub fn some(&self, places: &[usize]) -> Vec<Bytes> {
        let mut pieces = vec![Bytes::from_static(b"[")];
        pieces.extend(self.listed(places));
        pieces.push(Bytes::from_static(b"]"));
        pieces
    }

    fn listed(&self, places: &[usize]) -> impl Iterator<Item = Bytes> {
        places.iter().enumerate().flat_map(|(number, place)| {
            let comma = (number > 0).then(|| Bytes::from_static(b","));
            comma.into_iter().chain([self.nodes[*place].clone()])
        })
    }
}

/// A time that only says that a node was looked at again is no change; that of one that is silent stands still.
fn hash(entry: &Entry, state: &RandomState) -> serde_json::Result<u64> {
    let mut still = Entry { answered_unix_ms: 0, ..entry.clone() };
    if let Some(view) = &mut still.view {
        view.at_unix_ms = 0;
    }
    Ok(state.hash_one(serde_json::to_vec(&still)?))
}

/// The encodings of the present fleet.
#[derive(Debug, Default)]
pub(crate) struct Encodings {
    state: RandomState,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    of: Weak<Fleet>,
    /// By rights and the node that was asked for, the newest last.
    all: Vec<(Rights, String, Arc<Encoded>)>,
}

impl Encodings {
    /// What a reader with these rights sees of a fleet, of one node where one is named.
    pub fn get(
        &self,
        fleet: &Arc<Fleet>,
        rights: &Rights,
        node: &str,
    ) -> serde_json::Result<Arc<Encoded>> {
        // Held while it is made: others that want the same wait for it.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if !Weak::ptr_eq(&kept.of, &Arc::downgrade(fleet)) {
            *kept = Kept { of: Arc::downgrade(fleet), all: Vec::new() };
        }
        let same = kept.all.iter().find(|(known, name, _)| known == rights && name == node);
        if let Some((_, _, encoded)) = same {
            return Ok(Arc::clone(encoded));
        }
        let encoded = Arc::new(Encoded::new(fleet, rights, node, &self.state)?);
        if kept.all.len() == KEPT {
            kept.all.remove(0);
        }
        kept.all.push((rights.clone(), node.to_owned(), Arc::clone(&encoded)));
        Ok(encoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_view::fixtures::{Layout, MadeUp};

    fn fleet() -> Arc<Fleet> {
        Arc::new(MadeUp::new(Layout::default(), 0).fleet())
    }

    fn some(namespace: &str) -> Rights {
        Rights::Namespaces([namespace.to_owned()].into())
    }

    #[test]
    fn the_pieces_are_the_json_of_what_the_reader_may_see() {
        let (fleet, encodings) = (fleet(), Encodings::default());
        let namespace = fleet.nodes[0].view.as_ref().unwrap().tenants[0].namespace.clone();
        for rights in [Rights::All, some(&namespace), some("")] {
            let encoded = encodings.get(&fleet, &rights, "").unwrap();
            let seen: Fleet = serde_json::from_slice(&encoded.whole().concat()).unwrap();
            let narrowed = narrow::fleet((*fleet).clone(), &rights);
            assert_eq!(seen, narrowed);
            let nodes: Vec<Entry> =
                serde_json::from_slice(&encoded.some(&[0, 2]).concat()).unwrap();
            assert_eq!(nodes, [narrowed.nodes[0].clone(), narrowed.nodes[2].clone()]);
            let one = encodings.get(&fleet, &rights, &narrowed.nodes[1].node).unwrap();
            let one: Fleet = serde_json::from_slice(&one.whole().concat()).unwrap();
            assert_eq!(one.nodes, narrowed.nodes[1..2]);
            let none = encodings.get(&fleet, &rights, "no-such").unwrap();
            let none: Fleet = serde_json::from_slice(&none.whole().concat()).unwrap();
            assert_eq!(none.nodes, []);
        }
    }

    #[test]
    fn readers_with_equal_rights_share_one_and_others_never_do() {
        let (fleet, encodings) = (fleet(), Encodings::default());
        let first = encodings.get(&fleet, &Rights::All, "").unwrap();
        assert!(Arc::ptr_eq(&first, &encodings.get(&fleet, &Rights::All, "").unwrap()));
        for (rights, node) in [(some("a"), ""), (some("b"), ""), (Rights::All, "n")] {
            let other = encodings.get(&fleet, &rights, node).unwrap();
            assert!(!Arc::ptr_eq(&first, &other));
        }
        // The next look at the fleet is another, though nothing has changed but clocks.
        let later = encodings.get(&self::fleet(), &Rights::All, "").unwrap();
        assert!(!Arc::ptr_eq(&first, &later) && first.digest == later.digest);
        for number in 0..3 * KEPT {
            encodings.get(&fleet, &some(&number.to_string()), "").unwrap();
        }
        assert_eq!(encodings.kept.lock().unwrap().all.len(), KEPT);
    }

    #[test]
    fn any_figure_but_a_clock_changes_the_digest() {
        let (fleet, encodings) = (fleet(), Encodings::default());
        let digest = |change: &dyn Fn(&mut Entry)| {
            let mut fleet = (*fleet).clone();
            change(&mut fleet.nodes[0]);
            let encoded = encodings.get(&Arc::new(fleet), &Rights::All, "").unwrap();
            encoded.digest.nodes[0].1
        };
        let same = digest(&|_| {});
        assert_eq!(digest(&|entry| entry.answered_unix_ms += 1), same);
        assert_eq!(digest(&|entry| entry.view.as_mut().unwrap().at_unix_ms += 1), same);
        let changes: [&dyn Fn(&mut Entry); 7] = [
            &|entry| entry.answers = !entry.answers,
            &|entry| entry.error.push('x'),
            &|entry| entry.view = None,
            &|entry| entry.view.as_mut().unwrap().plugin.ready ^= true,
            &|entry| entry.view.as_mut().unwrap().gpus[0].memory_used_bytes += 1,
            &|entry| entry.view.as_mut().unwrap().tenants[0].refusals += 1,
            &|entry| entry.view.as_mut().unwrap().warnings.clear(),
        ];
        for (number, change) in changes.iter().enumerate() {
            let is_same = digest(change) == same;
            let had_none = number == 6 && fleet.nodes[0].view.as_ref().unwrap().warnings.is_empty();
            assert_eq!(is_same, had_none, "change {number}");
        }
    }
}
