//! The controller against an API server: single cases, and any sequence of events.

use std::collections::BTreeSet;

use proptest::prelude::*;
use tessera_cluster::fixtures::Temper;
use tessera_cluster::resource::ResourceClient;
use tessera_cluster::{Call, Kind, Verb};
use tessera_config::Config;

use super::super::{Published, device};
use super::*;
use crate::fixtures::{Cluster, fails, forbids, gpu, mig};

const NODE: &str = "n1";

/// A server, its clock, and instances of the driver.
struct World {
    api: Cluster,
    client: ResourceClient,
    now: Instant,
    unix: i64,
    offer: Offer,
    instances: Vec<Instance>,
}

struct Instance {
    controller: Controller,
    /// What its watch has reported.
    seen: BTreeMap<String, String>,
}

fn block<T>(future: impl Future<Output = T>) -> T {
    thread_local!(static RUNTIME: tokio::runtime::Runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap());
    RUNTIME.with(|runtime| runtime.block_on(future))
}

fn offer(gpus: &[Published]) -> Offer {
    Offer::new(gpus, &Config::default())
}

fn cordoned(gpu: Published) -> Published {
    Published { is_cordoned: true, ..gpu }
}

fn many(count: u32) -> Vec<Published> {
    (0..count).map(|i| mig(&format!("MIG-{i:03}"), i)).collect()
}

impl World {
    fn new(offer: Offer) -> Self {
        let api = Cluster::new(NODE);
        let (client, now, instances) = (api.client(), Instant::now(), Vec::new());
        let mut world = World { api, client, now, unix: 1_000_000, offer, instances };
        world.start();
        world
    }

    /// Whether the server drops what makes a device shareable.
    fn drops_shares(&self, drops: bool) {
        self.api.server.with(|store| store.has_whole_devices = drops);
    }

    fn forbid(&self, method: &str, forbidden: bool) {
        self.api.server.forbid(method, "resourceslices", forbidden);
    }

    fn remove(&self, name: &str) {
        self.api.server.with(|store| store.delete_slice(name)).unwrap();
    }

    fn start(&mut self) {
        let mut controller = Controller::new(NODE);
        controller.want(self.offer.clone(), self.time());
        self.instances.push(Instance { controller, seen: BTreeMap::new() });
    }

    fn time(&self) -> Timestamp {
        Timestamp::from_second(self.unix).unwrap()
    }

    fn want(&mut self, offer: Offer) {
        self.want_one_after_the_other(offer, 0);
    }

    /// Each instance notices `seconds` after the one before it.
    fn want_one_after_the_other(&mut self, offer: Offer, seconds: i64) {
        self.offer = offer;
        let mut at = self.unix;
        for instance in &mut self.instances {
            let time = Timestamp::from_second(at).unwrap();
            instance.controller.want(self.offer.clone(), time);
            at += seconds;
        }
    }

    fn pass(&mut self, seconds: u32) {
        self.now += Duration::from_secs(seconds.into());
        self.unix += i64::from(seconds);
    }

    /// Resource versions by name.
    fn there(&self) -> BTreeMap<String, String> {
        let text = |text: Option<String>| text.unwrap_or_default();
        let slices = self.api.slices().into_iter();
        slices.map(|s| (text(s.metadata.name), text(s.metadata.resource_version))).collect()
    }

    fn tell(&mut self, i: usize) {
        let there = self.there();
        let Instance { controller, seen } = &mut self.instances[i];
        for (name, version) in &there {
            if seen.get(name) != Some(version) {
                let (name, resource_version) = (name.clone(), version.clone());
                controller.heard(&SliceEvent::Changed { name, resource_version }, self.now);
            }
        }
        for name in seen.keys().filter(|name| !there.contains_key(*name)) {
            controller.heard(&SliceEvent::Removed { name: name.clone() }, self.now);
        }
        *seen = there;
    }

    /// One step of an instance; none if it waits.
    fn step(&mut self, i: usize) -> Option<Step> {
        self.tell(i);
        let step = self.instances[i].controller.next(self.now);
        if matches!(step, Step::Wait(_)) {
            return None;
        }
        let answer = block(step.take(&self.client));
        self.instances[i].controller.done(&step, answer, self.now);
        Some(step)
    }

