//! Files that are damaged anywhere, another version's, not to be written or taken away, and processes that are killed at
//! any moment: another file goes on, and nothing is told that did not happen.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tessera_history::{FlushError, Found, History, Options};
use tessera_view::SourceError;
use tessera_view::gpu::Gpu;
use tessera_view::history::{Answer, Query};
use tessera_view::node::Node;

use crate::{T0, ask, history, look, now, options, pods};

/// Records so many seconds, and stores each minute.
fn record(history: &History, seconds: std::ops::RangeInclusive<i64>, count: u64) {
    for second in seconds.step_by(10) {
        look(history, second, pods(second, count));
        if second % 60 == 0 {
            history.flush(false).unwrap();
        }
    }
}

/// Launches that are known of a pod, and the seconds that were observed.
fn known(history: &History, pod: &str) -> (u64, f64) {
    let answer = ask(history, &Query { subject: pod.into(), ..Query::default() }).unwrap();
    let points = answer.tenants.iter().flat_map(|series| &series.points);
    points.fold((0, 0.0), |(launches, seconds), point| {
        (launches + point.launches, seconds + point.seconds)
    })
}

fn aside(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.retain(|name| name != "history.redb");
    names.sort();
    names
}

#[test]
fn what_is_stored_is_there_for_the_next_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    let first = history(&path);
    record(&first, 0..=600, 3);
    assert_eq!(known(&first, "pod-1"), (6000, 600.0));
    // Another plugin waits, and loses nothing meanwhile.
    let next = history(&path);
    look(&next, 600, pods(600, 3));
    look(&next, 610, pods(610, 3));
    let busy = next.flush(false).unwrap_err();
    assert_eq!(busy, FlushError::InUse(path.clone()));
    first.close().unwrap();
    assert_eq!(next.flush(true), Ok(Some(Found::Existing)));
    assert_eq!(known(&next, "ns/pod-1"), (6100, 610.0));
    assert_eq!(aside(dir.path()), Vec::<String>::new());
}

#[test]
fn damage_is_put_aside_and_another_file_goes_on() {
    type Damage = fn(&Path);
    let garbage: Damage = |path| fs::write(path, vec![0xa5; 100_000]).unwrap();
    let truncated: Damage = |path| {
        fs::File::options().write(true).open(path).unwrap().set_len(70_000).unwrap();
    };
    let torn: Damage = |path| {
        let mut bytes = fs::read(path).unwrap();
        let len = bytes.len();
        bytes[4096..len.min(400_000)].fill(0x5a);
        fs::write(path, bytes).unwrap();
    };
    let text: Damage = |path| fs::write(path, "not a database").unwrap();
    for (what, damage) in
        [("garbage", garbage), ("truncated", truncated), ("torn", torn), ("text", text)]
    {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.redb");
        let one = history(&path);
        record(&one, 0..=600, 3);
        one.close().unwrap();
        damage(&path);
        let next = history(&path);
        let found = next.flush(false).unwrap();
        let Some(Found::Aside { kept_as, reason }) = found else { panic!("{what}: {found:?}") };
        assert!(kept_as.exists() && !reason.is_empty(), "{what}");
        record(&next, 600..=720, 3);
        assert_eq!(known(&next, "pod-0").0, 1200, "{what}");
        // A second time, one is kept.
        next.close().unwrap();
        damage(&path);
        history(&path).flush(false).unwrap();
        assert_eq!(aside(dir.path()), ["history.redb.unreadable"], "{what}");
    }
}

#[test]
fn an_empty_file_and_a_half_made_one_are_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    fs::write(&path, "").unwrap();
    fs::write(dir.path().join("history.redb.new"), vec![1; 1_500_000]).unwrap();
    let one = history(&path);
    assert_eq!(one.flush(false), Ok(Some(Found::Created)));
    record(&one, 0..=60, 1);
    assert_eq!(aside(dir.path()), Vec::<String>::new());
}

/// Makes a file that says it has another schema.
fn of_schema(path: &Path, schema: u64) {
    let db = redb::Database::create(path).unwrap();
    let write = db.begin_write().unwrap();
    let meta: redb::TableDefinition<&str, u64> = redb::TableDefinition::new("meta");
    write.open_table(meta).unwrap().insert("schema", schema).unwrap();
    write.commit().unwrap();
}

#[test]
fn another_versions_file_is_kept_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    of_schema(&path, 3);
    let one = history(&path);
    let Some(Found::Aside { kept_as, reason }) = one.flush(false).unwrap() else { panic!() };
    assert_eq!(kept_as, dir.path().join("history.redb.schema-3"));
    assert!(reason.contains("version 3"), "{reason}");
    record(&one, 0..=600, 2);
    assert_eq!(known(&one, "pod-1").0, 6000);
    assert_eq!(aside(dir.path()), ["history.redb.schema-3"]);
}

