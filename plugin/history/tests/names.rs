//! Names of pods: before the first look at them, and of those that ended before a look could see theirs.

use std::path::Path;

use tessera_history::{
    Context, History, Key, Look, Options, QueryError, Series, TenantLook, UseLook,
};
use tessera_view::history::Query;

const T0: i64 = 1_750_032_000;

fn history(path: &Path) -> History {
    let keep = [6 * 3600, 7 * 86400, 35 * 86400];
    History::new(Options { path: path.to_owned(), bound: 8 << 20, keep, sync: false })
}

/// A pod on a GPU, with the figures of a tenant that does nothing.
fn pod(id: char, pod: &str) -> (TenantLook, Series) {
    let key = Key { id: id.to_string().repeat(32), generation: 1, gpu_uuid: "GPU-a".into() };
    let look = TenantLook {
        id: key.id.clone(),
        generation: 1,
        read: true,
        uses: vec![UseLook { gpu_uuid: "GPU-a".into(), ..UseLook::default() }],
        ..TenantLook::default()
    };
    let series = Series { key, namespace: "ns".into(), pod: pod.into(), container: "main".into() };
    (look, series)
}

#[test]
fn a_pod_that_was_not_looked_at_yet_is_known_and_an_unknown_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let one = history(&dir.path().join("history.redb"));
    one.flush(false).unwrap();
    let (_, new) = pod('b', "chat-0");
    let tenants = [new];
    let context =
        Context { now_unix_ms: (T0 + 60) * 1000, tenants: &tenants, ..Context::default() };
    let ask = |subject: &str, namespace: &str| {
        let query =
            Query { subject: subject.into(), namespace: namespace.into(), ..Query::default() };
        one.answer(&query, &context)
    };
    for subject in ["chat-0", "ns/chat-0", "ns/chat-0/main", "main", "bbbb"] {
        let answer = ask(subject, "").unwrap();
        let [series] = answer.tenants.as_slice() else { panic!("{subject}: {answer:?}") };
        assert!(series.live && series.points.is_empty() && series.pod == "chat-0", "{series:?}");
        assert!(
            answer.remarks[0].starts_with("ns/chat-0: nothing was looked at yet"),
            "{answer:?}"
        );
    }
    // A reader of another namespace learns nothing of it.
    for (subject, namespace) in [("chat-1", ""), ("chat-0", "other"), ("bbbb", "other")] {
        let Err(QueryError::NotFound(text)) = ask(subject, namespace) else { panic!("{subject}") };
        assert!(namespace.is_empty() || !text.contains("chat-0, "), "{text}");
        assert!(namespace.is_empty() || !text.contains("there is"), "{text}");
    }
    assert!(ask("", "").unwrap().tenants.is_empty());
    // A bucket of it is there: the series has it, and says nothing more.
    let look = |at: i64, tenants: Vec<TenantLook>| Look {
        at_unix_ms: (T0 + at) * 1000,
        monotonic_ms: u64::try_from(at).unwrap() * 1000 + 1000,
        gpus: Vec::new(),
        tenants,
    };
    one.look(&look(0, vec![]));
    one.look(&look(10, vec![pod('b', "").0]));
    let answer = ask("chat-0", "").unwrap();
    assert_eq!((answer.tenants[0].points.len(), answer.tenants.len()), (1, 1), "{answer:?}");
    assert!(!answer.remarks.iter().any(|text| text.contains("looked at yet")), "{answer:?}");
}

#[test]
fn a_pod_that_lived_for_seconds_is_stored_by_the_name_that_came_later() {
    let dir = tempfile::tempdir().unwrap();
    let one = history(&dir.path().join("history.redb"));
    one.flush(false).unwrap();
    let (short, named) = pod('c', "job-0");
    for (at, tenants) in [(0, vec![]), (10, vec![short]), (20, vec![])] {
        let at_unix_ms = (T0 + at) * 1000;
        let monotonic_ms = u64::try_from(at).unwrap() * 1000 + 1000;
        one.look(&Look { at_unix_ms, monotonic_ms, gpus: Vec::new(), tenants });
    }
    assert_eq!(one.nameless(), [(named.key.id.clone(), 1)].into());
    // The ledger names no GPUs.
    let key = Key { gpu_uuid: String::new(), ..named.key.clone() };
    one.name(&[Series { key, ..named }]);
    assert!(one.nameless().is_empty());
    one.flush(true).unwrap();
    let context = Context { now_unix_ms: (T0 + 60) * 1000, ..Context::default() };
    let query = Query { subject: "ns/job-0".into(), ..Query::default() };
    let answer = one.answer(&query, &context).unwrap();
    assert_eq!((answer.tenants.len(), &*answer.tenants[0].gpu_uuid), (1, "GPU-a"), "{answer:?}");
}

/// Dead names would take the place of what is kept, and be found with nothing behind them.
#[test]
fn a_name_goes_with_its_last_bucket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.redb");
    let keep = [3600, 86400, 8 * 86400];
    let one = History::new(Options { path, bound: 4 << 20, keep, sync: false });
    let named = |id, name: &str| {
        let (look, Series { namespace, pod, .. }) = pod(id, name);
        TenantLook { namespace, pod, ..look }
    };
    let look = |hour: i64| Look {
        at_unix_ms: (T0 + hour * 3600) * 1000,
        monotonic_ms: hour.cast_unsigned() * 3_600_000,
        gpus: Vec::new(),
        tenants: if hour < 3 { vec![named('a', "old")] } else { vec![named('b', "new")] },
    };
    let knows = |hour: i64, subject: &str| {
        let context = Context { now_unix_ms: (T0 + hour * 3600) * 1000, ..Context::default() };
        one.answer(&Query { subject: subject.into(), ..Query::default() }, &context).is_ok()
    };
    for hour in 1..60 * 24 {
        one.look(&look(hour));
        one.flush(false).unwrap();
        if hour == 24 {
            assert!(knows(hour, "old") && knows(hour, "new"));
        }
    }
    assert!(knows(60 * 24, "new"));
    assert!(!knows(60 * 24, "old"), "its buckets are gone");
}
