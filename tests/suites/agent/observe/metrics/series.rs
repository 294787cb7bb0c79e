//! What the series say, and when they begin and end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::front_end::{Call, Outcome};
use tessera_api::metrics::families::{ALL, MetricKind};
use tessera_fake_kubelet::{Behaviour, Pod};
use tessera_gpu::GpuProcess;
use tessera_gpu::health::Observation;
use tessera_harness::exposition::Exposition;
use tessera_harness::metrics::{address, get, request, scrape_until, settings};
use tessera_harness::plugin::*;
use tessera_harness::workspace;

/// A pod that runs, with a process that holds `bytes`; kubelet has named it.
pub async fn running(node: &TestNode, name: &str, bytes: u64) -> (Pod, Tenant, Vec<String>) {
    let pod = pod(name, 1);
    let admitted = node.kubelet.admit(&pod).await.unwrap();
    node.kubelet.start_container(&pod, "main").await.unwrap();
    let ids = admitted[0].device_ids.clone();
    let pages = node.pages(&ids);
    let tenant = tokio::task::spawn_blocking(move || Tenant::hold(&pages, bytes)).await.unwrap();
    (pod, tenant, ids)
}

/// Everything that the plugin can emit, by a node on which all of it is the case.
pub async fn everything() -> (TestNode, Exposition) {
    let mut node = TestNode::start_with(&settings(SETTINGS)).await;
    let (pod, tenant, ids) = running(&node, "everything", GIB).await;
    let used = GpuProcess { pid: tenant.pid(), used_bytes: Some(2 * GIB) };
    let uuid = ids[0].split("::").next().unwrap().to_owned();
    node.gpus.processes.lock().unwrap().insert(uuid, vec![used]);
    node.allocate(&["GPU-nobody::0".to_owned()]).await.unwrap_err();
    // As a DRA driver would that serves beside it; `suites/dra` has a real one.
    let agent = node.agent();
    agent.board.publish(|facts| facts.dra.get_or_insert_default().registered = true);
    for call in [Call::Prepare, Call::Unprepare] {
        let driver = Arc::from("gpu.tessera.dev");
        agent.meters.observe(call, &driver, Outcome::Ok, Duration::from_millis(1));
    }
    // As an API that is served in a cluster.
    let view = node.sources();
    let counts = view.api.get().unwrap();
    counts.expect_listener();
    counts.expect_reviews();
    let address = address(&node).await;
    let all = scrape_until(address, |metrics| {
        let seen = metrics.of("tessera_container_memory_nvml_bytes").any(|s| s.value > 0.0);
        let is_stored = metrics.of("tessera_history_writing").count() > 0;
        (seen && is_stored).then(|| metrics.clone())
    })
    .await;
    drop((pod, tenant));
    node.stop_plugin().await;
    (node, all)
}

