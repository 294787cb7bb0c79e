use proptest::prelude::*;
use tessera_view::status::{GpuState, Holder};
use tessera_view::tenant::Compute;

use super::*;

const T0: i64 = 1_700_000_000_000;
const MIB: u64 = 1 << 20;

fn tenant_look(leased_us: u64, launches: u64) -> Allocation {
    let used = Use {
        gpu_uuid: "GPU-a".into(),
        memory_used_bytes: 100 * MIB,
        memory_peak_bytes: 100 * MIB,
        memory_limit_bytes: 1000 * MIB,
        cores_millis: 500,
        ..Use::default()
    };
    Allocation {
        id: "a".into(),
        generation: 1,
        gpus: vec![used],
        compute: Some(Compute { leased_us, ..Compute::default() }),
        launches,
        ..Allocation::default()
    }
}

fn status(wall_s: i64, allocations: Vec<Allocation>) -> Status {
    Status { at_unix_ms: T0 + wall_s * 1000, allocations, ..Status::default() }
}

fn look(folder: &mut Folder, wall_s: i64, mono_s: u64, allocations: Vec<Allocation>) {
    folder.look(&status(wall_s, allocations), &HashSet::new(), mono_s * 1000);
}

fn first(cells: &BTreeMap<Arc<Key>, Cell>) -> Cell {
    *cells.values().next().unwrap()
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
    look(&mut folder, 5, 100, vec![tenant_look(7_000_000, 70)]);
    assert!(folder.pending().is_empty());
    look(&mut folder, 15, 110, vec![tenant_look(11_000_000, 90)]);
    let buckets: Vec<_> = folder.pending().values().map(first).collect();
    assert_eq!(buckets.len(), 2);
    for bucket in buckets {
        assert_eq!((bucket.ms, bucket.counts[tenant::GOT]), (5000, 20_000));
        assert_eq!((bucket.counts[tenant::LAUNCHES], bucket.mean_kib), (10, 100 << 10));
    }
}

#[test]
fn a_tenant_that_comes_later_counts_from_nothing() {
    let mut folder = Folder::default();
    look(&mut folder, 0, 0, vec![]);
    look(&mut folder, 10, 10, vec![tenant_look(3_000_000, 5)]);
    let (ms, counts) = sums(&folder);
    assert_eq!((ms, counts[tenant::GOT], counts[tenant::LAUNCHES]), (10_000, 30_000, 5));
}

#[test]
fn counters_that_restart_and_generations_that_follow_lose_and_double_nothing() {
    let mut folder = Folder::default();
    look(&mut folder, 0, 0, vec![tenant_look(9_000_000, 50)]);
    // The arbiter was restarted, a process's slot was taken by another.
    look(&mut folder, 10, 10, vec![tenant_look(2_000_000, 3)]);
    look(&mut folder, 20, 20, vec![tenant_look(2_500_000, 8)]);
    let next = Allocation { generation: 2, ..tenant_look(1_000_000, 4) };
    look(&mut folder, 30, 30, vec![next]);
    let (_, counts) = sums(&folder);
    assert_eq!((counts[tenant::GOT], counts[tenant::LAUNCHES]), (35_000, 9));
    assert_eq!(folder.series().len(), 2);
}

#[test]
fn names_go_with_the_buckets_that_are_dropped_or_stored() {
    for is_stored in [false, true] {
        let mut folder = Folder::default();
        for n in 0..1000u32 {
            let tenant = Allocation { id: n.to_string(), ..tenant_look(0, 0) };
            look(&mut folder, i64::from(n) * 10, u64::from(n) * 10, vec![tenant]);
            if n % 6 == 0 {
                let taken = folder.take(false);
                match is_stored {
                    true => folder.forget(),
                    false => folder.give_back(taken),
                }
            }
        }
        let waits = folder.pending().len();
        assert_eq!(waits == PENDING, !is_stored, "{waits}");
        // One for each bucket that waits, and the one that lives.
        assert!(folder.series().len() <= waits + 1, "{}", folder.series().len());
    }
}

#[test]
fn two_looks_in_one_instant_are_one() {
    let mut folder = Folder::default();
    look(&mut folder, 0, 0, vec![tenant_look(0, 0)]);
    look(&mut folder, 0, 0, vec![tenant_look(5, 5)]);
    look(&mut folder, 10, 10, vec![tenant_look(8, 8)]);
    assert_eq!(sums(&folder).1[tenant::LAUNCHES], 8);
}

