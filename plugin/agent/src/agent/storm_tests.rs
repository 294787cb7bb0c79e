//! What views are made of, while allocations, starts, quotas and releases come as kubelet and people may send them: no
//! moment shows more sold than there is.

use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::tests::node;
use super::*;
use crate::fixtures::{self, GIB, GPU, MEMORY, RESOURCE, Step, ids};
use tessera_model::record::Record;

fn step() -> impl Strategy<Value = Step> {
    any::<u64>().prop_map(Step::of)
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
    assert!(sold + free <= MEMORY, "{sold} sold and {free} free of {MEMORY} bytes");
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
            step.take(&node.agent, &known);
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
            step.take(&node.agent, &known);
        }
        larger.take(&node.agent, &known);
        let refused = node.agent.pre_start(RESOURCE, &ids(app)).unwrap_err().to_string();
        assert!(
            refused.contains("taken the room") && refused.contains(GPU),
            "{before:?}: {refused}"
        );
        assert_fits(&node.agent);
        // As the words say.
        Step::Quota(other, 8 * GIB).take(&node.agent, &known);
        node.agent.pre_start(RESOURCE, &ids(app)).unwrap();
        assert_fits(&node.agent);
    }
}

#[test]
fn no_look_beside_a_storm_sees_more_sold_than_there_is() {
    let node = node(false);
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = prop::collection::vec(step(), 60);
    let steps = (0..3).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect();
    let look = || assert_fits(&node.agent);
    assert!(fixtures::storm(&node.agent, node.runtime.handle(), steps, look) > 0);
}
