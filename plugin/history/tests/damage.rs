//! A file that is damaged anywhere while no plugin runs, or taken away while one does: everything is there as it was
//! written, or a loss is said.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use tessera_history::{Context, Found, History, Look, Options, TenantLook, UseLook};
use tessera_view::history::{Answer, Query};

const T0: i64 = 1_750_032_000;
const PAGE: usize = 4096;

fn history(path: &Path) -> History {
    let keep = [6 * 3600, 7 * 86400, 35 * 86400];
    History::new(Options { path: path.to_owned(), bound: 4 << 20, keep, sync: false })
}

/// Stores a minute of so many pods, by looks at every full ten seconds.
fn minute(history: &History, minute: i64, pods: u64) -> Option<Found> {
    let mut found = None;
    for second in (minute * 60..minute * 60 + 60).step_by(10) {
        let tenant = |n: u64| TenantLook {
            id: format!("{n:032x}"),
            generation: 1,
            namespace: "ns".into(),
            pod: format!("pod-{n}"),
            read: true,
            uses: vec![UseLook {
                gpu_uuid: "GPU-a".into(),
                memory_used_bytes: (second.cast_unsigned() * 7919 % 997 + n) << 20,
                memory_limit_bytes: 1 << 30,
                ..UseLook::default()
            }],
            launches: second.cast_unsigned() * 10,
            ..TenantLook::default()
        };
        history.look(&Look {
            at_unix_ms: (T0 + second) * 1000,
            monotonic_ms: second.cast_unsigned() * 1000,
            gpus: Vec::new(),
            tenants: (0..pods).map(tenant).collect(),
        });
        found = history.flush(false).unwrap().or(found);
    }
    found
}

fn context() -> Context<'static> {
    Context { now_unix_ms: (T0 + 86_400) * 1000, ..Context::default() }
}

/// All of the finest buckets.
fn told(answer: &Answer) -> Vec<(String, i64, u64, u64)> {
    let series = answer.tenants.iter().map(|series| (&series.pod, &series.points));
    let points = series.flat_map(|(pod, points)| {
        points.iter().map(move |at| (pod.clone(), at.at_unix_ms, at.launches, at.memory_peak_bytes))
    });
    points.collect()
}

fn everything(step_seconds: u32) -> Query {
    Query { step_seconds, ..Query::default() }
}

fn known(history: &History) -> Vec<(String, i64, u64, u64)> {
    told(&history.answer(&everything(10), &context()).unwrap())
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
    fn after_damage_all_is_there_or_a_loss_is_said(
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
        let is_all = now == *before;
        // What a repair lost nothing by may be said or not.
        prop_assert!(is_all || found != Some(Found::Existing), "silently older");
        prop_assert!(now.iter().all(|point| before.contains(point)));
    }
}

#[test]
fn what_a_damaged_commit_takes_is_told_to_the_minute() {
    let written = written();
    let mut older = 0;
    // redb's two commits, one of which is the newest.
    for slot in [64, 192] {
        let mut bytes = written.killed.bytes.clone();
        bytes[slot + 8] ^= 1;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.redb");
        fs::write(&path, &bytes).unwrap();
        let one = history(&path);
        match one.flush(false).unwrap() {
            Some(Found::Existing) => assert!(known(&one) == written.killed.known),
            Some(Found::Older(lost)) => {
                older += 1;
                let newest = known(&one).iter().map(|point| point.1).max().unwrap() / 1000 + 10;
                assert_eq!(i64::from(lost.left_until), newest);
                assert_eq!(lost.stored_until.map(i64::from), Some(T0 + 20 * 60 + 40));
            }
            other => panic!("{other:?}"),
        }
        // It is said once.
        _ = minute(&one, 30, 3);
        one.close().unwrap();
        assert_eq!(history(&path).flush(false), Ok(Some(Found::Existing)));
    }
    assert_eq!(older, 1);
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
        assert!(matches!(found, Some(Found::Replaced(_))), "{what}: {found:?}");
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
