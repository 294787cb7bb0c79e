use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use tessera_model::health::State::{Healthy, Recovering, Suspect, Unhealthy};

const SECOND: Duration = Duration::from_secs(1);

struct Bench {
    health: Health,
    policy: config::Health,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let policy = config::Health::default();
        let gpus = ["GPU-a".to_owned(), "GPU-b".to_owned()];
        {
            let (now, at) = (Instant::now(), Moment::default());
            let health = Health::new(policy.clone(), &gpus, BTreeMap::new(), (&at, now));
            Bench { health, policy, now }
        }
    }

    fn tell(&mut self, observation: &Observation) -> Vec<State> {
        let reported = self.health.observe(observation, self.now);
        reported.into_iter().map(|transition| transition.to).collect()
    }

    fn xid(&mut self, xid: u64) -> Vec<State> {
        self.tell(&Observation::Xid { uuid: "GPU-a".into(), xid })
    }

    fn silent(&mut self, gone: bool) -> Vec<State> {
        let answer = Err(Silence { why: "GPU is lost".into(), gone });
        self.tell(&Observation::Probe { uuid: "GPU-a".into(), answer })
    }

    fn condition(&mut self, condition: Condition) -> Vec<State> {
        self.tell(&Observation::Condition { uuid: "GPU-a".into(), condition })
    }

    /// The GPU answers every ten seconds for this long.
    fn quiet(&mut self, time: Duration) -> Vec<State> {
        let end = self.now + time;
        let mut states = Vec::new();
        while self.now < end {
            self.now += 10 * SECOND;
            let answer = Ok(());
            states.extend(self.tell(&Observation::Probe { uuid: "GPU-a".into(), answer }));
        }
        states
    }

    fn view(&self) -> View {
        self.health.view("GPU-a", self.now)
    }

    fn minutes(&mut self, minutes: u32) -> Vec<State> {
        self.quiet(60 * SECOND * minutes)
    }
}

#[test]
fn a_programs_own_fault_leaves_the_gpu_healthy() {
    let mut bench = Bench::new();
    for xid in [13, 31, 43, 45, 68, 109] {
        let observation = Observation::Xid { uuid: "GPU-a".into(), xid };
        assert!(Health::ignores(&bench.policy, &observation));
        assert_eq!(bench.xid(xid), []);
    }
    assert_eq!(bench.view(), View::default());
}

#[test]
fn suspicions_far_apart_never_add_up() {
    let mut bench = Bench::new();
    for _ in 0..10 {
        assert_eq!(bench.xid(94), [Suspect]);
        assert_eq!(bench.minutes(11), [Healthy]);
    }
}

#[test]
fn an_unhealthy_gpu_comes_back_after_quiet_and_not_before() {
    let mut bench = Bench::new();
    assert_eq!(bench.xid(144), [Unhealthy]);
    assert_eq!(bench.minutes(4), [Recovering]);
    assert_eq!(bench.view().waits_for, "1m without trouble");
    assert_eq!(bench.health.reason("GPU-a"), Some("XID 144"), "not sold while it recovers");
    assert_eq!(bench.xid(144), [Unhealthy]);
    assert_eq!(bench.minutes(4), [Recovering]);
    assert_eq!(bench.minutes(1), [Healthy]);
    assert_eq!(bench.health.reason("GPU-a"), None);
}

#[test]
fn each_relapse_doubles_the_recovery_up_to_a_cap_and_long_health_forgives() {
    let mut bench = Bench::new();
    for minutes in [5, 10, 20, 40, 60, 60] {
        assert_eq!(bench.xid(144), [Unhealthy]);
        assert_eq!(bench.minutes(minutes - 1), [Recovering], "{minutes}");
        assert_eq!(bench.minutes(1), [Healthy], "{minutes}");
    }
    bench.minutes(61);
    bench.xid(144);
    assert_eq!(bench.minutes(5), [Recovering, Healthy]);
}

#[test]
fn one_unanswered_probe_is_a_suspicion_and_three_are_a_lost_gpu() {
    let mut bench = Bench::new();
    assert_eq!(bench.silent(false), [Suspect]);
    assert_eq!(bench.silent(false), []);
    assert_eq!(bench.silent(false), [Unhealthy]);
    assert_eq!(bench.health.reason("GPU-a"), Some("NVML: GPU is lost"));
    assert_eq!(bench.minutes(6), [Recovering, Healthy]);
    assert_eq!(bench.silent(false), [Suspect]);
    assert_eq!(bench.minutes(11), [Healthy]);
}

