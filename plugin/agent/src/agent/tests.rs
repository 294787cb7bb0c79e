//! The core between a front end and an engine that only note what they are asked.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use tessera_model::origin::{ClaimResult, ClaimShare, Origin};
use tessera_model::record::{Grant, Record};
use tessera_model::replica::Replica;
use tessera_model::sharing::Compute;
use tessera_tenant::regions::{Mode, Outcome};
use tessera_view::warning::GRAVE;

use super::*;
use crate::engines::EngineError;
use crate::fixtures::{self, GIB, GPU, MEMORY, RESOURCE, Step, ids};
use tessera_view::change::Target;

/// Notes its calls; refuses tenants whose memory is an odd number of GiB.
#[derive(Debug, Default)]
struct FakeEngine {
    calls: Mutex<Vec<String>>,
    /// Every tenant is refused.
    refuses: AtomicBool,
    /// Whose ledger it looks at when it is asked to release.
    agent: Mutex<std::sync::Weak<Agent>>,
}

impl FakeEngine {
    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

fn gib(record: &Record) -> u64 {
    record.grants[0].memory_limit_bytes / GIB
}

impl Engine for FakeEngine {
    fn admit(&self, record: &Record, mode: Mode) -> Result<Outcome, EngineError> {
        self.note(format!("admit {} {mode:?}", gib(record)));
        if gib(record) % 2 == 1 || self.refuses.load(Ordering::Relaxed) {
            return Err(EngineError("it is odd".to_owned()));
        }
        Ok(Outcome::default())
    }

    fn set_limits(&self, record: &Record) {
        self.note(format!("limits {}", gib(record)));
    }

    fn release(&self, id: &AllocationId) {
        let agent = self.agent.lock().unwrap().upgrade();
        let is_recorded = agent.is_some_and(|agent| agent.allocations.record(id).is_some());
        self.note(if is_recorded { "release" } else { "release unrecorded" }.to_owned());
    }
}

struct Node {
    agent: Arc<Agent>,
    engine: Arc<FakeEngine>,
    dir: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
}

fn open(dir: &Path, engine: &Arc<FakeEngine>, sells_claims: bool) -> Arc<Agent> {
    let agent = fixtures::open(dir, vec![Arc::clone(engine) as _], sells_claims);
    *engine.agent.lock().unwrap() = Arc::downgrade(&agent);
    agent
}

/// A node whose GPU is sold by replicas, or by claims.
fn node(sells_claims: bool) -> Node {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (dir, engine) = (tempfile::tempdir().unwrap(), Arc::new(FakeEngine::default()));
    let agent = {
        let _in = runtime.enter();
        open(dir.path(), &engine, sells_claims)
    };
    Node { agent, engine, dir, runtime }
}

impl Node {
    fn grant(&self, ask: &Ask) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        let _in = self.runtime.enter();
        self.agent.grant(std::slice::from_ref(ask))
    }

    /// The same node after its plugin was restarted, perhaps with another seller.
    fn restart(self, sells_claims: bool) -> Node {
        let Node { agent, engine, dir, runtime } = self;
        agent.close();
        drop(agent);
        let agent = {
            let _in = runtime.enter();
            open(dir.path(), &engine, sells_claims)
        };
        Node { agent, engine, dir, runtime }
    }

    fn pages(&self) -> usize {
        let all = std::fs::read_dir(self.dir.path().join("pages")).unwrap().flatten();
        all.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.')).count()
    }

    fn specs(&self) -> usize {
        std::fs::read_dir(self.dir.path().join("cdi")).map_or(0, Iterator::count)
    }
}

fn claim(uid: &str, gib: u64, cores_millis: u32) -> Ask {
    let result = ClaimResult { device: "gpu-a".to_owned(), share_id: Some("s".to_owned()) };
    let share = ClaimShare {
        uid: uid.to_owned(),
        namespace: "default".to_owned(),
        name: "chat".to_owned(),
        request: "gpu".to_owned(),
        pool: "node".to_owned(),
        results: vec![result],
        asked: BTreeMap::new(),
    };
    let grant = Grant {
        uuid: GPU.to_owned(),
        memory_limit_bytes: gib * GIB,
        context_overhead_bytes: 0,
        cores_millis,
        compute: Compute::Strict,
    };
    let record = Record::new(share.allocation_id(), 0, vec![grant]);
    Ask::Share(Box::new(Record { origin: Origin::Claim(Box::new(share)), ..record }))
}

fn replicas(indexes: &[u32]) -> Ask {
    let ids = indexes.iter().map(|index| Replica::id(GPU, *index)).collect();
    Ask::Replicas { resource: RESOURCE.to_owned(), ids }
}

#[test]
fn each_engine_is_asked_through_a_tenants_life() {
    let node = node(false);
    node.grant(&replicas(&[1])).unwrap();
    assert_eq!(node.engine.take(), ["admit 4 Fresh"]);
    let record = node.agent.allocations.records().pop().unwrap();
    assert!(record.origin.is_device_plugin() && node.pages() == 1);
    let target = Target { name: record.id.to_string(), ..Target::default() };
    let memory_limit_bytes = Some(2 * GIB);
    let ask = SetQuotaRequest { target, memory_limit_bytes, ..SetQuotaRequest::default() };
    node.agent.set_quota(&ask, Actor::Plugin).unwrap();
    assert_eq!(node.engine.take(), ["limits 2"]);
    node.agent.release(std::slice::from_ref(&record.id)).unwrap();
    // First while the ledger has it: a plugin that is killed in between leaves no pages without a record.
    assert_eq!(node.engine.take(), ["release"]);
    assert_eq!((node.pages(), node.agent.allocations.records().len()), (0, 0));
    // What has ended already may be released again.
    node.agent.release(std::slice::from_ref(&record.id)).unwrap();
    assert!(node.engine.take().is_empty());
}

