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
pub enum Whose {
    /// A container's, by its id.
    Container(String),
    /// A process's that is in no pod, by pid and start time.
    Process(u32, u64),
}

#[derive(Debug)]
struct Seen {
    allocation: AllocationId,
    damages: Vec<Damage>,
    since: Instant,
    last: Instant,
    told: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Integrity {
    seen: BTreeMap<Whose, Seen>,
}

impl Integrity {
    /// Takes a look at one; what it confirms, once.
    pub fn see(
        &mut self,
        whose: Whose,
        allocation: &AllocationId,
        damages: Vec<Damage>,
        now: Instant,
    ) -> Option<Vec<Damage>> {
        let damages: Vec<Damage> =
            damages.into_iter().filter(|damage| !damage.may_be_innocent()).collect();
        if damages.is_empty() {
            self.seen.remove(&whose);
            return None;
        }
        let fresh = || Seen {
            allocation: allocation.clone(),
            damages: damages.clone(),
            since: now,
            last: now,
            told: false,
        };
        let seen = self.seen.entry(whose).or_insert_with(fresh);
        if seen.damages != damages || seen.allocation != *allocation {
            *seen = fresh();
        }
        seen.last = now;
        let confirmed = !seen.told && now.saturating_duration_since(seen.since) >= CONFIRM;
        seen.told |= confirmed;
        confirmed.then_some(damages)
    }

    /// Forgets whom nobody has seen since then: they have ended.
    pub fn forget(&mut self, before: Instant) {
        self.seen.retain(|_, seen| seen.last >= before);
    }

    /// Forgets containers that are no more.
    pub fn forget_containers(&mut self, is_there: impl Fn(&str) -> bool) {
        self.seen.retain(|whose, _| match whose {
            Whose::Container(id) => is_there(id),
            Whose::Process(..) => true,
        });
    }

    /// Whether a look is to be confirmed.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.seen.values().any(|seen| !seen.told)
    }

    /// What stands, confirmed, by allocation.
    #[must_use]
    pub fn standing(&self) -> BTreeMap<AllocationId, Vec<Damage>> {
        let mut standing: BTreeMap<AllocationId, Vec<Damage>> = BTreeMap::new();
        for seen in self.seen.values().filter(|seen| seen.told) {
            let damages = standing.entry(seen.allocation.clone()).or_default();
            damages.extend(&seen.damages);
            damages.sort();
            damages.dedup();
        }
        standing
    }
}

#[cfg(test)]
mod tests {
    use super::super::mounts::{Fault, Part};
    use super::*;

    const SHADOWED: Damage = Damage { part: Part::Pages, fault: Fault::Shadowed };
    const UNPRELOADED: Damage = Damage { part: Part::Preload, fault: Fault::Missing };

    fn id(digit: &str) -> AllocationId {
        AllocationId::parse(&digit.repeat(32)).unwrap()
    }

    #[test]
    fn a_damage_is_told_once_it_has_lasted() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        let whose = || Whose::Container("c".into());
        assert_eq!(integrity.see(whose(), &id("a"), vec![SHADOWED], begin), None);
        assert!(integrity.waits() && integrity.standing().is_empty());
        let later = begin + CONFIRM;
        let told = integrity.see(whose(), &id("a"), vec![SHADOWED], later);
        assert_eq!(told, Some(vec![SHADOWED]));
        assert_eq!(integrity.see(whose(), &id("a"), vec![SHADOWED], later + CONFIRM), None);
        assert!(!integrity.waits());
        assert_eq!(integrity.standing()[&id("a")], [SHADOWED]);
        integrity.forget(later + CONFIRM);
        assert_eq!(integrity.standing().len(), 1);
        integrity.forget(later + 2 * CONFIRM);
        assert!(integrity.standing().is_empty());
    }

    #[test]
    fn a_container_that_is_being_set_up_is_told_of_nothing() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        let whose = || Whose::Container("c".into());
        assert_eq!(integrity.see(whose(), &id("a"), vec![SHADOWED], begin), None);
        assert_eq!(integrity.see(whose(), &id("a"), vec![], begin + CONFIRM), None);
        assert!(!integrity.waits());
        // Another damage begins anew.
        let writable = Damage { part: Part::Shim, fault: Fault::Writable };
        integrity.see(whose(), &id("a"), vec![SHADOWED], begin);
        let later = begin + CONFIRM;
        assert_eq!(integrity.see(whose(), &id("a"), vec![writable], later), None);
    }

    #[test]
    fn what_may_be_innocent_is_no_finding() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        let whose = || Whose::Process(7, 1);
        integrity.see(whose(), &id("a"), vec![UNPRELOADED], begin);
        assert_eq!(integrity.see(whose(), &id("a"), vec![UNPRELOADED], begin + CONFIRM), None);
    }

    #[test]
    fn several_containers_of_one_allocation_are_told_together() {
        let mut integrity = Integrity::default();
        let begin = Instant::now();
        for name in ["c", "d"] {
            for at in [begin, begin + CONFIRM] {
                integrity.see(Whose::Container(name.into()), &id("a"), vec![SHADOWED], at);
            }
        }
        assert_eq!(integrity.standing()[&id("a")], [SHADOWED]);
    }
}