    /// Runs until all wait, however long that takes; the steps of the first.
    fn settle(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        for _ in 0..200 {
            let mut quiet = true;
            for i in 0..self.instances.len() {
                while let Some(step) = self.step(i) {
                    quiet = false;
                    self.check().unwrap();
                    if i == 0 {
                        steps.push(step);
                    }
                    assert!(steps.len() < 1000, "no end: {:?}", &steps[990..]);
                }
            }
            let waits = |one: &mut Instance, now| match one.controller.next(now) {
                Step::Wait(pause) => pause,
                _ => Some(Duration::ZERO),
            };
            let now = self.now;
            let pauses = self.instances.iter_mut().filter_map(|one| waits(one, now));
            match pauses.min() {
                None if quiet => return steps,
                // Until what the server refused is tried again.
                Some(pause) if pause > LONGEST && quiet => return steps,
                Some(pause) if pause > LONGEST => {}
                None => {}
                Some(pause) => self.now += pause,
            }
        }
        panic!("it does not settle: {:?}", self.status());
    }

    fn status(&self) -> &Status {
        &self.instances[0].controller.status
    }

    /// The slices that a scheduler reads, in its order.
    fn read(&self) -> Vec<ResourceSlice> {
        let slices = self.api.slices();
        let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
        let mut read: Vec<_> =
            slices.into_iter().filter(|s| Some(s.spec.pool.generation) == newest).collect();
        read.sort_by_key(|slice| slice.metadata.name.clone());
        read
    }

    fn names(&self) -> Vec<String> {
        self.read().iter().flat_map(devices).map(|device| device.name.clone()).collect()
    }

    /// What must hold at any time.
    fn check(&self) -> Result<(), String> {
        let read = self.read();
        let all: Vec<&Device> = read.iter().flat_map(devices).collect();
        let names: BTreeSet<&str> = all.iter().map(|device| device.name.as_str()).collect();
        let unshared = all.iter().find(|device| !is_shared(device));
        // It is about to, or has not heard of it.
        let removes = |one: &Instance| {
            let Instance { controller, seen } = one;
            controller.unshared().is_some() || controller.stale || *seen != self.there()
        };
        if let Some(device) = unshared
            && !self.instances.iter().any(removes)
        {
            return Err(format!("{} stays there for one pod as a whole", device.name));
        }
        if names.len() != all.len() {
            return Err("a device is there twice".to_owned());
        }
        Ok(())
    }

    /// What must hold once nothing is left to do.
    fn check_settled(&self) {
        let slices = self.api.slices();
        let read = self.read();
        assert_eq!(slices.len(), read.len(), "outdated slices are left");
        for slice in &read {
            assert_eq!(slice.spec.pool.resource_slice_count, i64::try_from(read.len()).unwrap());
        }
        assert!(read.iter().flat_map(devices).all(is_shared));
        let controller = &self.instances[0].controller;
        let status = &controller.status;
        if status.error.as_ref().is_some_and(|error| error.contains("DRAConsumableCapacity")) {
            assert_eq!((status.state, slices.len()), (State::Failing, 0));
            return;
        }
        let wanted: Vec<&str> = controller.wanted().iter().map(|d| d.name.as_str()).collect();
        assert_eq!(self.names(), wanted);
        assert_eq!((status.state, &status.error), (State::Published, &None));
    }
}

/// Steps in short: `C`reate, `U`pdate, `D`elete with generation and devices; `L`ist; `N`ode.
fn short(steps: &[Step]) -> Vec<String> {
    let of = |slice: &ResourceSlice| {
        format!("{}:{}", slice.spec.pool.generation, devices(slice).count())
    };
    let word = |step: &Step| match step {
        Step::NodeUid => "N".to_owned(),
        Step::List => "L".to_owned(),
        Step::Create(slice) => format!("C{}", of(slice)),
        Step::Update(slice) => format!("U{}", of(slice)),
        Step::Delete(_) => "D".to_owned(),
        Step::Wait(_) => "W".to_owned(),
    };
    steps.iter().map(word).collect()
}

