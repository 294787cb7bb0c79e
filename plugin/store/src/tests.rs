use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::StorageBackend;
use redb::backends::InMemoryBackend;

use super::*;
use crate::HISTORY_KEPT;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::health::Moment;

fn record(name: &str, generation: u64) -> Record {
    Record {
        resource: "r".into(),
        replicas: vec![name.into()],
        allocated_unix_ms: 1,
        ..Record::new(AllocationId::of("r", [name]), generation, Vec::new())
    }
}

fn put(name: &str, generation: u64) -> Change {
    let mut change = Change::default();
    change.put(record(name, generation), What::Allocated, 1);
    change
}

#[test]
fn what_was_committed_is_there_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/ledger.redb");
    let (mut ledger, opened) = Ledger::open(&path, true).unwrap();
    assert_eq!(opened, Opened::Created);
    ledger.commit(&put("a", 1)).unwrap();
    ledger.commit(&put("b", 2)).unwrap();
    let remove = Change { remove: vec![record("b", 2).id], ..Change::default() };
    ledger.commit(&remove).unwrap();
    drop(ledger);

    let (mut ledger, opened) = Ledger::open(&path, true).unwrap();
    assert_eq!(opened, Opened::Existing);
    let (records, generation, broken) = ledger.load().unwrap();
    assert_eq!(records, [record("a", 1)]);
    assert_eq!(generation, 2, "a released generation does not come back");
    assert!(broken.is_empty());
    assert_eq!(ledger.lines(&Filter::all()).unwrap().events.len(), 2);
}

#[test]
fn a_ledger_that_is_lost_is_not_taken_for_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    for fsync in [true, false] {
        std::fs::write(&path, b"").unwrap();
        let (_, opened) = Ledger::open(&path, fsync).unwrap();
        assert_eq!(opened, Opened::Lost { found: "is empty" });
        assert_eq!(Ledger::open(&path, fsync).unwrap().1, Opened::Existing, "said once");
        std::fs::remove_file(&path).unwrap();
    }
    assert_eq!(Ledger::open(&path, true).unwrap().1, Opened::Created, "nobody knows of another");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(dir.path().join("ledger.redb.config.toml"), "").unwrap();
    let (_, opened) = Ledger::open(&path, true).unwrap();
    assert!(matches!(opened, Opened::Lost { found } if found.starts_with("is gone")), "{opened:?}");
}

#[test]
fn without_fsync_the_end_of_the_process_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let (mut ledger, _) = Ledger::open(&path, false).unwrap();
    ledger.commit(&put("a", 1)).unwrap();
    assert_eq!(ledger.load().unwrap().0.len(), 1);
    // What the kernel has is what a SIGKILL leaves.
    let left = dir.path().join("left.redb");
    std::fs::copy(&path, &left).unwrap();
    assert_eq!(Ledger::open(&left, false).unwrap().0.load().unwrap().0.len(), 1);
    drop(ledger);
    assert_eq!(Ledger::open(&path, true).unwrap().0.load().unwrap().0.len(), 1);
}

#[test]
fn a_second_plugin_gets_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let _first = Ledger::open(&path, true).unwrap();
    let error = Ledger::open(&path, true).unwrap_err();
    assert!(matches!(error, OpenError::InUse(_)), "{error}");
    assert!(error.to_string().contains("another Tessera plugin"));
}

#[test]
fn an_unreadable_ledger_is_kept_aside_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    for content in [b"not a database, but text".repeat(400), vec![0; 100], vec![0xff; 1 << 16]] {
        std::fs::write(&path, &content).unwrap();
        let (mut ledger, opened) = Ledger::open(&path, true).unwrap();
        let Opened::Rebuilt { kept_as, .. } = opened else { panic!("{opened:?}") };
        assert_eq!(std::fs::read(kept_as).unwrap(), content, "the old file is whole");
        ledger.commit(&put("a", 1)).unwrap();
        drop(ledger);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_ledger_damaged_anywhere_opens_or_is_kept_aside() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let (mut ledger, _) = Ledger::open(&path, true).unwrap();
    for n in 0..50 {
        ledger.commit(&put(&format!("replica-{n}"), n)).unwrap();
    }
    drop(ledger);
    let whole = std::fs::read(&path).unwrap();
    let mut rebuilt = 0;
    for start in (0..whole.len()).step_by(whole.len() / 24) {
        let mut damaged = whole.clone();
        let end = (start + 512).min(whole.len());
        damaged[start..end].iter_mut().for_each(|byte| *byte = !*byte);
        std::fs::write(&path, &damaged).unwrap();
        let (mut ledger, opened) = Ledger::open(&path, true).unwrap();
        rebuilt += usize::from(matches!(opened, Opened::Rebuilt { .. }));
        ledger.load().unwrap();
        ledger.commit(&put("after", 99)).unwrap();
    }
    assert!(rebuilt > 0, "some damage must have been noticed");
    // Cut short.
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let (mut ledger, _) = Ledger::open(&path, true).unwrap();
    ledger.commit(&put("after", 99)).unwrap();
}

