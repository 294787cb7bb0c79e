//! Rules of the scheduler on taints, other pods and device classes, case by case.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tessera_cluster::user::objects::Pod;

use super::{OURS, entry, facts, gpu, kinds, node, pod};
use crate::pending::{BlockKind, Facts, Fit, claims, judge};

fn on_tainted(tolerations: Value, taint: Value) -> Facts {
    let tainted = json!({ "/spec": { "taints": [taint] } });
    facts(pod(json!({ "tolerations": tolerations })), node("a", tainted), vec![gpu(0, 4)])
}

fn is_open(facts: &Facts, words: &str) {
    let verdict = judge(facts);
    let one = &verdict.nodes[0];
    assert_eq!((one.fit, kinds(&verdict)), (Fit::May, vec![]), "{verdict:#?}");
    assert!(one.open.iter().any(|text| text.contains(words)), "{words}: {:?}", one.open);
}

/// Another pod that has started on node `a`.
fn other(spec: Value) -> Pod {
    let mut other = pod(json!({ "nodeName": "a", "containers": [{ "name": "main" }] }));
    let whole = pod(spec);
    other.spec.affinity = whole.spec.affinity;
    other.spec.init_containers = whole.spec.init_containers;
    other.metadata.name = "other".into();
    other.status.phase = "Running".into();
    other
}

fn beside(mine: Value, others: Vec<Pod>) -> Facts {
    let zone = json!({ "/metadata/labels": { "zone": "z" } });
    let mut known = facts(pod(mine), node("a", zone), vec![gpu(0, 4)]);
    known.pods = Ok(others);
    known
}

#[test]
fn a_node_that_is_not_ready_is_open_where_no_taint_keeps_the_pod_away() {
    let away = json!({
        "/status/conditions": [{ "type": "Ready", "status": "False", "message": "gone" }],
        "/spec": { "taints": [{ "key": "node.kubernetes.io/not-ready", "effect": "NoSchedule" }] },
    });
    let all = json!({ "tolerations": [{ "operator": "Exists" }] });
    is_open(&facts(pod(all), node("a", away), vec![gpu(0, 4)]), "kubelet is not ready: gone");
}

#[test]
fn what_an_operator_of_another_version_means_is_open() {
    let taint = || json!({ "key": "k", "value": "5", "effect": "NoSchedule" });
    let toleration =
        |operator: &str, value: &str| json!([{ "key": "k", "operator": operator, "value": value }]);
    is_open(&on_tainted(toleration("Gt", "4"), taint()), "whether it tolerates k=5:NoSchedule");
    is_open(&on_tainted(toleration("Near", "4"), taint()), "whether it tolerates k=5:NoSchedule");
    is_open(
        &on_tainted(json!([]), json!({ "key": "k", "effect": "Tomorrow" })),
        "whether it tolerates k:Tomorrow",
    );
    for (operator, value) in [("Gt", "5"), ("Lt", "5"), ("Gt", "x"), ("Equal", "4")] {
        let verdict = judge(&on_tainted(toleration(operator, value), taint()));
        assert_eq!(kinds(&verdict), [BlockKind::Taint], "{operator} {value}");
    }
}

#[test]
fn a_pod_that_is_being_deleted_does_not_wait() {
    let mut gone = pod(json!({}));
    gone.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
    let verdict = judge(&facts(gone, node("a", json!({})), vec![gpu(0, 4)]));
    assert!(!verdict.waits && verdict.nodes.is_empty());
    assert!(verdict.state.contains("is being deleted"), "{}", verdict.state);
}

#[test]
fn the_nodes_that_are_asked_about_are_the_only_ones_judged() {
    let mut known = facts(pod(json!({})), node("a", json!({})), vec![gpu(0, 4)]);
    known.nodes = Ok(vec![node("a", json!({})), node("b", json!({}))]);
    known.only = BTreeSet::from(["a".to_owned()]);
    let verdict = judge(&known);
    let names: Vec<&str> = verdict.nodes.iter().map(|one| one.node.as_str()).collect();
    assert_eq!(names, ["a"]);
}

