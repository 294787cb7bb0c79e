use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_cluster::user::objects::{Node, Pod};
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::gpu::{Fit as Room, Gpu, Replicas};
use tessera_view::node::Node as View;

use super::claims::Claim;
use super::{BlockKind, Facts, Fit, Verdict, judge, text};

mod fields;
mod rules;

const OURS: &str = "tessera.dev/gpu";

fn pod(spec: Value) -> Pod {
    let mut whole = json!({
        "metadata": { "name": "chat", "namespace": "team" },
        "spec": { "containers": [{ "name": "main", "resources": { "limits": { OURS: "1" } } }] },
        "status": { "phase": "Pending" },
    });
    merge(&mut whole["spec"], spec);
    serde_json::from_value(whole).unwrap()
}

fn merge(to: &mut Value, from: Value) {
    for (name, value) in from.as_object().cloned().unwrap_or_default() {
        to[name] = value;
    }
}

fn node(name: &str, change: Value) -> Node {
    let mut whole = json!({
        "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
        "spec": {},
        "status": {
            "allocatable": { "cpu": "4", "memory": "16Gi", "pods": "10", OURS: "4" },
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    });
    for (path, value) in change.as_object().cloned().unwrap_or_default() {
        *whole.pointer_mut(&path).unwrap() = value;
    }
    serde_json::from_value(whole).unwrap()
}

fn gpu(held: u32, free: u32) -> Gpu {
    let replicas = Replicas {
        resource_name: OURS.into(),
        count: 4,
        held,
        free,
        memory_limit_bytes: 6 << 30,
        cores_millis: 250,
    };
    let fits = vec![Room {
        resource_name: OURS.into(),
        count: free,
        memory_bytes: 6 << 30,
        cores_millis: 250,
    }];
    Gpu {
        uuid: "GPU-a".into(),
        state: "healthy".into(),
        replicas: vec![replicas],
        fits,
        ..Gpu::default()
    }
}

fn entry(node: &str, gpus: Vec<Gpu>) -> Entry {
    let view = View { node: node.into(), gpus, ..View::default() };
    Entry { node: node.into(), answers: true, view: Some(view), ..Entry::default() }
}

fn facts(pod: Pod, node: Node, gpus: Vec<Gpu>) -> Facts {
    let fleet = Fleet { nodes: vec![entry(&node.metadata.name, gpus)], ..Fleet::default() };
    Facts {
        pod,
        only: BTreeSet::new(),
        nodes: Ok(vec![node]),
        pods: Ok(Vec::new()),
        claims: Vec::new(),
        classes: BTreeMap::new(),
        extended: Ok(BTreeSet::new()),
        fleet,
        fleet_error: None,
    }
}

fn kinds(verdict: &Verdict) -> Vec<BlockKind> {
    verdict.nodes[0].blocks.iter().map(|block| block.kind).collect()
}

#[test]
fn a_pod_that_nothing_keeps_from_a_node_has_room_there() {
    let verdict = judge(&facts(pod(json!({})), node("a", json!({})), vec![gpu(1, 3)]));
    assert_eq!((verdict.nodes[0].fit, kinds(&verdict)), (Fit::Fits, vec![]));
    assert_eq!(verdict.asks, ["1 × tessera.dev/gpu"]);
    assert_eq!(verdict.nodes[0].left, ["3 of 4 × tessera.dev/gpu"]);
    assert!(verdict.nodes[0].largest.contains("3 × tessera.dev/gpu of 6 GiB"), "{verdict:?}");
    let text = text(&verdict);
    assert!(text.contains("1 of 1 nodes have room") && text.contains("a: has room"), "{text}");
}

#[test]
fn each_kind_of_obstacle_is_named() {
    use BlockKind::{
        Affinity, Capacity, Cordon, Health, NoPlugin, NodeCordon, NotReady, Resource, Selector,
        Taint,
    };
    let healthy = || vec![gpu(1, 3)];
    let cordoned = || vec![Gpu { cordon: "by uid 0".into(), ..gpu(1, 0) }];
    let sick = || {
        let why = "XID 79".to_owned();
        vec![Gpu { state: "unhealthy".into(), state_reason: why, ..gpu(1, 0) }]
    };
    let taint =
        json!({ "/spec": { "taints": [{ "key": "k", "value": "v", "effect": "NoSchedule" }] } });
    let soft = json!({ "/spec": { "taints": [{ "key": "k", "effect": "PreferNoSchedule" }] } });
    let away = json!({
        "/status/conditions": [{ "type": "Ready", "status": "Unknown", "message": "gone" }],
        "/spec": { "taints": [{ "key": "node.kubernetes.io/unreachable", "effect": "NoSchedule" }] },
    });
    let closed = json!({ "/spec": { "unschedulable": true } });
    let bare = json!({ "/status/allocatable": { "cpu": "4", "memory": "16Gi", "pods": "10" } });
    let affine = |operator: &str, key: &str| {
        json!({ "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{ "matchExpressions": [{ "key": key, "operator": operator }] }],
        }}}})
    };
    let asks = |resource: &str, amount: &str| json!({ "containers": [{ "resources": { "limits": { OURS: "1", resource: amount } } }] });
    let cases: Vec<(Value, Value, Vec<Gpu>, Vec<BlockKind>)> = vec![
        (json!({}), taint.clone(), healthy(), vec![Taint]),
        (
            json!({ "tolerations": [{ "key": "k", "operator": "Exists" }] }),
            taint.clone(),
            healthy(),
            vec![],
        ),
        (
            json!({ "tolerations": [{ "key": "k", "value": "w" }] }),
            taint.clone(),
            healthy(),
            vec![Taint],
        ),
        (
            json!({ "tolerations": [{ "operator": "Exists", "effect": "NoExecute" }] }),
            taint,
            healthy(),
            vec![Taint],
        ),
        (json!({}), soft, healthy(), vec![]),
        (json!({}), away, healthy(), vec![NotReady, Taint]),
        (json!({}), closed.clone(), healthy(), vec![NodeCordon]),
        (json!({ "tolerations": [{ "operator": "Exists" }] }), closed, healthy(), vec![]),
        (json!({ "nodeSelector": { "disk": "ssd" } }), json!({}), healthy(), vec![Selector]),
        (affine("Exists", "zone"), json!({}), healthy(), vec![Affinity]),
        (affine("DoesNotExist", "zone"), json!({}), healthy(), vec![]),
        (asks("memory", "17Gi"), json!({}), healthy(), vec![Resource]),
        (asks("cpu", "4001m"), json!({}), healthy(), vec![Resource]),
        (asks(OURS, "4"), json!({}), healthy(), vec![Capacity]),
        (asks(OURS, "5"), json!({}), vec![gpu(0, 4)], vec![Capacity]),
        (json!({}), json!({}), cordoned(), vec![Cordon, Capacity]),
        (json!({}), json!({}), sick(), vec![Health, Capacity]),
        (json!({}), bare, healthy(), vec![Capacity]),
        (json!({}), json!({ "/status/allocatable": { "pods": "10" } }), vec![], vec![Capacity]),
    ];
    for (spec, change, gpus, expected) in cases {
        let case = format!("{spec} {change}");
        let verdict = judge(&facts(pod(spec), node("a", change), gpus));
        assert_eq!(kinds(&verdict), expected, "{case}: {verdict:#?}");
        assert_eq!(verdict.nodes[0].fit == Fit::Fits, expected.is_empty(), "{case}");
    }
    let mut elsewhere =
        facts(pod(json!({})), node("b", json!({ "/status/allocatable": { "pods": "9" } })), vec![]);
    elsewhere.fleet.nodes.clear();
    let verdict = judge(&elsewhere);
    assert_eq!(kinds(&verdict), [NoPlugin]);
    assert!(text(&verdict).contains("1 more nodes have no plugin"));
}