#[test]
fn what_cannot_be_written_says_so_and_waits_for_half_an_hour() {
    let dir = tempfile::tempdir().unwrap();
    // A directory where the file should be; root is stopped by no permission.
    let path = dir.path().join("history.redb");
    fs::create_dir(&path).unwrap();
    let one = history(&path);
    for second in (0..=7200).step_by(10) {
        look(&one, second, pods(second, 1));
        if second % 60 == 0 {
            let error = one.flush(false).unwrap_err().to_string();
            assert!(error.contains("history.enabled = false"), "{error}");
        }
    }
    fs::remove_dir(&path).unwrap();
    assert_eq!(one.flush(true), Ok(Some(Found::Created)));
    assert_eq!(known(&one, "pod-0"), (18_000, 1800.0));
}

#[test]
fn a_smaller_bound_shortens_the_file_and_keeps_what_is_coarser_and_newer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    let one = History::new(options(&path, 32 << 20));
    record(&one, 0..=6 * 3600, 400);
    let before = fs::metadata(&path).unwrap().len();
    assert!(before > 8 << 20, "{before}");
    one.set_options(options(&path, 4 << 20));
    assert_eq!(one.flush(false), Ok(Some(Found::Existing)));
    let len = fs::metadata(&path).unwrap().len();
    assert!(len <= 4 << 20, "{len}");
    let hours = |step_seconds| {
        let query = Query { subject: "pod-7".into(), step_seconds, ..Query::default() };
        let answer = ask(&one, &query).unwrap();
        answer.tenants.iter().flat_map(|one| &one.points).map(|at| at.seconds).sum::<f64>() / 3600.0
    };
    assert!(hours(10) < 6.0 && hours(3600) > 5.9, "{} {}", hours(10), hours(3600));
}

#[test]
fn a_gpu_is_asked_for_by_its_index_and_a_window_ends_after_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let one = history(&dir.path().join("history.redb"));
    one.flush(false).unwrap();
    record(&one, 0..=60, 12);
    let gpu = Gpu { uuid: "GPU-a".into(), index: 3, ..Gpu::default() };
    let now = Node { gpus: vec![gpu], ..now(60) };
    let of_gpu = one.answer(&Query { subject: "3".into(), ..Query::default() }, &now).unwrap();
    assert_eq!(of_gpu.tenants.len(), 12);
    let invalid = |query: Query| matches!(one.answer(&query, &now), Err(SourceError::Invalid(_)));
    assert!(invalid(Query { since_unix_ms: i64::MAX, ..Query::default() }));
    assert!(!invalid(Query { since_unix_ms: i64::MIN, ..Query::default() }));
}

#[test]
fn an_answer_says_where_coarser_buckets_know_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    let keep = [3600, 7 * 86400, 35 * 86400];
    let one = History::new(Options { keep, ..options(&path, 4 << 20) });
    let remarks = |step_seconds, since: i64| {
        let query = Query { step_seconds, since_unix_ms: (T0 + since) * 1000, ..Query::default() };
        ask(&one, &query).unwrap().remarks
    };
    record(&one, 0..=1800, 1);
    assert_eq!(remarks(10, -86_400), Vec::<String>::new());
    record(&one, 1800..=5 * 3600, 1);
    assert_eq!(remarks(300, -86_400), Vec::<String>::new());
    assert!(remarks(10, 0)[0].contains("coarser ones go further back"));
    assert_eq!(remarks(10, 5 * 3600 - 600), Vec::<String>::new());
    assert_eq!(remarks(0, 0), Vec::<String>::new());
}

const ROLE: &str = "TESSERA_TEST_HISTORY";
const ROUND: &str = "TESSERA_TEST_ROUND";