#[test]
fn anti_affinity_of_other_pods_counts() {
    let keeps = |term: Value| {
        let rules = json!({ "requiredDuringSchedulingIgnoredDuringExecution": [term] });
        vec![other(json!({ "affinity": { "podAntiAffinity": rules } }))]
    };
    let verdict = |term: Value| judge(&beside(json!({}), keeps(term)));
    let all = verdict(json!({ "topologyKey": "zone", "labelSelector": {} }));
    assert_eq!(kinds(&all), [BlockKind::PodAffinity]);
    assert!(all.nodes[0].blocks[0].text.contains("team/other (zone=z)"), "{all:#?}");
    let harmless = [
        json!({ "topologyKey": "zone" }),
        json!({ "topologyKey": "rack", "labelSelector": {} }),
        json!({ "topologyKey": "zone", "labelSelector": { "matchLabels": { "app": "x" } } }),
        json!({ "topologyKey": "zone", "labelSelector": {}, "namespaces": ["elsewhere"] }),
    ];
    for term in harmless {
        assert_eq!(verdict(term.clone()).nodes[0].fit, Fit::Fits, "{term}");
    }
    let labelled = json!({
        "topologyKey": "zone",
        "labelSelector": {},
        "namespaceSelector": { "matchLabels": { "team": "a" } },
    });
    is_open(&beside(json!({}), keeps(labelled)), "anti-affinity of pod team/other");
}

#[test]
fn host_ports_count_as_the_scheduler_counts_them() {
    let port =
        |port: Value| json!([{ "name": "side", "restartPolicy": "Always", "ports": [port] }]);
    let mine = |mine: Value| {
        let taken = other(json!({ "initContainers": port(json!({ "hostPort": 80 })) }));
        judge(&beside(json!({ "initContainers": port(mine) }), vec![taken]))
    };
    assert_eq!(kinds(&mine(json!({ "hostPort": 80 }))), [BlockKind::HostPort]);
    assert_eq!(
        kinds(&mine(json!({ "hostPort": 80, "hostIP": "10.0.0.1" }))),
        [BlockKind::HostPort]
    );
    assert_eq!(mine(json!({ "hostPort": 80, "protocol": "UDP" })).nodes[0].fit, Fit::Fits);
    assert_eq!(mine(json!({ "hostPort": 81 })).nodes[0].fit, Fit::Fits);
    let mut unread = beside(json!({ "initContainers": port(json!({ "hostPort": 80 })) }), vec![]);
    unread.pods = Err("forbidden".into());
    is_open(&unread, "which host ports other pods have");
}

#[test]
fn room_that_is_kept_for_a_nominated_pod_is_gone() {
    let nominated = |priority: i32| {
        let mut one = pod(json!({ "priority": priority }));
        one.spec.containers[0].resources.limits.insert(OURS.into(), "4".into());
        one.metadata.name = "first".into();
        one.status.nominated_node_name = "a".into();
        judge(&beside(json!({ "priority": 5 }), vec![one])).nodes[0].fit
    };
    assert_eq!((nominated(4), nominated(5)), (Fit::Fits, Fit::Not));
}

#[test]
fn resources_that_claims_serve_are_open_where_no_plugin_offers_them() {
    let classes = [
        json!({ "metadata": { "name": "one" }, "spec": { "extendedResourceName": "example.com/gpu" } }),
        json!({ "metadata": { "name": "two" }, "spec": {} }),
    ];
    let names = claims::extended(&classes);
    let expected = [
        "deviceclass.resource.kubernetes.io/one",
        "deviceclass.resource.kubernetes.io/two",
        "example.com/gpu",
    ];
    assert_eq!(names.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    let asks = json!({ "containers": [{ "resources": { "limits": { OURS: "1", "example.com/gpu": "1" } } }] });
    let mut known = facts(pod(asks), node("a", json!({})), vec![gpu(0, 4)]);
    assert_eq!(kinds(&judge(&known)), [BlockKind::Resource]);
    known.extended = Ok(names);
    is_open(&known, "claims may serve it, which is not judged");
    known.extended = Err("you may not list device classes".into());
    is_open(&known, "not known: you may not list device classes");
}

#[test]
fn a_node_whose_plugin_says_nothing_is_open() {
    let mut known = facts(pod(json!({})), node("a", json!({})), vec![gpu(0, 4)]);
    known.fleet.nodes = vec![entry("b", vec![gpu(0, 4)])];
    is_open(&known, "no pod of the plugin runs on it");
    known.fleet_error = Some("you may not list pods".into());
    is_open(&known, "its plugin could not be asked");
}
