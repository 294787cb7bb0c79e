//! Laws that hold whatever is seen.

use proptest::prelude::*;
use tessera_config::Advice;
use tessera_view::advice::{Recommendation, Scope};
use tessera_view::tenant::ComputePolicy;

use super::{lines, observed, only, waste};
use crate::fixtures::{GIB, Hour, Limits, Made};
use crate::recommend::{CORES_STEP, MEMORY_STEP};

fn hours() -> impl Strategy<Value = Vec<Hour>> {
    let hour = (0u64..78 << 10, 0u32..3600, 0u32..1001, 0u32..3600, 0u64..3, 0u64..2).prop_map(
        |(peak_mib, got, busiest, waited, refusals, launches)| Hour {
            peak_mib,
            got: got.into(),
            // Nothing was busy where nothing was got.
            busiest: if got > 0 { busiest } else { 0 },
            // No more than the hour has.
            waited: f64::from(waited.min(3600 - got)),
            refusals: refusals / 2,
            launches,
        },
    );
    prop::collection::vec(hour, 1..40)
}

fn limits() -> impl Strategy<Value = Limits> {
    let policy = prop::sample::select(vec![
        ComputePolicy::Burst,
        ComputePolicy::Strict,
        ComputePolicy::None,
    ]);
    (1u64..79, 1u32..100, policy).prop_map(|(gib, cores, policy)| Limits {
        memory_bytes: gib * GIB,
        cores_millis: cores * 10,
        policy,
    })
}

fn settings() -> impl Strategy<Value = Advice> {
    (50u32..=100, 0u32..50, 50u32..=100, 0u32..50).prop_map(|(memory, margin, cores, other)| {
        Advice {
            memory_percentile: memory,
            memory_margin: margin,
            cores_percentile: cores,
            cores_margin: other,
            ..Advice::default()
        }
    })
}

fn advised(settings: &Advice, limits: Limits, hours: &[Hour]) -> Recommendation {
    let made = [Made::new().pod("chat-0", limits, hours)];
    crate::recommend(&observed(&made), settings, &Scope::default()).workloads.remove(0)
}

fn without_refusals(hours: &[Hour]) -> Vec<Hour> {
    hours.iter().map(|hour| Hour { refusals: 0, ..*hour }).collect()
}

