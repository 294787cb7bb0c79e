//! The rules and examples for autoscalers (`deploy/examples/autoscale`), as a real Prometheus evaluates them that
//! scrapes the plugin: which pods they find, and that their values are what the plugin did.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use tessera_harness::gate_tenants::working;
use tessera_harness::metrics::{address, get, say, scrape, settings};
use tessera_harness::plugin::*;
use tessera_harness::{Owned, external, workspace};

use super::series::running;

/// The window of the examples' rates, seconds.
const WINDOW: f64 = 120.0;

/// Prometheus, scraping one target every second.
struct Prometheus {
    _child: Owned,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    async fn start(program: &Path, target: SocketAddr) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs:\n\
             - job_name: tessera\n  \
               honor_labels: true\n  \
               static_configs: [{{targets: [\"{target}\"]}}]\n"
        );
        std::fs::write(&config, text).unwrap();
        let mut child = Command::new(program)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg("--web.listen-address=127.0.0.1:0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = Vec::new();
        let address = lines.find_map(|line| {
            let line = line.unwrap();
            let found = line.contains("Listening on").then(|| {
                let (_, rest) = line.split_once("address=").expect("an address");
                rest.split_whitespace().next().unwrap().parse().expect("an address")
            });
            said.push(line);
            found
        });
        // What it says from now on is read, so that it never waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        let Some(address) = address else { panic!("Prometheus ended: {said:#?}") };
        let started = Prometheus { _child: Owned(child), address, _dir: dir };
        // Until it has its storage, it answers 503.
        until_async(async || (get(address, "/-/ready").await.status == 200).then_some(())).await;
        started
    }

    /// `data` of its answer.
    async fn api(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let query: Vec<String> =
            parameters.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        // Of HTTP/1.0, so that the answer has one piece.
        let request = format!("GET /api/v1/{path}?{} HTTP/1.0\r\n\r\n", query.join("&"));
        let answer = say(self.address, request.as_bytes()).await.expect("an answer");
        let body = serde_json::from_str(&answer.body);
        let body: Value = body.unwrap_or_else(|_| panic!("{path}: {}", answer.body));
        assert_eq!(body["status"], "success", "{parameters:?}: {body}");
        body["data"].clone()
    }

    /// Values of an instant query at `time`, by pod; the key is empty where a result has none.
    async fn ask(&self, query: &str, time: &str) -> BTreeMap<String, f64> {
        let data = self.api("query", &[("query", query), ("time", time)]).await;
        assert_eq!(data["resultType"], "vector", "{query}");
        let results = data["result"].as_array().unwrap();
        let found: BTreeMap<String, f64> = results
            .iter()
            .map(|one| {
                let pod = one["metric"]["pod"].as_str().unwrap_or_default().to_owned();
                (pod, one["value"][1].as_str().unwrap().parse().unwrap())
            })
            .collect();
        assert_eq!(found.len(), results.len(), "{query}: one value for each pod");
        found
    }

    /// The samples of a counter of one pod in the window before `time`.
    async fn samples(&self, name: &str, pod: &str, time: &str) -> Vec<(f64, f64)> {
        let query = format!("{name}{{pod=\"{pod}\"}}[2m]");
        let data = self.api("query", &[("query", &query), ("time", time)]).await;
        let series = data["result"].as_array().unwrap();
        let values = series.first().and_then(|one| one["values"].as_array().cloned());
        values
            .unwrap_or_default()
            .iter()
            .map(|pair| (pair[0].as_f64().unwrap(), pair[1].as_str().unwrap().parse().unwrap()))
            .collect()
    }
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

fn example(name: &str) -> String {
    let path = workspace().join("deploy/examples/autoscale").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The values of `key: '…'` in a YAML file, in their order.
fn quoted<'t>(text: &'t str, key: &str) -> Vec<&'t str> {
    let of = |line: &'t str| line.trim_start().trim_start_matches("- ").strip_prefix(key);
    let values = text.lines().filter_map(of).filter_map(|rest| rest.strip_prefix(": '"));
    values.map(|rest| rest.trim_end().strip_suffix('\'').expect("on one line")).collect()
}

/// One rule of the adapter.
struct Rule {
    series: String,
    metric: String,
    query: String,
}

fn rules() -> Vec<Rule> {
    let text = example("prometheus-adapter.yaml");
    let metrics = text.lines().filter_map(|line| line.trim().strip_prefix("name: {as: "));
    let metrics: Vec<&str> = metrics.map(|rest| rest.trim_end_matches('}')).collect();
    let (series, queries) = (quoted(&text, "seriesQuery"), quoted(&text, "metricsQuery"));
    assert!(series.len() == queries.len() && series.len() == metrics.len() && !series.is_empty());
    let parts = series.iter().zip(metrics).zip(queries);
    parts
        .map(|((series, metric), query)| Rule {
            series: (*series).to_owned(),
            metric: metric.to_owned(),
            query: query.to_owned(),
        })
        .collect()
}

/// Asserts that `rate` is what Prometheus may make of these samples: it adds at most 1.1 intervals at each end.
fn is_rate_of(rate: f64, samples: &[(f64, f64)]) {
    let (first, last) = (samples[0], samples[samples.len() - 1]);
    let (sampled, grown) = (last.0 - first.0, last.1 - first.1);
    let interval = sampled / (samples.len() - 1) as f64;
    let least = grown / WINDOW;
    let most = least * (1.0 + 2.2 * interval / sampled);
    assert!((least * 0.999..=most * 1.001).contains(&rate), "{rate}, not {least} to {most}");
}

#[tokio::test(flavor = "multi_thread")]
async fn autoscalers_see_what_the_plugin_did() {
    let program = match external::program("prometheus", "prometheus") {
        Ok(program) => program,
        Err(reason) => return external::skip("autoscalers_see_what_the_plugin_did", &reason),
    };
    // Three pods on one GPU: two that contend for it, and one that does nothing.
    let mut node = TestNode::without_plugin(&settings(SETTINGS)).await;
    node.gpus.gpus.lock().unwrap().truncate(1);
    node.start_plugin().await;
    let mut tenants = Vec::new();
    let mut pages = Vec::new();
    for (pod, gib) in [("inference-a", 2), ("inference-b", 4), ("other", 1)] {
        let (pod, tenant, ids) = running(&node, pod, gib * GIB).await;
        pages.push(node.pages(&ids));
        tenants.push((pod, tenant));
    }
    let target = address(&node).await;
    let prometheus = Prometheus::start(&program, target).await;
    let workers: Vec<_> = pages[..2].iter().map(|dir| working(dir)).collect();

    // Enough to make a rate of, while they contend.
    let wait = "tessera_container_gate_wait_seconds_total";
    let gpu = "tessera_container_gpu_used_seconds_total";
    until_async(async || {
        let now = unix_now();
        let mut enough = true;
        for (name, pod) in [(wait, "inference-a"), (gpu, "inference-a"), (gpu, "inference-b")] {
            let samples = prometheus.samples(name, pod, &now).await;
            enough &= samples.windows(2).filter(|pair| pair[1].1 > pair[0].1).count() >= 5;
        }
        enough.then_some(())
    })
    .await;
    drop(workers);

    // What Prometheus has seen last is what the plugin counted, to the last microsecond. All that follows is asked
    // of that instant: a scrape that comes late later on changes nothing.
    let (metrics, time) = until_async(async || {
        let (metrics, time) = (scrape(target).await, unix_now());
        let mut same = true;
        for name in [wait, gpu] {
            let seen = prometheus.ask(name, &time).await;
            same &= seen.len() == 3;
            same &= seen.iter().all(|(pod, seen)| *seen == metrics.sum(name, &[("pod", pod)]));
        }
        same.then_some((metrics, time))
    })
    .await;
    let of = |name: &str, pod: &str| metrics.sum(name, &[("pod", pod)]);

    // As the adapter asks for the pods of a Deployment.
    let matchers = "namespace=\"default\",pod=~\"inference-a|inference-b\"";
    let mut values = BTreeMap::new();
    for rule in rules() {
        let found = prometheus.api("series", &[("match[]", &rule.series)]).await;
        let names: Vec<&str> =
            found.as_array().unwrap().iter().map(|one| one["__name__"].as_str().unwrap()).collect();
        assert_eq!(names.len(), 3, "{}: each pod has a series: {names:?}", rule.metric);
        let query = rule
            .query
            .replace("<<.Series>>", names[0])
            .replace("<<.LabelMatchers>>", matchers)
            .replace("<<.GroupBy>>", "pod");
        assert!(!query.contains("<<"), "{query}");
        let found = prometheus.ask(&query, &time).await;
        let pods: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(pods, ["inference-a", "inference-b"], "{query}");
        values.insert(rule.metric, found);
    }
    for pod in ["inference-a", "inference-b"] {
        let waiting = values["tessera_gpu_waiting_ratio"][pod];
        is_rate_of(waiting, &prometheus.samples(wait, pod, &time).await);
        assert!(waiting > 0.0 && waiting <= 1.0, "{waiting}");
        let share = of("tessera_container_cores_ratio", pod);
        assert_eq!(share, 0.25);
        let used = values["tessera_gpu_seconds_per_share"][pod];
        is_rate_of(used * share, &prometheus.samples(gpu, pod, &time).await);
        let memory = of("tessera_container_memory_used_bytes", pod)
            / of("tessera_container_memory_limit_bytes", pod);
        assert_eq!(values["tessera_gpu_memory_used_ratio"][pod], memory);
    }
    assert_eq!(values["tessera_gpu_memory_used_ratio"]["inference-b"], 0.5);

    // As KEDA asks: one value for all pods, of the same figures.
    let keda = example("keda.yaml");
    let queries = quoted(&keda, "query");
    let sums = ["tessera_gpu_waiting_ratio", "tessera_gpu_seconds_per_share"];
    assert_eq!(queries.len(), sums.len());
    for (query, metric) in queries.into_iter().zip(sums) {
        let found = prometheus.ask(query, &time).await;
        assert_eq!(found.len(), 1, "{query}");
        let sum: f64 = values[metric].values().sum();
        assert!((found[""] - sum).abs() <= 1e-9 * sum, "{query}: {found:?}, not {sum}");
    }
    drop(tenants);
}

fn unix_now() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    format!("{:.3}", now.as_secs_f64())
}
