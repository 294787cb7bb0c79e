use std::time::{Duration, Instant};

use super::*;
use tessera_model::health::State::{Healthy, Recovering, Suspect, Unhealthy};

const SECOND: Duration = Duration::from_secs(1);

/// One GPU and a clock.
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
fn one_contained_error_is_a_suspicion_and_three_take_the_gpu_out() {
    let mut bench = Bench::new();
    assert_eq!(bench.xid(94), [Suspect]);
    assert_eq!(bench.health.reason("GPU-a"), None, "a suspect GPU is sold");
    assert!(bench.health.is_suspect("GPU-a") && !bench.health.is_suspect("GPU-b"));
    assert_eq!(bench.view().waits_for, "10m without trouble");
    bench.minutes(2);
    assert_eq!(bench.xid(94), []);
    bench.minutes(2);
    assert_eq!(bench.xid(94), [Unhealthy]);
    assert_eq!(bench.health.reason("GPU-a"), Some("XID 94, number 3 within 10m"));
    assert_eq!(bench.health.reason("GPU-b"), None);
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
fn until_reset_outlasts_any_quiet() {
    let mut bench = Bench::new();
    assert_eq!(bench.xid(95), [Unhealthy]);
    assert_eq!(bench.xid(64), []);
    assert_eq!(bench.minutes(60 * 24), []);
    assert_eq!(bench.health.reason("GPU-a"), Some("XID 95"), "the first cause is kept");
    assert_eq!(bench.view().waits_for, "a reset of the GPU, because of XID 95");
}

#[test]
fn a_gpu_that_was_gone_and_answers_again_was_reset() {
    let mut bench = Bench::new();
    bench.xid(79);
    bench.silent(false);
    assert_eq!(bench.minutes(10), [], "a time without an answer is no reset");
    bench.silent(true);
    assert_eq!(bench.view().waits_for, "NVML to find the GPU again");
    assert_eq!(bench.minutes(6), [Recovering, Healthy]);
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
fn what_nvml_says_against_a_gpu_keeps_it_out_while_it_stands() {
    let mut bench = Bench::new();
    let says = |recovery| Condition { recovery: Some(recovery), ..Condition::default() };
    assert_eq!(bench.condition(says(0)), []);
    assert_eq!(bench.condition(says(1)), [Unhealthy]);
    assert_eq!(bench.health.reason("GPU-a"), Some("NVML: it takes a reset of the GPU"));
    assert_eq!(bench.minutes(60), []);
    assert!(bench.view().waits_for.starts_with("NVML to say otherwise"));
    bench.xid(119);
    // The administrator has reset it: the driver no longer asks for it, and the lock ends as well.
    bench.condition(says(0));
    assert_eq!(bench.minutes(6), [Recovering, Healthy]);
    let failed = Condition { remap_failed: Some(true), ..Condition::default() };
    assert_eq!(bench.condition(failed), [Unhealthy]);
    assert_eq!(bench.minutes(60), []);
}

#[test]
fn a_driver_that_is_away_takes_all_gpus_with_it() {
    let mut bench = Bench::new();
    let away = Observation::Driver(Silence { why: "driver not loaded".into(), gone: true });
    assert_eq!(bench.tell(&away), [Suspect, Suspect]);
    bench.tell(&away);
    assert_eq!(bench.tell(&away), [Unhealthy, Unhealthy]);
    assert_eq!(bench.health.reason("GPU-b"), Some("NVML: driver not loaded"));
    assert_eq!(bench.minutes(6), [Recovering, Healthy]);
}

#[test]
fn a_gpu_that_is_not_ours_is_nobodys_business() {
    let mut bench = Bench::new();
    assert_eq!(bench.tell(&Observation::Xid { uuid: "GPU-z".into(), xid: 79 }), []);
    assert_eq!(bench.health.reason("GPU-z"), None);
}
