//! A history as the plugin uses it: its file, names, and months of use.

mod adversity;
mod month;

use std::collections::HashSet;
use std::path::Path;

use tessera_history::{History, Key, Options, Series};
use tessera_view::SourceError;
use tessera_view::history::{Answer, Query};
use tessera_view::node::Node;
use tessera_view::status::{Allocation, Holder, Status};
use tessera_view::tenant::{Compute, Tenant, Use};

const T0: i64 = 1_750_032_000;
const HOUR: i64 = 3600;
const KEEP: [u32; 3] = [6 * 3600, 7 * 86400, 35 * 86400];

fn options(path: &Path, bound: u64) -> Options {
    Options { path: path.to_owned(), bound, keep: KEEP, sync: false }
}

fn history(path: &Path) -> History {
    History::new(options(path, 4 << 20))
}

/// A pod with a quarter of a GPU, of which it has used nothing yet.
fn pod(id: &str, name: &str) -> Allocation {
    let used = Use {
        gpu_uuid: "GPU-a".into(),
        memory_limit_bytes: 1 << 30,
        cores_millis: 250,
        ..Use::default()
    };
    let holder = Holder { namespace: "ns".into(), pod: name.into(), container: "main".into() };
    Allocation {
        id: id.into(),
        generation: 1,
        holder: Some(holder).filter(|_| !name.is_empty()),
        gpus: vec![used],
        compute: Some(Compute::default()),
        ..Allocation::default()
    }
}

/// So many pods that do the same all the time.
fn pods(second: i64, count: u64) -> Vec<Allocation> {
    let second = second.cast_unsigned();
    let pod = |n: u64| {
        let mut one = pod(&format!("{n:032x}"), &format!("pod-{n}"));
        one.gpus[0].memory_used_bytes = (second * 7919 % 997 + n) << 20;
        let us = second * 200_000;
        one.compute =
            Some(Compute { leased_us: us, used_us: us, measured_us: us, ..Compute::default() });
        one.launches = second * 10;
        one
    };
    (0..count).map(pod).collect()
}

/// Looks at these allocations so many seconds later, by both clocks.
fn look(history: &History, second: i64, allocations: Vec<Allocation>) {
    let at_unix_ms = (T0 + second) * 1000;
    let status = Status { at_unix_ms, allocations, ..Status::default() };
    history.look(&status, &HashSet::new(), second.cast_unsigned() * 1000);
}

/// The node so many seconds later, on which nothing is.
fn now(second: i64) -> Node {
    Node { at_unix_ms: (T0 + second) * 1000, ..Node::default() }
}

fn ask(history: &History, query: &Query) -> Result<Answer, SourceError> {
    history.answer(query, &now(24 * HOUR))
}

/// A pod, and its series.
fn with_series(id: char, name: &str) -> (Allocation, Series) {
    let id = id.to_string().repeat(32);
    let key = Key { id: id.clone(), generation: 1, gpu_uuid: "GPU-a".into() };
    let series = Series { key, namespace: "ns".into(), pod: name.into(), container: "main".into() };
    (pod(&id, name), series)
}

#[test]
fn a_pod_that_was_not_looked_at_yet_is_known_and_an_unknown_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let one = history(&dir.path().join("history.redb"));
    one.flush(false).unwrap();
    let new = Tenant {
        id: "b".repeat(32),
        generation: 1,
        namespace: "ns".into(),
        pod: "chat-0".into(),
        container: "main".into(),
        gpus: vec![Use { gpu_uuid: "GPU-a".into(), ..Use::default() }],
        ..Tenant::default()
    };
    let now = Node { tenants: vec![new], ..now(60) };
    let ask = |subject: &str, namespace: &str| {
        let query =
            Query { subject: subject.into(), namespace: namespace.into(), ..Query::default() };
        one.answer(&query, &now)
    };
    for subject in ["chat-0", "ns/chat-0", "ns/chat-0/main", "main", "bbbb"] {
        assert!(ask(subject, "").unwrap().tenants.is_empty(), "{subject}");
    }
    // A reader of another namespace learns nothing of it.
    for (subject, namespace) in [("chat-1", ""), ("chat-0", "other"), ("bbbb", "other")] {
        let Err(SourceError::NotFound(text)) = ask(subject, namespace) else { panic!("{subject}") };
        assert!(namespace.is_empty() || !text.contains("chat-0, "), "{text}");
        assert!(namespace.is_empty() || !text.contains("there is"), "{text}");
    }
    // A bucket of it is there: the series has it, and says nothing more.
    look(&one, 0, vec![]);
    look(&one, 10, vec![with_series('b', "").0]);
    let answer = ask("chat-0", "").unwrap();
    assert_eq!((answer.tenants[0].points.len(), answer.tenants.len()), (1, 1), "{answer:?}");
}