#[tokio::test]
async fn every_metric_of_the_table_is_exposed_as_it_says_and_no_other() {
    let (_node, metrics) = everything().await;
    let mut want = BTreeSet::new();
    for family in ALL {
        let name = family.name();
        let exposed =
            metrics.families.get(&name).unwrap_or_else(|| panic!("{name} is not exposed"));
        let kind = match family.kind {
            MetricKind::Info => "gauge",
            kind => kind.into_str(),
        };
        assert_eq!((exposed.kind.as_str(), exposed.help.as_str()), (kind, family.help));
        let suffixes: &[&str] = match family.kind {
            MetricKind::Histogram => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        for suffix in suffixes {
            let name = format!("{name}{suffix}");
            assert!(metrics.of(&name).count() > 0, "{name} has no series");
            for sample in metrics.of(&name) {
                let mut labels: BTreeSet<&str> = sample.labels.keys().map(String::as_str).collect();
                labels.remove("le");
                assert_eq!(labels, family.labels.iter().copied().collect(), "{name}");
            }
        }
        want.insert(name);
    }
    assert_eq!(metrics.families.keys().cloned().collect::<BTreeSet<_>>(), want);
    // Buckets are cumulative, and the last one has all.
    for sample in metrics.of("tessera_allocate_duration_seconds_bucket") {
        if sample.labels["le"] == "+Inf" {
            let outcome = sample.labels["outcome"].as_str();
            let count =
                metrics.sum("tessera_allocate_duration_seconds_count", &[("outcome", outcome)]);
            assert_eq!(sample.value, count);
        }
    }
}

/// What each series of a container has.
const OF_CONTAINERS: &[&str] = &["namespace", "pod", "container", "gpu", "uuid", "allocation"];

/// The tables of the reference as they must be.
fn reference() -> String {
    let mut out = String::from("| Metric | Labels | Meaning |\n|---|---|---|\n");
    for family in ALL {
        let histogram = match family.kind {
            MetricKind::Histogram => " (histogram)",
            _ => "",
        };
        let (mut labels, own) = match family.labels.strip_prefix(OF_CONTAINERS) {
            Some(own) => (vec!["a container's".to_owned()], own),
            None => (Vec::new(), family.labels),
        };
        labels.extend(own.iter().map(|label| format!("`{label}`")));
        let labels = labels.join(", ");
        out += &format!("| `{}`{histogram} | {labels} | {} |\n", family.name(), family.help);
    }
    out
}

#[test]
fn the_reference_is_the_table() {
    let path = workspace().join("docs/metrics.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let want = reference();
    let (begin, end) = ("<!-- table -->\n", "<!-- end of the table -->\n");
    let found =
        text.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).map(|(table, _)| table);
    if std::env::var_os("UPDATE").is_some() {
        let (before, rest) = text.split_once(begin).unwrap();
        let (_, after) = rest.split_once(end).unwrap();
        std::fs::write(path, format!("{before}{begin}{want}{end}{after}")).unwrap();
        return;
    }
    assert_eq!(
        found,
        Some(want.as_str()),
        "write it again: UPDATE=1 cargo test -p tessera-suite-agent --test agent the_reference"
    );
}

/// Labels whose values are words of ours.
const CLOSED: [&str; 4] = ["state", "outcome", "policy", "finding"];
/// Words that the node of the test is not in a state to emit.
const OTHER_WORDS: [&str; 4] = ["failed", "refused", "strict", "none"];

/// That there are such metrics, with such labels, `tests/deploy/monitoring.py` knows from the reference.
#[tokio::test]
async fn alerts_and_dashboard_select_words_that_there_are() {
    let (_node, metrics) = everything().await;
    for path in ["deploy/prometheus/rules.yaml", "deploy/grafana/tessera.json"] {
        let text = std::fs::read_to_string(workspace().join(path)).unwrap().replace("\\\"", "\"");
        for label in CLOSED {
            let seen: BTreeSet<&str> = metrics
                .samples
                .iter()
                .filter_map(|s| s.labels.get(label).map(String::as_str))
                .collect();
            let selected = ["=", "=~", "!=", "!~"].map(|operator| format!("{label}{operator}\""));
            for rest in selected.iter().flat_map(|begin| text.split(begin).skip(1)) {
                for word in rest.split('"').next().unwrap().split('|') {
                    assert!(
                        seen.contains(word) || OTHER_WORDS.contains(&word),
                        "{path}: {label}={word}"
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn figures_are_those_of_the_node_and_end_with_the_pod() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let (pod, tenant, _ids) = running(&node, "server-0", 3 * GIB).await;
    let address = address(&node).await;
    let labels =
        [("namespace", "default"), ("pod", "server-0"), ("container", "main"), ("gpu", "0")];
    let metrics = scrape_until(address, |metrics| {
        (metrics.sum("tessera_container_processes", &labels) == 1.0).then(|| metrics.clone())
    })
    .await;
    let of = |name: &str| metrics.sum(name, &labels);
    assert_eq!(of("tessera_container_memory_limit_bytes"), (8 * GIB) as f64);
    assert!(of("tessera_container_memory_used_bytes") >= (3 * GIB) as f64);
    assert_eq!(of("tessera_container_memory_peak_bytes"), (3 * GIB) as f64);
    assert_eq!(of("tessera_container_cores_ratio"), 0.25);
    assert_eq!(of("tessera_container_out_of_memory_total"), 0.0);
    let first = [("gpu", "0")];
    assert_eq!(metrics.sum("tessera_gpu_memory_total_bytes", &first), (40 * GIB) as f64);
    assert_eq!(metrics.sum("tessera_gpu_memory_sold_bytes", &first), (8 * GIB) as f64);
    let replicas = |state| metrics.sum("tessera_gpu_replicas", &[("gpu", "0"), ("state", state)]);
    assert_eq!([replicas("held"), replicas("free"), replicas("unhealthy")], [1.0, 3.0, 0.0]);
    assert_eq!(metrics.sum("tessera_ready", &[]), 1.0);
    assert_eq!(metrics.sum("tessera_kubelet_registrations_total", &[]), 1.0);
    let allocated = [("resource", GPU), ("outcome", "ok")];
    assert_eq!(metrics.sum("tessera_allocate_duration_seconds_count", &allocated), 1.0);
    assert_eq!(metrics.sum("tessera_pre_start_duration_seconds_count", &allocated), 1.0);
    assert!(metrics.sum("tessera_ledger_commits_total", &[("outcome", "ok")]) >= 2.0);
    assert_eq!(metrics.sum("tessera_gpu_health", &[("gpu", "1"), ("state", "healthy")]), 1.0);

    // A GPU falls ill: one state at a time.
    node.gpus.report(Observation::Xid { uuid: gpu(1).uuid, xid: 79 });
    scrape_until(address, |metrics| {
        let ill = metrics.sum("tessera_gpu_health", &[("gpu", "1"), ("state", "unhealthy")]) == 1.0;
        assert_eq!(metrics.sum("tessera_gpu_health", &[("gpu", "1")]), 1.0);
        (ill && metrics.sum("tessera_gpu_available", &[("gpu", "1")]) == 0.0).then_some(())
    })
    .await;

    // The pod goes, and its series with it. Another stays: of an answer without any pod nothing follows.
    node.kubelet.admit(&tessera_harness::plugin::pod("other", 1)).await.unwrap();
    tenant.kill();
    node.kubelet.remove(&pod.namespace, &pod.name);
    scrape_until(address, |metrics| {
        let gone = |pod: Option<&String>| pod.is_none_or(|pod| pod != "server-0");
        metrics.samples.iter().all(|sample| gone(sample.labels.get("pod"))).then_some(())
    })
    .await;
}

/// A figure that nobody took is no figure: 0 would say that all is well.
#[tokio::test]
async fn what_nobody_looked_at_has_no_series() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let address = address(&node).await;
    let looked = |metrics: &Exposition, name: &str| -> BTreeSet<String> {
        metrics.of(name).map(|sample| sample.labels["gpu"].clone()).collect()
    };
    let names = ["tessera_gpu_memory_outside_bytes", "tessera_gpu_strangers"];
    let metrics = scrape_until(address, |metrics| {
        (metrics.of("tessera_gpu_health").count() > 0).then(|| metrics.clone())
    })
    .await;
    for name in names {
        assert!(looked(&metrics, name).is_empty(), "{name}: no GPU has a tenant");
    }
    for name in ["tessera_api_listening", "tessera_api_reviews_total"] {
        assert_eq!(metrics.of(name).count(), 0, "{name}: the API is off");
    }
    let (_pod, _tenant, ids) = running(&node, "first", GIB).await;
    assert_eq!(ids[0].split("::").next(), Some(gpu(0).uuid.as_str()));
    scrape_until(address, |metrics| {
        let first = BTreeSet::from(["0".to_owned()]);
        names.iter().all(|name| looked(metrics, name) == first).then_some(())
    })
    .await;
    // The driver tells nothing more of it.
    node.gpus.gpus.lock().unwrap().retain(|one| one.index != 0);
    scrape_until(address, |metrics| {
        names.iter().all(|name| looked(metrics, name).is_empty()).then_some(())
    })
    .await;
}

/// A start of the plugin must not end the alert about a GPU that it cannot sell.
#[tokio::test]
async fn a_gpu_that_is_lost_stays_unhealthy() {
    let node = TestNode::without_plugin(&settings(SETTINGS)).await;
    node.gpus.lost.lock().unwrap().push(1);
    node.gpus.gpus.lock().unwrap().retain(|one| one.index != 1);
    let mut node = node;
    node.start_plugin().await;
    let metrics = scrape_until(address(&node).await, |metrics| {
        (metrics.of("tessera_gpu_health").count() > 0).then(|| metrics.clone())
    })
    .await;
    let health = |state| metrics.sum("tessera_gpu_health", &[("gpu", "1"), ("state", state)]);
    let all = ["healthy", "suspect", "unhealthy", "recovering"].map(health);
    assert_eq!(all, [0.0, 0.0, 1.0, 0.0]);
    let available = metrics.of("tessera_gpu_available").filter(|one| one.labels["gpu"] == "1");
    assert_eq!(available.map(|one| one.value).collect::<Vec<_>>(), [0.0]);
}

#[tokio::test]
async fn a_successor_of_the_same_name_has_series_of_its_own_and_no_twins() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let address = address(&node).await;
    let (pod, tenant, first) = running(&node, "db-0", GIB).await;
    let metrics = scrape_until(address, |metrics| {
        (metrics.of("tessera_container_info").count() == 1).then(|| metrics.clone())
    })
    .await;
    let id = metrics.of("tessera_container_info").next().unwrap().labels["allocation"].clone();
    // A StatefulSet's pod is replaced while a process of the first still dies.
    node.kubelet.remove(&pod.namespace, &pod.name);
    // Another takes the replicas that the first had, so that the second gets others.
    let squatter = tessera_harness::plugin::pod("squatter", 1);
    node.kubelet.admit(&squatter).await.unwrap();
    let (_pod, second, _ids) = running(&node, "db-0", GIB).await;
    scrape_until(address, |metrics| {
        // The reader refuses twins.
        let mut infos = metrics.of("tessera_container_info").filter(|s| s.labels["pod"] == "db-0");
        infos.all(|sample| sample.labels["allocation"] != id).then_some(())
    })
    .await;
    drop((tenant, second, first));
}

// Probes, and what each client is served.

#[tokio::test]
async fn ready_means_registered_and_watched() {
    let mut node = TestNode::without_plugin(&settings(SETTINGS)).await;
    node.kubelet.set_behaviour(Behaviour { no_stream: true, ..Behaviour::default() });
    node.launch_plugin();
    let address = address(&node).await;
    // It lives, but kubelet does not look.
    let text = until_async(async || {
        let answer = get(address, "/readyz").await;
        (answer.status == 503 && answer.body.contains("does not watch")).then_some(answer.body)
    })
    .await;
    assert!(
        text.starts_with("tessera.dev/gpu: registered, but kubelet does not watch it"),
        "{text}"
    );
    assert_eq!(get(address, "/healthz").await.body, "ok\n");

    node.kubelet.set_behaviour(Behaviour::default());
    node.kubelet.restart().await.unwrap();
    until_async(async || (get(address, "/readyz").await.status == 200).then_some(())).await;
    // Kubelet goes: it lives, and is not ready.
    node.kubelet.stop().await;
    until_async(async || (get(address, "/readyz").await.status == 503).then_some(())).await;
    assert_eq!(get(address, "/healthz").await.status, 200);
    node.stop_plugin().await;
}

#[tokio::test]
async fn without_gpus_it_lives_and_says_what_it_waits_for() {
    let mut node = TestNode::without_plugin(&settings(SETTINGS)).await;
    node.gpus.gpus.lock().unwrap().clear();
    node.launch_plugin();
    let address = address(&node).await;
    let answer = until_async(async || {
        let answer = get(address, "/readyz").await;
        answer.body.contains("waiting for GPUs").then_some(answer)
    })
    .await;
    assert_eq!(answer.status, 503);
    assert_eq!(get(address, "/healthz").await.status, 200);
    // There is something to scrape from the first moment.
    let metrics = Exposition::parse(&get(address, "/metrics").await.body);
    assert_eq!(metrics.sum("tessera_ready", &[]), 0.0);
    assert_eq!(metrics.of("tessera_build_info").count(), 1);
    node.stop_plugin().await;
}

#[tokio::test]
async fn the_text_is_prometheus_own_and_nothing_else_is_served() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let address = address(&node).await;
    let answer = get(address, "/metrics").await;
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let samples = Exposition::parse(&answer.body).samples;
    assert!(samples.len() > 50, "{}", samples.len());

    let head = request(address, "HEAD", "/metrics").await;
    assert!(head.status == 200 && head.body.is_empty());
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/debug/pprof", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
        ("GET", "/metrics?name[]=x", 200),
    ] {
        assert_eq!(request(address, method, path).await.status, status, "{method} {path}");
    }
}

#[tokio::test]
async fn an_address_that_is_taken_is_reported_and_hinders_nothing() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let settings = format!("[metrics]\nlisten = \"127.0.0.1:{port}\"\n{SETTINGS}");
    let node = TestNode::start_with(&settings).await;
    let warning = node.warned("metrics.listen").await;
    assert!(
        warning.starts_with(&format!("metrics and probes are not served: 127.0.0.1:{port}")),
        "{warning}"
    );
    node.allocate(&[replica(0, 0)]).await.unwrap();
}
