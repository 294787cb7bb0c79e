//! Releases allocations without a holder, and learns holders. The device plugin API has no Deallocate: kubelet's
//! PodResources is compared with the ledger and with what really runs. A claim's share ends when kubelet unprepares
//! it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_model::allocation_id::AllocationId;
use tessera_model::holding::{Census, Holding};
use tessera_model::record::{Holder, Record, State};

#[derive(Debug, Default)]
pub struct Round {
    /// Records with their holders, as kubelet names them now: of a claim's share all that hold it; of one whose record was
    /// lost what it is.
    pub named: Vec<Arc<Record>>,
    /// Nobody holds them and nothing runs: remove their pages, keep their history.
    pub released: Vec<AllocationId>,
}

/// Since when each allocation has been unlisted, in which generation: what is allocated again is missed from then on.
#[derive(Clone, Debug, Default)]
pub struct Absences {
    unlisted: BTreeMap<AllocationId, (u64, Instant)>,
    /// When this plugin last heard that a container of it starts.
    started: BTreeMap<AllocationId, Instant>,
}

impl Absences {
    /// A container of it starts, so that kubelet lists it from now on.
    pub fn started(&mut self, id: &AllocationId, now: Instant) {
        self.started.insert(id.clone(), now);
    }

    /// Whether its container had started before kubelet was `asked`.
    fn is_listed(&self, record: &Record, asked: Instant) -> bool {
        // Kubelet lists a claim's pods as long as they run.
        record.origin.claim().is_some()
            || record.state == State::Started
                && self.started.get(&record.id).is_none_or(|started| *started < asked)
    }

    /// Since when this generation is known to be unlisted, which it is `now`.
    fn since(&mut self, record: &Record, now: Instant) -> Instant {
        let entry = self.unlisted.entry(record.id.clone()).or_insert((record.generation, now));
        if entry.0 != record.generation {
            *entry = (record.generation, now);
        }
        entry.1
    }
}

pub fn decide(
    records: &BTreeMap<AllocationId, Arc<Record>>,
    kubelet: &Census,
    in_use: &dyn Fn(&AllocationId) -> bool,
    absences: &mut Absences,
    grace: Duration,
    now: Instant,
) -> Round {
    absences.unlisted.retain(|id, _| records.contains_key(id));
    absences.started.retain(|id, _| records.contains_key(id));
    if kubelet.pods == 0 {
        // Right after its start kubelet knows no pods. What was absent before is not more absent now.
        absences.unlisted.clear();
        return Round::default();
    }
    let mut held: BTreeMap<AllocationId, Vec<&Holding>> = BTreeMap::new();
    for holding in &kubelet.holdings {
        held.entry(holding.allocation()).or_default().push(holding);
    }

    let mut round = Round::default();
    for (id, record) in records {
        if let Some(holdings) = held.get(id) {
            absences.unlisted.remove(id);
            let is_listed = absences.is_listed(record, kubelet.asked);
            let Some(holder) = choose(record, holdings, is_listed) else { continue };
            let mut named = Arc::clone(record);
            let is_lost = record.replicas.is_empty() && !holdings[0].is_claim();
            if is_lost {
                let replicas: BTreeSet<_> = holdings[0].device_ids.iter().cloned().collect();
                let known = Arc::make_mut(&mut named);
                known.resource.clone_from(&holdings[0].resource_name);
                known.replicas = replicas.into_iter().collect();
            }
            if record.origin.claim().is_some() {
                let others = others(holdings, &holder);
                if others != record.others {
                    Arc::make_mut(&mut named).others = others;
                }
            }
            if record.holder.as_ref() != Some(&holder) && (is_lost || record.state != State::Parked)
            {
                Arc::make_mut(&mut named).holder = Some(holder);
            }
            if !Arc::ptr_eq(&named, record) {
                round.named.push(named);
            }
            continue;
        }
        // Kubelet says when a claim's share ends: it unprepares it.
        if record.origin.claim().is_some() {
            continue;
        }
        let since = absences.since(record, now);
        let is_init =
            || records.values().any(|other| held.contains_key(&other.id) && covers(other, record));
        let long_gone = now.saturating_duration_since(since) >= grace;
        if long_gone && !is_init() && !in_use(id) {
            round.released.push(id.clone());
        }
    }
    round
}

