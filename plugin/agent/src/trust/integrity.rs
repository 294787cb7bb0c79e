//! Damaged mounts in containers, confirmed by a second sweep. Pure.
//!
//! One sweep is not enough: while a runtime sets a container up, its first process is in the container's
//! cgroup already and still has the host's mounts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::mounts::Damage;
use tessera_model::allocation_id::AllocationId;

/// How long a damage must last to be believed; runtimes set a container up in less.
pub const CONFIRM: Duration = Duration::from_secs(2);

/// Whose mounts they are: all processes of a container have the same, as a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MountOwner {
    /// A container's, by its id.
    Container(String),
    /// A process's that is in no pod, by pid and start time.
    Process(u32, u64),
}

#[derive(Debug)]
struct Seen {
    damages: Vec<Damage>,
    since: Instant,
    last: Instant,
    reported: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Integrity {
    /// A container may have several shares.
    seen: BTreeMap<(MountOwner, AllocationId), Seen>,
}

impl Integrity {
    /// Takes a look at one; what it confirms, once.
    pub fn see(
        &mut self,
        owner: MountOwner,
        allocation: &AllocationId,
        damages: Vec<Damage>,
        now: Instant,
    ) -> Option<Vec<Damage>> {
        let damages: Vec<Damage> =
            damages.into_iter().filter(|damage| !damage.may_be_innocent()).collect();
        let key = (owner, allocation.clone());
        if damages.is_empty() {
            self.seen.remove(&key);
            return None;
        }
        let fresh = || Seen { damages: damages.clone(), since: now, last: now, reported: false };
        let seen = self.seen.entry(key).or_insert_with(fresh);
        if seen.damages != damages {
            *seen = fresh();
        }
        seen.last = now;
        let confirmed = !seen.reported && now.saturating_duration_since(seen.since) >= CONFIRM;
        seen.reported |= confirmed;
        confirmed.then_some(damages)
    }

    /// Forgets whom nobody has seen since then: they have ended.
    pub fn forget(&mut self, before: Instant) {
        self.seen.retain(|_, seen| seen.last >= before);
    }

    /// Forgets containers that are no more.
    pub fn forget_containers(&mut self, is_there: impl Fn(&str) -> bool) {
        self.seen.retain(|(owner, _), _| match owner {
            MountOwner::Container(id) => is_there(id),
            MountOwner::Process(..) => true,
        });
    }

    /// Whether a look is to be confirmed.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.seen.values().any(|seen| !seen.reported)
    }

    /// What stands, confirmed, by allocation.
    #[must_use]
    pub fn confirmed(&self) -> BTreeMap<AllocationId, Vec<Damage>> {
        let mut confirmed: BTreeMap<AllocationId, Vec<Damage>> = BTreeMap::new();
        for ((_, allocation), seen) in self.seen.iter().filter(|(_, seen)| seen.reported) {
            let damages = confirmed.entry(allocation.clone()).or_default();
            damages.extend(&seen.damages);
            damages.sort();
            damages.dedup();
        }
        confirmed
    }
}

#[cfg(test)]
mod tests {
    use super::super::mounts::{Fault, GivenFile};
    use super::*;

    const SHADOWED: Damage = Damage { part: GivenFile::Pages, fault: Fault::Shadowed };
    const UNPRELOADED: Damage = Damage { part: GivenFile::Preload, fault: Fault::Missing };

    fn id(digit: &str) -> AllocationId {
        AllocationId::parse(&digit.repeat(32)).unwrap()
    }

    #[test]
    fn a_damage_is_reported_once_it_has_lasted() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        let owner = || MountOwner::Container("c".into());
        assert_eq!(integrity.see(owner(), &id("a"), vec![SHADOWED], begin), None);
        assert!(integrity.waits() && integrity.confirmed().is_empty());
        let later = begin + CONFIRM;
        let reported = integrity.see(owner(), &id("a"), vec![SHADOWED], later);
        assert_eq!(reported, Some(vec![SHADOWED]));
        assert_eq!(integrity.see(owner(), &id("a"), vec![SHADOWED], later + CONFIRM), None);
        assert!(!integrity.waits());
        assert_eq!(integrity.confirmed()[&id("a")], [SHADOWED]);
        integrity.forget(later + CONFIRM);
        assert_eq!(integrity.confirmed().len(), 1);
        integrity.forget(later + 2 * CONFIRM);
        assert!(integrity.confirmed().is_empty());
    }

    #[test]
    fn a_container_that_is_being_set_up_is_not_reported() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        let owner = || MountOwner::Container("c".into());
        assert_eq!(integrity.see(owner(), &id("a"), vec![SHADOWED], begin), None);
        assert_eq!(integrity.see(owner(), &id("a"), vec![], begin + CONFIRM), None);
        assert!(!integrity.waits());
        // Another damage starts over.
        let writable = Damage { part: GivenFile::Shim, fault: Fault::Writable };
        integrity.see(owner(), &id("a"), vec![SHADOWED], begin);
        let later = begin + CONFIRM;
        assert_eq!(integrity.see(owner(), &id("a"), vec![writable], later), None);
    }

    #[test]
    fn what_may_be_innocent_is_no_finding() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        let owner = || MountOwner::Process(7, 1);
        integrity.see(owner(), &id("a"), vec![UNPRELOADED], begin);
        assert_eq!(integrity.see(owner(), &id("a"), vec![UNPRELOADED], begin + CONFIRM), None);
    }

    #[test]
    fn several_containers_of_one_allocation_are_reported_together() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        for name in ["c", "d"] {
            for at in [begin, begin + CONFIRM] {
                integrity.see(MountOwner::Container(name.into()), &id("a"), vec![SHADOWED], at);
            }
        }
        assert_eq!(integrity.confirmed()[&id("a")], [SHADOWED]);
    }
}