#[test]
fn what_a_damaged_commit_takes_is_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let left = dir.path().join("left.redb");
    let (mut ledger, _) = Ledger::open(&left, false).unwrap();
    (0..5).for_each(|n| ledger.commit(&put(&format!("replica-{n}"), n)).unwrap());
    // As a kill leaves it.
    let whole = std::fs::read(&left).unwrap();
    let mut older = 0;
    // redb's two commits, one of which is the newest.
    for slot in [64, 192] {
        let mut damaged = whole.clone();
        damaged[slot + 8] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        let (mut ledger, opened) = Ledger::open(&path, false).unwrap();
        let is_all = ledger.load().unwrap().0.len() == 5;
        match opened {
            Opened::Older(lost) => {
                older += 1;
                assert!(!is_all && lost.stored_until.is_some_and(|until| until >= lost.left_until));
            }
            opened => assert!(is_all && opened == Opened::Existing, "{opened:?}"),
        }
        drop(ledger);
        assert_eq!(Ledger::open(&path, false).unwrap().1, Opened::Existing);
    }
    assert_eq!(older, 1);
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(Ledger::open(&path, false).unwrap().1, Opened::Existing, "a kill loses nothing");
}

#[test]
fn a_ledger_that_went_back_under_a_running_plugin_refuses_until_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut older = 0;
    // redb's two commits, one of which is the newest.
    for slot in [64, 192] {
        let path = dir.path().join(format!("{slot}.redb"));
        let (mut ledger, _) = Ledger::open(&path, false).unwrap();
        (0..5).for_each(|n| ledger.commit(&put(&format!("replica-{n}"), n)).unwrap());
        let mut damaged = std::fs::read(&path).unwrap();
        damaged[slot + 8] ^= 1;
        // A disk that fails has it opened again.
        ledger.failed(&"the disk failed");
        std::fs::write(&path, damaged).unwrap();
        let Err(error) = ledger.load() else { continue };
        older += 1;
        let again = [ledger.commit(&put("x", 9)).unwrap_err(), ledger.load().unwrap_err()];
        for error in again.into_iter().chain([error]) {
            assert!(error.to_string().contains("restart the plugin"), "{error}");
        }
        drop(ledger);
        let (mut next, opened) = Ledger::open(&path, false).unwrap();
        assert!(matches!(opened, Opened::Older(_)), "{opened:?}");
        let left = next.load().unwrap().0.len();
        assert!(left < 5);
        next.commit(&put("x", 9)).unwrap();
        // From here on, nothing is lost.
        next.failed(&"the disk failed");
        assert_eq!(next.load().unwrap().0.len(), left + 1);
    }
    assert_eq!(older, 1);
}

#[test]
fn a_newer_schema_is_kept_aside() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    drop(Ledger::open(&path, true).unwrap());
    let db = builder().create(&path).unwrap();
    let write = db.begin_write().unwrap();
    write.open_table(META).unwrap().insert(META_SCHEMA, SCHEMA + 1).unwrap();
    write.commit().unwrap();
    drop(db);
    let (_, opened) = Ledger::open(&path, true).unwrap();
    let Opened::Rebuilt { reason, .. } = opened else { panic!("{opened:?}") };
    assert!(reason.contains("schema 2"), "{reason}");
}

#[test]
fn history_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let (mut ledger, _) = Ledger::open(&dir.path().join("ledger.redb"), false).unwrap();
    let mut change = put("a", 1);
    change.events = vec![change.events[0].clone(); 3000];
    ledger.commit(&change).unwrap();
    ledger.commit(&change).unwrap();
    assert_eq!(ledger.lines(&Filter::all()).unwrap().events.len() as u64, HISTORY_KEPT);
}