#[test]
fn a_clock_that_is_set_moves_what_comes_and_doubles_nothing() {
    for jump in [-7200, -15, 3, 7200, 400 * 86400] {
        let mut folder = Folder::default();
        look(&mut folder, 0, 0, vec![tenant_look(0, 0)]);
        look(&mut folder, 10, 10, vec![tenant_look(4_000_000, 10)]);
        look(&mut folder, 20 + jump, 20, vec![tenant_look(8_000_000, 30)]);
        let (ms, counts) = sums(&folder);
        assert_eq!((ms, counts[tenant::GOT], counts[tenant::LAUNCHES]), (20_000, 80_000, 30));
    }
}

#[test]
fn what_the_arbiter_did_not_say_is_no_restart() {
    let mut folder = Folder::default();
    let unheard = || Allocation { compute: None, ..tenant_look(0, 0) };
    // Unheard at first: counting begins with what is heard.
    for (second, one) in [
        (0, unheard()),
        (10, unheard()),
        (20, tenant_look(50_000_000, 0)),
        (30, tenant_look(52_000_000, 0)),
        (40, unheard()),
        (50, tenant_look(54_000_000, 0)),
    ] {
        look(&mut folder, second, second.cast_unsigned(), vec![one]);
    }
    assert_eq!(sums(&folder).1[tenant::GOT], 40_000);
}

#[test]
fn a_gap_is_spread_and_a_clock_before_1970_is_left_out() {
    let mut folder = Folder::default();
    look(&mut folder, 0, 0, vec![tenant_look(0, 0)]);
    look(&mut folder, 600, 600, vec![tenant_look(60_000_000, 600)]);
    assert_eq!(folder.pending().len(), 60);
    assert!(folder.pending().values().all(|cells| first(cells).counts[tenant::LAUNCHES] == 10));
    for at_unix_ms in [-5, i64::MAX] {
        let wrong = Status { at_unix_ms, ..status(0, vec![tenant_look(70_000_000, 700)]) };
        folder.look(&wrong, &HashSet::new(), 610_000);
    }
    assert_eq!(sums(&folder).1[tenant::LAUNCHES], 600);
}

#[test]
fn a_peak_between_looks_is_seen() {
    let mut folder = Folder::default();
    look(&mut folder, 0, 0, vec![tenant_look(0, 0)]);
    let mut later = tenant_look(0, 0);
    later.gpus[0].memory_peak_bytes = 700 * MIB;
    look(&mut folder, 10, 10, vec![later.clone()]);
    look(&mut folder, 20, 20, vec![later]);
    let peaks: Vec<u64> =
        folder.pending().values().map(|cells| first(cells).peak_kib >> 10).collect();
    assert_eq!(peaks, [700, 100]);
}

#[test]
fn waiting_for_what_its_share_is_spent_on_counts_as_capped() {
    let mut folder = Folder::default();
    let with = |leased_us, waited_us| Allocation {
        compute: Some(Compute { leased_us, waited_us, ..Compute::default() }),
        ..tenant_look(0, 0)
    };
    look(&mut folder, 0, 0, vec![with(0, 0)]);
    look(&mut folder, 10, 10, vec![with(2_000_000, 3_000_000)]);
    assert_eq!(sums(&folder).1[tenant::CAPPED], 0);
    look(&mut folder, 20, 20, vec![with(7_000_000, 8_000_000)]);
    assert_eq!(sums(&folder).1[tenant::CAPPED], 50_000);
}

#[test]
fn a_gpu_has_its_states_and_no_more_leased_than_there_is() {
    let mut folder = Folder::default();
    let gpu = Gpu {
        uuid: "GPU-a".into(),
        memory_total_bytes: 1000 * MIB,
        memory_used_bytes: 500 * MIB,
        memory_limits_bytes: 900 * MIB,
        state: GpuState::Unhealthy,
        cordon: "by root: fans".into(),
        ..Gpu::default()
    };
    look(&mut folder, 0, 0, vec![tenant_look(0, 0)]);
    let other = Allocation { id: "b".into(), ..tenant_look(9_000_000, 0) };
    let all = status(10, vec![tenant_look(9_000_000, 0), other]);
    // One that does not answer says nothing of its memory.
    let silent = Gpu { uuid: "GPU-b".into(), ..Gpu::default() };
    folder.look(&Status { gpus: vec![gpu, silent], ..all }, &HashSet::new(), 10_000);
    assert_eq!(folder.series().values().filter(|series| series.is_gpu()).count(), 1);
    let cells = folder.pending().values().next().unwrap();
    let of_gpu = cells.iter().find(|(key, _)| key.id.is_empty()).unwrap().1;
    assert_eq!(of_gpu.counts[..3], [100_000; 3]);
    assert_eq!(of_gpu.overhead_kib, 900 << 10);
}

