use proptest::prelude::*;

use super::*;

const T0: i64 = 1_700_000_000_000;
const MIB: u64 = 1 << 20;

fn tenant_look(leased_us: u64, launches: u64) -> TenantLook {
    let used = UseLook {
        gpu_uuid: "GPU-a".into(),
        memory_used_bytes: 100 * MIB,
        process_peak_bytes: 100 * MIB,
        memory_limit_bytes: 1000 * MIB,
        cores_millis: 500,
        ..UseLook::default()
    };
    TenantLook {
        id: "a".into(),
        generation: 1,
        read: true,
        uses: vec![used],
        leased_us,
        launches,
        ..TenantLook::default()
    }
}

fn look(wall_s: i64, mono_s: u64, tenants: Vec<TenantLook>) -> Look {
    let at_unix_ms = T0 + wall_s * 1000;
    Look { at_unix_ms, monotonic_ms: mono_s * 1000, gpus: Vec::new(), tenants }
}

/// Sums over all that waits: milliseconds, and counts.
fn sums(folder: &Folder) -> (u64, [u64; COUNTS]) {
    let cells = folder.pending().values().flat_map(BTreeMap::values);
    cells.fold((0, [0; COUNTS]), |(ms, mut sum), cell| {
        sum.iter_mut().zip(cell.counts).for_each(|(sum, more)| *sum += more);
        (ms + cell.ms, sum)
    })
}

#[test]
fn counting_begins_with_the_first_look_and_each_bucket_has_its_part() {
    let mut folder = Folder::default();
    folder.look(&look(5, 100, vec![tenant_look(7_000_000, 70)]));
    assert!(folder.pending().is_empty());
    folder.look(&look(15, 110, vec![tenant_look(11_000_000, 90)]));
    let buckets: Vec<_> = folder.pending().values().map(|cells| cells[&0]).collect();
    assert_eq!(buckets.len(), 2);
    for bucket in buckets {
        assert_eq!((bucket.ms, bucket.counts[tenant::GOT]), (5000, 2_000_000));
        assert_eq!((bucket.counts[tenant::LAUNCHES], bucket.cell().mean_kib), (10, 100 << 10));
    }
}

#[test]
fn a_tenant_that_comes_later_counts_from_nothing() {
    let mut folder = Folder::default();
    folder.look(&look(0, 0, vec![]));
    folder.look(&look(10, 10, vec![tenant_look(3_000_000, 5)]));
    let (ms, counts) = sums(&folder);
    assert_eq!((ms, counts[tenant::GOT], counts[tenant::LAUNCHES]), (10_000, 3_000_000, 5));
}

#[test]
fn counters_that_restart_and_generations_that_follow_lose_and_double_nothing() {
    let mut folder = Folder::default();
    folder.look(&look(0, 0, vec![tenant_look(9_000_000, 50)]));
    // The arbiter was restarted, a process's slot was taken by another.
    folder.look(&look(10, 10, vec![tenant_look(2_000_000, 3)]));
    folder.look(&look(20, 20, vec![tenant_look(2_500_000, 8)]));
    let next = TenantLook { generation: 2, ..tenant_look(1_000_000, 4) };
    folder.look(&look(30, 30, vec![next]));
    let (_, counts) = sums(&folder);
    assert_eq!((counts[tenant::GOT], counts[tenant::LAUNCHES]), (3_500_000, 9));
    assert_eq!(folder.all_series().count(), 2);
}

#[test]
fn without_a_disk_names_go_with_the_buckets_that_are_dropped() {
    let mut folder = Folder::default();
    for n in 0..1000u32 {
        let tenant = TenantLook { id: n.to_string(), ..tenant_look(0, 0) };
        folder.look(&look(i64::from(n) * 10, u64::from(n) * 10, vec![tenant]));
        if n % 6 == 0 {
            let taken = folder.take(false);
            folder.give_back(taken);
        }
    }
    assert!(folder.dropped() > 800, "{}", folder.dropped());
    // One for each bucket that waits, and the one that lives.
    assert!(folder.all_series().count() <= PENDING + 1, "{}", folder.all_series().count());
    assert_eq!(folder.numbers.len(), folder.series.len());
}