#[test]
fn a_tenant_that_one_engine_cannot_hold_leaves_nothing_with_the_others() {
    let node = node(true);
    let error = node.grant(&claim("u", 3, 100)).unwrap_err();
    assert!(error.to_string().contains("odd"), "{error}");
    assert_eq!(node.engine.take(), ["admit 3 Fresh", "release unrecorded"]);
    assert_eq!((node.pages(), node.specs()), (0, 0));
    assert!(node.agent.allocations.records().is_empty());
    let again = node.restart(true);
    assert!(again.agent.allocations.records().is_empty());
}

#[test]
fn containers_are_all_granted_what_they_ask_for_or_none_is() {
    let node = node(false);
    let _in = node.runtime.enter();
    for bad in [replicas(&[9]), Ask::Replicas { resource: RESOURCE.to_owned(), ids: vec![] }] {
        node.agent.grant(&[replicas(&[0]), bad]).unwrap_err();
    }
    // The second has pages and is refused by the last engine.
    node.engine.refuses.store(true, Ordering::Relaxed);
    node.agent.grant(&[replicas(&[0]), replicas(&[1])]).unwrap_err();
    assert_eq!((node.pages(), node.agent.allocations.records().len()), (0, 0));
    node.engine.refuses.store(false, Ordering::Relaxed);
    assert_eq!(node.agent.grant(&[replicas(&[0]), replicas(&[1])]).unwrap().len(), 2);
}

#[test]
fn every_change_of_what_is_live_is_an_event() {
    let node = node(true);
    let mut events = node.agent.advertised.events();
    events.mark_unchanged();
    node.grant(&claim("u", 2, 100)).unwrap();
    assert!(events.has_changed().unwrap());
    events.mark_unchanged();
    node.agent.cordon(None, None, Actor::Plugin).unwrap();
    assert!(events.has_changed().unwrap());
    let error = node.grant(&claim("v", 2, 100)).unwrap_err().to_string();
    assert!(error.contains("cordoned"), "{error}");
}

/// Whether `status` says long after the start that an allocation is not held.
fn is_warned_of(node: &Node) -> bool {
    let warnings = node.agent.board.warnings(unix_ms() + 30 * GRAVE);
    warnings.iter().any(|one| one.text.contains("has no pages") && one.times == 0)
}

#[test]
fn what_cannot_be_held_is_a_warning_until_it_can_or_is_gone() {
    let mut node = node(true);
    let ask = claim("u", 2, 100);
    node.grant(&ask).unwrap();
    assert!(!is_warned_of(&node));
    node.engine.refuses.store(true, Ordering::Relaxed);
    node = node.restart(true);
    assert!(is_warned_of(&node));
    node.engine.refuses.store(false, Ordering::Relaxed);
    node.grant(&ask).unwrap();
    assert!(!is_warned_of(&node));
    node.engine.refuses.store(true, Ordering::Relaxed);
    node = node.restart(true);
    assert!(is_warned_of(&node));
    let record = node.agent.allocations.records().pop().unwrap();
    node.agent.release(std::slice::from_ref(&record.id)).unwrap();
    assert!(!is_warned_of(&node));
}

fn offered(node: &Node) -> usize {
    node.agent.advertised.refresh();
    let devices = node.agent.advertised.devices(RESOURCE);
    devices.borrow().iter().filter(|device| device.healthy).count()
}

#[test]
fn a_gpu_that_moves_is_sold_by_nobody_until_the_last_of_the_other_has_ended() {
    let node = node(false);
    assert_eq!(offered(&node), 4);
    let error = node.grant(&claim("u", 2, 100)).unwrap_err().to_string();
    assert!(error.contains("sold by device plugin"), "{error}");
    node.grant(&replicas(&[1])).unwrap();
    // To claims.
    let node = node.restart(true);
    assert_eq!(offered(&node), 0);
    let error = node.grant(&claim("u", 2, 100)).unwrap_err().to_string();
    assert!(error.contains("moving from device plugin") && error.contains("1 share"), "{error}");
    let id = node.agent.allocations.records()[0].id.clone();
    node.agent.release(&[id]).unwrap();
    node.grant(&claim("u", 2, 100)).unwrap();
    // And back. What was prepared is prepared again, also if another sells the GPU by now.
    let node = node.restart(false);
    let error = node.grant(&replicas(&[1])).unwrap_err().to_string();
    assert!(error.contains("moving from DRA"), "{error}");
    node.grant(&claim("u", 2, 100)).unwrap();
}

// What views are made of, while allocations, starts, quotas and releases come as kubelet and people may send them: no moment
// shows more sold than there is.

fn step() -> impl Strategy<Value = Step> {
    any::<u64>().prop_map(Step::of)
}

/// What is sold, and what kubelet may give away beside it.
fn sold(agent: &Agent) -> (u64, u64) {
    let books = agent.advertised.books();
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
