//! What views are made of, while allocations, starts, quotas and releases come as kubelet and people may send them: no
//! moment shows more sold than there is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::tests::{GIB, GPU, RESOURCE, node};
use super::*;
use crate::allocations::steer::QuotaRequest;
use tessera_model::record::Record;
use tessera_model::replica::Replica;

/// What may happen to a GPU of 16 GiB that four replicas share.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Kubelet allocates a set of replicas, a bit each.
    Allocate(u8),
    /// A container starts with a set that was allocated at some time.
    Start(u8),
    /// Bytes.
    Quota(u8, u64),
    Reset(u8),
    Release(u8),
}

fn step() -> impl Strategy<Value = Step> {
    // Of an init container and its app, and two beside them.
    let set = || prop::sample::select(vec![0b0001u8, 0b0011, 0b0100, 0b1100]);
    // The sizes of one and of two replicas, of all that there is, and others.
    let bytes = prop_oneof![(1u64..=8).prop_map(|n| n * 2 * GIB), GIB / 2..16 * GIB];
    prop_oneof![
        4 => set().prop_map(Step::Allocate),
        4 => set().prop_map(Step::Start),
        4 => (set(), bytes).prop_map(|(set, bytes)| Step::Quota(set, bytes)),
        1 => set().prop_map(Step::Reset),
        1 => set().prop_map(Step::Release),
    ]
}

fn ids(set: u8) -> Vec<String> {
    (0..4).filter(|bit| set >> bit & 1 == 1).map(|bit| Replica::id(GPU, bit)).collect()
}

fn id(set: u8) -> AllocationId {
    AllocationId::of(RESOURCE, ids(set).iter().map(String::as_str))
}

/// Does it; what is refused changes nothing.
fn take(agent: &Agent, step: Step, known: &AtomicU64) {
    match step {
        Step::Allocate(set) => {
            if agent.allocate(RESOURCE, &[ids(set)]).is_ok() {
                known.fetch_or(1 << set, Ordering::Relaxed);
            }
        }
        Step::Start(set) if known.load(Ordering::Relaxed) >> set & 1 == 1 => {
            let _ = agent.pre_start(RESOURCE, &ids(set));
        }
        Step::Start(_) => {}
        Step::Quota(set, bytes) => {
            let request =
                QuotaRequest { memory_limit_bytes: Some(bytes), ..QuotaRequest::default() };
            let _ = agent.set_quota(&target(set), &request, Actor::Plugin);
        }
        Step::Reset(set) => {
            let _ = agent.reset_quota(&target(set), &ChangeOptions::default(), Actor::Plugin);
        }
        Step::Release(set) => {
            agent.release(&[id(set)]).unwrap();
        }
    }
}

fn target(set: u8) -> Target {
    Target { name: id(set).to_string(), ..Target::default() }
}

/// What is sold, and what kubelet may give away beside it.
fn sold(agent: &Agent) -> (u64, u64) {
    let books = agent.advertised().books();
    let live = |record: &&Arc<Record>| record.is_live();
    let records = books.allocations.iter().map(|(record, _)| record).filter(live);
    let sold = records.map(|record| record.grants[0].memory_limit_bytes).sum();
    let held = |id: &str| {
        let records = books.allocations.iter().map(|(record, _)| record).filter(live);
        records.flat_map(|record| &record.replicas).any(|held| held == id)
    };
    let devices = books.advertised.values().flatten();
    let free = devices.filter(|device| device.healthy && !held(&device.id)).count();
    (sold, u64::try_from(free).unwrap() * 4 * GIB)
}

fn assert_fits(agent: &Agent) {
    let (sold, free) = sold(agent);
    assert!(sold + free <= 16 * GIB, "{sold} sold and {free} free of {} bytes", 16 * GIB);
}

proptest! {
    // Each is a node of its own.
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn no_step_sells_more_than_there_is(steps in prop::collection::vec(step(), 1..40)) {
        let node = node(false);
        let known = AtomicU64::new(0);
        let _in = node.runtime.enter();
        for step in steps {
            take(&node.agent, step, &known);
            assert_fits(&node.agent);
        }
    }
}

#[test]
fn a_start_is_refused_the_room_that_others_were_given_meanwhile() {
    let (init, app, other) = (0b0001, 0b0011, 0b0100);
    let larger = Step::Quota(other, 12 * GIB);
    for before in [Step::Release(app), Step::Start(init)] {
        let node = node(false);
        let known = AtomicU64::new(0);
        let _in = node.runtime.enter();
        for step in [Step::Allocate(init), Step::Allocate(app), Step::Allocate(other), before] {
            take(&node.agent, step, &known);
        }
        take(&node.agent, larger, &known);
        let refused = node.agent.pre_start(RESOURCE, &ids(app)).unwrap_err().to_string();
        assert!(
            refused.contains("taken the room") && refused.contains(GPU),
            "{before:?}: {refused}"
        );
        assert_fits(&node.agent);
        // As the words say.
        take(&node.agent, Step::Quota(other, 8 * GIB), &known);
        node.agent.pre_start(RESOURCE, &ids(app)).unwrap();
        assert_fits(&node.agent);
    }
}

#[test]
fn no_look_beside_a_storm_sees_more_sold_than_there_is() {
    let node = node(false);
    let (known, stop, looks) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = prop::collection::vec(step(), 60);
    let runtime = node.runtime.handle();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let steps = strategy.new_tree(&mut runner).unwrap().current();
                scope.spawn(|| {
                    let _in = runtime.enter();
                    steps.into_iter().for_each(|step| take(&node.agent, step, &known));
                })
            })
            .collect();
        let looking = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert_fits(&node.agent);
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        looking.join().unwrap();
    });
    assert!(looks.load(Ordering::Relaxed) > 0);
}