#[test]
fn what_other_pods_hold_is_gone_and_what_has_ended_is_not() {
    let other = |phase: &str, node: &str| {
        let mut other = pod(json!({ "nodeName": node }));
        other.metadata.name = "other".into();
        other.status.phase = phase.into();
        other
    };
    let mut known = facts(pod(json!({})), node("a", json!({})), vec![gpu(0, 4)]);
    known.pods = Ok(vec![other("Running", "a"); 3]);
    assert_eq!(judge(&known).nodes[0].fit, Fit::Fits);
    known.pods = Ok(vec![other("Pending", "a"); 4]);
    assert_eq!(kinds(&judge(&known)), [BlockKind::Capacity]);
    known.pods = Ok([vec![other("Succeeded", "a"); 9], vec![other("Running", "b"); 9]].concat());
    assert_eq!(judge(&known).nodes[0].fit, Fit::Fits);
}

#[test]
fn what_may_not_be_read_is_said_and_nothing_is_sure_then() {
    let mut known = facts(pod(json!({})), node("a", json!({})), vec![gpu(1, 3)]);
    known.pods = Err("you may not list pods".into());
    let verdict = judge(&known);
    assert_eq!(verdict.nodes[0].fit, Fit::May);
    assert!(verdict.unread.iter().any(|text| text.contains("you may not list pods")));
    known.nodes = Err("you may not list nodes".into());
    let verdict = judge(&known);
    assert_eq!((verdict.nodes[0].fit, verdict.nodes[0].node.as_str()), (Fit::May, "a"));
    // What the plugin knows is enough to say no.
    known.fleet.nodes = vec![entry("a", vec![gpu(4, 0)])];
    assert_eq!(judge(&known).nodes[0].fit, Fit::Not);
    known.fleet.nodes[0].answers = false;
    known.fleet.nodes[0].error = "it did not answer within 5 s".into();
    let verdict = judge(&known);
    assert_eq!(verdict.nodes[0].fit, Fit::May);
    assert!(verdict.nodes[0].open.iter().any(|text| text.contains("within 5 s")));
}

