//! Fields of a pod that no rule here judges. Each starts from a pod that fits.

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};

use super::{OURS, facts, gpu, node};
use crate::pending::{Fit, judge};

/// A change of a pod: where, and what is set there, or added to the list there.
type Change = (&'static str, Value);

/// A pod that fits, with all lists that a change may be about.
fn plain() -> Value {
    json!({
        "metadata": { "name": "chat", "namespace": "team" },
        "spec": {
            "containers": [{ "name": "main", "resources": { "limits": { OURS: "1" } } }],
            "initContainers": [{ "name": "first" }],
            "tolerations": [{ "key": "k", "operator": "Exists" }],
            "volumes": [],
            "affinity": { "nodeAffinity": {}, "podAffinity": {}, "podAntiAffinity": {} },
        },
        "status": { "phase": "Pending" },
    })
}

fn fit(changes: &[Change]) -> Fit {
    let mut pod = plain();
    for (place, value) in changes {
        let (parent, key) = place.rsplit_once('/').unwrap();
        match pod.pointer_mut(place) {
            Some(Value::Array(list)) => list.push(value.clone()),
            _ => pod.pointer_mut(parent).unwrap()[key] = value.clone(),
        }
    }
    // The node has the taint that the pod tolerates, so the toleration counts.
    let tainted = json!({ "/spec": { "taints": [{ "key": "k", "effect": "NoSchedule" }] } });
    let pod = serde_json::from_value(pod).unwrap();
    judge(&facts(pod, node("a", tainted), vec![gpu(0, 4)])).nodes[0].fit
}

/// What the scheduler's filters do not read.
fn harmless() -> Vec<Change> {
    let volume = |kind: &str| ("/spec/volumes", json!({ "name": kind, kind: {} }));
    vec![
        ("/spec/activeDeadlineSeconds", json!(60)),
        ("/spec/dnsConfig", json!({ "options": [] })),
        ("/spec/priorityClassName", json!("high")),
        ("/spec/restartPolicy", json!("Always")),
        ("/spec/securityContext", json!({ "runAsUser": 1000 })),
        ("/spec/serviceAccountName", json!("chat")),
        ("/spec/hostNetwork", json!(true)),
        ("/spec/topologySpreadConstraints", json!([{ "whenUnsatisfiable": "ScheduleAnyway" }])),
        ("/spec/containers/0/image", json!("chat:1")),
        ("/spec/containers/0/env", json!([{ "name": "A", "value": "b" }])),
        ("/spec/containers/0/ports", json!([{ "containerPort": 80 }])),
        ("/spec/containers/0/readinessProbe", json!({ "httpGet": { "port": 80 } })),
        ("/spec/initContainers/0/command", json!(["true"])),
        ("/spec/tolerations/0/tolerationSeconds", json!(300)),
        (
            "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution",
            json!([{ "weight": 1, "preference": {} }]),
        ),
        (
            "/spec/affinity/podAntiAffinity/preferredDuringSchedulingIgnoredDuringExecution",
            json!([{ "weight": 1, "podAffinityTerm": { "topologyKey": "zone" } }]),
        ),
        volume("configMap"),
        volume("emptyDir"),
        volume("hostPath"),
        volume("projected"),
        volume("secret"),
    ]
}

/// What a filter of the scheduler reads, and this program does not.
fn unjudged() -> Vec<Change> {
    let volume = |kind: &str| ("/spec/volumes", json!({ "name": kind, kind: {} }));
    let near = json!([{ "topologyKey": "zone", "labelSelector": {} }]);
    let affine = |requirement: Value| {
        let terms = json!({ "nodeSelectorTerms": [{ "matchExpressions": [requirement] }] });
        ("/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution", terms)
    };
    vec![
        ("/spec/volumes", json!({ "name": "data", "persistentVolumeClaim": { "claimName": "d" } })),
        volume("ephemeral"),
        volume("awsElasticBlockStore"),
        volume("gcePersistentDisk"),
        volume("iscsi"),
        volume("rbd"),
        ("/spec/schedulerName", json!("another")),
        ("/spec/topologySpreadConstraints", json!([{ "whenUnsatisfiable": "DoNotSchedule" }])),
        ("/spec/affinity/podAffinity/requiredDuringSchedulingIgnoredDuringExecution", near.clone()),
        ("/spec/affinity/podAntiAffinity/requiredDuringSchedulingIgnoredDuringExecution", near),
        affine(json!({ "key": "zone", "operator": "Near", "values": ["a"] })),
        ("/spec/tolerations/0/operator", json!("Like")),
        ("/spec/containers/0/restartPolicyRules", json!([{ "action": "RestartAllContainers" }])),
    ]
}

/// Objects that get fields which this program has never heard of.
const PLACES: [&str; 8] = [
    "/spec",
    "/spec/containers/0",
    "/spec/initContainers/0",
    "/spec/tolerations/0",
    "/spec/affinity",
    "/spec/affinity/nodeAffinity",
    "/spec/affinity/podAffinity",
    "/spec/affinity/podAntiAffinity",
];

fn some_harmless() -> impl Strategy<Value = Vec<Change>> {
    let all = harmless();
    let most = all.len();
    subsequence(all, 0..=most)
}

#[test]
fn each_harmless_field_keeps_the_room_and_each_unjudged_one_leaves_it_open() {
    assert_eq!(fit(&[]), Fit::Fits);
    for change in harmless() {
        assert_eq!(fit(std::slice::from_ref(&change)), Fit::Fits, "{change:?}");
    }
    for change in unjudged() {
        assert_eq!(fit(std::slice::from_ref(&change)), Fit::May, "{change:?}");
    }
}

proptest! {
    #[test]
    fn harmless_fields_keep_the_room(changes in some_harmless()) {
        prop_assert_eq!(fit(&changes), Fit::Fits);
    }

    #[test]
    fn an_unjudged_rule_is_never_room(mut changes in some_harmless(), one in select(unjudged())) {
        // The later change of a place is the one that holds.
        changes.push(one);
        prop_assert_ne!(fit(&changes), Fit::Fits, "{:?}", changes);
    }

    #[test]
    fn a_field_of_tomorrow_is_never_room(
        changes in some_harmless(),
        place in select(&PLACES[..]),
        name in "new[A-Z][a-z]{1,8}",
        value in select(vec![json!(true), json!("a"), json!({}), json!([{}])]),
    ) {
        let place: &'static str = Box::leak(format!("{place}/{name}").into_boxed_str());
        let changes = [changes, vec![(place, value)]].concat();
        prop_assert_ne!(fit(&changes), Fit::Fits, "{:?}", changes);
    }

    #[test]
    fn a_volume_of_tomorrow_is_never_room(changes in some_harmless(), kind in "new[A-Z][a-z]{1,8}") {
        let volume = json!({ "name": "data", kind.as_str(): {} });
        let changes = [changes, vec![("/spec/volumes", volume)]].concat();
        prop_assert_ne!(fit(&changes), Fit::Fits, "{:?}", changes);
    }
}
