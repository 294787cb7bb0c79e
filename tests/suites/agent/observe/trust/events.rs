//! Kubernetes events: what a pod gets, and an API server that hangs, refuses, is slow or is not there.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_agent::kubernetes::{Server, Timing};
use tessera_model::audit::{Event, What};

use tessera_harness::PATIENCE;
use tessera_harness::plugin::*;

/// What the server does with a request.
#[derive(Clone, Copy)]
enum Mood {
    Takes,
    Hangs,
    Answers(u16, &'static str),
}

/// An API server that remembers what it was asked.
struct Api {
    server: Server,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
    connections: Arc<AtomicUsize>,
    mood: Arc<Mutex<Mood>>,
    _dir: tempfile::TempDir,
}

impl Api {
    fn start(mood: Mood) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "secret\n").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Server { host: "127.0.0.1".into(), port, token, authority: None };
        let (asked, mood) = (Arc::default(), Arc::new(Mutex::new(mood)));
        let connections = Arc::new(AtomicUsize::new(0));
        let api = Api { server, asked, connections, mood, _dir: dir };
        let (asked, mood) = (Arc::clone(&api.asked), Arc::clone(&api.mood));
        let connections = Arc::clone(&api.connections);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::Relaxed);
                let (asked, mood) = (Arc::clone(&asked), Arc::clone(&mood));
                std::thread::spawn(move || serve(stream, &asked, &mood));
            }
        });
        api
    }

    fn timing(&self) -> Timing {
        Timing {
            // Of a server that answers, however long that takes here; see [`Api::hurried`].
            limit: PATIENCE,
            pace: Duration::from_millis(1),
            pause: [Duration::from_millis(20), Duration::from_millis(200)],
            server: Some(self.server.clone()),
        }
    }

    /// With little patience, for a server that does not answer; enough for one that does, on a busy machine.
    fn hurried(&self) -> Timing {
        Timing { limit: Duration::from_secs(2), ..self.timing() }
    }

    fn asked(&self) -> Vec<(String, Value)> {
        self.asked.lock().unwrap().clone()
    }

    fn turn(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }
}

