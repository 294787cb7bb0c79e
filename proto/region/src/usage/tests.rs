use std::fs::{self, OpenOptions};
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::PageFault;
use crate::account::{self, Account};
use crate::layout::{
    Kind, LAUNCH_SHARDS, MAX_BYTES, Past, SLOTS, Slot, USAGE_BYTES, USAGE_FILE, UsageHeader,
    slot_lock_offset,
};
use crate::quota::{GpuQuota, Policy, QuotaReader, QuotaSpec};

fn pages() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let gpu = GpuQuota {
        uuid: "GPU-0".into(),
        memory_limit_bytes: 1000,
        context_overhead_bytes: 0,
        cores_millis: 1000,
        policy: Policy::None,
    };
    let spec = QuotaSpec { allocation: "a".into(), generation: 3, gpus: vec![gpu] };
    let quota = crate::quota::create(dir.path(), &spec).unwrap();
    quota.set_departure(Duration::from_micros(1));
    assert!(create(dir.path(), 3).unwrap().fresh);
    dir
}

fn claim(dir: &TempDir) -> OwnedSlot {
    UsageMap::attach(dir.path()).unwrap().claim_within(1).unwrap()
}

/// A process that holds `bytes`; dropping it is its death.
fn holder(dir: &TempDir, bytes: u64) -> Account {
    let map = UsageMap::attach(dir.path()).unwrap();
    let slot = map.claim().unwrap();
    let account = Account::new(QuotaReader::attach(dir.path()).unwrap(), map, slot);
    account.reserve(0, bytes).unwrap().commit(bytes, Kind::Plain).unwrap();
    account
}

fn file(dir: &TempDir) -> UsageFile {
    UsageFile::open(dir.path()).unwrap()
}

