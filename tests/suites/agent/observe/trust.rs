//! Use of the GPUs past the quota: real processes, in mount namespaces of their own where the test may make them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_agent::kubernetes::Timing;
use tessera_cluster::fixtures::{ApiServer, Temper};
use tessera_harness::plugin::*;
use tessera_harness::{Owned, PATIENCE};
use tessera_model::audit::{Event, What};

const MIB: u64 = 1 << 20;

/// A process that does nothing.
struct Idle(Owned);

impl Idle {
    fn start() -> Self {
        Idle(Owned(Command::new("sleep").arg("300").spawn().unwrap()))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// As a container of an allocation: in a mount namespace of its own, with its pages. `None` where that may not be done.
fn container(pages: &Path) -> Option<Idle> {
    let script = format!(
        "set -e; mount -t tmpfs own /usr/local
         at=/usr/local/tessera/pages/{id}; mkdir -p $at
         mount --bind {pages} $at; mount -o remount,bind,ro $at
         mount --bind {pages}/usage $at/usage
         echo ready; exec sleep 300",
        pages = pages.display(),
        id = pages.file_name()?.display(),
    );
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let mut line = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    let idle = Idle(Owned(child));
    if line.trim() == "ready" {
        return Some(idle);
    }
    eprintln!("not run: no mount namespace can be made here");
    None
}

async fn trail(node: &mut TestNode) -> Vec<Event> {
    node.stop_plugin().await;
    crate::trail(&node.ledger())
}

#[tokio::test]
async fn a_process_of_no_tenant_on_a_shared_gpu_is_flagged_and_named() {
    let mut node = TestNode::start().await;
    let admitted = node.start_pod("a", 1).await;
    let stranger = Idle::start();
    node.gpus.show(&[uses(stranger.pid(), 300 * MIB)]);
    let _tenant = Tenant::hold(&admitted.pages, MIB);
    let pid = format!("process {} (sleep)", stranger.pid());
    let warning = node.warned(&pid).await;
    assert!(warning.contains("300 MiB") && warning.contains(&gpu(0).uuid), "{warning}");
    assert!(warning.contains("no pod: a process of the host itself"), "{warning}");
    assert_eq!(node.status().await.gpus[0].memory_outside_bytes, 300 * MIB);
    assert_eq!(node.status().await.allocations[0].unaccounted, 0, "nobody else's fault");
    node.gpus.show(&[]);
    drop(Tenant::hold(&admitted.pages, MIB));
    node.unwarned().await;
    let events = trail(&mut node).await;
    let bypassed = events.iter().find(|e| matches!(e.what, What::Bypassed { .. })).unwrap();
    assert_eq!((&bypassed.id, bypassed.gpu.as_deref()), (&None, Some(gpu(0).uuid.as_str())));
    assert!(bypassed.sentence("it").ends_with("has no share of it"), "{bypassed:?}");
    assert!(bypassed.detail().starts_with(&pid), "{bypassed:?}");
}

#[tokio::test]
async fn a_tenant_on_a_gpu_that_it_was_not_given_is_named() {
    let node = TestNode::start_with(
        "[share]\nreplicas = 4\nmemory = \"8Gi\"\nplacement = \"distributed\"\n",
    )
    .await;
    let mut pages = Vec::new();
    for name in ["a", "b"] {
        let admitted = node.start_pod(name, 1).await;
        pages.push((name, admitted.pages, admitted.ids));
    }
    let on_first = |ids: &[String]| ids[0].starts_with(&gpu(0).uuid);
    let (_, first, _) = pages.iter().find(|(_, _, ids)| on_first(ids)).unwrap();
    let (name, second, _) = pages.iter().find(|(_, _, ids)| !on_first(ids)).unwrap();
    let Some(elsewhere) = container(second) else { return };
    node.all_named().await;
    node.gpus.show(&[uses(elsewhere.pid(), 50 * MIB)]);
    let _tenant = Tenant::hold(first, MIB);
    let pod = format!("pod default/{name} (container main), whose share is of another GPU");
    node.warned(&pod).await;
}

/// A tenant's process that holds far more than it says, one that is in no slot, one of nobody's, and a page
/// that is ruined.
#[tokio::test]
async fn each_finding_raises_its_metric() {
    let node = TestNode::start_with(&tessera_harness::metrics::settings(SETTINGS)).await;
    let address = tessera_harness::metrics::address(&node).await;
    let mut pages = Vec::new();
    for name in ["beyond", "past", "ruins"] {
        let admitted = node.start_pod(name, 1).await;
        pages.push(admitted.pages);
    }
    node.all_named().await;
    let Some(past) = container(&pages[1]) else { return };
    let counts = |metrics: &tessera_harness::exposition::Exposition| {
        ["bypass", "unaccounted", "stranger", "usage_page"]
            .map(|kind| metrics.sum("tessera_findings_total", &[("finding", kind)]))
    };
    let before = tessera_harness::metrics::scrape(address).await;
    assert_eq!(counts(&before), [0.0; 4]);
    assert_eq!(before.of("tessera_findings_total").count(), 4, "each is there from the start");

    let (beyond, stranger) = (Tenant::hold(&pages[0], MIB), Idle::start());
    let bytes = [(beyond.pid(), 4096 * MIB), (past.pid(), 700 * MIB), (stranger.pid(), 300 * MIB)];
    node.gpus.show(&bytes.map(|(pid, bytes)| uses(pid, bytes)));
    let ruined = std::fs::File::options().write(true).open(pages[2].join("usage")).unwrap();
    ruined.set_len(0).unwrap();
    // And by container, where one is to blame. A scrape may come between a finding and its container's series.
    let blamed = [
        ("tessera_container_unaccounted_memory_findings_total", "beyond"),
        ("tessera_container_unaccounted_memory_findings_total", "past"),
        ("tessera_container_tamperings_total", "ruins"),
    ];
    let metrics = tessera_harness::metrics::scrape_until(address, |metrics| {
        ruined.set_len(0).unwrap();
        let of = |(name, pod): &(&str, &str)| metrics.sum(name, &[("pod", *pod)]);
        let all = counts(metrics).into_iter().chain(blamed.iter().map(of));
        all.min_by(f64::total_cmp).is_some_and(|least| least >= 1.0).then(|| metrics.clone())
    })
    .await;
    let outside = metrics.sum("tessera_gpu_memory_outside_bytes", &[]);
    assert!(outside >= (300 * MIB) as f64, "{outside}");
    assert!(metrics.sum("tessera_gpu_strangers", &[]) >= 1.0);
}

// Kubernetes events: what a pod gets, and an API server that hangs, refuses, is slow or is not there.

/// An API server, with what it writes.
struct Api {
    server: ApiServer,
    _dir: tempfile::TempDir,
}

impl Api {
    fn start(temper: Temper) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::start(dir.path());
        server.set_temper(temper);
        Api { server, _dir: dir }
    }

    fn timing(&self) -> Timing {
        Timing {
            // Of a server that answers, however long that takes here; see [`Api::hurried`].
            limit: PATIENCE,
            pause: [Duration::from_millis(20), Duration::from_millis(200)],
            server: Some(self.server.access()),
        }
    }

    /// With little patience, for a server that does not answer; enough for one that does, on a busy machine.
    fn hurried(&self) -> Timing {
        Timing { limit: Duration::from_secs(2), ..self.timing() }
    }

    fn events(&self) -> Vec<Value> {
        self.server.asked().into_iter().map(|asked| asked.body).collect()
    }
}

fn answers(status: u16, message: &str) -> Temper {
    Temper::Answers(status, message.to_owned())
}

async fn node_of(events: Timing) -> TestNode {
    let mut node = TestNode::without_plugin(SETTINGS).await;
    node.events = events;
    node.start_plugin().await;
    node
}

/// A line of the audit trail about the pod of these replicas.
async fn happens(node: &TestNode, ids: &[String], what: What) {
    node.all_named().await;
    let inner = node.agent();
    let id = id_of(ids);
    tokio::task::spawn_blocking(move || {
        let record = inner.allocations.record(&id).unwrap();
        inner.journal.audit([Event::of(&record, what, 1_795_340_700_000).because("for a test")]);
    })
    .await
    .unwrap();
}

fn refused(bytes: u64) -> What {
    What::RefusedMemory { bytes, charged_bytes: GIB, limit_bytes: 2 * GIB }
}

#[tokio::test]
async fn a_pods_event_has_its_uid_by_what_kubelet_wrote_down() {
    let api = Api::start(Temper::Works);
    let node = node_of(api.timing()).await;
    let admitted = node.start_pod("a", 1).await;
    let checkpoint = json!({ "Data": { "PodDeviceEntries": [{
        "PodUID": "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff", "ContainerName": "main",
        "ResourceName": GPU, "DeviceIDs": { "-1": admitted.ids }, "AllocResp": "" }],
        "RegisteredDevices": null }, "Checksum": 1 });
    let file = node.kubelet.device_plugins_dir().join("kubelet_internal_checkpoint");
    std::fs::write(file, checkpoint.to_string()).unwrap();
    happens(&node, &admitted.ids, refused(5 * GIB)).await;
    let asked = until(|| api.server.asked().first().cloned()).await;
    let target = asked.target.trim_end_matches('?');
    assert_eq!((&*asked.method, target), ("POST", "/api/v1/namespaces/default/events"));
    assert_eq!(asked.headers["authorization"], "Bearer secret");
    let event = asked.body;
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
    happens(&node, &admitted.ids, What::Tampered { what: "x".into() }).await;
    let event = until(|| api.events().get(1).cloned()).await;
    assert_eq!(event["reason"], "GPUQuotaTampered");
    // Its reason in the trail is for `explain` alone.
    assert!(!event["message"].as_str().unwrap().contains("for a test"), "{event}");
}

/// Whatever a line says of somebody that it cannot name, or of a stranger, is no news for the pods beside it.
#[tokio::test]
async fn what_a_stranger_does_is_no_event_on_its_neighbours() {
    let api = Api::start(Temper::Works);
    let node = node_of(api.timing()).await;
    node.start_pod("a", 1).await;
    node.all_named().await;
    let agent = node.agent();
    tokio::task::spawn_blocking(move || {
        let uuid = agent.inventory.catalogue().gpus.keys().next().unwrap().clone();
        for what in What::examples() {
            let because = "process 1 (theirs) of pod theirs/train".to_owned();
            agent.journal.audit([Event::of_gpu(&uuid, what, because, 1_795_340_700_000)]);
        }
        // The last: what comes before it has been sent.
        let of_node = Event::of_node(What::Uncordoned, 1_795_340_700_001);
        agent.journal.audit([of_node]);
    })
    .await
    .unwrap();
    let events = until(|| {
        let sent = api.events();
        let of_node = |event: &Value| event["message"].as_str().unwrap().starts_with("its GPU ");
        sent.iter().any(of_node).then_some(sent)
    })
    .await;
    let reasons: Vec<&str> = events.iter().map(|event| event["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["GPUUnhealthy", "GPUCordoned", "GPUUncordoned", "GPUUncordoned"]);
}

#[tokio::test]
async fn a_server_that_hangs_or_fails_holds_nothing_up_and_gets_events_later() {
    for mood in [Temper::Silent, answers(500, "etcd"), answers(429, "slow down")] {
        let api = Api::start(mood);
        let node = node_of(api.hurried()).await;
        let admitted = node.start_pod("a", 1).await;
        happens(&node, &admitted.ids, refused(1)).await;
        until(|| (api.events().len() >= 2).then_some(())).await;
        // Meanwhile everything goes its way.
        let other = node.start_pod("b", 1).await;
        drop(Tenant::hold(&other.pages, GIB));
        node.warned("Kubernetes events").await;
        api.server.set_temper(Temper::Works);
        node.unwarned().await;
        assert_eq!(api.events().last().unwrap()["reason"], "GPUMemoryRefused");
    }
}

#[tokio::test]
async fn a_server_that_forbids_it_is_asked_seldom() {
    let api = Api::start(answers(403, "events is forbidden"));
    let node = node_of(api.timing()).await;
    let begun = Instant::now();
    let admitted = node.start_pod("a", 1).await;
    for n in 0..20 {
        happens(&node, &admitted.ids, refused(n)).await;
        happens(&node, &admitted.ids, What::Tampered { what: n.to_string() }).await;
    }
    let warning = node.warned("grant it").await;
    assert!(warning.contains("403: events is forbidden"), "{warning}");
    // Once for each pause, however long all this takes here.
    let pauses = begun.elapsed().as_millis() / api.timing().pause[1].as_millis();
    assert!(api.events().len() as u128 <= 3 + pauses, "{} in {pauses}", api.events().len());
}

#[tokio::test]
async fn a_server_that_answers_is_no_longer_said_to_be_silent_even_if_it_takes_nothing() {
    let api = Api::start(Temper::Silent);
    let node = node_of(api.hurried()).await;
    let admitted = node.start_pod("a", 1).await;
    happens(&node, &admitted.ids, refused(1)).await;
    node.warned("Kubernetes events").await;
    api.server.set_temper(answers(404, "namespaces \"default\" not found"));
    until(|| (node.agent().trust.events.all()[2].1 == 1).then_some(())).await;
    assert!(node.status().await.warnings.is_empty());
}

#[tokio::test]
async fn events_are_switched_on_and_off_while_the_plugin_runs() {
    let api = Api::start(Temper::Works);
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
    let ids = node.start_pod("a", 1).await.ids;
    let sends = async |node: &TestNode| {
        let before = api.events().len();
        while api.events().len() == before {
            happens(node, &ids, quota()).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let sends_nothing = async |node: &TestNode| {
        let before = api.server.connections();
        happens(node, &ids, quota()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(api.server.connections(), before);
    };
    sends_nothing(&node).await;
    switch(&mut node, "auto");
    bounded(sends(&node)).await;
    // Failures are reported as long as events are on.
    api.server.set_temper(answers(403, "events is forbidden"));
    happens(&node, &ids, What::Tampered { what: "x".into() }).await;
    node.warned("grant it").await;
    // Nothing is being sent any more.
    let mut before = None;
    while before != Some(node.agent().trust.events.all()) {
        before = Some(node.agent().trust.events.all());
        tokio::time::sleep(3 * api.timing().pause[1]).await;
    }
    switch(&mut node, "off");
    let plugin = node.status_until(|s| s.warnings.is_empty().then(|| s.plugin.clone())).await;
    assert!(plugin.configuration.unwrap().waiting_keys.is_empty());
    sends_nothing(&node).await;
    api.server.set_temper(Temper::Works);
    switch(&mut node, "auto");
    bounded(sends(&node)).await;
    node.stop_plugin().await;
}