#[test]
fn a_first_start_publishes_in_one_write_and_the_next_finds_it_there() {
    let gpus = [gpu("GPU-a", 0), gpu("GPU-b", 1)];
    let mut world = World::new(offer(&gpus));
    assert_eq!(short(&world.settle()), ["N", "L", "C1:2"]);
    world.check_settled();
    let [slice] = &world.read()[..] else { panic!("one slice") };
    let owner = &slice.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!(
        (owner.kind.as_str(), owner.uid.as_str(), owner.controller),
        ("Node", "uid-of-n1", Some(true))
    );
    // The next instance finds all as it should be, and has nothing to write.
    world.instances.clear();
    world.start();
    assert_eq!(short(&world.settle()), ["N", "L"]);
    world.check_settled();
}

#[test]
fn without_consumable_capacity_the_slice_goes_at_once_and_the_version_is_said() {
    let gpus = [gpu("GPU-a", 0), cordoned(gpu("GPU-b", 1))];
    let mut world = World::new(offer(&gpus));
    world.drops_shares(true);
    assert_eq!(short(&world.settle()), ["N", "L", "C1:2", "D"]);
    assert_eq!(world.api.slices(), []);
    assert_eq!(world.status().state, State::Failing);
    let said = world.status().sentences();
    assert!(said[0].contains("needs Kubernetes 1.36 (DRAConsumableCapacity)"), "{said:?}");
    // It is left in peace for a while, and noticed when it has been upgraded.
    let left = world.instances[0].controller.next(world.now);
    assert!(matches!(left, Step::Wait(Some(pause)) if pause > REFUSED_FOR / 2), "{left:?}");
    world.pass(600);
    assert_eq!(short(&world.settle()), ["C1:2", "D"]);
    world.drops_shares(false);
    world.pass(600);
    assert_eq!(short(&world.settle()), ["C1:2"]);
    world.check_settled();
    assert_eq!(world.status().sentences(), Vec::<String>::new());
}

#[test]
fn no_gpu_is_an_empty_slice() {
    let mut world = World::new(Offer::default());
    assert_eq!(short(&world.settle()), ["N", "L", "C1:0"]);
    world.check_settled();
    assert_eq!(world.read().len(), 1);
}

#[test]
fn a_change_of_health_is_one_write_and_keeps_its_time() {
    let mut world = World::new(offer(&[gpu("GPU-a", 0), gpu("GPU-b", 1)]));
    world.settle();
    let added = |world: &World| {
        let read = world.read();
        let all = read.iter().flat_map(devices).filter_map(|device| device.taints.clone());
        all.flatten().map(|taint| taint.time_added.unwrap().0.as_second()).collect::<Vec<_>>()
    };
    world.pass(60);
    let begin = world.unix;
    world.want(offer(&[cordoned(gpu("GPU-a", 0)), gpu("GPU-b", 1)]));
    assert_eq!(short(&world.settle()), ["U1:2"]);
    assert_eq!(added(&world), [begin]);
    // Another instance, another GPU: the first taint stays as old as it is.
    world.pass(60);
    world.instances.clear();
    world.start();
    world.settle();
    world.want(offer(&[cordoned(gpu("GPU-a", 0)), cordoned(gpu("GPU-b", 1))]));
    world.settle();
    assert_eq!(added(&world), [begin, begin + 60]);
    world.want(offer(&[gpu("GPU-a", 0), cordoned(gpu("GPU-b", 1))]));
    assert_eq!(short(&world.settle()), ["U1:2"]);
    assert_eq!(added(&world), [begin + 60]);
    // One that was lifted and comes back is new.
    world.pass(60);
    world.want(offer(&[cordoned(gpu("GPU-a", 0)), cordoned(gpu("GPU-b", 1))]));
    world.settle();
    assert_eq!(added(&world), [begin + 120, begin + 60]);
}

#[test]
fn more_slices_are_a_new_generation_and_one_write_is_none() {
    let mut gpus = many(66);
    let mut world = World::new(offer(&gpus));
    assert_eq!(short(&world.settle()), ["N", "L", "C1:64", "C1:2"]);
    // A taint in the second slice: one write.
    gpus[65] = cordoned(gpus[65].clone());
    world.want(offer(&gpus));
    assert_eq!(short(&world.settle()), ["U1:2"]);
    // The first is gone: all devices move.
    gpus.remove(0);
    world.want(offer(&gpus));
    assert_eq!(short(&world.settle()), ["U2:64", "U2:1"]);
    world.check_settled();
    // Fewer: what is obsolete goes first.
    gpus.truncate(3);
    world.want(offer(&gpus));
    assert_eq!(short(&world.settle()), ["D", "U2:3"]);
    world.check_settled();
}

