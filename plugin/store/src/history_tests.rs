use proptest::prelude::*;

use super::*;
use crate::{HISTORY_KEPT, INCIDENTS_KEPT, INCIDENTS_KEPT_EACH};
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Event, What};
use tessera_model::record::Holder;

fn ledger() -> (tempfile::TempDir, Ledger) {
    let dir = tempfile::tempdir().unwrap();
    let (ledger, _) = Ledger::open(&dir.path().join("ledger.redb"), false).unwrap();
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
    ledger.lines(&Filter::all()).unwrap().events
}

fn whats(events: &[Event]) -> Vec<&'static str> {
    events.iter().map(|event| event.what.name()).collect()
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
    assert_eq!(whats(&trail.read(&Filter::all()).unwrap().events), ["allocated"]);
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
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
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

#[test]
fn lines_that_a_filter_leaves_out_are_not_decoded() {
    let (_dir, mut ledger) = ledger();
    let others = (0..3000).flat_map(|n| [of("b", n, What::Allocated), of("c", n, refused(n))]);
    write(&mut ledger, others.collect());
    write(&mut ledger, vec![of("a", 9000, What::Allocated), of("a", 9000, refused(1))]);
    write(&mut ledger, vec![Event::of_node(What::Cordoned, 7)]);
    let id = format!("\"{}\"", id("a"));
    let lines = ledger.lines(&Filter::mentioning([&id])).unwrap();
    assert_eq!((whats(&lines.events), lines.decoded), (vec!["allocated", "refused-memory"], 2));
    assert_eq!((lines.kept, lines.since_unix_ms), (all(&mut ledger).len(), Some(1)));
    let with_nodes = ledger.lines(&Filter::mentioning([&id]).or_without_allocation()).unwrap();
    assert_eq!((with_nodes.events.len(), with_nodes.decoded), (3, 3));
    let then = ledger.lines(&Filter::all().written(7..=7)).unwrap();
    assert_eq!((whats(&then.events), then.decoded), (vec!["cordoned"], 1));
}

proptest! {
    /// Whatever names are made of: what a filter leaves out does not mention the word.
    #[test]
    fn a_filter_misses_no_line(
        pod in "(?s).{0,12}",
        reason in "(?s).{0,12}",
        word in "(?s)[a-cA-C\"\\\\é]{1,3}",
        at in any::<i64>(),
        since in any::<i64>(),
        is_of_node in any::<bool>(),
    ) {
        let holder = Holder { namespace: "n".into(), pod: pod.clone(), container: word.clone() };
        let mut event = Event { at_unix_ms: at, holder: Some(holder), ..of("a", 1, What::Started) };
        if is_of_node {
            event.id = None;
        }
        let event = event.because(reason.clone());
        let line = encode(&event).unwrap();
        for text in [&pod, &reason, &word] {
            prop_assert!(Filter::mentioning([text]).takes(&line));
            prop_assert!(Filter::like([text.to_ascii_uppercase()]).takes(&line));
            prop_assert!(Filter::like([text.to_ascii_lowercase()]).takes(&line));
        }
        for text in [&pod, &word] {
            let (whole, beginning) = (format!("\"{text}\""), format!("\"{text}"));
            prop_assert!(Filter::mentioning([whole]).takes(&line));
            prop_assert!(Filter::mentioning([beginning]).takes(&line));
        }
        let nothing: [&str; 0] = [];
        let without = Filter::mentioning(nothing).or_without_allocation().takes(&line);
        prop_assert!(without || !is_of_node);
        let escaped = line.contains(&b'\\');
        prop_assert_eq!(without, is_of_node || escaped);
        prop_assert_eq!(Filter::all().written(since..=i64::MAX).takes(&line), at >= since);
    }

    /// As no version writes them, but a person or another program might: taken, whatever they say.
    #[test]
    fn lines_in_another_form_are_taken(before in "[ a-z]{1,5}", at in any::<i64>()) {
        let line = format!("{{{before}\"at_unix_ms\": {at}, \"id\": \"a\"}}");
        let nothing: [&str; 0] = [];
        prop_assert!(Filter::mentioning(nothing).or_without_allocation().takes(line.as_bytes()));
        prop_assert!(Filter::all().written(i64::MAX..=i64::MAX).takes(line.as_bytes()));
    }
}