/// The child of the test below: records as quickly as it can, and says what is stored.
#[test]
fn process() {
    let Ok(path) = std::env::var(ROLE) else { return };
    let path = PathBuf::from(path);
    let one = history(&path);
    one.flush(false).unwrap();
    let since = fs::read_to_string(path.with_extension("stored")).ok();
    let since = since.and_then(|text| text.trim().parse::<i64>().ok()).unwrap_or(0);
    // What was stored and not said before a kill is not lived again, though nothing was said in the first two rounds.
    let round: i64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let mut second = (since / 60 + 3 * (round + 1)) * 60;
    let stored = path.with_extension("stored");
    let new = path.with_extension("stored-new");
    look(&one, second, pods(second, 30));
    loop {
        for _ in 0..6 {
            second += 10;
            look(&one, second, pods(second, 30));
        }
        one.flush(false).unwrap();
        // The bucket that is being filled is not stored; looks are at full tens, so all are full.
        fs::write(&new, (second - 10).to_string()).unwrap();
        fs::rename(&new, &stored).unwrap();
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_kill_at_any_moment_loses_no_more_than_was_not_stored() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    let stored = path.with_extension("stored");
    let read = || {
        let text = fs::read_to_string(&stored).unwrap_or_default();
        text.trim().parse::<i64>().unwrap_or(0)
    };
    let mut rng = fastrand::Rng::with_seed(12_345);
    for round in 0..12 {
        let before = read();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "adversity::process", "--nocapture"]).stdout(Stdio::null());
        child.env(ROLE, &path).env(ROUND, round.to_string());
        let mut child = Killed(child.spawn().unwrap());
        // Some rounds end while the file is made or opened, most amid commits.
        let wait = Duration::from_millis(rng.u64(..64));
        let begun = Instant::now();
        while round > 1 && read() <= before && begun.elapsed() < Duration::from_secs(60) {
            assert_eq!(child.0.try_wait().unwrap(), None, "round {round}: it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(wait);
        drop(child);
        let one = history(&path);
        let found = one.flush(false).unwrap();
        assert!(
            matches!(found, Some(Found::Existing | Found::Created)),
            "round {round}: {found:?}"
        );
        let until = read();
        if until > 0 {
            let answer =
                ask(&one, &Query { subject: "pod-7".into(), step_seconds: 10, ..Query::default() });
            let series = &answer.unwrap().tenants[0];
            let last = series.points.last().unwrap().at_unix_ms / 1000 - T0;
            assert!(last >= until - 10, "round {round}: {last}, stored {until}");
            // Nothing twice: buckets are distinct, and each has what ten seconds have.
            for point in &series.points {
                assert!((point.seconds, point.launches) == (10.0, 100), "round {round}: {point:?}");
            }
        }
        one.close().unwrap();
    }
    assert!(read() > 0);
}

/// A child has its parent's descriptors until its program begins.
#[test]
fn a_file_is_free_when_it_is_closed_whatever_is_being_started() {
    let dir = tempfile::tempdir().unwrap();
    let over = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let _ = Command::new("/bin/true").status();
            }
        });
        let round = |_| {
            let one = history(&dir.path().join("history.redb"));
            one.flush(false).and(one.close())
        };
        let found = (0..100).try_for_each(round);
        over.store(true, Ordering::Relaxed);
        found
    });
    assert_eq!(found, Ok(()));
}

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

fn known_pods(history: &History) -> Vec<(String, i64, u64, u64)> {
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
    Whole { bytes, known: known_pods(&one) }
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

/// Other bytes at a place, in redb's header or in a page that is used; without any, the page is that of a minute ago.
fn spoil(bytes: &mut [u8], earlier: &[u8], header: bool, at: usize, with: Option<&[u8]>) {
    let is_used = |page: &usize| bytes[page * PAGE..][..PAGE].iter().any(|byte| *byte != 0);
    let used: Vec<usize> = (1..bytes.len() / PAGE).filter(is_used).collect();
    let at = match header {
        true => at % 600,
        false => used[at / PAGE % used.len()] * PAGE + at % PAGE,
    };
    match with {
        Some(with) => {
            let end = (at + with.len()).min(bytes.len());
            bytes[at..end].copy_from_slice(&with[..end - at]);
        }
        // The whole header of a minute ago is the file of a minute ago.
        None if header => {}
        None => {
            let page = at / PAGE * PAGE;
            bytes[page..page + PAGE].copy_from_slice(&earlier[page..][..PAGE]);
        }
    }
}

proptest! {
    #[test]
    fn after_damage_nothing_is_told_that_did_not_happen(
        ended: bool,
        spoilt in prop::collection::vec(
            (any::<bool>(), any::<usize>(), prop::option::weighted(0.85, prop::collection::vec(any::<u8>(), 1..6000))),
            1..3,
        ),
    ) {
        let written = written();
        let Whole { bytes, known: before } = if ended { &written.ended } else { &written.killed };
        let mut bytes = bytes.clone();
        for (header, at, with) in &spoilt {
            spoil(&mut bytes, &written.earlier, *header, *at, with.as_deref());
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.redb");
        fs::write(&path, &bytes).unwrap();
        let one = history(&path);
        let found = one.flush(false).unwrap();
        let now = known_pods(&one);
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
        let known = known_pods(&next);
        for at in (51 * 60..52 * 60 + 50).step_by(10) {
            assert!(known.iter().any(|point| point.1 == (T0 + at) * 1000), "{what}: {at}");
        }
    }
}