fn claim(object: Value) -> Claim {
    Claim { name: "gpu".into(), object_name: Some("chat-gpu".into()), object: Ok(Some(object)) }
}

fn claiming(claim: Claim, class: Option<Value>) -> Facts {
    let spec = json!({
        "containers": [{ "name": "main" }],
        "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": "small" }],
    });
    let left =
        Room { resource_name: String::new(), count: 1, memory_bytes: 8 << 30, cores_millis: 500 };
    let gpu = Gpu {
        state: "healthy".into(),
        front_end: "DRA".into(),
        fits: vec![left],
        ..Gpu::default()
    };
    let mut known = facts(pod(spec), node("a", json!({})), vec![gpu]);
    known.claims = vec![claim];
    known.classes = BTreeMap::from([("gpu.tessera.dev".to_owned(), Ok(class))]);
    known
}

fn asking(memory: &str, cores: &str) -> Value {
    json!({ "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": {
        "deviceClassName": "gpu.tessera.dev",
        "capacity": { "requests": { "memory": memory, "cores": cores } },
    }}]}}})
}

fn class() -> Option<Value> {
    Some(
        json!({ "spec": { "selectors": [{ "cel": { "expression": "device.driver == \"gpu.tessera.dev\"" } }] } }),
    )
}

#[test]
fn a_claim_is_judged_by_size_place_and_class() {
    let verdict = |object: Value| judge(&claiming(claim(object), class()));
    let fits = verdict(asking("8Gi", "50"));
    assert_eq!((fits.nodes[0].fit, kinds(&fits)), (Fit::May, vec![]), "selectors are not judged");
    assert_eq!(fits.asks, ["claim \"gpu\": 8 GiB and 50% of a GPU of gpu.tessera.dev"]);
    for (memory, cores) in [("8193Mi", "50"), ("1Gi", "51")] {
        assert_eq!(kinds(&verdict(asking(memory, cores))), [BlockKind::Capacity]);
    }
    let allocated = |node: &str| {
        let mut object = asking("8Gi", "50");
        object["status"]["allocation"] = json!({ "nodeSelector": { "nodeSelectorTerms": [{
            "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [node] }],
        }]}});
        object
    };
    assert_eq!(kinds(&verdict(allocated("b"))), [BlockKind::Claim]);
    assert_eq!(verdict(allocated("a")).nodes[0].fit, Fit::Fits);
    let everywhere = |facts: &Facts| {
        let verdict = judge(facts);
        assert_eq!(verdict.nodes[0].fit, Fit::Not);
        verdict.blocks[0].clone()
    };
    let missing = everywhere(&claiming(claim(asking("1Gi", "1")), None));
    assert_eq!(missing.kind, BlockKind::Class);
    assert!(missing.text.contains("dra.deviceClasses"), "{}", missing.text);
    let unmade = Claim { object_name: None, object: Ok(None), ..claim(json!({})) };
    let unmade = everywhere(&claiming(unmade, class()));
    assert!(unmade.text.contains("template small"), "{}", unmade.text);
    assert!(unmade.text.contains("ResourceQuota"), "{}", unmade.text);
    let gone = Claim { object: Ok(None), ..claim(json!({})) };
    assert!(everywhere(&claiming(gone, class())).text.contains("there is no claim team/chat-gpu"));
}