const MOST_OTHERS: usize = 64;

/// The containers among these beside `holder`, sorted, each once.
fn others(holdings: &[&Holding], holder: &Holder) -> Vec<Holder> {
    let all: BTreeSet<Holder> = holdings.iter().map(|holding| named(holding)).collect();
    all.into_iter().filter(|other| other != holder).take(MOST_OTHERS).collect()
}

fn named(holding: &Holding) -> Holder {
    Holder {
        namespace: holding.namespace.clone(),
        pod: holding.pod.clone(),
        container: holding.container.clone(),
    }
}

/// Whether `record` may belong to an init container of the pod that holds `other`: kubelet gives its
/// replicas to the next container with more, and lists only the latter. The former runs before it, and again when
/// the sandbox dies. What kubelet once listed as another pod's is not.
fn covers(other: &Record, record: &Record) -> bool {
    let is_anothers = match (&record.holder, &other.holder) {
        (Some(of), Some(than)) => (&of.namespace, &of.pod) != (&than.namespace, &than.pod),
        _ => false,
    };
    (other.is_live() || record.is_live())
        && !is_anothers
        && other.resource == record.resource
        && record.replicas.iter().all(|replica| other.replicas.contains(replica))
}

/// Kubelets before 1.34 list finished pods too: of several holders one that was not known before is
/// the new one. One that is called as the one before may be that one, and the new one not listed yet; or it
/// is a new pod of the same name, as a StatefulSet makes them, which is certain where the answer is younger
/// than its container (`is_listed`). Until then nobody is named.
fn choose(record: &Record, holdings: &[&Holding], is_listed: bool) -> Option<Holder> {
    let is = |holding: &Holding, holder: &Holder| {
        (&holding.pod, &holding.namespace, &holding.container)
            == (&holder.pod, &holder.namespace, &holder.container)
    };
    let known = record.holder.as_ref().filter(|holder| holdings.iter().any(|h| is(h, holder)));
    if let Some(known) = known {
        return Some(known.clone());
    }
    let is_new = |holding: &&&Holding| record.predecessor.as_ref().is_none_or(|p| !is(holding, p));
    let namesake = || holdings.first().filter(|_| is_listed);
    let chosen = holdings.iter().find(is_new).or_else(namesake)?;
    Some(named(chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(30);

    struct World {
        records: BTreeMap<AllocationId, Arc<Record>>,
        holdings: Vec<Holding>,
        pods: usize,
        busy: BTreeSet<AllocationId>,
        absences: Absences,
        start: Instant,
        answer_age: Duration,
    }

    fn world() -> World {
        World {
            records: BTreeMap::new(),
            holdings: Vec::new(),
            pods: 3,
            busy: BTreeSet::new(),
            absences: Absences::default(),
            start: Instant::now(),
            answer_age: Duration::ZERO,
        }
    }

    impl World {
        fn record(&mut self, replicas: &[&str], state: State) -> AllocationId {
            let id = AllocationId::of("r", replicas.iter().copied());
            let record = Record {
                resource: "r".into(),
                replicas: replicas.iter().map(ToString::to_string).collect(),
                state,
                ..Record::new(id.clone(), 1, Vec::new())
            };
            self.records.insert(id.clone(), Arc::new(record));
            id
        }

        fn change(&mut self, id: &AllocationId) -> &mut Record {
            Arc::make_mut(self.records.get_mut(id).unwrap())
        }

        fn hold(&mut self, pod: &str, replicas: &[&str]) {
            self.holdings.push(Holding {
                namespace: "ns".into(),
                pod: pod.into(),
                container: "c".into(),
                resource_name: "r".into(),
                device_ids: replicas.iter().map(ToString::to_string).collect(),
            });
        }

        fn at(&mut self, after: Duration) -> Round {
            let now = self.start + after;
            let asked = now.checked_sub(self.answer_age).unwrap();
            let kubelet = Census { pods: self.pods, holdings: self.holdings.clone(), asked };
            let busy = self.busy.clone();
            let in_use = move |id: &AllocationId| busy.contains(id);
            decide(&self.records, &kubelet, &in_use, &mut self.absences, GRACE, now)
        }

        /// What a round releases that names nobody.
        fn released(&mut self, after: Duration) -> Vec<AllocationId> {
            let Round { named, released } = self.at(after);
            assert_eq!(named, []);
            released
        }

        /// Holders, and others beside them, in a round that releases nothing.
        fn named(&mut self, after: Duration) -> Vec<(AllocationId, Holder, Vec<Holder>)> {
            let Round { named, released } = self.at(after);
            assert_eq!(released, []);
            let of = |record: Arc<Record>| {
                (record.id.clone(), record.holder.clone().unwrap(), record.others.clone())
            };
            named.into_iter().map(of).collect()
        }
    }

    fn holder(pod: &str) -> Holder {
        Holder { namespace: "ns".into(), pod: pod.into(), container: "c".into() }
    }

    #[test]
    fn what_nobody_holds_is_released_after_the_grace() {
        let mut world = world();
        let id = world.record(&["a", "b"], State::Started);
        assert_eq!(world.released(Duration::ZERO), []);
        assert_eq!(world.released(GRACE / 2), []);
        assert_eq!(world.released(GRACE), [id]);
    }

    #[test]
    fn what_runs_is_never_released() {
        let mut world = world();
        let id = world.record(&["a"], State::Started);
        world.busy.insert(id);
        assert_eq!(world.released(Duration::ZERO), []);
        assert_eq!(world.released(GRACE * 100), []);
    }

    #[test]
    fn a_restarted_kubelet_that_knows_no_pods_releases_nothing() {
        let mut world = world();
        world.record(&["a"], State::Started);
        assert_eq!(world.released(Duration::ZERO), []);
        world.pods = 0;
        assert_eq!(world.released(GRACE * 10), []);
        world.pods = 3;
        assert_eq!(world.released(GRACE * 20), [], "the grace starts again");
        assert_ne!(world.released(GRACE * 21), []);
    }

    #[test]
    fn holders_are_named_once() {
        let mut world = world();
        let id = world.record(&["a", "b"], State::Started);
        world.hold("pod", &["b", "a"]);
        assert_eq!(world.named(Duration::ZERO), [(id.clone(), holder("pod"), vec![])]);
        world.change(&id).holder = Some(holder("pod"));
        assert_eq!(world.released(Duration::ZERO), []);
    }

    #[test]
    fn a_finished_pod_that_is_still_listed_is_not_taken_for_its_successor() {
        let mut world = world();
        let id = world.record(&["a"], State::Allocated);
        world.change(&id).predecessor = Some(holder("old"));
        world.hold("new", &["a"]);
        world.hold("old", &["a"]);
        assert_eq!(world.named(Duration::ZERO), [(id, holder("new"), vec![])]);
    }

    #[test]
    fn what_is_allocated_again_is_missed_from_then_on() {
        let mut world = world();
        let id = world.record(&["a"], State::Started);
        assert_eq!(world.released(Duration::ZERO), []);
        // Given to another pod, which kubelet's answer is too old to know.
        let record = world.change(&id);
        (record.generation, record.state) = (2, State::Allocated);
        assert_eq!(world.released(GRACE * 2), [], "nobody has missed this one before");
        assert_eq!(world.released(GRACE * 3), [id]);
    }

    #[test]
    fn a_namesake_of_the_one_before_is_named_when_it_must_be_the_new_one() {
        let mut world = world();
        let id = world.record(&["a"], State::Allocated);
        world.change(&id).predecessor = Some(holder("web-0"));
        world.hold("web-0", &["a"]);
        assert_eq!(world.released(Duration::ZERO), [], "the finished one, as far as anybody knows");
        world.change(&id).state = State::Started;
        let start = world.start + Duration::from_secs(8);
        world.absences.started(&id, start);
        world.answer_age = Duration::from_secs(5);
        assert_eq!(
            world.released(Duration::from_secs(12)),
            [],
            "the answer is from before its start"
        );
        let named = [(id, holder("web-0"), vec![])];
        assert_eq!(world.named(Duration::from_secs(14)), named);
    }

    /// Kubelet lists the app's container alone, whichever of the two runs.
    #[test]
    fn an_init_containers_allocation_stays_while_its_pod_does() {
        for (init, app) in [(State::Started, State::Parked), (State::Parked, State::Started)] {
            let mut world = world();
            let init = world.record(&["a"], init);
            let app = world.record(&["a", "b"], app);
            world.hold("pod", &["a", "b"]);
            world.at(Duration::ZERO);
            assert_eq!(world.at(GRACE * 2).released, []);
            world.holdings.clear();
            world.at(GRACE * 3);
            let released = world.at(GRACE * 5).released;
            assert!(released.contains(&init) && released.contains(&app), "{released:?}");
        }
    }

    /// Kubelets before 1.34 list them.
    #[test]
    fn a_finished_pod_keeps_no_allocation_of_another() {
        let mut world = world();
        let ended = world.record(&["a"], State::Started);
        let finished = world.record(&["a", "b"], State::Parked);
        for (id, pod) in [(&ended, "ended"), (&finished, "finished")] {
            let (namespace, container) = ("ns".into(), "c".into());
            world.change(id).holder = Some(Holder { namespace, pod: pod.into(), container });
        }
        world.hold("finished", &["a", "b"]);
        world.at(Duration::ZERO);
        assert_eq!(world.released(GRACE * 2), [ended]);
    }

    #[test]
    fn a_lost_record_is_completed_from_what_kubelet_says() {
        let mut world = world();
        let id = world.record(&["a", "b"], State::Started);
        let record = world.change(&id);
        record.replicas.clear();
        record.resource.clear();
        world.hold("pod", &["b", "a"]);
        let [record] = world.at(Duration::ZERO).named.try_into().unwrap();
        assert_eq!((&record.id, record.resource.as_str()), (&id, "r"));
        assert_eq!(
            (&record.replicas[..], &record.holder),
            (&["a".into(), "b".into()][..], &Some(holder("pod")))
        );
    }

    fn claimed(world: &mut World, is_known: bool) -> AllocationId {
        let share = tessera_model::origin::ClaimShare {
            uid: "u".into(),
            namespace: "ns".into(),
            name: "claim".into(),
            request: "gpu".into(),
            pool: "node".into(),
            results: Vec::new(),
            asked: BTreeMap::new(),
        };
        let id = share.allocation_id();
        let mut record = Record::new(id.clone(), 1, Vec::new());
        if is_known {
            record.origin = tessera_model::origin::Origin::Claim(Box::new(share));
        }
        world.records.insert(id.clone(), Arc::new(record));
        id
    }

    fn hold_claim(world: &mut World, pod: &str, id: &AllocationId) {
        world.hold(pod, &[id.as_str()]);
        if let Some(last) = world.holdings.last_mut() {
            last.resource_name = tessera_model::cdi_name::SHARE_KIND.into();
        }
    }

    #[test]
    fn a_claims_share_gets_a_holder_and_stays_until_kubelet_unprepares_it() {
        let mut world = world();
        let id = claimed(&mut world, true);
        assert_eq!(world.released(GRACE * 3), [], "nobody holds it yet");
        hold_claim(&mut world, "first", &id);
        hold_claim(&mut world, "second", &id);
        let holder = Holder { namespace: "ns".into(), pod: "first".into(), container: "c".into() };
        let second = Holder { pod: "second".into(), ..holder.clone() };
        let named = [(id.clone(), holder.clone(), vec![second.clone()])];
        assert_eq!(world.named(GRACE * 3), named);
        world.change(&id).holder = Some(holder);
        world.change(&id).others = vec![second.clone()];
        assert_eq!(world.released(GRACE * 4), []);
        world.holdings.remove(0);
        assert_eq!(world.named(GRACE * 5), [(id.clone(), second.clone(), vec![])]);
        world.change(&id).others.clear();
        world.change(&id).holder = Some(second);
        world.holdings.clear();
        assert_eq!(world.released(GRACE * 9), []);
    }

    #[test]
    fn adopted_pages_of_a_claim_stay_while_a_pod_has_them() {
        let mut world = world();
        let id = claimed(&mut world, false);
        hold_claim(&mut world, "pod", &id);
        assert_eq!(world.named(GRACE * 2), [(id.clone(), holder("pod"), vec![])]);
        world.holdings.clear();
        assert_eq!(world.released(GRACE * 3), []);
        assert_eq!(world.released(GRACE * 5), [id]);
    }
}
