use super::*;
use crate::{HISTORY_KEPT, INCIDENTS_KEPT, INCIDENTS_KEPT_EACH};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::health::Moment;

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    (dir, path)
}

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
    let (dir, _) = place();
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
    assert_eq!(ledger.lines().unwrap().events.len(), 2);
}

#[test]
fn a_ledger_that_is_lost_is_not_taken_for_the_first() {
    let (dir, path) = place();
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
    let (dir, path) = place();
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
    let (_dir, path) = place();
    let _first = Ledger::open(&path, true).unwrap();
    let error = Ledger::open(&path, true).unwrap_err();
    assert!(matches!(error, OpenError::InUse(_)), "{error}");
    assert!(error.to_string().contains("another Tessera plugin"));
}

#[test]
fn an_unreadable_ledger_is_kept_aside_and_replaced() {
    let (_dir, path) = place();
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
    let (_dir, path) = place();
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
fn a_newer_schema_is_kept_aside() {
    let (_dir, path) = place();
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
fn trouble_of_gpus_is_kept_and_an_entry_that_cannot_be_read_counts_as_trouble() {
    let (_dir, path) = place();
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

fn ledger() -> (tempfile::TempDir, Ledger) {
    let (dir, path) = place();
    let (ledger, _) = Ledger::open(&path, false).unwrap();
    (dir, ledger)
}

fn id(replica: &str) -> AllocationId {
    AllocationId::of("r", [replica])
}

fn of(replica: &str, generation: u64, what: What) -> Event {
    Event { id: Some(id(replica)), generation, ..Event::of_node(what, 1) }
}

fn refused(bytes: u64) -> What {
    What::RefusedMemory { bytes, charged_bytes: 0, limit_bytes: 9 }
}

fn write(ledger: &mut Ledger, events: Vec<Event>) {
    ledger.commit(&Change { events, ..Change::default() }).unwrap();
}

fn all(ledger: &mut Ledger) -> Vec<Event> {
    ledger.lines().unwrap().events
}

fn whats(events: &[Event]) -> Vec<&'static str> {
    events.iter().map(|event| event.what.into_str()).collect()
}

#[test]
fn a_hostile_container_drops_nothing_but_its_own_lines_of_that_kind() {
    let (_dir, mut ledger) = ledger();
    let tampered = || What::Tampered { what: "usage page".into() };
    write(&mut ledger, vec![of("a", 1, What::Allocated), of("a", 1, tampered())]);
    write(&mut ledger, vec![of("b", 2, refused(7))]);
    let flood = (0..10_000).map(|n| of("a", 1, refused(n))).collect();
    write(&mut ledger, flood);
    let all = all(&mut ledger);
    assert_eq!(whats(&all[..3]), ["allocated", "tampered", "refused-memory"]);
    assert_eq!(all[2].id, Some(id("b")));
    assert_eq!(all.len() as u64, 3 + INCIDENTS_KEPT_EACH);
    assert_eq!(all.last().unwrap().what, refused(9999), "the newest are kept");
}

#[test]
fn incidents_of_many_containers_are_bounded_and_the_oldest_go() {
    let (_dir, mut ledger) = ledger();
    for from in (0..3 * INCIDENTS_KEPT).step_by(1024) {
        let flood = (from..from + 1024).map(|n| of("a", n, refused(n))).collect();
        write(&mut ledger, flood);
    }
    let all = all(&mut ledger);
    assert!((INCIDENTS_KEPT / 2..=INCIDENTS_KEPT).contains(&(all.len() as u64)), "{}", all.len());
    let newest = 3 * INCIDENTS_KEPT - 1;
    assert!(all.iter().rev().zip(0..).all(|(event, n)| event.what == refused(newest - n)));
}

#[test]
fn lines_are_read_in_the_order_in_which_they_were_written_whatever_the_clock_said() {
    let (_dir, mut ledger) = ledger();
    let lines = [What::Allocated, What::Started, refused(1), What::Cordoned, refused(2)];
    for (n, what) in (0..).zip(lines) {
        write(&mut ledger, vec![Event { at_unix_ms: 100 - n, ..of("a", 1, what) }]);
    }
    let all = all(&mut ledger);
    let expected = ["allocated", "started", "refused-memory", "cordoned", "refused-memory"];
    assert_eq!(whats(&all), expected);
}

#[test]
fn who_reads_the_trail_sees_one_moment_and_holds_up_nobody() {
    let (dir, mut ledger) = ledger();
    write(&mut ledger, vec![of("a", 1, What::Allocated)]);
    let trail = ledger.trail().unwrap();
    write(&mut ledger, vec![of("a", 1, What::Started), of("a", 1, What::Released)]);
    assert_eq!(whats(&trail.read().unwrap().events), ["allocated"]);
    assert_eq!(whats(&all(&mut ledger)), ["allocated", "started", "released"]);
    // Nor does a reader keep the file from the next plugin.
    ledger.close();
    let (mut next, opened) = Ledger::open(&dir.path().join("ledger.redb"), false).unwrap();
    assert_eq!(opened, Opened::Existing);
    write(&mut next, vec![of("b", 2, What::Allocated)]);
    drop(trail);
    assert_eq!(all(&mut next).len(), 4);
}

#[test]
fn lines_and_tables_that_another_version_lacks_or_knows_are_no_harm() {
    let (_dir, path) = place();
    let (mut ledger, _) = Ledger::open(&path, false).unwrap();
    write(&mut ledger, vec![of("a", 1, What::Allocated)]);
    drop(ledger);
    // As an older version leaves it, and with a line of a newer one.
    let db = builder().create(&path).unwrap();
    let tx = db.begin_write().unwrap();
    tx.delete_table(INCIDENTS).unwrap();
    tx.open_table(META).unwrap().remove(crate::META_SEQUENCE).unwrap();
    let newer = br#"{"at_unix_ms":5,"what":{"teleported":{"to":"the moon"}},"mood":1}"#;
    tx.open_table(HISTORY).unwrap().insert(7, newer.as_slice()).unwrap();
    tx.commit().unwrap();
    drop(db);
    let (mut ledger, opened) = Ledger::open(&path, false).unwrap();
    assert_eq!(opened, Opened::Existing);
    assert_eq!(whats(&all(&mut ledger)), ["allocated"]);
    write(&mut ledger, vec![of("a", 1, What::Started), of("a", 1, What::Parked)]);
    assert_eq!(whats(&all(&mut ledger)), ["allocated", "started", "parked"]);
}

#[test]
fn what_people_did_is_bounded_by_itself() {
    let (_dir, mut ledger) = ledger();
    for _ in 0..3 {
        write(&mut ledger, vec![Event::of_node(What::Cordoned, 0); 3000]);
    }
    assert_eq!(all(&mut ledger).len() as u64, HISTORY_KEPT);
}