/// Storage that is full while the flag is up.
#[derive(Clone, Debug)]
struct Disk {
    storage: Arc<InMemoryBackend>,
    full: Arc<AtomicBool>,
}

impl Disk {
    fn check(&self) -> io::Result<()> {
        if self.full.load(Ordering::SeqCst) {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        Ok(())
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.storage.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.storage.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.check()?;
        self.storage.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        self.storage.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        self.storage.write(offset, data)
    }
}

#[test]
fn a_full_disk_refuses_a_commit_and_the_next_one_recovers() {
    let full = Arc::new(AtomicBool::new(false));
    let disk = Disk { storage: Arc::new(InMemoryBackend::new()), full: Arc::clone(&full) };
    let mut ledger =
        Ledger::with_opener(move || builder().create_with_backend(disk.clone())).unwrap();
    ledger.commit(&put("a", 1)).unwrap();

    full.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        let error = ledger.commit(&put("b", 2)).unwrap_err();
        assert!(error.to_string().contains("free space on its disk"), "{error}");
    }

    full.store(false, Ordering::SeqCst);
    assert_eq!(ledger.load().unwrap().0, [record("a", 1)], "nothing lost, nothing half written");
    ledger.commit(&put("c", 3)).unwrap();
    assert_eq!(ledger.load().unwrap().0.len(), 2);
}

#[test]
fn measured_contexts_are_kept_by_driver_and_product() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let (mut ledger, _) = Ledger::open(&path, true).unwrap();
    assert!(ledger.contexts("570.1").unwrap().is_empty());
    let measured = |driver: &str, product: &str, bytes| MeasuredContext {
        driver: driver.into(),
        product: product.into(),
        bytes,
    };
    let contexts = vec![
        measured("570.1", "NVIDIA L4", 1),
        measured("570.1", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 2),
        measured("570.10", "NVIDIA L4", 3),
        measured("57", "0.1/NVIDIA L4", 4),
    ];
    ledger.commit(&Change { contexts, ..Change::default() }).unwrap();
    let less = vec![measured("570.1", "NVIDIA L4", 5)];
    ledger.commit(&Change { contexts: less, ..Change::default() }).unwrap();
    ledger.commit(&put("a", 7)).unwrap();
    drop(ledger);
    let (mut ledger, opened) = Ledger::open(&path, true).unwrap();
    assert_eq!(opened, Opened::Existing);
    let contexts = ledger.contexts("570.1").unwrap();
    let contexts: Vec<_> = contexts.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
    assert_eq!(contexts, [("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 2), ("NVIDIA L4", 5)]);
    assert_eq!(ledger.contexts("570.10").unwrap().len(), 1);
    assert!(ledger.contexts("570").unwrap().is_empty());
    assert_eq!(ledger.load().unwrap().1, 7, "the generation is what it was");
}

#[test]
fn trouble_of_gpus_is_kept_and_an_entry_that_cannot_be_read_counts_as_trouble() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    let unreadable = || Remembered { reason: "unreadable".to_owned(), ..Remembered::default() };
    let (mut ledger, _) = Ledger::open(&path, true).unwrap();
    assert!(ledger.health(unreadable).unwrap().is_empty(), "older versions do not make the table");
    let known = Remembered {
        at: Moment { boot: "one".into(), monotonic_ms: 7, unix_ms: 8 },
        state: tessera_model::health::State::Unhealthy,
        suspicions_ms: vec![3, 1],
        locked: Some("XID 74".into()),
        energy_mj: Some(5),
        ..Remembered::default()
    };
    let health = ["a", "b"].map(|uuid| (uuid.to_owned(), Some(known.clone())));
    ledger.commit(&Change { health: health.to_vec(), ..Change::default() }).unwrap();
    ledger.commit(&Change { health: vec![("b".into(), None)], ..Change::default() }).unwrap();
    let write = ledger.db().map_err(Unopened::into_redb).unwrap().begin_write().unwrap();
    write.open_table(HEALTH).unwrap().insert("c", b"{".as_slice()).unwrap();
    write.commit().unwrap();
    drop(ledger);
    let (mut ledger, _) = Ledger::open(&path, true).unwrap();
    let all = [("a".to_owned(), known), ("c".to_owned(), unreadable())];
    assert_eq!(ledger.health(unreadable).unwrap(), all.into());
}
