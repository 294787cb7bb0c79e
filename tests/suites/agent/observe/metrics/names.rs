//! Dashboard, alerts and reference against the plugin's real output: no name, label or value of a label
//! that is not there, and nothing there that the reference leaves out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use tessera_api::metrics::families::{ALL, MetricKind};

use super::series::everything;
use tessera_harness::exposition::Exposition;
use tessera_harness::workspace;

fn read(path: &str) -> String {
    let root = workspace();
    let path: PathBuf = root.join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A label's name, an operator and a value.
type Matcher = (String, String, String);

/// What a query names.
#[derive(Debug, Default)]
struct Named {
    /// Each metric with the labels that select its series.
    selectors: Vec<(String, Vec<Matcher>)>,
    /// Labels in `by (…)` and the like.
    labels: BTreeSet<String>,
}

/// Words of PromQL that name no metric. Functions are recognised by their parenthesis.
const WORDS: &[&str] = &[
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
];
const GROUPING: &[&str] = &["by", "without", "on", "ignoring", "group_left", "group_right"];
/// What Prometheus itself adds to every target, and Grafana's own.
const TARGET: &[&str] = &["cluster", "instance", "job", "node", "le", "alertname"];

/// Reads a query of PromQL, as far as names go.
fn named(query: &str) -> Named {
    let mut out = Named::default();
    let bytes = query.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        if byte == b'"' {
            at += 2 + query[at + 1..].find('"').expect("a closed string");
        } else if byte == b'[' {
            // Durations.
            at += 1 + query[at..].find(']').expect("a closed bracket");
        } else if byte.is_ascii_digit() {
            at +=
                bytes[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'.').count();
        } else if byte.is_ascii_alphabetic() || byte == b'_' {
            let word: String = query[at..]
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':'))
                .collect();
            at += word.len();
            let rest = query[at..].trim_start();
            if GROUPING.contains(&word.as_str()) {
                if rest.starts_with('(') {
                    let close = rest.find(')').unwrap();
                    let names = rest[1..close].split(',').map(|name| name.trim().to_owned());
                    out.labels.extend(names.filter(|name| !name.is_empty()));
                    at += query[at..].find(')').unwrap() + 1;
                }
            } else if !is_call(&word, rest) {
                let mut selected = Vec::new();
                if rest.starts_with('{') {
                    let open = at + query[at..].find('{').unwrap();
                    let close = open + query[open..].find('}').unwrap();
                    selected = matchers(&query[open + 1..close]);
                    at = close + 1;
                }
                out.selectors.push((word, selected));
            }
        } else {
            at += 1;
        }
    }
    out
}

/// Whether `word`, before `rest`, is a function, an operator or an aggregation.
fn is_call(word: &str, rest: &str) -> bool {
    let grouped = ["by ", "by(", "without ", "without("].iter().any(|word| rest.starts_with(word));
    WORDS.contains(&word) || rest.starts_with('(') || grouped
}

fn matchers(text: &str) -> Vec<(String, String, String)> {
    let mut out = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let end = rest.find(['=', '!']).unwrap_or_else(|| panic!("{text}"));
        let (name, after) = rest.split_at(end);
        let quote = after.find('"').unwrap();
        let (operator, after) = after.split_at(quote);
        let close = 1 + after[1..].find('"').unwrap();
        out.push((name.trim().to_owned(), operator.trim().to_owned(), after[1..close].to_owned()));
        rest = after[close + 1..].trim_start_matches([',', ' ']);
    }
    out
}

/// Labels of every series name, and the values of each that have a fixed set.
fn labels_by_name(metrics: &Exposition) -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let mut out: BTreeMap<String, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for sample in &metrics.samples {
        let labels = out.entry(sample.name.clone()).or_default();
        for (key, value) in &sample.labels {
            labels.entry(key.clone()).or_default().insert(value.clone());
        }
    }
    out
}

/// Labels whose values are words of ours.
const CLOSED: &[&str] = &["state", "outcome", "policy", "finding"];
/// Words that the node of the test is not in a state to emit.
const OTHER_WORDS: &[&str] = &["failed", "refused", "strict", "none"];

fn hold(
    place: &str,
    query: &str,
    known: &BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
    recorded: &BTreeSet<String>,
) {
    let named = named(query);
    assert!(!named.selectors.is_empty(), "{place}: no metric in {query}");
    let mut all = BTreeSet::new();
    for (name, selected) in &named.selectors {
        if name == "up" || recorded.contains(name) {
            continue;
        }
        let labels =
            known.get(name).unwrap_or_else(|| panic!("{place}: no metric {name}: {query}"));
        all.extend(labels.keys().cloned());
        for (label, _, value) in selected {
            let is_target = TARGET.contains(&label.as_str());
            assert!(
                is_target || labels.contains_key(label),
                "{place}: {name} has no {label}: {query}"
            );
            if CLOSED.contains(&label.as_str()) {
                for word in value.split('|') {
                    let there = labels[label].contains(word) || OTHER_WORDS.contains(&word);
                    assert!(there, "{place}: {name} has no {label}=\"{word}\": {query}");
                }
            }
        }
    }
    for label in &named.labels {
        let there = TARGET.contains(&label.as_str())
            || all.contains(label)
            || !recorded.is_empty() && query.contains(':');
        assert!(there, "{place}: none of its metrics has {label}: {query}");
    }
}

