use proptest::prelude::*;

use super::*;
use std::collections::BTreeMap;
use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Grant;
use tessera_model::sharing::Compute;

const GIB: u64 = 1 << 30;

fn gpu(memory_bytes: u64) -> Gpu {
    Gpu { memory_bytes, ..Gpu::example("GPU-a", 0) }
}

fn held(granted: u64, regrant: u64) -> Held {
    Held { granted_bytes: granted, regrant_bytes: regrant }
}

#[test]
fn defaults_are_possible_on_common_gpus() {
    let gpus: Vec<Gpu> = [16, 24, 40, 48, 80, 141].map(|gib| gpu(gib * GIB)).to_vec();
    assert_eq!(check(&gpus, &Config::default()), []);
}

#[test]
fn impossible_quotas_are_reported_for_every_gpu_with_what_would_fit() {
    let config = Config::parse("[share]\nreplicas = 4\nmemory = \"8Gi\"\n").unwrap();
    let problems = check(&[gpu(80 * GIB), gpu(16 * GIB), gpu(24 * GIB)], &config);
    assert_eq!(problems.len(), 2);
    assert!(problems.iter().all(|p| p.key == "share.memory" && p.line == Some(3)));
    assert!(problems[0].message.contains("need 32 GiB"), "{}", problems[0].message);
    assert!(problems[0].message.contains("or 1 replica"), "{}", problems[0].message);
}

#[test]
fn a_layout_that_is_impossible_on_a_gpu_is_reported_at_its_line() {
    let text = "[[layout]]\ngpus = [\"*\"]\nshares = [\n\
                { resource = \"x.dev/a\", memory = \"40Gi\", cores = \"10%\" },\n\
                { resource = \"x.dev/b\", memory = \"2%\", cores = \"10%\" },\n]\n";
    let config = Config::parse(text).unwrap();
    let problems = check(&[gpu(80 * GIB), gpu(16 * GIB), gpu(40 * GIB)], &config);
    let places: Vec<_> = problems.iter().map(|p| (p.key.as_str(), p.line)).collect();
    // 2 % of 16 GiB are less than a context; 40 GiB and a bit are more than a GPU of 40 GiB.
    assert_eq!(places, [("layout[0].shares", Some(3)), ("layout[0].shares[1].memory", Some(5))]);
    assert!(problems[0].message.contains("1 × 40 GiB, 1 × "), "{}", problems[0].message);
}

#[test]
fn a_layout_that_names_no_gpu_here_is_reported_and_is_no_error() {
    let text = "[[layout]]\ngpus = [\"*\"]\nshares = [{ resource = \"x.dev/a\" }]\n\
                [[layout]]\ngpus = [\"0\"]\nshares = [{ resource = \"x.dev/b\" }]\n\
                [[layout]]\ngpus = [\"NVIDIA H100*\"]\nshares = [{ resource = \"x.dev/c\" }]\n";
    let config = Config::parse(text).unwrap();
    let gpus = [gpu(16 * GIB)];
    assert_eq!(check(&gpus, &config), []);
    let idle = remarks(&gpus, &config);
    assert_eq!(idle.len(), 2, "{idle:?}");
    assert!(idle[0].contains(":5: layout[1].gpus: an earlier layout"), "{}", idle[0]);
    assert!(idle[1].contains(":8: layout[2].gpus: names none"), "{}", idle[1]);
}

#[test]
fn the_largest_free_replicas_go_first_and_the_highest_of_equals() {
    let sizes = [50, 25, 25];
    let kept = |live: u64| judge(100, &[held(live, 0)], &sizes).free;
    assert_eq!(kept(0), [true, true, true]);
    assert_eq!(kept(1), [false, true, true]);
    assert_eq!(kept(50), [false, true, true]);
    assert_eq!(kept(51), [false, true, false]);
    assert_eq!(kept(76), [false, false, false]);
    assert_eq!(kept(200), [false, false, false]);
}

#[test]
fn room_is_kept_for_what_a_held_replica_would_get_today() {
    // AdvertisedGpu with 10, now 30: the free one of 65 would leave it no room.
    let verdict = judge(100, &[held(10, 30)], &[65, 70]);
    assert_eq!(verdict, Verdict { held: vec![true], free: vec![true, false] });
    // Where it can't be kept, nobody else gets the held one either.
    assert_eq!(judge(100, &[held(10, 30), held(75, 0)], &[5]).held, [false, true]);
    // Less than before always fits.
    assert_eq!(judge(100, &[held(80, 70), held(40, 40)], &[1]).held, [true, true]);
}

