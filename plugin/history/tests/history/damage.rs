//! A file that is damaged anywhere while no plugin runs, or taken away while one does: another goes on, and nothing is
//! told that did not happen.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use tessera_history::{Found, History};
use tessera_view::history::{Answer, Query};

use crate::{T0, ask, history, look, pods};

const PAGE: usize = 4096;

/// Stores a minute of so many pods, by looks at every full ten seconds.
fn minute(history: &History, minute: i64, count: u64) -> Option<Found> {
    let mut found = None;
    for second in (minute * 60..minute * 60 + 60).step_by(10) {
        look(history, second, pods(second, count));
        found = history.flush(false).unwrap().or(found);
    }
    found
}

/// All of the finest buckets.
fn told(answer: &Answer) -> Vec<(String, i64, u64, u64)> {
    let series = answer.tenants.iter().map(|series| (&series.pod, &series.points));
    let points = series.flat_map(|(pod, points)| {
        points.iter().map(move |at| (pod.clone(), at.at_unix_ms, at.launches, at.memory_peak_bytes))
    });
    points.collect()
}

fn known(history: &History) -> Vec<(String, i64, u64, u64)> {
    told(&ask(history, &Query { step_seconds: 10, ..Query::default() }).unwrap())
}

/// A file, and what it knows.
struct Whole {
    bytes: Vec<u8>,
    known: Vec<(String, i64, u64, u64)>,
}

/// Files as a killed plugin leaves them and as one that ended, and the bytes of a minute earlier.
struct Written {
    killed: Whole,
    ended: Whole,
    earlier: Vec<u8>,
}

fn whole(bytes: Vec<u8>) -> Whole {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    fs::write(&path, &bytes).unwrap();
    let one = history(&path);
    assert_eq!(one.flush(false), Ok(Some(Found::Existing)));
    Whole { bytes, known: known(&one) }
}

fn written() -> &'static Written {
    static WRITTEN: OnceLock<Written> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.redb");
        let one = history(&path);
        (0..20).for_each(|at| _ = minute(&one, at, 5 + at.cast_unsigned() % 3));
        let earlier = fs::read(&path).unwrap();
        _ = minute(&one, 20, 5);
        let killed = whole(fs::read(&path).unwrap());
        one.close().unwrap();
        Written { killed, ended: whole(fs::read(&path).unwrap()), earlier }
    })
}

#[derive(Clone, Debug)]
enum Damage {
    /// Bits of one byte are others.
    Bits(u8),
    /// So many bytes are one.
    Run(u8, usize),
    /// A page's bytes are another's.
    Page(prop::sample::Index),
    /// A page was not written for the last minute.
    Stale,
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        3 => (1u8..).prop_map(Damage::Bits),
        2 => (any::<u8>(), 1usize..6000).prop_map(|(byte, len)| Damage::Run(byte, len)),
        1 => any::<prop::sample::Index>().prop_map(Damage::Page),
        1 => Just(Damage::Stale),
    ]
}

/// Where: in redb's header, in a page that is written to, or anywhere.
#[derive(Clone, Debug)]
enum Place {
    Header(usize),
    Changed(prop::sample::Index, usize),
    Any(prop::sample::Index),
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        3 => (0usize..600).prop_map(Place::Header),
        3 => (any::<prop::sample::Index>(), 0..PAGE).prop_map(|(page, at)| Place::Changed(page, at)),
        1 => any::<prop::sample::Index>().prop_map(Place::Any),
    ]
}

fn pages(bytes: &[u8]) -> Vec<usize> {
    (1..bytes.len() / PAGE)
        .filter(|page| bytes[page * PAGE..][..PAGE].iter().any(|b| *b != 0))
        .collect()
}

fn spoil(bytes: &mut [u8], earlier: &[u8], place: &Place, damage: &Damage) {
    let used = pages(bytes);
    let at = match place {
        Place::Header(at) => *at,
        Place::Changed(page, at) => used[page.index(used.len())] * PAGE + at,
        Place::Any(at) => at.index(bytes.len()),
    };
    let page = at / PAGE * PAGE;
    match damage {
        Damage::Bits(bits) => bytes[at] ^= bits,
        Damage::Run(byte, len) => {
            let end = (at + len).min(bytes.len());
            bytes[at..end].fill(*byte);
        }
        Damage::Page(other) => {
            let other = used[other.index(used.len())] * PAGE;
            bytes.copy_within(other..other + PAGE, page);
        }
        // The whole header of a minute ago is the file of a minute ago.
        Damage::Stale if page > 0 => {
            bytes[page..page + PAGE].copy_from_slice(&earlier[page..][..PAGE])
        }
        Damage::Stale => {}
    }
}

proptest! {
    #[test]
    fn after_damage_nothing_is_told_that_did_not_happen(
        ended: bool,
        spoilt in prop::collection::vec((place(), damage()), 1..3),
    ) {
        let written = written();
        let Whole { bytes, known: before } = if ended { &written.ended } else { &written.killed };
        let mut bytes = bytes.clone();
        for (place, damage) in &spoilt {
            spoil(&mut bytes, &written.earlier, place, damage);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.redb");
        fs::write(&path, &bytes).unwrap();
        let one = history(&path);
        let found = one.flush(false).unwrap();
        let now = known(&one);
        // redb's repair goes back by a commit, and that is a minute.
        let lost = before.len() - now.len();
        prop_assert!(lost <= 6 * 7 || found != Some(Found::Existing), "{} of {}", lost, before.len());
        prop_assert!(now.iter().all(|point| before.contains(point)));
    }
}

#[test]
fn a_file_that_is_taken_away_is_noticed_when_something_is_stored() {
    type Act = fn(&Path);
    let removed: Act = |path| fs::remove_file(path).unwrap();
    let moved: Act = |path| fs::rename(path, path.with_extension("mine")).unwrap();
    let emptied: Act = |path| fs::write(path, "").unwrap();
    let another: Act = |path| {
        let other = path.with_extension("other");
        fs::write(&other, &written().ended.bytes).unwrap();
        fs::rename(&other, path).unwrap();
    };
    let gone: Act = |path| fs::remove_dir_all(path.parent().unwrap()).unwrap();
    for (what, act) in [
        ("removed", removed),
        ("moved", moved),
        ("emptied", emptied),
        ("another", another),
        ("directory gone", gone),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state").join("history.redb");
        let one = history(&path);
        assert_eq!(minute(&one, 50, 1), Some(Found::Created));
        act(&path);
        let found = minute(&one, 51, 1);
        assert!(found.is_some(), "{what}");
        assert_eq!(minute(&one, 52, 1), None, "{what}: said once");
        one.close().unwrap();
        // What came after is where the next plugin finds it.
        let next = history(&path);
        assert_eq!(next.flush(false), Ok(Some(Found::Existing)), "{what}");
        let known = known(&next);
        for at in (51 * 60..52 * 60 + 50).step_by(10) {
            assert!(known.iter().any(|point| point.1 == (T0 + at) * 1000), "{what}: {at}");
        }
    }
}