/// `expr:` of a rule file as this repository writes it: on one line, or indented below `|`.
fn expressions(yaml: &str) -> Vec<(String, String)> {
    let lines: Vec<&str> = yaml.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let (mut out, mut name) = (Vec::new(), String::new());
    for (at, line) in lines.iter().enumerate() {
        let text = line.trim_start().trim_start_matches("- ");
        if let Some(rest) = text.strip_prefix("alert: ").or_else(|| text.strip_prefix("record: ")) {
            name = rest.trim().to_owned();
        }
        let Some(rest) = text.strip_prefix("expr:") else { continue };
        let query = match rest.trim() {
            "|" | ">-" | "|-" => {
                let below = lines[at + 1..].iter().take_while(|next| indent(next) > indent(line));
                below.map(|line| line.trim()).collect::<Vec<_>>().join(" ")
            }
            query => query.to_owned(),
        };
        out.push((name.clone(), query));
    }
    out
}

#[tokio::test]
async fn alerts_and_dashboard_name_what_there_is() {
    let (_node, metrics) = everything().await;
    let known = labels_by_name(&metrics);

    let rules = read("deploy/prometheus/rules.yaml");
    let expressions = expressions(&rules);
    let count =
        |what: &str| rules.lines().filter(|line| line.trim_start().starts_with(what)).count();
    assert_eq!(expressions.len(), count("- alert:") + count("- record:"));
    assert!(count("- alert:") >= 10);
    assert_eq!(count("- alert:"), count("severity:"), "each alert says how bad it is");
    assert_eq!(count("- alert:"), count("summary:"), "each alert says what is the matter");
    assert_eq!(count("- alert:"), count("description:"), "each alert says what to do");
    assert_eq!(count("- alert:"), count("runbook_url:"), "each alert links to its runbook");
    let recorded: BTreeSet<String> = expressions
        .iter()
        .map(|(name, _)| name.clone())
        .filter(|name| name.contains(':'))
        .collect();
    for (name, query) in &expressions {
        hold(&format!("rules.yaml, {name}"), query, &known, &recorded);
    }

    let dashboard: serde_json::Value =
        serde_json::from_str(&read("deploy/grafana/tessera.json")).unwrap();
    let mut queries = Vec::new();
    collect(&dashboard, &mut queries);
    assert!(queries.len() >= 15, "{}", queries.len());
    for query in &queries {
        // Grafana's variables stand for values of labels, and for durations.
        let plain = query.replace("$__rate_interval", "5m").replace("$__range", "1h");
        hold("tessera.json", &plain, &known, &recorded);
    }
}

/// Every query in a dashboard: panels' expressions, and variables' `label_values(…)`.
fn collect(value: &serde_json::Value, queries: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                match (key.as_str(), value.as_str()) {
                    ("expr", Some(text)) => queries.push(text.to_owned()),
                    ("query", Some(text)) => {
                        if let Some(inner) = text.strip_prefix("label_values(") {
                            let (query, label) =
                                inner.trim_end_matches(')').rsplit_once(',').unwrap();
                            queries.push(format!("count by ({}) ({query})", label.trim()));
                        }
                    }
                    _ => collect(value, queries),
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| collect(value, queries)),
        _ => {}
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
    let text = read("docs/metrics.md");
    let want = reference();
    let (begin, end) = ("<!-- table -->\n", "<!-- end of the table -->\n");
    let found =
        text.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).map(|(table, _)| table);
    if std::env::var_os("UPDATE").is_some() {
        let (before, rest) = text.split_once(begin).unwrap();
        let (_, after) = rest.split_once(end).unwrap();
        let root = workspace();
        std::fs::write(root.join("docs/metrics.md"), format!("{before}{begin}{want}{end}{after}"))
            .unwrap();
        return;
    }
    assert_eq!(
        found,
        Some(want.as_str()),
        "write it again: UPDATE=1 cargo test -p tessera-suite-agent --test agent the_reference"
    );
}

#[test]
fn queries_are_read_as_prometheus_reads_them() {
    let query = "sum by (le, resource) (rate(a_bucket{x=\"y\",z!~\"a|b\"}[5m])) > 0.5 and on (pod) b offset 5m";
    let named = named(query);
    let names: Vec<&str> = named.selectors.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a_bucket", "b"]);
    assert_eq!(named.labels, ["le", "pod", "resource"].map(str::to_owned).into());
    assert_eq!(named.selectors[0].1[1], ("z".to_owned(), "!~".to_owned(), "a|b".to_owned()));
    // And this test can fail.
    let known = BTreeMap::from([("a".to_owned(), BTreeMap::new())]);
    for wrong in ["b", "a{x=\"y\"}", "sum by (x) (a)"] {
        let held = std::panic::catch_unwind(|| hold("", wrong, &known, &BTreeSet::new()));
        assert!(held.is_err(), "{wrong}");
    }
}