#[test]
fn a_counter_that_starts_again_shows_a_reset() {
    let mut bench = Bench::new();
    let errors = |n| Condition { uncorrectable: Some(n), ..Condition::default() };
    assert_eq!(bench.condition(errors(5)), [], "what was before the plugin is no news");
    bench.xid(48);
    assert_eq!(bench.condition(errors(6)), []);
    assert_eq!(bench.minutes(10), []);
    bench.condition(errors(0));
    assert_eq!(bench.minutes(6), [Recovering, Healthy]);
}

#[test]
fn uncorrectable_errors_without_an_event_are_suspicions() {
    let mut bench = Bench::new();
    let errors = |n| Condition { uncorrectable: Some(n), ..Condition::default() };
    bench.condition(errors(0));
    assert_eq!(bench.condition(errors(1)), [Suspect]);
    assert_eq!(bench.condition(errors(1)), []);
    bench.condition(errors(2));
    assert_eq!(bench.condition(errors(4)), [Unhealthy]);
    assert_eq!(bench.health.reason("GPU-a"), Some("uncorrectable ECC errors, number 3 within 10m"));
}

#[test]
fn a_gpu_that_is_not_ours_is_nobodys_business() {
    let mut bench = Bench::new();
    assert_eq!(bench.tell(&Observation::Xid { uuid: "GPU-z".into(), xid: 79 }), []);
    assert_eq!(bench.health.reason("GPU-z"), None);
}

// What holds for every sequence of events.

#[derive(Clone, Debug)]
enum Step {
    Xid(u64),
    Passed,
    Silent(bool),
    Driver(bool),
    Uncorrectable(u64),
    Recovery(bool),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => prop::sample::select(vec![31u64, 94, 94, 999, 144, 79, 95]).prop_map(Step::Xid),
        6 => Just(Step::Passed),
        2 => any::<bool>().prop_map(Step::Silent),
        1 => any::<bool>().prop_map(Step::Driver),
        1 => (0u64..4).prop_map(Step::Uncorrectable),
        1 => any::<bool>().prop_map(Step::Recovery),
        4 => (1u64..900).prop_map(Step::Wait),
    ]
}

fn observation(step: &Step) -> Option<Observation> {
    let uuid = || "GPU-a".to_owned();
    let silence = |gone: &bool| Silence { why: "silent".into(), gone: *gone };
    Some(match step {
        Step::Xid(xid) => Observation::Xid { uuid: uuid(), xid: *xid },
        Step::Passed => Observation::Probe { uuid: uuid(), answer: Ok(()) },
        Step::Silent(gone) => Observation::Probe { uuid: uuid(), answer: Err(silence(gone)) },
        Step::Driver(gone) => Observation::Driver(silence(gone)),
        Step::Uncorrectable(n) => Observation::Condition {
            uuid: uuid(),
            condition: Condition { uncorrectable: Some(*n), ..Condition::default() },
        },
        Step::Recovery(needed) => Observation::Condition {
            uuid: uuid(),
            condition: Condition { recovery: Some(u64::from(*needed)), ..Condition::default() },
        },
        Step::Wait(_) => return None,
    })
}

/// What befalls a GPU of which a program without patience resets it.
#[derive(Clone, Debug)]
enum Fate {
    /// It runs, and uses so many millijoules.
    Run(u64),
    Fault,
    Reset,
    Probe,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        3 => (1u64..100).prop_map(Fate::Run),
        2 => Just(Fate::Fault),
        2 => Just(Fate::Reset),
        3 => Just(Fate::Probe),
    ]
}

fn start(remembered: BTreeMap<String, Remembered>, at: (&Moment, Instant)) -> Health {
    let gpus = ["GPU-a".to_owned(), "GPU-b".to_owned()];
    Health::new(config::Health::default(), &gpus, remembered, at)
}

/// Runs the steps; `look` sees the health after each, with the step and the time.
fn run(steps: &[Step], mut look: impl FnMut(&Health, &Step, Instant)) -> (Health, Instant) {
    let mut now = Instant::now();
    let mut health = start(BTreeMap::new(), (&Moment::default(), now));
    for step in steps {
        if let Step::Wait(seconds) = step {
            now += Duration::from_secs(*seconds);
        }
        if let Some(observation) = observation(step) {
            health.observe(&observation, now);
        }
        look(&health, step, now);
    }
    (health, now)
}

/// Hours in which the GPU answers and nothing happens; the driver asks for no repair.
fn hours_of_quiet(health: &mut Health, mut now: Instant) {
    health.observe(&observation(&Step::Recovery(false)).unwrap(), now);
    for _ in 0..40 {
        now += Duration::from_secs(300);
        health.observe(&observation(&Step::Passed).unwrap(), now);
    }
}

