//! A fleet behind an API server on a port: nodes that answer, stall, lie, flood, forbid and expire, side by side.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_cluster::fixtures::{ApiServer, Behind};
use tessera_fleet::{Fleet, Live, Options, Why, pending};
use tessera_view::advice::Scope;
use tessera_view::fleet::Entry;
use tessera_web::Source;

const LIMIT: Duration = Duration::from_secs(3);

struct World {
    server: ApiServer,
    dir: tempfile::TempDir,
}

impl World {
    fn new(nodes: &[(&str, Option<Behind>)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::start(dir.path());
        for (node, behind) in nodes {
            server.with(|store| store.put_plugin(node, behind.clone()));
        }
        std::fs::write(dir.path().join("config"), server.kubeconfig()).unwrap();
        World { server, dir }
    }

    fn fleet(&self) -> Fleet {
        let kubeconfig = Some(self.dir.path().join("config"));
        Fleet::new(Options { kubeconfig, limit: LIMIT, ..Options::default() }).unwrap()
    }
}

fn view(node: &str) -> String {
    json!({
        "api_version": "tessera.dev/v1",
        "nodes": [{ "node": node, "answers": true, "view": {
            "node": node, "gpus": [{ "uuid": "GPU-1" }],
            "tenants": [{ "id": "1", "namespace": "team", "pod": format!("chat-{node}") }],
        }}],
    })
    .to_string()
}

fn refusal(code: u16, error: &str) -> Behind {
    let body = json!({ "api_version": "tessera.dev/v1", "error": error, "code": code });
    Behind::Answers(code, body.to_string())
}

#[tokio::test]
async fn one_nodes_trouble_is_a_sentence_beside_it_and_nothing_for_the_others() {
    let world = World::new(&[
        ("good", Some(Behind::Knows("secret".into(), view("good")))),
        ("nameless", Some(Behind::Answers(200, view("")))),
        ("expired", Some(Behind::Knows("another".into(), view("expired")))),
        ("flood", Some(Behind::Floods(20 << 20))),
        ("forbids", Some(refusal(403, "nothing of yours is here"))),
        ("liar", Some(Behind::Answers(200, view("good")))),
        ("escapes", Some(Behind::Answers(200, view("b\u{1b}[2J")))),
        ("newer", Some(Behind::Answers(200, r#"{"api_version":"tessera.dev/v2"}"#.into()))),
        ("nonsense", Some(Behind::Answers(200, "<html>".into()))),
        ("list", Some(Behind::Answers(200, "[]".into()))),
        (
            "shape",
            Some(Behind::Answers(200, r#"{"nodes":7,"api_version":"tessera.dev/v1"}"#.into())),
        ),
        ("none", Some(Behind::Answers(200, r#"{"api_version":"tessera.dev/v1"}"#.into()))),
        (
            "two",
            Some(Behind::Answers(
                200,
                r#"{"api_version":"tessera.dev/v1","nodes":[{},{}]}"#.into(),
            )),
        ),
        ("refuses", None),
        ("stalls", Some(Behind::Stalls)),
    ]);
    let fleet = world.fleet().gather().await.unwrap();
    let entry = |node: &str| -> &Entry { fleet.nodes.iter().find(|one| one.node == node).unwrap() };
    for node in ["good", "nameless"] {
        let entry = entry(node);
        assert!(entry.answers && entry.error.is_empty(), "{entry:?}");
        assert_eq!(entry.view.as_ref().unwrap().node, node);
    }
    for (node, says) in [
        ("expired", "log in again"),
        ("flood", "more than"),
        ("forbids", "nothing of yours"),
        ("liar", "says that it is node \"good\""),
        ("escapes", "its answer is left out"),
        ("newer", "kubectl-tessera of its version"),
        ("nonsense", "makes no sense"),
        ("list", "makes no sense"),
        ("shape", "makes no sense"),
        ("none", "0 nodes"),
        ("two", "2 nodes"),
        ("refuses", "connection refused"),
        ("stalls", "did not answer within 3 s"),
    ] {
        let entry = entry(node);
        assert!(!entry.answers && entry.view.is_none(), "{entry:?}");
        assert!(entry.error.contains(says), "{node}: {}", entry.error);
        assert!(!entry.error.contains('\u{1b}'), "{node}: {}", entry.error);
    }
}

#[tokio::test]
async fn an_impersonated_user_is_not_shown_what_the_token_may_see() {
    let world = World::new(&[("a", Some(Behind::Knows("of-tessera-viewer".into(), view("a"))))]);
    let file = world.dir.path().join("config");
    let config = world.server.kubeconfig();
    std::fs::write(&file, config.replace("token: secret", "token: secret, as: jane")).unwrap();
    let entry = world.fleet().gather().await.unwrap().nodes.remove(0);
    assert!(entry.answers, "{entry:?}");
    let asked = world.server.asked();
    assert!(!asked.is_empty());
    for one in asked {
        assert_eq!(one.headers["impersonate-user"], "jane", "{one:?}");
        let passed = one.headers.get("tessera-authorization");
        assert!(passed.is_none_or(|token| token == "Bearer of-tessera-viewer"), "{one:?}");
    }
}

#[tokio::test]
async fn the_console_shows_the_others_while_one_stalls() {
    let world =
        World::new(&[("a", Some(Behind::Answers(200, view("a")))), ("b", Some(Behind::Stalls))]);
    let live = Live::new(world.fleet(), Duration::from_millis(50));
    let began = Instant::now();
    loop {
        let fleet = live.fleet().await.unwrap();
        let answers: Vec<bool> = fleet.nodes.iter().map(|entry| entry.answers).collect();
        if answers == [true, false] && fleet.nodes[1].error.contains("did not answer") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{fleet:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_node_that_is_known_not_to_answer_delays_no_answer_and_is_named_in_it() {
    let world = World::new(&[("a", Some(with_history("a", 2))), ("b", Some(Behind::Stalls))]);
    let fleet = world.fleet();
    // Found out here, as by the console's rounds.
    fleet.gather().await.unwrap();
    let live = Live::new(fleet, Duration::from_millis(50));
    let query = |subject: &str| tessera_view::history::Query {
        subject: subject.into(),
        ..tessera_view::history::Query::default()
    };
    let began = Instant::now();
    let names = |remarks: &[String]| {
        let is = |one: &String| one.starts_with("node b is left out") && one.contains("within 3 s");
        assert!(remarks.iter().any(is), "{remarks:?}");
    };
    names(&live.waste(Scope::default()).await.unwrap().remarks);
    names(&live.recommend(Scope::default()).await.unwrap().remarks);
    // Of a pod that is gone every node is asked; of one that is there, its node.
    names(&live.history("", query("team/gone-0")).await.unwrap().remarks);
    assert_eq!(live.history("", query("team/chat-a")).await.unwrap().remarks, [""; 0]);
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
    // A node that is asked for by its name is asked.
    let before = world.server.asked().len();
    live.history("b", query("")).await.unwrap_err();
    let asked = world.server.asked();
    let is_it = |one: &tessera_cluster::fixtures::Asked| one.target.contains("tessera-b");
    assert!(asked[before..].iter().any(is_it), "{asked:?}");
}

#[tokio::test]
async fn a_waiting_pod_has_the_schedulers_sentence_and_what_each_node_has_left() {
    let mut full: Value = serde_json::from_str(&view("full")).unwrap();
    let replicas = |free| json!([{ "resource_name": "tessera.dev/gpu", "count": 4, "free": free }]);
    full["nodes"][0]["view"]["gpus"][0]["replicas"] = replicas(0);
    full["nodes"][0]["view"]["gpus"][0]["cordon"] = "cordoned by root: fans".into();
    let mut free: Value = serde_json::from_str(&view("free")).unwrap();
    free["nodes"][0]["view"]["gpus"][0]["replicas"] = replicas(3);
    let world = World::new(&[
        ("free", Some(Behind::Answers(200, free.to_string()))),
        ("full", Some(Behind::Answers(200, full.to_string()))),
        ("stalls", Some(Behind::Stalls)),
    ]);
    let says = "0/3 nodes are available: 3 node(s) had untolerated taint {k: v}.";
    let event = |pod: &str, last: &str, count: u64| {
        json!({ "involvedObject": { "kind": "Pod", "name": pod }, "message": says, "eventTime": null,
            "lastTimestamp": last, "count": count })
    };
    world.server.with(|store| {
        let pod = json!({
            "metadata": { "name": "chat", "namespace": "team" },
            "spec": { "containers": [{ "name": "m", "resources": { "limits": { "tessera.dev/gpu": "2" } } }] },
            "status": { "phase": "Pending",
                "conditions": [{ "type": "PodScheduled", "status": "False", "message": says }] },
        });
        store.pods.insert(("team".into(), "chat".into()), pod);
        store.events = vec![
            event("chat", "2026-11-22T10:00:00Z", 1),
            event("chat", "2026-11-22T11:00:00Z", 7),
            event("other", "2026-11-22T12:00:00Z", 9),
        ];
    });
    let fleet = world.fleet();
    let waits = pending::pending(&fleet, "team", "chat").await.unwrap().unwrap();
    assert!(waits.waits && waits.unread.is_empty(), "{waits:#?}");
    assert_eq!(
        (waits.asks, waits.scheduler_says),
        (vec!["2 × tessera.dev/gpu".to_owned()], says.to_owned())
    );
    let event = waits.event.unwrap();
    assert_eq!((event.times, event.last.as_str()), (7, "2026-11-22T11:00:00Z"));
    let nodes: Vec<_> =
        waits.nodes.iter().map(|node| (node.node.as_str(), node.has_room)).collect();
    assert_eq!(nodes, [("free", Some(true)), ("stalls", None), ("full", Some(false))]);
    assert_eq!(waits.nodes[0].left, ["3 of 4 × tessera.dev/gpu"]);
    assert!(waits.nodes[1].error.contains("did not answer"), "{:?}", waits.nodes);
    assert_eq!(waits.nodes[2].amiss, ["GPU 0 is cordoned by root: fans"]);
    // What the user may not read is said, and hides nothing else.
    world.server.forbid("GET", "events", true);
    let waits = pending::pending(&fleet, "team", "chat").await.unwrap().unwrap();
    assert_eq!(waits.unread, ["the scheduler's events: you may not list events team"]);
    assert_eq!(waits.scheduler_says, says);
    assert!(pending::pending(&fleet, "team", "other").await.unwrap().is_none());
}

/// A node with one pod of the workload `chat`, seen for an hour.
fn with_history(node: &str, peak_gib: u64) -> Behind {
    let pod = format!("chat-{node}");
    let at = 1_795_305_600_000_i64;
    let advice = json!({ "namespace": "team", "workload": "chat", "container": "main", "pods": [pod],
        "memory_bytes": 1, "since_unix_ms": at });
    let point = json!({ "at_unix_ms": at, "seconds": 3600.0, "memory_peak_bytes": peak_gib << 30,
        "memory_limit_bytes": 20u64 << 30, "cores_millis": 500 });
    let series = json!({ "id": pod, "namespace": "team", "pod": pod, "container": "main", "workload": "chat",
        "gpu_uuid": "GPU-1", "live": true, "points": [point] });
    let of = |key: &str, value: Value| {
        json!({ "api_version": "tessera.dev/v1", "node": node, "step_seconds": 3600, key: [value] })
            .to_string()
    };
    let answers = [
        ("fleet", view(node)),
        ("recommend", of("workloads", advice)),
        ("history", of("tenants", series)),
        ("waste", json!({ "api_version": "tessera.dev/v1" }).to_string()),
    ];
    Behind::Serves(answers.into())
}

#[tokio::test]
async fn advice_for_a_workload_on_two_nodes_comes_from_the_series_of_both() {
    let world = World::new(&[("a", Some(with_history("a", 2))), ("b", Some(with_history("b", 8)))]);
    let scope = Scope { pod: "team/chat-a".into(), ..Scope::default() };
    let all = world.fleet().recommendations(&scope).await.unwrap();
    assert_eq!(all.remarks, [""; 0]);
    let [one] = all.workloads.as_slice() else { panic!("{all:?}") };
    assert_eq!(one.pods, ["chat-a", "chat-b"]);
    assert!(one.memory_bytes >= 8 << 30 && one.memory_bytes < 10 << 30, "{one:?}");
    assert!((one.observed_seconds - 7200.0).abs() < 1.0, "{one:?}");
    // What only one node has is judged there, and its series are not asked for.
    let world = World::new(&[("a", Some(with_history("a", 2))), ("b", None)]);
    let all = world.fleet().recommendations(&Scope::default()).await.unwrap();
    assert_eq!((all.workloads.len(), all.workloads[0].memory_bytes), (1, 1));
    assert!(world.server.asked().iter().all(|asked| !asked.target.contains("/history")));
}

#[tokio::test]
async fn advice_that_every_node_refuses_is_refused_and_not_empty() {
    let refuses = || Some(refusal(403, "jane may not get pods in team"));
    let scope = Scope { namespace: "team".into(), ..Scope::default() };
    let world = World::new(&[("a", refuses()), ("b", refuses())]);
    let errors = [
        world.fleet().recommendations(&scope).await.unwrap_err(),
        world.fleet().waste(&scope).await.unwrap_err(),
    ];
    for error in errors {
        assert!(
            error.why == Why::NoRights && error.text.contains("may not get pods in team"),
            "{error:?}"
        );
    }
    // One that answers has something to say, and the other is beside it.
    let world = World::new(&[("a", Some(with_history("a", 2))), ("b", refuses())]);
    let all = world.fleet().recommendations(&scope).await.unwrap();
    assert_eq!((all.workloads.len(), all.remarks.len()), (1, 1), "{all:?}");
}

#[tokio::test]
async fn without_a_plugin_or_a_node_of_that_name_the_error_says_what_to_give() {
    let world = World::new(&[]);
    let error = world.fleet().gather().await.unwrap_err().to_string();
    assert!(error.contains("--plugin-namespace"), "{error}");
    let world = World::new(&[("a", None)]);
    let kubeconfig = Some(world.dir.path().join("config"));
    let nodes = ["b".to_owned()].into();
    let fleet = Fleet::new(Options { kubeconfig, nodes, ..Options::default() }).unwrap();
    let error = fleet.gather().await.unwrap_err().to_string();
    assert!(error.contains("called b") && error.contains("on a"), "{error}");
    let missing = Options {
        context: Some("other".into()),
        kubeconfig: Some(world.dir.path().join("config")),
        ..Options::default()
    };
    let error = Fleet::new(missing).unwrap_err().to_string();
    assert!(error.contains("no context \"other\"; it has sandbox"), "{error}");
    assert!(error.contains("/config: "), "{error}");
    let file = world.dir.path().join("config");
    let config = world.server.kubeconfig();
    std::fs::write(&file, config.replace("token: secret", "tokenFile: absent")).unwrap();
    let error = world.fleet().places().await.unwrap_err();
    assert!(
        error.why == Why::Kubeconfig
            && error.text.contains("/config: ")
            && error.text.contains("/absent"),
        "{error:?}"
    );
}

/// An empty answer would say that nothing is there.
#[tokio::test]
async fn where_no_node_says_anything_nothing_is_said_to_be_empty() {
    let scope = Scope::default();
    for (behind, is_forbidden) in [
        (Some(refusal(401, "token expired")), false),
        (Some(refusal(403, "jane may not")), true),
        (Some(Behind::Answers(403, r#"{"kind":"Status","message":"no proxy"}"#.into())), true),
        (Some(Behind::Answers(429, "slowly".into())), false),
        (Some(Behind::Answers(302, String::new())), false),
        (Some(refusal(503, "starting")), false),
        (None, false),
    ] {
        let world = World::new(&[("a", behind.clone()), ("b", behind.clone())]);
        let fleet = world.fleet();
        let view = fleet.gather().await.unwrap();
        assert!(view.nodes.iter().all(|entry| !entry.answers));
        let errors = [
            fleet.refusal().unwrap(),
            world.fleet().recommendations(&scope).await.unwrap_err(),
            world.fleet().waste(&scope).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(
                matches!(error.why, Why::Forbidden | Why::NoRights),
                is_forbidden,
                "{behind:?}: {error:?}"
            );
        }
        // With one that answers, it is a remark.
        let world = World::new(&[("a", behind), ("b", Some(with_history("b", 1)))]);
        let fleet = world.fleet();
        fleet.gather().await.unwrap();
        assert_eq!(fleet.refusal(), None);
        assert_eq!(fleet.waste(&scope).await.unwrap().remarks.len(), 1);
    }
}

#[tokio::test]
async fn traces_of_all_nodes_are_one_and_a_node_that_refuses_hides_no_other() {
    let trace = |begun: i64| {
        let name =
            json!({ "ph": "M", "name": "process_name", "pid": 1, "args": { "name": "GPU 0" } });
        let lease =
            json!({ "ph": "X", "name": "lease", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1 });
        let text = json!({ "api_version": "tessera.dev/v1", "otherData": { "begun_unix_ms": begun, "duration_us": 9.0, "lost_events": 3 },
            "traceEvents": [name, lease] });
        Some(Behind::Serves([("trace", text.to_string())].into()))
    };
    let busy = refusal(503, "another traces this node already");
    let world = World::new(&[("a", trace(1000)), ("b", Some(busy)), ("c", trace(1005))]);
    let fleet = world.fleet();
    let each = fleet.traces("", "team", 7).await.unwrap();
    let (_, refused) = each.iter().find(|(node, _)| node == "b").unwrap();
    assert!(refused.as_ref().unwrap_err().to_string().contains("another traces"), "{refused:?}");
    let asked = world.server.asked();
    let asked: Vec<_> = asked.iter().filter(|one| one.target.contains("/trace?")).collect();
    assert_eq!(asked.len(), 3);
    assert!(asked.iter().all(|one| one.target.contains("namespace=team&seconds=7")));

    let live = Live::new(world.fleet(), Duration::from_millis(50));
    let all = live.trace("", 1).await.unwrap();
    let is_name = |name: &&&str| name.contains(", GPU 0");
    let names = all.events.iter().filter_map(|event| Some(event.args.as_ref()?.name.as_str()));
    let names: Vec<&str> = names.collect();
    assert_eq!(names.iter().filter(is_name).count(), 2, "{names:?}");
    let times: Vec<f64> =
        all.events.iter().filter_map(|event| event.dur.map(|_| event.ts)).collect();
    assert_eq!(times, [1.0, 5001.0]);
    assert_eq!((all.about.begun_unix_ms, all.about.lost_events), (1000, 6));
    assert!((all.about.duration_us - 5009.0).abs() < 0.1, "{:?}", all.about);
    assert_eq!(live.trace("c", 1).await.unwrap().events.len(), 2);
    assert!(live.trace("b", 1).await.unwrap_err().to_string().contains("another traces"));
}