/// GPUs that are claimed, each with so much left, and what a claim gets that states no size.
fn claimed(left: &[(u64, u32)]) -> Vec<Gpu> {
    let gpu = |(index, (memory_bytes, cores_millis)): (usize, &(u64, u32))| {
        let (memory_bytes, cores_millis) = (*memory_bytes, *cores_millis);
        let no_room = if cores_millis == 0 { "GPU time" } else { "" };
        let left = Room { resource_name: String::new(), count: 1, memory_bytes, cores_millis };
        Gpu {
            index: u32::try_from(index).unwrap(),
            state: "healthy".into(),
            front_end: "DRA".into(),
            left_memory_bytes: memory_bytes,
            left_cores_millis: cores_millis,
            no_room: no_room.into(),
            default_memory_bytes: 2 << 30,
            default_cores_millis: 250,
            fits: if no_room.is_empty() { vec![left] } else { Vec::new() },
            ..Gpu::default()
        }
    };
    left.iter().enumerate().map(gpu).collect()
}

fn capacity(verdict: &Verdict) -> Vec<&str> {
    let blocks = verdict.nodes[0].blocks.iter();
    blocks.filter(|one| one.kind == BlockKind::Capacity).map(|one| &*one.text).collect()
}

#[test]
fn a_gpu_whose_time_is_sold_out_has_no_room_and_what_is_missing_is_said() {
    let mut known = claiming(claim(asking("1Gi", "10")), class());
    known.fleet.nodes = vec![entry("a", claimed(&[(3 << 30, 0), (1 << 29, 500)]))];
    let verdict = judge(&known);
    assert_eq!(
        capacity(&verdict),
        [
            "claim chat-gpu asks for 1 GiB and 10% of a GPU: too little GPU time on GPU 0; too little memory on GPU 1"
        ]
    );
    // A claim that states no size gets one replica's share, and needs room for it.
    let mut known = claiming(
        claim(json!({ "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": {
            "deviceClassName": "gpu.tessera.dev",
        }}]}}})),
        class(),
    );
    known.fleet.nodes = vec![entry("a", claimed(&[(3 << 30, 100)]))];
    let verdict = judge(&known);
    assert_eq!(
        capacity(&verdict),
        ["claim chat-gpu asks for one share: too little GPU time on GPU 0"]
    );
    known.fleet.nodes = vec![entry("a", claimed(&[(3 << 30, 0)]))];
    assert_eq!(judge(&known).nodes[0].largest, "nothing: too little GPU time on GPU 0");
}