proptest! {
    #[test]
    fn no_less_is_advised_than_was_used(settings in settings(), limits in limits(), hours in hours()) {
        let advice = advised(&settings, limits, &hours);
        let peak = hours.iter().map(|hour| hour.peak_mib << 20).max().unwrap();
        prop_assert!(advice.memory_bytes >= peak, "{advice:?}");
        let got = hours.iter().map(|hour| hour.got).fold(0.0, f64::max);
        if advice.recommended_cores_millis != limits.cores_millis || limits.policy != ComputePolicy::None {
            prop_assert!(f64::from(advice.recommended_cores_millis) >= got / 3.6 - 1e-3, "{advice:?}");
            // A list of many workloads is judged by hours, and must not miss what ten seconds had.
            let busiest = hours.iter().map(|hour| hour.busiest).max().unwrap();
            prop_assert!(advice.recommended_cores_millis >= busiest, "{advice:?}");
        }
        prop_assert!(advice.recommended_cores_millis <= 1000);
    }

    #[test]
    fn more_use_never_gets_less(
        settings in settings(), limits in limits(), hours in hours(), more in 0u64..4096, got in 0u32..600, refusals in 0u64..2,
        which in any::<prop::sample::Index>(),
    ) {
        let before = advised(&settings, limits, &hours);
        let mut after = hours.clone();
        let hour = &mut after[which.index(hours.len())];
        hour.peak_mib += more;
        hour.refusals += refusals;
        hour.got += f64::from(got).min(3600.0 - hour.got - hour.waited);
        let after = advised(&settings, limits, &after);
        prop_assert!(after.memory_bytes >= before.memory_bytes, "{before:?} {after:?}");
        // Where nothing ran before, the share meant nothing.
        if hours.iter().any(|hour| hour.got + hour.waited > 0.0) {
            prop_assert!(after.recommended_cores_millis >= before.recommended_cores_millis);
        }
    }

    #[test]
    fn advice_that_was_taken_is_not_given_again(settings in settings(), limits in limits(), hours in hours()) {
        let hours = without_refusals(&hours);
        let first = advised(&settings, limits, &hours);
        let taken = Limits {
            memory_bytes: first.memory_bytes,
            cores_millis: first.recommended_cores_millis,
            ..limits
        };
        let second = advised(&settings, taken, &hours);
        prop_assert!(second.memory_bytes.abs_diff(first.memory_bytes) <= MEMORY_STEP, "{second:?}");
        let cores = second.recommended_cores_millis.abs_diff(first.recommended_cores_millis);
        prop_assert!(cores <= CORES_STEP, "{second:?}");
        prop_assert!(!lines(&second).iter().any(|line| line.starts_with("tessera quota")), "{second:?}");
    }

    #[test]
    fn refusals_never_make_it_less(settings in settings(), limits in limits(), hours in hours()) {
        let refused = hours.iter().any(|hour| hour.refusals > 0);
        let advice = advised(&settings, limits, &hours);
        prop_assert!(!refused || advice.memory_bytes >= limits.memory_bytes, "{advice:?}");
        // More, unless a whole GPU is not enough.
        let full = limits.memory_bytes >= 79 * GIB;
        prop_assert!(!refused || full || advice.memory_bytes > limits.memory_bytes, "{advice:?}");
    }

    #[test]
    fn two_nodes_are_judged_as_one(limits in limits(), a in hours(), b in hours()) {
        let one = Made::new().pod("chat-0", limits, &a).pod("chat-1", limits, &b);
        let mut there = Made::new().pod("chat-1", limits, &b);
        there.node.node = "n2".into();
        let two = [Made::new().pod("chat-0", limits, &a), there];
        prop_assert_eq!(only(&[one]), only(&two));
    }

    #[test]
    fn waste_is_what_was_asked_and_not_used(
        pods in prop::collection::vec((limits(), hours(), any::<bool>()), 0..5), price in 0u64..10_000,
    ) {
        let mut made = Made::new();
        for (i, (limits, hours, live)) in pods.iter().enumerate() {
            let name = format!("chat-{i}");
            match live {
                true => made = made.pod(&name, *limits, hours),
                false => made.gone(&name, *limits, hours),
            }
            let namespace = format!("team-{}", i % 2);
            made.history.tenants.last_mut().unwrap().namespace = namespace;
        }
        let settings = Advice { price_millis_per_gpu_hour: price, ..Advice::default() };
        let waste = waste(&[made], &settings);
        let mut tenants = 0;
        for namespace in &waste.namespaces {
            tenants += namespace.tenants.len();
            prop_assert!(namespace.used_gpu_hours >= -1e-9);
            prop_assert!(namespace.asked_gpu_hours >= namespace.used_gpu_hours - 1e-9);
            let sum = |of: fn(&tessera_view::advice::TenantWaste) -> f64| {
                namespace.tenants.iter().map(of).sum::<f64>()
            };
            let wasted = sum(|one| one.wasted_gpu_hours);
            let rest = namespace.asked_gpu_hours - namespace.used_gpu_hours;
            prop_assert!((rest - wasted).abs() < 1e-6);
            prop_assert!((namespace.asked_gpu_hours - sum(|one| one.asked_gpu_hours)).abs() < 1e-6);
            prop_assert!((namespace.cost - wasted * price as f64 / 1000.0).abs() < 1e-6);
            prop_assert!(price > 0 || namespace.cost == 0.0);
            for tenant in &namespace.tenants {
                prop_assert!(tenant.wasted_gpu_hours >= 0.0);
                prop_assert!(tenant.wasted_gpu_hours <= tenant.asked_gpu_hours);
                prop_assert!(!tenant.idle || tenant.idle_seconds.is_some_and(|s| s > 4.0 * 3600.0));
            }
        }
        prop_assert_eq!(tenants, pods.len());
    }
}