#[test]
fn a_tenant_holds_no_more_than_its_gpu_has_and_an_unread_page_says_nothing() {
    let mut folder = Folder::default();
    look(&mut folder, 0, 0, vec![]);
    let mut liar = tenant_look(0, 9);
    liar.gpus[0].memory_used_bytes = u64::MAX;
    let holder = Holder { namespace: "ns".into(), pod: "p".into(), container: "c".into() };
    liar.holder = Some(holder);
    let parked = Allocation { id: "b".into(), state: AllocationState::Parked, ..liar.clone() };
    let gpu = Gpu { uuid: "GPU-a".into(), memory_total_bytes: 200 * MIB, ..Gpu::default() };
    let all = Status { gpus: vec![gpu], ..status(10, vec![liar, parked]) };
    folder.look(&all, &["b".to_owned()].into(), 10_000);
    let of = |id: &str| {
        let (key, series) = folder.series().iter().find(|(key, _)| key.id == id).unwrap();
        (folder.pending().values().next().unwrap()[key], series.pod.clone())
    };
    let ((a, pod), (b, _)) = (of("a"), of("b"));
    assert_eq!((pod.as_str(), a.mean_kib, a.counts[tenant::LAUNCHES]), ("p", 200 << 10, 9));
    assert_eq!((a.limit_kib, a.cores_millis), (1000 << 10, 500));
    assert_eq!((b.mean_kib, b.counts[tenant::LAUNCHES], b.limit_kib), (0, 0, 0));
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
            let (leased_us, waited_us) = (step.leased, step.leased);
            let one = Allocation {
                generation: step.generation,
                compute: Some(Compute { leased_us, waited_us, ..Compute::default() }),
                ..tenant_look(0, step.launches)
            };
            let unread = if step.read { HashSet::new() } else { [one.id.clone()].into() };
            let status = Status { at_unix_ms: wall_ms, ..status(0, vec![one]) };
            folder.look(&status, &unread, mono_ms);
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
        prop_assert!(total(tenant::GOT) <= observed * 10);
        prop_assert!(total(tenant::WAITED) <= observed * 10);
        prop_assert!(total(tenant::CAPPED) <= total(tenant::WAITED));
        prop_assert!(total(tenant::LAUNCHES) <= observed * 100_000 + 60);
    }
}

#[test]
fn use_that_becomes_known_later_belongs_to_the_time_of_which_it_is_known() {
    let mut folder = Folder::default();
    let mut alone = |ten: u64, [used_us, measured_us]: [u64; 2]| {
        let compute =
            Compute { leased_us: ten * 10_000_000, used_us, measured_us, ..Compute::default() };
        let one = Allocation { compute: Some(compute), ..tenant_look(0, 0) };
        look(&mut folder, i64::try_from(ten * 10).unwrap(), ten * 10, vec![one]);
    };
    alone(1000, [0, 0]);
    // Measured every ten seconds, once between no two looks and once twice.
    for (ten, known) in [(1001, 1), (1002, 1), (1003, 3), (1004, 4), (1005, 5)] {
        alone(ten, [known * 1_000_000, known * 10_000_000]);
    }
    let cells: Vec<_> = folder.pending().values().map(first).collect();
    let known = |cell: &Cell| {
        [tenant::GOT, tenant::MEASURED, tenant::USED].map(|at| cell.counts[at] / 1000)
    };
    let all: Vec<_> = cells.iter().map(known).collect();
    assert_eq!(all, [[100, 100, 10], [100, 0, 0], [100, 100, 10], [100, 100, 10], [100, 100, 10]]);
    assert!(cells.iter().all(|cell| cell.busiest_millis <= 100));
}