#[test]
fn two_looks_in_one_instant_are_one() {
    let mut folder = Folder::default();
    folder.look(&look(0, 0, vec![tenant_look(0, 0)]));
    folder.look(&look(0, 0, vec![tenant_look(5, 5)]));
    folder.look(&look(10, 10, vec![tenant_look(8, 8)]));
    assert_eq!(sums(&folder).1[tenant::LAUNCHES], 8);
}

#[test]
fn a_clock_that_is_set_moves_what_comes_and_doubles_nothing() {
    for jump in [-7200, -15, 3, 7200, 400 * 86400] {
        let mut folder = Folder::default();
        folder.look(&look(0, 0, vec![tenant_look(0, 0)]));
        folder.look(&look(10, 10, vec![tenant_look(4_000_000, 10)]));
        folder.look(&look(20 + jump, 20, vec![tenant_look(8_000_000, 30)]));
        let (ms, counts) = sums(&folder);
        assert_eq!((ms, counts[tenant::GOT], counts[tenant::LAUNCHES]), (20_000, 8_000_000, 30));
    }
}

#[test]
fn what_the_arbiter_did_not_say_is_no_restart() {
    let mut folder = Folder::default();
    let heard = |second: i64, leased_us| {
        look(second, second.cast_unsigned(), vec![tenant_look(leased_us, 0)])
    };
    let unheard = |second: i64| {
        let one = TenantLook { unheard: true, ..tenant_look(0, 0) };
        look(second, second.cast_unsigned(), vec![one])
    };
    // Unheard at first: counting begins with what is heard.
    folder.look(&unheard(0));
    folder.look(&unheard(10));
    folder.look(&heard(20, 50_000_000));
    folder.look(&heard(30, 52_000_000));
    folder.look(&unheard(40));
    folder.look(&heard(50, 54_000_000));
    assert_eq!(sums(&folder).1[tenant::GOT], 4_000_000);
}

#[test]
fn a_gap_is_spread_and_a_clock_before_1970_is_left_out() {
    let mut folder = Folder::default();
    folder.look(&look(0, 0, vec![tenant_look(0, 0)]));
    folder.look(&look(600, 600, vec![tenant_look(60_000_000, 600)]));
    assert_eq!(folder.pending().len(), 60);
    assert!(folder.pending().values().all(|cells| cells[&0].counts[tenant::LAUNCHES] == 10));
    folder.look(&Look { at_unix_ms: -5, ..look(0, 610, vec![tenant_look(70_000_000, 700)]) });
    folder.look(&Look { at_unix_ms: i64::MAX, ..look(0, 610, vec![tenant_look(7, 7)]) });
    assert_eq!(sums(&folder).1[tenant::LAUNCHES], 600);
}

#[test]
fn a_peak_between_looks_is_seen() {
    let mut folder = Folder::default();
    folder.look(&look(0, 0, vec![tenant_look(0, 0)]));
    let mut later = tenant_look(0, 0);
    later.uses[0].process_peak_bytes = 700 * MIB;
    folder.look(&look(10, 10, vec![later.clone()]));
    folder.look(&look(20, 20, vec![later]));
    let peaks: Vec<u64> = folder.pending().values().map(|cells| cells[&0].peak_kib >> 10).collect();
    assert_eq!(peaks, [700, 100]);
}

#[test]
fn waiting_for_what_its_share_is_spent_on_counts_as_capped() {
    let mut folder = Folder::default();
    let with = |leased_us, waited_us| TenantLook { waited_us, ..tenant_look(leased_us, 0) };
    folder.look(&look(0, 0, vec![with(0, 0)]));
    folder.look(&look(10, 10, vec![with(2_000_000, 3_000_000)]));
    assert_eq!(sums(&folder).1[tenant::CAPPED], 0);
    folder.look(&look(20, 20, vec![with(7_000_000, 8_000_000)]));
    assert_eq!(sums(&folder).1[tenant::CAPPED], 5_000_000);
}

#[test]
fn a_gpu_has_its_states_and_no_more_leased_than_there_is() {
    let mut folder = Folder::default();
    let gpu = |healthy, cordoned| GpuLook {
        uuid: "GPU-a".into(),
        memory_used_bytes: 500 * MIB,
        memory_limits_bytes: 900 * MIB,
        healthy,
        cordoned,
    };
    folder.look(&look(0, 0, vec![tenant_look(0, 0)]));
    let other = TenantLook { id: "b".into(), ..tenant_look(9_000_000, 0) };
    let all = vec![tenant_look(9_000_000, 0), other];
    folder.look(&Look { gpus: vec![gpu(false, true)], ..look(10, 10, all) });
    let cells = folder.pending().values().next().unwrap();
    let (number, _) = folder.all_series().find(|(_, series)| series.is_gpu()).unwrap();
    let of_gpu = cells[&number];
    assert_eq!(of_gpu.counts[..3], [10_000_000; 3]);
    assert_eq!(of_gpu.cell().overhead_kib, 900 << 10);
}