#[test]
fn nothing_makes_an_oversold_gpu_worse() {
    let capacity = Capacity { memory_bytes: 100, reserve_bytes: 10 };
    assert!(capacity.grants(50, 50, 40));
    assert!(!capacity.grants(50, 50, 41));
    // The reserve was raised: 100 live, one of 30 is replaced.
    assert!(capacity.grants(100, 70, 30));
    assert!(!capacity.grants(100, 70, 31));
}

/// An idle H200 under driver 550, by `nvidia-smi -q -d MEMORY`: 143,771 MiB, of which the driver keeps 700.
fn h200() -> Gpu {
    Gpu { driver_bytes: 700 << 20, ..gpu(143_771 << 20) }
}

#[test]
fn what_the_driver_keeps_is_not_sold_whatever_the_reserve_says() {
    for settings in ["", "[gpus]\nreserve = 0\n", "[gpus]\nreserve = \"512Mi\"\n"] {
        let config = Config::parse(settings).unwrap();
        let sold = 4 * crate::shares::equal(&h200(), &config).memory_bytes;
        assert!(sold <= (143_771 - 700 - 128) << 20, "{settings}: {} MiB", sold >> 20);
        assert_eq!(check(&[h200()], &config), [], "a start goes on");
    }
    let more = Config::parse("[gpus]\nreserve = \"2Gi\"\n").unwrap();
    assert_eq!(Capacity::of(&h200(), &more).reserve_bytes, 2 * GIB);
}

fn world() -> impl Strategy<Value = (u64, Vec<Held>, Vec<u64>)> {
    let held = (0..40 * GIB, 0..40 * GIB).prop_map(|(granted, regrant)| held(granted, regrant));
    (
        0..200 * GIB,
        prop::collection::vec(held, 0..6),
        // Few sizes, so that equals are common.
        prop::collection::vec((1u64..8).prop_map(|n| n * 5 * GIB), 0..24),
    )
}

fn total(bytes: impl Iterator<Item = u64>) -> u128 {
    bytes.map(u128::from).sum()
}

proptest! {
    /// Whatever kubelet hands out of what is Healthy, held or free, limits stay within the GPU, or
    /// within what they were where they exceeded it already.
    #[test]
    fn what_is_advertised_never_breaks_the_rule(
        (sellable, held, free) in world(),
        given in prop::collection::vec(any::<bool>(), 32),
    ) {
        let verdict = judge(sellable, &held, &free);
        let live = total(held.iter().map(|held| held.granted_bytes));
        let healthy = total(free.iter().zip(&verdict.free).filter(|(_, ok)| **ok).map(|(b, _)| *b));
        prop_assert!(healthy == 0 || live + healthy <= u128::from(sellable));

        let again = |i: usize| given[i] && verdict.held[i];
        let after = total(held.iter().enumerate().map(|(i, held)| {
            if again(i) { held.regrant_bytes } else { held.granted_bytes }
        })) + total(free.iter().enumerate().filter(|(i, _)| verdict.free[*i] && given[8 + *i]).map(|(_, b)| *b));
        prop_assert!(after <= u128::from(sellable).max(live));
    }

    #[test]
    fn nothing_is_withheld_that_would_fit((sellable, held, free) in world()) {
        let verdict = judge(sellable, &held, &free);
        let growth = |held: &Held| held.regrant_bytes.saturating_sub(held.granted_bytes);
        let used = total(held.iter().map(|held| held.granted_bytes))
            + total(held.iter().zip(&verdict.held).filter(|(_, ok)| **ok).map(|(h, _)| growth(h)));
        for (held, ok) in held.iter().zip(&verdict.held) {
            prop_assert!(*ok || used + u128::from(growth(held)) > u128::from(sellable));
        }
        let used = used
            + total(free.iter().zip(&verdict.free).filter(|(_, ok)| **ok).map(|(b, _)| *b));
        for (bytes, ok) in free.iter().zip(&verdict.free) {
            prop_assert!(*ok || used + u128::from(*bytes) > u128::from(sellable));
        }
    }

    #[test]
    fn more_room_takes_nothing_away((sellable, held, free) in world(), more in 0..50 * GIB) {
        let less = judge(sellable, &held, &free);
        let more = judge(sellable + more, &held, &free);
        prop_assert!(less.held.iter().zip(&more.held).all(|(less, more)| more | !less));
        // More room may first go to held ones that grow.
        prop_assume!(less.held == more.held);
        prop_assert!(less.free.iter().zip(&more.free).all(|(less, more)| more | !less));
    }

    #[test]
    fn a_released_allocation_takes_no_free_replica_away((sellable, held, free) in world()) {
        let shrink = |held: Held| Held { regrant_bytes: held.regrant_bytes.min(held.granted_bytes), ..held };
        let held: Vec<Held> = held.into_iter().map(shrink).collect();
        let Some((released, others)) = held.split_first() else { return Ok(()) };
        let before = judge(sellable, &held, &free);
        let mut freed = free.clone();
        freed.push(released.regrant_bytes);
        let after = judge(sellable, others, &freed);
        prop_assert!(before.free.iter().zip(&after.free).all(|(before, after)| after | !before));
    }

}