#[test]
fn shares_by_claims_are_each_of_another_gpu_and_rights_that_lack_are_no_lack_of_room() {
    let asks =
        json!({ "containers": [{ "name": "main", "resources": { "limits": { OURS: "3" } } }] });
    let bare = node("a", json!({ "/status/allocatable": { "pods": "110" } }));
    let mut known = facts(pod(asks), bare, claimed(&[(3 << 30, 500), (3 << 30, 500)]));
    known.extended = Ok(BTreeSet::from([OURS.to_owned()]));
    assert_eq!(
        capacity(&judge(&known)),
        [
            "tessera.dev/gpu: asks 3 by claims, each of another GPU: 2 GPUs could give one share each"
        ]
    );
    // Who may read neither nodes nor device classes: there is room, and that is what cannot be read.
    known.pod = pod(json!({}));
    known.nodes = Err("you may not list nodes".into());
    known.extended = Err("you may not list deviceclasses".into());
    let verdict = judge(&known);
    assert_eq!((verdict.nodes[0].fit, kinds(&verdict)), (Fit::May, vec![]));
    let open = verdict.nodes[0].open.join("; ");
    assert!(open.contains("you may not list deviceclasses"), "{open}");
}

#[test]
fn a_pod_that_does_not_wait_for_us_is_said_to_be_so() {
    let known = |pod: Pod| facts(pod, node("a", json!({})), vec![gpu(0, 4)]);
    let bound = judge(&known(pod(json!({ "nodeName": "a" }))));
    assert!(!bound.waits && bound.state.contains("has node a"), "{}", bound.state);
    let mut stuck = pod(json!({ "nodeName": "a" }));
    stuck.status.phase = "Running".into();
    stuck.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".into());
    let stuck = judge(&known(stuck)).state;
    assert!(stuck.contains("is being deleted") && !stuck.contains("Running"), "{stuck}");
    let plain = judge(&known(pod(json!({ "containers": [{ "name": "main" }] }))));
    assert!(!plain.waits && plain.state.contains("no resource and no claim of Tessera"));
    let mut ended = pod(json!({}));
    ended.status.phase = "Failed".into();
    assert!(judge(&known(ended)).state.contains("has ended"));
    let gated = judge(&known(pod(json!({ "schedulingGates": [{ "name": "quota" }] }))));
    assert_eq!((gated.blocks[0].kind, gated.nodes[0].fit), (BlockKind::Gate, Fit::Not));
}

#[test]
fn hostile_words_change_nothing_and_lines_stay_narrow() {
    let evil = "\u{1b}[2J<script>\n".repeat(60);
    let mut known = facts(
        pod(json!({})),
        node("a", json!({})),
        vec![Gpu { cordon: evil.clone(), ..gpu(4, 0) }],
    );
    known.pod.status.conditions.push(tessera_cluster::user::objects::Condition {
        kind: "PodScheduled".into(),
        status: "False".into(),
        reason: String::new(),
        message: format!("0/3 nodes are available: {evil} {}", "x".repeat(500)),
    });
    let text = text(&judge(&known));
    assert!(!text.contains('\u{1b}'), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
}

/// The scheduler's rules, as its documentation has them: an independent reading, with plain numbers.
#[derive(Clone, Debug)]
struct Model {
    asks: u64,
    cpu: u64,
    allocatable: u64,
    cpus: u64,
    slots: u64,
    others: Vec<(u64, u64)>,
    taint: Option<u8>,
    tolerates: Option<u8>,
    label: Option<u8>,
    wants: Option<u8>,
    not_in: Option<u8>,
    ready: bool,
    cordoned: bool,
    free: u32,
}

impl Model {
    fn places(&self) -> bool {
        let ours: u64 = self.others.iter().map(|(ours, _)| ours).sum();
        let cpu: u64 = self.others.iter().map(|(_, cpu)| cpu).sum();
        let room = ours + self.asks <= self.allocatable
            && cpu + self.cpu <= self.cpus
            && u64::try_from(self.others.len()).unwrap() < self.slots;
        let taints = self.taint.is_none() || self.taint == self.tolerates;
        let selected = self.wants.is_none() || self.wants == self.label;
        let affine = self.not_in.is_none() || self.not_in != self.label;
        room && taints && selected && affine && !self.cordoned
    }

    fn facts(&self) -> Facts {
        let value = |value: u8| format!("v{value}");
        let asks = |ours: u64, cpu: u64| json!([{ "name": "main", "resources": { "requests": { OURS: ours.to_string(), "cpu": format!("{cpu}m") } } }]);
        let mut spec = json!({ "containers": asks(self.asks, self.cpu) });
        if let Some(tolerated) = self.tolerates {
            spec["tolerations"] =
                json!([{ "key": "k", "value": value(tolerated), "effect": "NoSchedule" }]);
        }
        if let Some(wanted) = self.wants {
            spec["nodeSelector"] = json!({ "label": value(wanted) });
        }
        if let Some(refused) = self.not_in {
            spec["affinity"] = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{ "matchExpressions": [
                    { "key": "label", "operator": "NotIn", "values": [value(refused)] },
                ]}],
            }}});
        }
        let mut change = json!({
            "/status/allocatable": {
                OURS: self.allocatable.to_string(),
                "cpu": format!("{}m", self.cpus),
                "pods": self.slots.to_string(),
            },
            "/status/conditions": [{ "type": "Ready", "status": if self.ready { "True" } else { "False" } }],
        });
        let mut node_spec = json!({ "unschedulable": self.cordoned });
        if let Some(taint) = self.taint {
            node_spec["taints"] =
                json!([{ "key": "k", "value": value(taint), "effect": "NoSchedule" }]);
        }
        change["/spec"] = node_spec;
        if let Some(label) = self.label {
            change["/metadata/labels"] = json!({ "label": value(label) });
        }
        let mut known = facts(pod(spec), node("a", change), vec![gpu(0, self.free)]);
        let other = |(ours, cpu): &(u64, u64)| {
            let mut other = pod(json!({ "nodeName": "a", "containers": asks(*ours, *cpu) }));
            other.metadata.name = "other".into();
            other.status.phase = "Running".into();
            other
        };
        known.pods = Ok(self.others.iter().map(other).collect());
        known
    }
}