#[derive(Clone, Debug)]
struct Step {
    mono_ms: u64,
    wall_jump_ms: i64,
    leased: u64,
    launches: u64,
    generation: u64,
    read: bool,
    take: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let hostile = prop_oneof![8 => 0..20_000_000u64, 1 => any::<u64>()];
    let launches = prop_oneof![8 => 0..100_000u64, 1 => any::<u64>()];
    (0..40_000u64, prop_oneof![5 => Just(0i64), 1 => -9_000_000..9_000_000i64], hostile, launches)
        .prop_flat_map(|(mono_ms, wall_jump_ms, leased, launches)| {
            (1..3u64, any::<bool>(), any::<bool>()).prop_map(move |(generation, read, take)| Step {
                mono_ms,
                wall_jump_ms,
                leased,
                launches,
                generation,
                read,
                take,
            })
        })
}

proptest! {
    #[test]
    fn nothing_outruns_the_clock_whatever_is_said(steps in prop::collection::vec(step(), 1..35)) {
        let mut folder = Folder::default();
        let (mut mono_ms, mut wall_ms) = (0, T0);
        let mut observed = 0;
        let mut stored = (0u64, [0u64; COUNTS]);
        let mut first = true;
        for step in steps {
            mono_ms += step.mono_ms;
            wall_ms += step.mono_ms.cast_signed() + step.wall_jump_ms;
            observed += if first { 0 } else { step.mono_ms };
            first = false;
            let one = TenantLook {
                generation: step.generation,
                read: step.read,
                waited_us: step.leased,
                ..tenant_look(step.leased, step.launches)
            };
            folder.look(&Look {
                at_unix_ms: wall_ms,
                monotonic_ms: mono_ms,
                gpus: Vec::new(),
                tenants: vec![one],
            });
            if step.take {
                let taken = folder.take(false);
                for cell in taken.values().flat_map(BTreeMap::values) {
                    stored.0 += cell.ms;
                    stored.1.iter_mut().zip(cell.counts).for_each(|(sum, more)| *sum += more);
                }
            }
        }
        let (ms, counts) = sums(&folder);
        let ms = ms + stored.0;
        let total = |i: usize| counts[i] + stored.1[i];
        prop_assert_eq!(ms, observed);
        prop_assert!(total(tenant::GOT) <= observed * 1000);
        prop_assert!(total(tenant::WAITED) <= observed * 1000);
        prop_assert!(total(tenant::CAPPED) <= total(tenant::WAITED));
        prop_assert!(total(tenant::LAUNCHES) <= observed * 100_000 + 60);
    }
}

#[test]
fn use_that_becomes_known_later_belongs_to_the_time_of_which_it_is_known() {
    let mut folder = Folder::default();
    let alone = |ten: u64, [used_us, measured_us]: [u64; 2]| {
        let one = TenantLook { used_us, measured_us, ..tenant_look(ten * 10_000_000, 0) };
        look(i64::try_from(ten * 10).unwrap(), ten * 10, vec![one])
    };
    folder.look(&alone(1000, [0, 0]));
    // Measured every ten seconds, once between no two looks and once twice.
    for (ten, known) in [(1001, 1), (1002, 1), (1003, 3), (1004, 4), (1005, 5)] {
        folder.look(&alone(ten, [known * 1_000_000, known * 10_000_000]));
    }
    let cells: Vec<_> = folder.pending().values().map(|cells| cells[&0].cell()).collect();
    let known = |cell: &crate::cell::Cell| {
        [tenant::GOT, tenant::MEASURED, tenant::USED].map(|at| cell.counts[at] / 1000)
    };
    let all: Vec<_> = cells.iter().map(known).collect();
    assert_eq!(all, [[100, 100, 10], [100, 0, 0], [100, 100, 10], [100, 100, 10], [100, 100, 10]]);
    assert!(cells.iter().all(|cell| cell.busiest_millis <= 100));
}