#[test]
fn a_pod_that_lived_for_seconds_is_stored_by_the_name_that_came_later() {
    let dir = tempfile::tempdir().unwrap();
    let one = history(&dir.path().join("history.redb"));
    one.flush(false).unwrap();
    let (_, named) = with_series('c', "job-0");
    for (at, allocations) in [(0, vec![]), (10, vec![with_series('c', "").0]), (20, vec![])] {
        look(&one, at, allocations);
    }
    assert_eq!(one.nameless(), [(named.key.id.clone(), 1)].into());
    // The ledger names no GPUs.
    let key = Key { gpu_uuid: String::new(), ..named.key.clone() };
    one.name(&[Series { key, ..named }]);
    assert!(one.nameless().is_empty());
    one.flush(true).unwrap();
    let query = Query { subject: "ns/job-0".into(), ..Query::default() };
    let answer = one.answer(&query, &now(60)).unwrap();
    assert_eq!((answer.tenants.len(), &*answer.tenants[0].gpu_uuid), (1, "GPU-a"), "{answer:?}");
}

/// Dead names would take the place of what is kept, and be found with nothing behind them.
#[test]
fn a_name_goes_with_its_last_bucket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    let keep = [3600, 86400, 8 * 86400];
    let one = History::new(Options { keep, ..options(&path, 4 << 20) });
    let knows = |hour: i64, subject: &str| {
        let query = Query { subject: subject.into(), ..Query::default() };
        one.answer(&query, &now(hour * HOUR)).is_ok()
    };
    for hour in 1..60 * 24 {
        let allocation = if hour < 3 { with_series('a', "old") } else { with_series('b', "new") };
        look(&one, hour * HOUR, vec![allocation.0]);
        one.flush(false).unwrap();
        if hour == 24 {
            assert!(knows(hour, "old") && knows(hour, "new"));
        }
    }
    assert!(knows(60 * 24, "new"));
    assert!(!knows(60 * 24, "old"), "its buckets are gone");
}

#[test]
fn what_is_older_than_is_kept_goes_as_new_comes() {
    let dir = tempfile::tempdir().unwrap();
    let one = History::new(options(&dir.path().join("history.redb"), 8 << 20));
    let live = |hours: std::ops::Range<i64>| {
        for second in (hours.start * HOUR..hours.end * HOUR).step_by(60) {
            look(&one, second, pods(second, 1));
            one.flush(false).unwrap();
        }
    };
    // Seconds of the first eight hours that each level knows.
    let known = || {
        [10, 300, 3600].map(|step_seconds| {
            let until_unix_ms = (T0 + 8 * HOUR) * 1000 - 1;
            let query = Query { step_seconds, until_unix_ms, ..Query::default() };
            let answer = ask(&one, &query).unwrap();
            let points = answer.tenants.iter().flat_map(|series| &series.points);
            points.map(|point| point.seconds).sum::<f64>()
        })
    };
    live(0..8);
    assert!(known().iter().all(|seconds| *seconds > 0.0), "{:?}", known());
    // The node was off for so long.
    live(8 * 24..8 * 24 + 1);
    let [fine, middle, coarse] = known();
    assert!(fine == 0.0 && middle == 0.0 && coarse > 7.0 * 3600.0, "{fine} {middle} {coarse}");
    live(100 * 24..100 * 24 + 1);
    assert_eq!(known(), [0.0; 3]);
}