fn models() -> impl Strategy<Value = Model> {
    let few = || proptest::option::of(0u8..3);
    let numbers = (1u64..5, 0u64..3000, 0u64..9, 0u64..5000, 0u64..5);
    let others = proptest::collection::vec((0u64..3, 0u64..1500), 0..4);
    let words = (few(), few(), few(), few(), few());
    let flags = (proptest::bool::weighted(0.9), proptest::bool::weighted(0.1), 0u32..9);
    (numbers, others, words, flags).prop_map(|(numbers, others, words, flags)| {
        let (asks, cpu, allocatable, cpus, slots) = numbers;
        let (taint, tolerates, label, wants, not_in) = words;
        let (ready, cordoned, free) = flags;
        Model {
            asks,
            cpu,
            allocatable,
            cpus,
            slots,
            others,
            taint,
            tolerates,
            label,
            wants,
            not_in,
            ready,
            cordoned,
            free,
        }
    })
}

proptest! {
    /// Where it says that a node has room, the scheduler would place the pod there and the plugin has the shares;
    /// and where both would, it says so.
    #[test]
    fn it_says_room_exactly_where_the_scheduler_and_the_plugin_have_it(model in models()) {
        let verdict = judge(&model.facts());
        let would = model.places() && u64::from(model.free) >= model.asks;
        // A node without a taint is open to the scheduler, ready or not; the pod would wait there.
        let expected = match (would, model.ready) {
            (true, true) => Fit::Fits,
            (true, false) => Fit::May,
            (false, _) => Fit::Not,
        };
        prop_assert_eq!(verdict.nodes[0].fit, expected, "{:#?}", verdict);
    }

    /// With less to read, it never becomes surer.
    #[test]
    fn less_knowledge_never_makes_room(model in models(), hides in 0..3) {
        let mut known = model.facts();
        match hides {
            0 => known.pods = Err("forbidden".into()),
            1 => known.nodes = Err("forbidden".into()),
            _ => known.fleet.nodes[0].answers = false,
        }
        let verdict = judge(&known);
        prop_assert_ne!(verdict.nodes[0].fit, Fit::Fits, "{:#?}", verdict);
    }
}