fn serve(stream: TcpStream, asked: &Mutex<Vec<(String, Value)>>, mood: &Mutex<Mood>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
            head += &line;
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        asked.lock().unwrap().push((head, serde_json::from_slice(&body).unwrap()));
        let mood = *mood.lock().unwrap();
        let (status, text) = match mood {
            Mood::Takes => (201, "{}".to_owned()),
            Mood::Answers(status, message) => (status, json!({ "message": message }).to_string()),
            Mood::Hangs => {
                std::thread::sleep(Duration::from_secs(30));
                return;
            }
        };
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{text}", text.len());
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

async fn node_with(api: &Api) -> TestNode {
    node_of(api.timing()).await
}

async fn node_of(events: Timing) -> TestNode {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    node.events = events;
    node.start_plugin().await;
    node
}

/// A line of the audit trail about the pod of these replicas.
async fn happens(node: &TestNode, ids: &[String], what: What) {
    node.status_until(|s| s.allocations.iter().all(|a| a.holder.is_some()).then_some(())).await;
    let inner = node.agent();
    let id = id_of(ids);
    tokio::task::spawn_blocking(move || {
        let record = inner.allocations().record(&id).unwrap();
        inner.journal().audit([Event::of(&record, what, 1_795_340_700_000).because("for a test")]);
    })
    .await
    .unwrap();
}

fn refused(bytes: u64) -> What {
    What::RefusedMemory { bytes, charged_bytes: GIB, limit_bytes: 2 * GIB }
}

#[tokio::test]
async fn a_pods_event_has_its_uid_by_what_kubelet_wrote_down() {
    let api = Api::start(Mood::Takes);
    let node = node_with(&api).await;
    let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
    let checkpoint = json!({ "Data": { "PodDeviceEntries": [{
        "PodUID": "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff", "ContainerName": "main",
        "ResourceName": GPU, "DeviceIDs": { "-1": admitted.device_ids }, "AllocResp": "" }],
        "RegisteredDevices": null }, "Checksum": 1 });
    let file = node.kubelet.device_plugins_dir().join("kubelet_internal_checkpoint");
    std::fs::write(file, checkpoint.to_string()).unwrap();
    happens(&node, &admitted.device_ids, refused(5 * GIB)).await;
    let (head, event) = until(|| api.asked().first().cloned()).await;
    assert!(head.starts_with("POST /api/v1/namespaces/default/events HTTP/1.1"), "{head}");
    assert!(head.to_lowercase().contains("authorization: bearer secret\r\n"), "{head}");
    assert_eq!(event["reason"], "GPUMemoryRefused");
    assert_eq!(event["type"], "Warning");
    let message = event["message"].as_str().unwrap();
    let what = "container main: a request for 5 GiB was refused: 1 GiB of 2 GiB device memory were in use. ";
    let more = "`kubectl tessera explain a -n default` has more";
    assert!(message.starts_with(what) && message.ends_with(more), "{message}");
    let subject = &event["involvedObject"];
    assert_eq!((&subject["kind"], &subject["name"]), (&json!("Pod"), &json!("a")));
    assert_eq!(subject["uid"], "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff");
    // Whether it is a sidecar is not known.
    assert!(subject.get("fieldPath").is_none(), "{subject}");
    assert_eq!(
        (&event["count"], &event["lastTimestamp"]),
        (&json!(1), &json!("2026-11-22T09:45:00Z"))
    );
    assert_eq!(event["source"]["component"], "tessera");
    // Another kind is another event, over the same or another connection.
    happens(&node, &admitted.device_ids, What::Tampered { what: "x".into() }).await;
    let (_, event) = until(|| api.asked().get(1).cloned()).await;
    assert_eq!(event["reason"], "GPUQuotaTampered");
    // Its reason in the trail is for `explain` alone.
    assert!(!event["message"].as_str().unwrap().contains("for a test"), "{event}");
}

/// Whatever a line says of somebody that it cannot name, or of a stranger, is no news for the pods beside it.
#[tokio::test]
async fn what_a_stranger_does_is_no_event_on_its_neighbours() {
    let api = Api::start(Mood::Takes);
    let node = node_with(&api).await;
    node.kubelet.run(&pod("a", 1)).await.unwrap();
    node.status_until(|s| s.allocations.iter().all(|a| a.holder.is_some()).then_some(())).await;
    let agent = node.agent();
    tokio::task::spawn_blocking(move || {
        let uuid = agent.inventory().catalogue().gpus.keys().next().unwrap().clone();
        for what in What::examples() {
            let because = "process 1 (theirs) of pod theirs/train".to_owned();
            agent.journal().audit([Event::of_gpu(&uuid, what, because, 1_795_340_700_000)]);
        }
        // The last: what comes before it has been sent.
        let of_node = Event::of_node(What::Uncordoned, 1_795_340_700_001);
        agent.journal().audit([of_node]);
    })
    .await
    .unwrap();
    let events = until(|| {
        let sent: Vec<Value> = api.asked().into_iter().map(|(_, event)| event).collect();
        let of_node = |event: &Value| event["message"].as_str().unwrap().starts_with("its GPU ");
        sent.iter().any(of_node).then_some(sent)
    })
    .await;
    let reasons: Vec<&str> = events.iter().map(|event| event["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["GPUUnhealthy", "GPUCordoned", "GPUUncordoned", "GPUUncordoned"]);
}

#[tokio::test]
async fn a_server_that_hangs_or_fails_holds_nothing_up_and_gets_events_later() {
    for mood in [Mood::Hangs, Mood::Answers(500, "etcd"), Mood::Answers(429, "slow down")] {
        let api = Api::start(mood);
        let node = node_of(api.hurried()).await;
        let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
        happens(&node, &admitted.device_ids, refused(1)).await;
        until(|| (api.asked().len() >= 2).then_some(())).await;
        // Meanwhile everything goes its way.
        let other = node.kubelet.run(&pod("b", 1)).await.unwrap().remove(0);
        drop(Tenant::hold(&node.pages(&other.device_ids), GIB));
        let says = |s: &tessera_view::status::Status| {
            s.warnings.iter().any(|w| w.contains("Kubernetes events")).then_some(())
        };
        node.status_until(says).await;
        api.turn(Mood::Takes);
        node.status_until(|s| s.warnings.is_empty().then_some(())).await;
        assert_eq!(api.asked().last().unwrap().1["reason"], "GPUMemoryRefused");
    }
}

#[tokio::test]
async fn a_server_that_forbids_it_is_asked_seldom() {
    let api = Api::start(Mood::Answers(403, "events is forbidden"));
    let node = node_with(&api).await;
    let begun = Instant::now();
    let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
    for n in 0..20 {
        happens(&node, &admitted.device_ids, refused(n)).await;
        happens(&node, &admitted.device_ids, What::Tampered { what: n.to_string() }).await;
    }
    let warning =
        node.status_until(|s| s.warnings.iter().find(|w| w.contains("grant it")).cloned()).await;
    assert!(warning.contains("403: events is forbidden"), "{warning}");
    // Once for each pause, however long all this takes here.
    let pauses = begun.elapsed().as_millis() / api.timing().pause[1].as_millis();
    assert!(api.asked().len() as u128 <= 3 + pauses, "{} in {pauses}", api.asked().len());
}

#[tokio::test]
async fn what_will_never_be_taken_is_given_up() {
    let api = Api::start(Mood::Answers(
        403,
        "unable to create new content in namespace x because it is being terminated",
    ));
    let node = node_with(&api).await;
    let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
    happens(&node, &admitted.device_ids, refused(1)).await;
    let dropped = |node: &TestNode| node.agent().trust().events().all()[2].1;
    until(|| (dropped(&node) == 1).then_some(())).await;
    assert_eq!(api.asked().len(), 1);
    assert!(node.status().await.warnings.is_empty());
}

#[tokio::test]
async fn a_server_that_answers_is_no_longer_said_to_be_silent_even_if_it_takes_nothing() {
    let api = Api::start(Mood::Hangs);
    let node = node_of(api.hurried()).await;
    let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
    happens(&node, &admitted.device_ids, refused(1)).await;
    node.status_until(|s| s.warnings.iter().any(|w| w.contains("Kubernetes events")).then_some(()))
        .await;
    api.turn(Mood::Answers(404, "namespaces \"default\" not found"));
    until(|| (node.agent().trust().events().all()[2].1 == 1).then_some(())).await;
    assert!(node.status().await.warnings.is_empty());
}

#[tokio::test]
async fn without_a_server_events_cost_a_counter() {
    let api = Api::start(Mood::Takes);
    let mut timing = api.timing();
    // Nobody listens there.
    timing.server = Some(Server { port: 1, ..api.server.clone() });
    let mut node = TestNode::without_plugin(SETTINGS).await;
    node.events = timing;
    node.start_plugin().await;
    let admitted = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0);
    happens(&node, &admitted.device_ids, refused(1)).await;
    until(|| (node.agent().trust().events().all()[1].1 >= 2).then_some(())).await;
    assert_eq!(node.agent().trust().events().all()[0].1, 0);
    assert_eq!(api.connections.load(Ordering::Relaxed), 0);
    node.stop_plugin().await;
    // Switched off, no event is sent.
    node.settings = format!("{SETTINGS}[kubernetes]\nevents = \"off\"\n");
    node.events = api.timing();
    node.start_plugin().await;
    happens(&node, &admitted.device_ids, What::Tampered { what: "x".into() }).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(api.connections.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn events_are_switched_on_and_off_while_the_plugin_runs() {
    let api = Api::start(Mood::Takes);
    let mut node = TestNode::without_plugin(SETTINGS).await;
    node.events = api.timing();
    let file = node.dir.path().join("config.toml");
    let switch = |node: &mut TestNode, events: &str| {
        node.settings = format!("{SETTINGS}[kubernetes]\nevents = \"{events}\"\n");
        let new = file.with_extension("new");
        std::fs::write(&new, node.config_text()).unwrap();
        std::fs::rename(&new, &file).unwrap();
    };
    // Not drawn together, however often.
    let quota = || What::QuotaReset { before: Vec::new(), after: Vec::new() };
    switch(&mut node, "off");
    node.launch_plugin_on(&file);
    bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) > 0)).await;
    let ids = node.kubelet.run(&pod("a", 1)).await.unwrap().remove(0).device_ids;
    let sends = async |node: &TestNode| {
        let before = api.asked().len();
        while api.asked().len() == before {
            happens(node, &ids, quota()).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let sends_nothing = async |node: &TestNode| {
        let before = api.connections.load(Ordering::Relaxed);
        happens(node, &ids, quota()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(api.connections.load(Ordering::Relaxed), before);
    };
    sends_nothing(&node).await;
    switch(&mut node, "auto");
    bounded(sends(&node)).await;
    // Failures are reported as long as events are on.
    api.turn(Mood::Answers(403, "events is forbidden"));
    happens(&node, &ids, What::Tampered { what: "x".into() }).await;
    node.status_until(|s| s.warnings.iter().any(|w| w.contains("grant it")).then_some(())).await;
    switch(&mut node, "off");
    let plugin = node.status_until(|s| s.warnings.is_empty().then(|| s.plugin.clone())).await;
    assert!(plugin.configuration.unwrap().waiting_keys.is_empty());
    sends_nothing(&node).await;
    api.turn(Mood::Takes);
    switch(&mut node, "auto");
    bounded(sends(&node)).await;
    node.stop_plugin().await;
}