#[test]
fn a_gpu_that_both_front_ends_would_sell_is_refused() {
    let text = "[dra]\nenabled = true\ngpus = [\"NVIDIA L4\", \"1\"]\n\
                [[layout]]\ngpus = [\"1\"]\nshares = [{ resource = \"x.dev/a\" }]\n";
    let config = Config::parse(text).unwrap();
    let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
    let problems = check(&gpus, &config);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!((problems[0].key.as_str(), problems[0].line), ("dra.gpus", Some(3)));
    assert!(problems[0].message.starts_with("names GPU 1 (Example, GPU-b), which layout[0] cuts"));
    assert_eq!(check(&gpus[..1], &config), []);
    // Off: the layout counts.
    let config = Config::parse(&text.replace("true", "false")).unwrap();
    assert_eq!(check(&gpus, &config), []);
}

#[test]
fn a_step_that_is_larger_than_a_share_is_refused() {
    let text = "[share]\nreplicas = 8\n[dra]\nenabled = true\nmemory_step = \"4Gi\"\n";
    let config = Config::parse(text).unwrap();
    let problems = check(&[gpu(80 * GIB), gpu(16 * GIB)], &config);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!((problems[0].key.as_str(), problems[0].line), ("dra.memory_step", Some(5)));
    assert!(problems[0].message.contains("4 GiB is more than one share"), "{problems:?}");
    // What is wrong with the share itself comes first.
    let config = Config::parse(&text.replace("= 8", "= 64")).unwrap();
    assert_eq!(check(&[gpu(16 * GIB)], &config)[0].key, "share.replicas");
}

fn share(gib: u64, cores_millis: u32) -> Record {
    let grant = Grant {
        uuid: "GPU-a".to_owned(),
        memory_limit_bytes: gib * GIB,
        context_overhead_bytes: GIB / 4,
        cores_millis,
        compute: Compute::Strict,
    };
    Record::new(AllocationId::of("claim:u", ["r"]), 1, vec![grant])
}

fn left(shares: &[Record]) -> Left {
    let capacity = Capacity { memory_bytes: 5 * GIB, reserve_bytes: GIB };
    Left::beside(capacity, "GPU-a", shares.iter())
}

#[test]
fn a_gpu_without_time_or_without_memory_has_no_room_and_says_which() {
    let lack = |shares: &[Record]| left(shares).lack_of_any(GIB / 4);
    assert_eq!(lack(&[]), None);
    assert_eq!(lack(&[share(1, 1000)]), Some("GPU time"));
    assert_eq!(lack(&[share(1, 995)]), Some("GPU time"), "no scheduler counts so little");
    assert_eq!(lack(&[share(4, 100)]), Some("memory"));
    assert_eq!(lack(&[share(2, 500), share(2, 500)]), Some("memory and GPU time"));
    assert_eq!(lack(&[share(1, 400), share(1, 500)]), None);
    assert_eq!(left(&[share(9, 2000)]), Left { memory_bytes: 0, cores_millis: 0 });
}

#[test]
fn memory_counts_as_it_is_held_and_time_as_it_was_allocated() {
    let share = share(1, 300);
    let less = Grant { memory_limit_bytes: 2 * GIB, cores_millis: 100, ..share.grants[0].clone() };
    let changed = share.with_limits(vec![less], BTreeMap::new());
    assert_eq!(left(&[changed]), Left { memory_bytes: 2 * GIB, cores_millis: 700 });
}