/// What a tenant does to its own page.
fn scribble(dir: &TempDir, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(dir.path().join(USAGE_FILE)).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

fn resize(dir: &TempDir, len: u64) {
    let file = OpenOptions::new().write(true).open(dir.path().join(USAGE_FILE)).unwrap();
    file.set_len(len).unwrap();
}

const SLOT_0: u64 = slot_lock_offset(0);

#[test]
fn a_fresh_page_is_empty_and_anybodys_to_write() {
    let dir = pages();
    let meta = fs::metadata(dir.path().join(USAGE_FILE)).unwrap();
    assert_eq!((meta.len(), meta.mode() & 0o777), (USAGE_BYTES as u64, 0o666));
    assert!(meta.blocks() * 512 >= USAGE_BYTES as u64, "not allocated");
    assert_eq!(file(&dir).snapshot().unwrap(), Snapshot { generation: 3, ..Snapshot::default() });
    assert!(!file(&dir).any_slot_locked());
}

#[test]
fn the_plugin_sees_what_processes_hold() {
    let dir = pages();
    let one = holder(&dir, 100);
    let two = holder(&dir, 50);
    two.release(0, 20, Kind::Plain);
    assert!(one.reserve(0, 901).is_err());
    let snapshot = file(&dir).snapshot().unwrap();
    assert_eq!((snapshot.charged(0), snapshot.granted(0), snapshot.slots.len()), (130, 130, 2));
    let [one, two] = &snapshot.slots[..] else { panic!("{snapshot:?}") };
    assert_eq!((one.index, one.did.refusals, one.last_refused_bytes), (0, 1, 901));
    assert_eq!((two.index, two.did.peak[0], two.allocations, two.frees), (1, 50, 1, 1));
    assert_eq!(two.kinds[Kind::Plain as usize], 30);
    assert_eq!(two.pid_hint, std::process::id());
    assert!(two.claimed_ns > 0 && one.last_refused_ns >= one.claimed_ns);
}

#[test]
fn slots_are_taken_lowest_first_and_again_after_death() {
    let dir = pages();
    let slots: Vec<OwnedSlot> = (0..3).map(|_| claim(&dir)).collect();
    assert_eq!(slots.iter().map(OwnedSlot::index).collect::<Vec<_>>(), [0, 1, 2]);
    let [zero, one, two] = <[OwnedSlot; 3]>::try_from(slots).unwrap();
    drop(one);
    assert_eq!(claim(&dir).index(), 1);
    let usage = file(&dir);
    assert!(usage.slot_locked(0) && !usage.slot_locked(1));
    drop((zero, two));
    assert!(!usage.any_slot_locked());
}

#[test]
fn the_plugin_recovers_the_dead_and_leaves_the_living() {
    let dir = pages();
    let living = holder(&dir, 100);
    let (dead, also_dead) = (holder(&dir, 50), holder(&dir, 7));
    let usage = file(&dir);
    assert_eq!(usage.recover_dead().unwrap(), Recovered::default());
    drop((dead, also_dead));
    let recovered = usage.recover_dead().unwrap();
    assert_eq!((recovered.slots, recovered.bytes[0]), (2, 57));
    assert_eq!(usage.snapshot().unwrap().charged(0), 100);
    assert_eq!(living.charged_total(0), 100);
}

/// What everybody did, wherever it is written by now.
fn everything(usage: &UsageFile, ended: &Tally) -> Tally {
    let snapshot = usage.snapshot().unwrap();
    let mut all = ended.clone();
    all.merge(&snapshot.tally());
    all
}

/// A process that holds `bytes`, has been refused once, and ends.
fn short_life(dir: &TempDir, bytes: u64) {
    let account = holder(dir, bytes);
    account.reserve(0, 1001).unwrap_err();
}

#[test]
fn what_a_process_did_outlives_its_slot_whoever_takes_it() {
    let dir = pages();
    let usage = file(&dir);
    let mut ended = Tally::default();
    // Each takes the slot of the one before it, or the plugin does.
    for (round, bytes) in (1u64..).zip([100, 700, 300, 50]) {
        short_life(&dir, bytes);
        if round % 2 == 0 {
            ended.merge(&usage.recover_dead().unwrap().tally);
        }
        let all = everything(&usage, &ended);
        assert_eq!((all.refusals, all.peak[0]), (round, if round == 1 { 100 } else { 700 }));
    }
    // Renewed for the same tenant, nothing is lost; for another, nothing is left.
    short_life(&dir, 10);
    ended.merge(&create(dir.path(), 3).unwrap().recovered.tally);
    assert_eq!(everything(&usage, &ended).refusals, 5);
    short_life(&dir, 10);
    create(dir.path(), 4).unwrap();
    assert_eq!(everything(&usage, &Tally::default()), Tally::default());
}

#[test]
fn what_the_dead_held_departs_as_the_driver_gives_it_back() {
    const HOUR: Duration = Duration::from_secs(3600);
    let dir = pages();
    crate::quota::QuotaWriter::open(dir.path()).unwrap().set_departure(HOUR);
    let living = holder(&dir, 100);
    drop(holder(&dir, 50));
    let usage = file(&dir);
    let only = || {
        let slots = usage.snapshot().unwrap().slots;
        slots.into_iter().find(|slot| slot.index == 1).unwrap()
    };
    assert!(!only().is_departing(), "nobody has looked");
    assert_eq!(usage.bury(HOUR).unwrap(), Recovered::default());
    let (dead, since) = (only(), only().departing_ns);
    assert!(dead.is_departing() && living.any_departing(0));
    assert_eq!((living.charged_total(0), living.shares().used(0)), (150, 100));
    let fate = |left, seen| Fate { slot: 1, claimed_ns: dead.claimed_ns, gpu: 0, left, seen };

    // Others' slots and living ones are nobody's to settle.
    let others = [Fate { claimed_ns: 1, ..fate(0, false) }, Fate { slot: 0, ..fate(0, false) }];
    assert_eq!(usage.settle(&others).unwrap(), Recovered::default());
    // It is seen, in part.
    assert_eq!(usage.settle(&[fate(20, true)]).unwrap().bytes[0], 30);
    assert!(only().departing_ns > since);
    assert_eq!((only().charged[0], only().granted[0]), (20, 20));
    assert_eq!(usage.settle(&[fate(40, true)]).unwrap(), Recovered::default(), "never more again");
    // A process that claims meanwhile takes another slot.
    assert_eq!(UsageMap::attach(dir.path()).unwrap().claim().unwrap().index(), 2);
    assert_eq!(usage.settle(&[fate(0, false)]).unwrap().bytes[0], 20);
    assert_eq!((living.charged_total(0), living.any_departing(0)), (100, false));
    assert_eq!(holder(&dir, 5).slot_index(), 1);
}

#[test]
fn a_successor_waits_for_what_departs_and_is_not_refused() {
    let dir = pages();
    let time = Duration::from_millis(60);
    crate::quota::QuotaWriter::open(dir.path()).unwrap().set_departure(time);
    drop(holder(&dir, 800));
    let began = std::time::Instant::now();
    let next = holder(&dir, 0);
    assert_eq!((next.slot_index(), next.shares().used(0)), (1, 0), "noticed at the claim");
    // What fits beside it does not wait, what fits nobody's quota is refused at once.
    drop(next.reserve(0, 200).unwrap());
    assert_eq!(next.reserve(0, 1001).unwrap_err().reason, account::Reason::OverQuota);
    assert!(began.elapsed() < time);
    drop(next.reserve(0, 1000).unwrap());
    assert!(began.elapsed() >= time);
}

fn refusal(map: &UsageMap) -> String {
    map.claim().unwrap_err().to_string()
}

#[test]
fn when_all_slots_are_taken_it_says_so() {
    let dir = pages();
    let map = UsageMap::attach(dir.path()).unwrap();
    let slots: Vec<OwnedSlot> = (0..SLOTS).map(|_| map.claim().unwrap()).collect();
    assert_eq!(refusal(&map), "128 processes of this container use CUDA already");
    assert_eq!(file(&dir).snapshot().unwrap().slots.len(), SLOTS);
    drop(slots);
    assert!(map.claim().is_ok());
}

#[test]
fn another_file_at_the_path_is_not_claimed_in() {
    let dir = pages();
    let map = UsageMap::attach(dir.path()).unwrap();
    crate::remove_pages(dir.path()).unwrap();
    assert_eq!(refusal(&map), "claiming a slot: open: No such file or directory (os error 2)");
    create(dir.path(), 1).unwrap();
    assert_eq!(refusal(&map), "the usage page's path leads to another file now");
}

#[test]
fn tampering_is_named_and_the_size_restored() {
    let dir = pages();
    let usage = file(&dir);
    let what = || usage.snapshot().unwrap_err().what;
    resize(&dir, 4);
    assert_eq!(usage.snapshot().unwrap_err(), Tampered::page("its size", 4));
    assert_eq!(usage.recover_dead().unwrap(), Recovered::default());
    assert!(usage.restore(3).unwrap());
    assert_eq!(usage.snapshot().unwrap(), Snapshot { generation: 3, ..Snapshot::default() });
    assert!(!create(dir.path(), 4).unwrap().fresh);
    assert_eq!(usage.snapshot().unwrap().generation, 4);
    resize(&dir, 1 << 30);
    assert_eq!(what(), "its size");
    assert!(usage.restore(4).unwrap() && !usage.restore(4).unwrap());
    assert!(usage.snapshot().is_ok());

    let holder = holder(&dir, 10);
    let expect = |at: u64, bytes: &[u8], what| {
        let path = dir.path().join(USAGE_FILE);
        let before = fs::read(&path).unwrap();
        scribble(&dir, at, bytes);
        let tampered = usage.snapshot().unwrap_err();
        assert_eq!(tampered.what, what, "{tampered}");
        scribble(&dir, 0, &before);
    };
    let word = |value: u64| value.to_le_bytes();
    expect(8, &[2], "its ABI version");
    expect(12, &[2], "its number of slots");
    expect(64, &[129], "its high-water mark");
    expect(64, &[0], "its high-water mark");
    expect(SLOT_0, &word(u64::MAX), "the bytes charged");
    expect(SLOT_0, &word(9), "the bytes granted");
    expect(SLOT_0 + 128, &word(11), "the bytes granted");
    expect(SLOT_0 + 256, &word(u64::MAX), "the peak");
    expect(SLOT_0 + 384, &word(u64::MAX), "the bytes of a kind");
    expect(SLOT_0 + 608, &word(0), "words of a slot nobody claimed");
    expect(SLOT_0 + 1023, &[1], "reserved bytes");
    assert_eq!(usage.snapshot().unwrap().charged(0), holder.charged_total(0));
}

#[test]
fn a_page_cut_to_nothing_is_usable_again_by_the_living_and_by_newcomers() {
    for len in [0, 1, 4095, 4096, SLOT_0 + 1024, USAGE_BYTES as u64 - 1] {
        let dir = pages();
        let usage = file(&dir);
        let living = holder(&dir, 100);
        resize(&dir, len);
        assert!(usage.snapshot().is_err());
        assert!(usage.restore(3).unwrap(), "{len}");
        let kept = if len >= SLOT_0 + 1024 { 100 } else { 0 };
        assert_eq!(usage.snapshot().unwrap().charged(0), kept, "{len}");
        // A process that was cut off goes on; what it releases from before stays at nothing.
        living.reserve(0, 300).unwrap().commit(300, Kind::Plain).unwrap();
        living.release(0, 100, Kind::Plain);
        assert_eq!(usage.snapshot().unwrap().charged(0), kept + 200, "{len}");
        // A newcomer attaches, and the sums of both reach each other.
        let newcomer = holder(&dir, 500);
        assert_eq!(newcomer.charged_total(0), kept + 700, "{len}");
        assert!(living.reserve(0, 400).is_err(), "{len}");
        drop((living, newcomer));
        usage.recover_dead().unwrap();
        assert_eq!(usage.snapshot().unwrap().slots, vec![], "{len}");
    }
}

#[test]
fn a_punched_page_gets_its_memory_back() {
    // On a tmpfs: elsewhere, blocks are counted otherwise.
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    create(dir.path(), 3).unwrap();
    let usage = UsageFile::open(dir.path()).unwrap();
    let file = OpenOptions::new().write(true).open(dir.path().join(USAGE_FILE)).unwrap();
    let punch = |at: i64, len: i64| {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain call on an open descriptor.
        let done =
            unsafe { libc::fallocate(std::os::fd::AsRawFd::as_raw_fd(&file), mode, at, len) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    };
    punch(8192, 4096);
    let tampered = usage.snapshot().unwrap_err();
    assert_eq!(
        (tampered.what, tampered.found),
        ("the bytes it has memory for", USAGE_BYTES as u64 - 4096)
    );
    assert!(usage.restore(3).unwrap() && usage.snapshot().is_ok());
    punch(0, 4096);
    assert!(usage.snapshot().is_err());
    assert!(usage.restore(3).unwrap() && usage.snapshot().is_ok());
}

#[test]
fn the_next_tenant_finds_a_sound_page_whatever_the_last_one_did() {
    let dir = pages();
    drop(holder(&dir, 10));
    let created = create(dir.path(), 4).unwrap();
    assert_eq!(created, Created::default());
    assert_eq!(file(&dir).snapshot().unwrap().charged(0), 10, "the driver may have them still");
    std::thread::sleep(Duration::from_millis(1));
    let recovered = create(dir.path(), 4).unwrap().recovered;
    assert_eq!((recovered.slots, recovered.bytes[0]), (1, 10));

    let path = dir.path().join(USAGE_FILE);
    let spoils: [&dyn Fn(); 5] = [
        &|| fs::write(&path, "").unwrap(),
        &|| fs::write(&path, vec![0xff; USAGE_BYTES]).unwrap(),
        &|| resize(&dir, 1 << 20),
        &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap(),
        &|| scribble(&dir, 8, &[9]),
    ];
    for spoil in spoils {
        spoil();
        assert!(create(dir.path(), 5).unwrap().repaired);
        assert!(!create(dir.path(), 5).unwrap().repaired);
        assert_eq!(
            file(&dir).snapshot().unwrap(),
            Snapshot { generation: 5, ..Snapshot::default() }
        );
        assert_eq!(holder(&dir, 1000).slot_index(), 0);
    }
}

#[test]
fn renewing_leaves_the_living_alone() {
    let dir = pages();
    let (dead, living) = (holder(&dir, 5), holder(&dir, 10));
    drop(dead);
    assert_eq!(create(dir.path(), 9).unwrap().recovered.slots, 0);
    std::thread::sleep(Duration::from_millis(1));
    let created = create(dir.path(), 9).unwrap();
    assert_eq!(created.recovered.bytes[0], 5);
    assert_eq!((living.charged_total(0), created.repaired), (10, false));
    // A header wiped under a living process must not hide its slot from sums.
    scribble(&dir, 0, &[0; 4096]);
    assert!(create(dir.path(), 9).unwrap().repaired);
    assert_eq!(living.charged_total(0), 10);
    assert_eq!(holder(&dir, 990).charged_total(0), 1000);
}

#[test]
fn what_stands_in_the_pages_place_is_distinguished() {
    let dir = pages();
    let path = dir.path().join(USAGE_FILE);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let fault = || create(dir.path(), 1).unwrap_err().fault;
    assert!(matches!(fault(), PageFault::IsDirectory));
    assert!(matches!(UsageFile::open(dir.path()).unwrap_err().fault, PageFault::IsDirectory));
    crate::prepare_dir(dir.path()).unwrap();
    symlink("quota", &path).unwrap();
    assert!(matches!(fault(), PageFault::NotRegular));
    assert!(matches!(UsageFile::open(dir.path()).unwrap_err().fault, PageFault::NotRegular));
}

/// A page as a sound tenant of two processes leaves it.
fn sound_page() -> Vec<u8> {
    let dir = pages();
    let _holders = (holder(&dir, 10), holder(&dir, 20));
    fs::read(dir.path().join(USAGE_FILE)).unwrap()
}

/// One of the page's words: of what has ended, of the first slot's counters, or any.
fn word() -> impl Strategy<Value = usize> {
    let (past, slot) = (offset_of!(UsageHeader, past), size_of::<UsageHeader>());
    let counters = slot + offset_of!(Slot, refusals)..slot + offset_of!(Slot, claimed_ns);
    prop_oneof![past..past + size_of::<Past>(), counters, 0..USAGE_BYTES].prop_map(|at| at / 8)
}

proptest! {
    #[test]
    fn no_figure_exceeds_what_can_happen(
        marks in prop::collection::vec((word(), prop_oneof![Just(u64::MAX), any::<u64>(), 0..9u64]), 1..9),
    ) {
        let mut page = sound_page();
        for (word, value) in marks {
            page[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
        let Ok(snapshot) = parse(&page) else { return Ok(()) };
        let slots = snapshot.slots.iter().map(|slot| slot.did.clone());
        for tally in slots.chain([snapshot.past.clone()]) {
            let Tally { refusals, driver_refusals, launches, gate_waits, gate_timeouts, .. } = tally;
            let counts = [refusals, driver_refusals, gate_waits, gate_timeouts, tally.window_waits];
            prop_assert!(counts.iter().all(|count| *count <= 1 << 48), "{tally:?}");
            prop_assert!(launches <= LAUNCH_SHARDS as u64 * (1 << 48), "{tally:?}");
            prop_assert!(tally.gpu_time_ns.max(tally.gate_wait_ns) <= 1 << 63, "{tally:?}");
            prop_assert!(tally.peak.iter().all(|bytes| *bytes <= MAX_BYTES), "{tally:?}");
        }
        for slot in &snapshot.slots {
            prop_assert!(slot.allocations.max(slot.frees) <= 1 << 48, "{slot:?}");
        }
    }
}

#[test]
fn imports_are_seen_by_all_until_they_end_or_their_process_is_taken_back() {
    let dir = pages();
    let (exporter, importer) = (holder(&dir, 10), holder(&dir, 0));
    let seen = |mark| exporter.any_import(|found| found == mark);
    assert!(!seen(7));
    importer.mark_import(7);
    importer.mark_import(7);
    assert!(seen(7) && !seen(8));
    importer.unmark_import(7);
    assert!(seen(7), "it was imported twice");
    // Any word is legal: a mark means something to the tenant alone.
    importer.mark_import(u64::MAX);
    assert!(file(&dir).snapshot().is_ok());
    drop(importer);
    assert!(seen(7), "dead, and nobody has looked");
    // It holds no bytes, and is found all the same.
    assert!(exporter.recover_dead(0));
    assert!(seen(7) && exporter.any_importer_departing(), "with the driver still");
    std::thread::sleep(Duration::from_millis(1));
    assert!(exporter.recover_dead(0));
    assert!(!seen(7) && !seen(u64::MAX) && !exporter.any_importer_departing());
}

#[test]
fn more_imports_than_can_be_marked_stand_for_all() {
    let dir = pages();
    let (exporter, importer) = (holder(&dir, 10), holder(&dir, 0));
    let marks = u64::try_from(crate::layout::IMPORTS).unwrap() + 1;
    for mark in 1..=marks {
        importer.mark_import(mark);
    }
    assert!(exporter.any_import(|_| false));
    importer.unmark_import(marks);
    assert!(!exporter.any_import(|_| false));
    assert!(exporter.any_import(|found| found == 1));
}

#[test]
fn a_look_sees_all_that_anybody_lives_by_and_a_mark_that_hides_somebody() {
    const MARK: u64 = 64;
    let dir = pages();
    let usage = file(&dir);
    let (one, two) = (holder(&dir, 100), holder(&dir, 200));
    assert_eq!(usage.snapshot().unwrap().charged(0), 300);
    // What lies where nobody is is nobody's.
    scribble(&dir, slot_lock_offset(9), &[1]);
    assert_eq!(usage.snapshot().unwrap().slots.len(), 2);
    // A mark below a living process's slot hides its bytes from the others.
    scribble(&dir, MARK, &1u32.to_le_bytes());
    assert_eq!(usage.snapshot().unwrap_err().what, "its high-water mark");
    drop(two);
    assert_eq!(usage.snapshot().unwrap().charged(0), 100, "the dead hide nothing");
    drop(one);
}

#[test]
fn a_page_is_whole_when_creating_it_again_would_change_nothing() {
    const MARK: u64 = 64;
    // Elsewhere it is never said to be.
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    create(dir.path(), 3).unwrap();
    let usage = file(&dir);
    let again = |generation| {
        let created = create(dir.path(), generation).unwrap();
        assert!(usage.is_whole(generation));
        created.repaired || created.recovered.slots > 0
    };
    assert!(usage.is_whole(3) && !usage.is_whole(4));
    assert!(!again(4));
    let slot = claim(&dir);
    assert!(usage.is_whole(4), "somebody lives there");
    drop(slot);
    assert!(!usage.is_whole(4), "what the dead left");
    assert!(again(4));
    let path = dir.path().join(USAGE_FILE);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(!usage.is_whole(4) && again(4));
    for (at, bytes) in [(0, [1u8]), (8, [9]), (MARK, [255])] {
        scribble(&dir, at, &bytes);
        assert!(!usage.is_whole(4), "{at}");
        create(dir.path(), 4).unwrap();
        assert!(usage.is_whole(4), "{at}");
    }
    for len in [0, 4096, 1 << 20] {
        resize(&dir, len);
        assert!(!usage.is_whole(4) && again(4), "{len}");
    }
    resize(&dir, SLOT_0);
    resize(&dir, u64::try_from(USAGE_BYTES).unwrap());
    assert!(!usage.is_whole(4), "no memory behind it");
}