fn state(health: &Health) -> State {
    health.view("GPU-a", Instant::now()).state
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Kubelet never hears Healthy sooner than the recovery time after the last trouble, so a GPU can't
    /// flap faster than that.
    #[test]
    fn it_is_sold_again_only_after_quiet(steps in prop::collection::vec(step(), 0..60)) {
        // A counter may stand still, and then was no trouble.
        let steps: Vec<Step> =
            steps.into_iter().filter(|step| !matches!(step, Step::Uncorrectable(_))).collect();
        let quiet = config::Health::default().recovery;
        let (mut sold, mut trouble) = (true, None);
        run(&steps, |health, step, now| {
            if !matches!(step, Step::Passed | Step::Wait(_) | Step::Recovery(false) | Step::Xid(31)) {
                trouble = Some(now);
            }
            let sold_now = health.reason("GPU-a").is_none();
            if sold_now && !sold {
                assert!(matches!(step, Step::Passed), "sold again by {step:?}");
                let since = trouble.map(|then| now.saturating_duration_since(then));
                assert!(since.is_some_and(|since| since >= quiet), "{since:?}");
            }
            sold = sold_now;
        });
    }

    /// Each call moves it along an edge of the diagram.
    #[test]
    fn only_the_diagrams_edges_are_taken(steps in prop::collection::vec(step(), 0..80)) {
        let mut before = State::Healthy;
        run(&steps, |health, step, _| {
            let now = state(health);
            let edge = (before, now);
            let drawn = before == now || matches!(
                edge,
                (State::Healthy, State::Suspect | State::Unhealthy)
                    | (State::Suspect, State::Healthy | State::Unhealthy)
                    | (State::Unhealthy, State::Recovering)
                    | (State::Recovering, State::Healthy | State::Unhealthy)
            );
            assert!(drawn, "{edge:?} by {step:?}");
            before = now;
        });
    }

    #[test]
    fn a_quiet_gpu_that_needs_no_reset_ends_healthy(
        steps in prop::collection::vec(step(), 0..60)
    ) {
        let curable = |step: &Step| !matches!(step, Step::Xid(79 | 95));
        let steps: Vec<Step> = steps.into_iter().filter(curable).collect();
        let (mut health, now) = run(&steps, |_, _, _| {});
        hours_of_quiet(&mut health, now);
        prop_assert_eq!(state(&health), State::Healthy);
        prop_assert_eq!(health.reason("GPU-a"), None);
    }

    /// Quiet alone never ends it: not before the driver has shown a reset.
    #[test]
    fn until_reset_waits_for_a_reset(steps in prop::collection::vec(step(), 0..60)) {
        let shows_none = |step: &Step| !matches!(
            step,
            Step::Silent(true) | Step::Driver(true) | Step::Uncorrectable(_) | Step::Recovery(_)
        );
        let mut steps: Vec<Step> = steps.into_iter().filter(shows_none).collect();
        steps.insert(0, Step::Xid(79));
        let (mut health, now) = run(&steps, |health, _, _| {
            assert_eq!(state(health), State::Unhealthy);
        });
        for round in 0..40 {
            let now = now + Duration::from_secs(300 * round);
            health.observe(&observation(&Step::Passed).unwrap(), now);
        }
        prop_assert_eq!(health.reason("GPU-a"), Some("XID 79"));
        // And then does.
        health.observe(&observation(&Step::Silent(true)).unwrap(), now);
        hours_of_quiet(&mut health, now);
        prop_assert_eq!(health.reason("GPU-a"), None);
    }

    /// A plugin that starts again knows what its predecessor knew: a restart heals nothing, a reset and a reboot lift
    /// the same, and quiet goes on counting.
    #[test]
    fn restarts_change_nothing(
        steps in prop::collection::vec((step(), prop::sample::select(vec![0u8, 0, 0, 1, 2, 3])), 1..80),
        clock_set_by in -100_000i64..100_000,
    ) {
        let mut now = Instant::now();
        let mut moment = Moment { boot: "one".into(), monotonic_ms: 1 << 40, unix_ms: 1 << 40 };
        let (mut once, mut again) = (start(BTreeMap::new(), (&moment, now)), start(BTreeMap::new(), (&moment, now)));
        let answers = |health: &mut Health, now| {
            // To recovering, and to healthy.
            for _ in 0..=config::Health::default().probes_passed {
                for uuid in ["GPU-a", "GPU-b"] {
                    let uuid = uuid.to_owned();
                    health.observe(&Observation::Probe { uuid, answer: Ok(()) }, now);
                }
            }
        };
        let condition = |energy_mj, recovery| Observation::Condition {
            uuid: "GPU-a".into(),
            condition: Condition { energy_mj: Some(energy_mj), recovery, ..Condition::default() },
        };
        let mut energy_mj = 0;
        for (step, then) in steps {
            if let Step::Wait(seconds) = step {
                let passed = Duration::from_secs(seconds);
                now += passed;
                moment.monotonic_ms += seconds * 1000;
                moment.unix_ms += i64::try_from(seconds * 1000).unwrap();
            }
            let happened = observation(&step);
            energy_mj += 5;
            for health in [&mut once, &mut again] {
                happened.iter().for_each(|observation| drop(health.observe(observation, now)));
                health.observe(&condition(energy_mj, None), now);
            }
            if then > 0 {
                let known = again.remember(&moment, now);
                let mut at = moment.clone();
                match then {
                    // A clock that is set makes no difference within a boot.
                    1 => at.unix_ms += clock_set_by,
                    // While no plugin ran, the GPU was reset.
                    2 => {
                        energy_mj = 1;
                        once.was_gone("GPU-a");
                    }
                    _ => {
                        at.boot.push('+');
                        at.monotonic_ms = 5000;
                        energy_mj = 1;
                        once.was_gone("GPU-a");
                        once.was_gone("GPU-b");
                    }
                }
                moment = Moment { unix_ms: moment.unix_ms, ..at.clone() };
                let later = Moment { unix_ms: at.unix_ms.max(moment.unix_ms), ..at };
                again = start(known, (&later, now));
                for health in [&mut once, &mut again] {
                    let none = (then > 1).then_some(0);
                    health.observe(&condition(energy_mj, none), now);
                    answers(health, now);
                }
            }
            for uuid in ["GPU-a", "GPU-b"] {
                let (one, other) = (once.view(uuid, now), again.view(uuid, now));
                prop_assert_eq!((one.state, &one.reason), (other.state, &other.reason), "{:?}", step);
                prop_assert_eq!(once.reason(uuid), again.reason(uuid));
            }
        }
    }

    /// A reset is found by the first probe after it that reads less than the one before it, whenever it comes: twice
    /// between two faults, between two probes. Without one since the probe before the fault, its lock stays.
    #[test]
    fn each_reset_is_found_whenever_it_comes(
        fates in prop::collection::vec(fate(), 1..60)
    ) {
        let now = Instant::now();
        let mut health = start(BTreeMap::new(), (&Moment::default(), now));
        // The counter, what the last probe read of it, and whether the GPU was reset since the last fault: where the
        // counter shows it, or at all.
        let (mut energy_mj, mut read) = (1u64, None::<u64>);
        let (mut faulty, mut reset, mut found) = (false, false, false);
        let mut unread = false;
        for fate in fates {
            match fate {
                Fate::Run(mj) => energy_mj += mj,
                Fate::Reset => (energy_mj, reset, unread) = (0, true, true),
                Fate::Fault => {
                    // Nobody can tell which came first, where no probe lies between the two.
                    (faulty, reset, found) = (true, unread, false);
                    health.observe(&observation(&Step::Xid(79)).unwrap(), now);
                }
                Fate::Probe => {
                    found |= reset && read.is_some_and(|before| energy_mj < before);
                    (read, unread) = (Some(energy_mj), false);
                    health.observe(&observation(&Step::Passed).unwrap(), now);
                    let condition = Condition { energy_mj: Some(energy_mj), ..Condition::default() };
                    health.observe(&Observation::Condition { uuid: "GPU-a".into(), condition }, now);
                }
            }
            let locked = health.view("GPU-a", now).waits_for.contains("a reset of the GPU");
            if faulty && found && state(&health) == State::Unhealthy {
                prop_assert!(!locked, "a reset was overlooked by {:?}", fate);
            }
            if faulty && !reset {
                prop_assert!(locked, "ended without a reset by {:?}", fate);
            }
        }
    }

    /// Another GPU's trouble is its own, unless the driver as a whole is away.
    #[test]
    fn neighbours_are_left_alone(steps in prop::collection::vec(step(), 0..60)) {
        let own = |step: &Step| !matches!(step, Step::Driver(_));
        let steps: Vec<Step> = steps.into_iter().filter(own).collect();
        run(&steps, |health, step, now| {
            assert_eq!(health.view("GPU-b", now), View::default(), "{step:?}");
        });
    }
}