#[test]
fn what_kubelet_wipes_comes_back() {
    let mut world = World::new(offer(&[gpu("GPU-a", 0)]));
    world.settle();
    world.pass(60);
    for pause in [1, 2, 4] {
        world.api.wipe_slices();
        let before = world.now;
        assert_eq!(short(&world.settle()), ["L", "C1:1"]);
        assert_eq!(world.now - before, Duration::from_secs(pause));
        world.check_settled();
    }
    assert_eq!(world.status().wipes, 3);
    // One slice of several, with the watch broken meanwhile.
    world.want(offer(&many(66)));
    world.settle();
    world.pass(120);
    let name = world.read()[1].metadata.name.clone().unwrap();
    world.instances[0].controller.stale = true;
    world.instances[0].seen.clear();
    world.remove(&name);
    assert_eq!(short(&world.settle()), ["L", "C2:2"]);
}

#[test]
fn strangers_under_the_drivers_name_are_removed() {
    let mut world = World::new(offer(&[gpu("GPU-a", 0)]));
    world.settle();
    let mut stranger = world.read()[0].clone();
    stranger.metadata.name = Some("somebody".to_owned());
    stranger.metadata.resource_version = None;
    stranger.spec.devices.as_mut().unwrap()[0].name = "gpu-z".to_owned();
    world.api.put_slice(&stranger);
    assert_eq!(short(&world.settle()), ["L", "D"]);
    // Of a node that has been made again under its old name.
    let mut old = stranger.clone();
    old.metadata.name = Some(world.read()[0].metadata.name.clone().unwrap() + "2");
    old.metadata.owner_references.as_mut().unwrap()[0].uid = "before".to_owned();
    world.api.put_slice(&old);
    assert_eq!(short(&world.settle()), ["L", "D"]);
    world.check_settled();
}

#[test]
fn trouble_with_the_server_is_said_and_waited_out() {
    let mut world = World::new(offer(&[gpu("GPU-a", 0)]));
    world.api.server.set_temper(Temper::Away);
    for pause in [250, 500, 1000] {
        assert_eq!(world.step(0), Some(Step::NodeUid));
        let pause = Duration::from_millis(pause);
        assert_eq!(world.instances[0].controller.next(world.now), Step::Wait(Some(pause)));
        assert_eq!(world.status().state, State::Failing);
        assert!(world.status().error.as_ref().unwrap().contains("cannot be reached"));
        world.now += pause;
    }
    world.api.server.set_temper(Temper::Works);
    world.forbid("POST", true);
    while world.step(0).is_some() {}
    let status = world.status().clone();
    assert_eq!(status.state, State::Failing);
    assert!(
        status.error.as_ref().unwrap().contains("resourceslices\"], verbs: [\"create\"]"),
        "{status:?}"
    );
    assert_eq!(status.sentences().len(), 1);
    world.pass(61);
    world.forbid("POST", false);
    world.settle();
    world.check_settled();
}

#[test]
fn slices_that_the_server_refuses_are_not_sent_again_until_they_change() {
    let mut world = World::new(offer(&[gpu("GPU-a", 0)]));
    world.settle();
    let step = {
        world.want(offer(&[gpu("GPU-a", 0), gpu("GPU-b", 1)]));
        world.tell(0);
        world.instances[0].controller.next(world.now)
    };
    let field = Some("spec.devices[1].name".to_owned());
    let refused = Call::new(Verb::Update, Kind::SLICES, "x").failed(Failure::Invalid(field), "no");
    world.instances[0].controller.done(&step, Err(refused), world.now);
    world.pass(60);
    assert_eq!(world.step(0), Some(Step::List));
    assert_eq!(world.step(0), None);
    let left = REFUSED_FOR - Duration::from_secs(60);
    assert_eq!(world.instances[0].controller.next(world.now), Step::Wait(Some(left)));
    // The list has succeeded, and what was refused is refused still.
    assert_eq!(world.status().state, State::Failing);
    assert!(world.status().error.as_ref().unwrap().contains("spec.devices[1].name"));
    // What is published already is wanted again.
    world.want(offer(&[gpu("GPU-a", 0)]));
    assert_eq!(world.step(0), None);
    assert_eq!((world.status().state, &world.status().error), (State::Published, &None));
    world.want(offer(&[gpu("GPU-a", 0), gpu("GPU-c", 1)]));
    assert!(matches!(world.step(0), Some(Step::Update(_))));
    world.settle();
    world.check_settled();
}

#[test]
fn two_instances_that_noticed_a_cordon_at_different_times_agree_on_the_earlier() {
    let mut world = World::new(offer(&[gpu("GPU-a", 0)]));
    world.start();
    world.settle();
    world.want_one_after_the_other(offer(&[cordoned(gpu("GPU-a", 0))]), 3);
    world.settle();
    let first = world.time();
    let added = |world: &World| {
        let slices = world.read();
        let taints =
            slices.iter().flat_map(devices).flat_map(|device| device.taints.clone().unwrap());
        taints.map(|taint| taint.time_added.unwrap().0).collect::<Vec<_>>()
    };
    assert_eq!(added(&world), [first]);
    // The one that noticed first ends; the other goes on with its time.
    world.instances.remove(0);
    world.api.wipe_slices();
    world.pass(60);
    world.settle();
    assert_eq!(added(&world), [first]);
}

/// Of requests for slices: made, replaced, removed, listed.
const METHODS: [&str; 4] = ["POST", "PUT", "DELETE", "GET"];

#[derive(Clone, Debug)]
enum Op {
    Step { instance: usize, times: usize },
    Settle,
    Wipe,
    Remove(usize),
    Edit(usize),
    Temper(Temper),
    Forbid(&'static str, bool),
    Want { count: u32, sick: Vec<u32>, apart: i64 },
    Restart(usize),
    Join,
    Leave,
    Pass(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let tempers = vec![Temper::Works, Temper::Works, Temper::Away, fails(), forbids()];
    let temper = prop::sample::select(tempers);
    let method = prop::sample::select(METHODS.to_vec());
    prop_oneof![
        6 => (0usize..2, 1usize..6).prop_map(|(instance, times)| Op::Step { instance, times }),
        2 => Just(Op::Settle),
        2 => Just(Op::Wipe),
        1 => (0usize..4).prop_map(Op::Remove),
        1 => (0usize..4).prop_map(Op::Edit),
        1 => temper.prop_map(Op::Temper),
        1 => (method, any::<bool>()).prop_map(|(method, on)| Op::Forbid(method, on)),
        3 => (prop_oneof![0u32..4, 0u32..140], prop::collection::vec(prop_oneof![0u32..4, 0u32..140], 0..4), 0i64..3)
            .prop_map(|(count, sick, apart)| Op::Want { count, sick, apart }),
        1 => (0usize..2).prop_map(Op::Restart),
        1 => Just(Op::Join),
        1 => Just(Op::Leave),
        3 => (0u32..120).prop_map(Op::Pass),
    ]
}

fn take(world: &mut World, op: Op) -> Result<(), String> {
    let count = world.instances.len();
    match op {
        Op::Step { instance, times } => {
            for _ in 0..times {
                world.step(instance % count);
                world.check()?;
            }
        }
        Op::Settle => {
            for _ in 0..10 {
                while world.step(0).is_some() {
                    world.check()?;
                }
                world.pass(4);
            }
        }
        Op::Wipe => {
            // What was made since is reported before its end is.
            (0..count).for_each(|i| world.tell(i));
            world.api.wipe_slices();
        }
        Op::Remove(i) => {
            (0..count).for_each(|i| world.tell(i));
            let slices = world.api.slices();
            if let Some(slice) = slices.get(i) {
                world.remove(slice.metadata.name.as_deref().unwrap());
            }
        }
        // Somebody else's change, of a kind that sells nothing.
        Op::Edit(i) => {
            let slices = world.api.slices();
            if let Some(slice) = slices.get(i).filter(|slice| slice.spec.pool.generation > 0) {
                let mut slice = slice.clone();
                slice.spec.devices = None;
                let _ = block(world.client.update_slice(&slice));
            }
        }
        Op::Temper(temper) => world.api.server.set_temper(temper),
        Op::Forbid(method, on) => world.forbid(method, on),
        Op::Want { count, sick, apart } => {
            let sick: Vec<u32> = sick.into_iter().collect();
            let gpus = many(count).into_iter().zip(0..);
            let gpus: Vec<Published> =
                gpus.map(|(gpu, i)| if sick.contains(&i) { cordoned(gpu) } else { gpu }).collect();
            world.want_one_after_the_other(offer(&gpus), apart);
        }
        Op::Restart(i) => {
            world.instances.remove(i % count);
            world.start();
        }
        Op::Join if count < 2 => world.start(),
        Op::Leave if count > 1 => drop(world.instances.remove(0)),
        Op::Join | Op::Leave => {}
        Op::Pass(seconds) => world.pass(seconds),
    }
    world.check()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// Whatever happens in whatever order: no GPU is ever sold whole or twice, and in the end the server has what
    /// it should, and is left in peace.
    #[test]
    fn nothing_is_oversold_and_all_ends_well(
        ops in prop::collection::vec(op(), 1..25),
        drops_shares in any::<bool>(),
    ) {
        let mut world = World::new(offer(&[gpu("GPU-a", 0), gpu("GPU-b", 1)]));
        world.drops_shares(drops_shares);
        for op in ops {
            let text = format!("{op:?}");
            take(&mut world, op).map_err(|why| TestCaseError::fail(format!("{text}: {why}")))?;
        }
        world.api.server.set_temper(Temper::Works);
        METHODS.iter().for_each(|method| world.forbid(method, false));
        world.pass(700);
        world.settle();
        world.check_settled();
        if drops_shares {
            prop_assert!(world.read().iter().all(|slice| slice.spec.devices.is_none()));
            return Ok(());
        }
        prop_assert_eq!(world.status().state, State::Published);
        // An idle hour.
        let calls = world.api.server.count("");
        for _ in 0..3 {
            world.pass(1200);
            world.settle();
        }
        prop_assert_eq!(world.api.server.count(""), calls);
        let sick = world.offer.devices.iter().filter(|device| device.taints.is_some()).count();
        let tainted = world.read().iter().flat_map(devices)
            .filter(|device| device.taints.iter().flatten().any(|taint| taint.key == device::CORDONED))
            .count();
        prop_assert_eq!(tainted, sick);
    }
}

const MILLI: Duration = Duration::from_millis(1);

#[test]
fn a_burst_goes_through_and_then_one_at_a_time() {
    let (mut pace, begin) = (Pace::default(), Instant::now());
    for _ in 0..BURST {
        assert_eq!(pace.before_writing(begin), None);
        pace.wrote(begin);
    }
    assert_eq!(pace.before_writing(begin), Some(REFILL));
    let mut now = begin + REFILL;
    for _ in 0..5 {
        assert_eq!(pace.before_writing(now), None);
        pace.wrote(now);
        assert!(pace.before_writing(now + MILLI).is_some());
        now += REFILL;
    }
    now += REFILL * 20;
    pace.wrote(now);
    assert_eq!(pace.before_writing(now), None);
}

#[test]
fn failures_are_waited_out_longer_each_time() {
    let call = Call::new(Verb::List, Kind::SLICES, "");
    let error = call.failed(Failure::Unreachable, "x");
    let (mut pace, now) = (Pace::default(), Instant::now());
    let mut pauses = Vec::new();
    for _ in 0..10 {
        pace.failed(&error, now);
        pauses.push(pace.before_asking(now).unwrap());
    }
    assert_eq!(pauses[..3], [SHORTEST, SHORTEST * 2, SHORTEST * 4]);
    assert_eq!(pauses[9], LONGEST);
    pace.succeeded();
    assert_eq!(pace.before_asking(now), None);
    let after = Some(Duration::from_secs(7));
    pace.failed(&call.failed(Failure::Busy { status: 429, after }, ""), now);
    assert_eq!(pace.before_asking(now), after);
}

#[test]
fn whoever_removes_slices_over_and_over_is_given_more_time() {
    let (mut pace, mut now) = (Pace::default(), Instant::now());
    for seconds in [1, 2, 4, 8, 16, 30, 30] {
        assert!(pace.wiped(now));
        assert!(!pace.wiped(now + MILLI), "the same wipe");
        let pause = pace.before_writing(now).unwrap();
        assert_eq!(pause, Duration::from_secs(seconds));
        now += pause;
    }
    assert!(pace.wiped(now + WIPED_WITHIN * 2));
    assert_eq!(pace.before_writing(now + WIPED_WITHIN * 2), Some(WIPED));
}
