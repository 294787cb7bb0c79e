//! Why a pod waits: the scheduler's own sentence, and beside it what only the plugins know, of each node: what is left of
//! what the pod asks, the largest that fits, and GPUs that are cordoned or sick. No rule of the scheduler is applied here.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;
use tessera_cluster::user::objects::{Container, Event, Pod};
use tessera_cluster::{ApiError, Failure};
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_rules::shares::FrontEnd;
use tessera_view::API_VERSION;
use tessera_view::fleet::{self, Entry};
use tessera_view::gpu::{Fit, Gpu, Replicas};
use tessera_view::node::Node as View;

use crate::ask::AskError;
use crate::fleet::Fleet;
use crate::places;

/// Why a pod waits, or that it does not.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pending {
    /// [`API_VERSION`].
    pub api_version: String,
    /// `namespace/name`.
    pub pod: String,
    /// Where it is, in a sentence.
    pub state: String,
    /// It waits for a node, and asks for something of ours.
    pub waits: bool,
    /// What it asks of ours: resources with their number, claims.
    pub asks: Vec<String>,
    /// The message of its condition `PodScheduled`; empty without one.
    pub scheduler_says: String,
    /// The newest event `FailedScheduling`.
    pub event: Option<Said>,
    /// Nodes with the plugin; those with room first.
    pub nodes: Vec<NodeRoom>,
    /// What could not be read.
    pub unread: Vec<String>,
}

/// An event's message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Said {
    pub message: String,
    pub times: u64,
    /// RFC 3339; empty where it is not known.
    pub last: String,
}

impl From<Event> for Said {
    fn from(event: Event) -> Self {
        let last = event.last_at().to_owned();
        let series = event.series.and_then(|series| series.count);
        let times = series.or(event.count).unwrap_or(1).max(1);
        Said { message: event.message, times, last }
    }
}

/// Reads all that concerns a pod, with the user's own rights. `None` where there is no such pod.
pub async fn pending(
    fleet: &Fleet,
    namespace: &str,
    name: &str,
) -> Result<Option<Pending>, AskError> {
    let user = fleet.user();
    let Some(pod) = user.pod(namespace, name).await? else {
        return Ok(None);
    };
    let mut unread = Vec::new();
    let (gathered, events) = tokio::join!(fleet.gather(), user.unscheduled(namespace, name));
    let known = gathered.unwrap_or_else(|error| {
        unread.push(format!("the plugins: {error}"));
        fleet.known()
    });
    let event = events.unwrap_or_else(|error| {
        unread.push(format!("the scheduler's events: {}", words(&error)));
        None
    });
    let mut asks = asked(&pod, &known);
    for claim in &pod.spec.resource_claims {
        let made = pod.status.resource_claim_statuses.iter().find(|one| one.name == claim.name);
        let made = made.and_then(|status| status.resource_claim_name.clone());
        let Some(object_name) = claim.resource_claim_name.clone().or(made) else {
            let of = claim.resource_claim_template_name.as_deref().unwrap_or_default();
            asks.push(Ask::Claim(format!("claim \"{}\", not made of {of} yet", claim.name)));
            continue;
        };
        let object = match user.claim(namespace, &object_name).await {
            Ok(Some(object)) => object,
            Ok(None) => {
                asks.push(Ask::Claim(format!("claim {object_name}, which does not exist")));
                continue;
            }
            Err(error) => {
                unread.push(format!("the claim {object_name}: {}", words(&error)));
                asks.push(Ask::Claim(format!("claim {object_name}")));
                continue;
            }
        };
        for name in classes(&object) {
            // A class that cannot be read goes by its name.
            let class = user.device_class(name).await.unwrap_or_default();
            if is_ours(name, class.as_ref()) {
                asks.push(Ask::Claim(format!("claim {object_name}")));
                break;
            }
        }
    }
    Ok(Some(answer(&pod, &asks, &known, event.map(Said::from), unread)))
}

fn answer(
    pod: &Pod,
    asks: &[Ask],
    known: &fleet::Fleet,
    event: Option<Said>,
    unread: Vec<String>,
) -> Pending {
    let condition = pod.status.conditions.iter().find(|one| one.kind == "PodScheduled");
    let condition = condition.filter(|one| one.status != "True");
    let mut pending = Pending {
        api_version: API_VERSION.to_owned(),
        pod: format!("{}/{}", pod.metadata.namespace, pod.metadata.name),
        state: state(pod, asks.is_empty()),
        waits: pod.spec.node_name.is_empty()
            && !has_ended(pod)
            && !is_deleted(pod)
            && !asks.is_empty(),
        asks: asks.iter().map(Ask::words).collect(),
        unread,
        ..Pending::default()
    };
    if pending.waits {
        pending.scheduler_says = condition.map(|one| one.message.clone()).unwrap_or_default();
        pending.event = event;
        pending.nodes = known.nodes.iter().map(|entry| room(entry, asks)).collect();
        // Those with room, then those of which it is not known.
        pending.nodes.sort_by_key(|node| match node.has_room {
            Some(true) => 0,
            None => 1,
            Some(false) => 2,
        });
    }
    pending
}

/// What a pod asks of our resources: its containers together, or an init container that asks more.
fn asked(pod: &Pod, known: &fleet::Fleet) -> Vec<Ask> {
    let ours = resources(known);
    let of = |container: &Container| -> BTreeMap<String, u64> {
        let limits = container.resources.limits.iter();
        let ours =
            limits.filter(|(name, _)| name.starts_with(DOMAIN) || ours.contains(name.as_str()));
        ours.filter_map(|(name, count)| Some((name.clone(), count.parse().ok()?))).collect()
    };
    let mut all: BTreeMap<String, u64> = BTreeMap::new();
    for (name, count) in pod.spec.containers.iter().flat_map(of) {
        let sum = all.entry(name).or_default();
        *sum = sum.saturating_add(count);
    }
    for (name, count) in pod.spec.init_containers.iter().flat_map(of) {
        let most = all.entry(name).or_default();
        *most = (*most).max(count);
    }
    all.retain(|_, count| *count > 0);
    all.into_iter().map(|(name, count)| Ask::Resource(name, count)).collect()
}

fn is_deleted(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}

fn state(pod: &Pod, asks_nothing: bool) -> String {
    let (status, node) = (&pod.status, pod.spec.node_name.as_str());
    let deleted = if is_deleted(pod) { ", and it is being deleted" } else { "" };
    if node.is_empty() && !has_ended(pod) {
        let asks =
            if asks_nothing { ", and asks for no resource and no claim of Tessera" } else { "" };
        return format!("it waits for a node{asks}{deleted}");
    }
    let on = if node.is_empty() { String::new() } else { format!(" on node {node}") };
    let why = places::why(pod);
    format!(
        "it waits for no node: it is {}{on}{why}{deleted}; see `kubectl describe pod`",
        status.phase
    )
}

fn words(error: &ApiError) -> String {
    match error.failure {
        Failure::Forbidden => format!("you may not {}", error.call),
        _ => error.to_string(),
    }
}

/// The domain of our driver's classes.
const CLASSES: &str = "tessera.dev";
/// The domain of resources that a plugin sells if its configuration names none.
const DOMAIN: &str = "tessera.dev/";

/// A node with the plugin, for a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeRoom {
    pub node: String,
    /// Whether its GPUs have what the pod asks; absent where that is not known: a claim is the scheduler's affair.
    pub has_room: Option<bool>,
    /// What is left of what the pod asks, in words.
    pub left: Vec<String>,
    /// The largest share that fits now, in words.
    pub largest: String,
    /// GPUs that are cordoned or not healthy, and why.
    pub amiss: Vec<String>,
    /// Why its plugin does not answer; empty where it does.
    pub error: String,
}

/// Something of ours that a pod asks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ask {
    /// So many of a resource.
    Resource(String, u64),
    /// A claim, in words.
    Claim(String),
}

impl Ask {
    fn words(&self) -> String {
        match self {
            Ask::Resource(name, count) => format!("{count} × {name}"),
            Ask::Claim(words) => words.clone(),
        }
    }
}

/// Device classes that a claim names.
fn classes(claim: &Value) -> BTreeSet<&str> {
    fn ways(request: &Value) -> Vec<&Value> {
        match request["firstAvailable"].as_array() {
            Some(ways) => ways.iter().collect(),
            // v1 has one more level than v1beta1.
            None => vec![request.get("exactly").unwrap_or(request)],
        }
    }
    let requests = claim["spec"]["devices"]["requests"].as_array();
    let ways = requests.into_iter().flatten().flat_map(ways);
    ways.filter_map(|way| way["deviceClassName"].as_str()).collect()
}

/// Whether a device class is of our driver, by its selectors or else its name.
fn is_ours(name: &str, class: Option<&Value>) -> bool {
    class.map_or_else(|| name.ends_with(CLASSES), |class| class.to_string().contains(CLASSES))
}

/// Names of resources that the plugins sell.
fn resources(known: &fleet::Fleet) -> BTreeSet<&str> {
    let views = known.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let names = views.flat_map(|view| {
        let cut = view.gpus.iter().flat_map(|gpu| &gpu.replicas).map(|one| &one.resource_name);
        view.plugin.resources.iter().chain(cut)
    });
    names.map(String::as_str).filter(|name| !name.is_empty()).collect()
}

/// What the GPUs of a node have of it.
fn room(entry: &Entry, asks: &[Ask]) -> NodeRoom {
    let mut node = NodeRoom { node: entry.node.clone(), ..NodeRoom::default() };
    let Some(view) = entry.view.as_ref().filter(|_| entry.answers) else {
        node.error.clone_from(&entry.error);
        return node;
    };
    let (mut lacks, mut claims) = (false, false);
    for ask in asks {
        let Ask::Resource(name, count) = ask else {
            claims = true;
            continue;
        };
        let replicas = view.gpus.iter().flat_map(|gpu| &gpu.replicas);
        let replicas: Vec<&Replicas> = replicas.filter(|one| one.resource_name == *name).collect();
        if replicas.is_empty() && in_service(view).next().is_some() {
            // Each is a claim on one share of the default size.
            claims = true;
            continue;
        }
        let sum = |figure: fn(&Replicas) -> u32| {
            replicas.iter().map(|one| u64::from(figure(one))).sum::<u64>()
        };
        let (left, all) = (sum(|one| one.free), sum(|one| one.count));
        lacks |= left < *count;
        node.left.push(format!("{left} of {all} × {name}"));
    }
    if claims {
        node.left.extend(in_service(view).map(left));
    }
    node.has_room = (lacks || !claims).then_some(!lacks);
    node.largest = largest(view);
    node.amiss = view.gpus.iter().filter_map(Gpu::trouble).collect();
    node
}

/// GPUs that claims sell and that could give something.
fn in_service(view: &View) -> impl Iterator<Item = &Gpu> {
    let claimed = view.gpus.iter().filter(|gpu| gpu.front_end == FrontEnd::Dra.into_str());
    claimed.filter(|gpu| gives(gpu))
}

/// Neither a cordon nor its health keeps it from giving something.
fn gives(gpu: &Gpu) -> bool {
    gpu.cordon.is_empty() && !matches!(gpu.state.as_str(), "unhealthy" | "recovering")
}

/// What claims may have of a GPU yet.
fn left(gpu: &Gpu) -> String {
    let index = gpu.index;
    match gpu.fits.iter().find(|fit| fit.resource_name.is_empty() && fit.count > 0) {
        Some(fit) => format!("{} on GPU {index}", size(fit.memory_bytes, fit.cores_millis)),
        None if gpu.no_room.is_empty() => format!("nothing on GPU {index}"),
        None => format!("too little {} on GPU {index}", gpu.no_room),
    }
}

fn size(memory_bytes: u64, cores_millis: u32) -> String {
    match (memory_bytes, cores_millis) {
        (memory, 0) => format_bytes(memory),
        (0, cores) => format!("{} of a GPU", format_cores(cores)),
        (memory, cores) => format!("{} and {} of a GPU", format_bytes(memory), format_cores(cores)),
    }
}

fn largest(view: &View) -> String {
    let all = view.gpus.iter().flat_map(|gpu| gpu.fits.iter().map(move |fit| (gpu, fit)));
    let best = all
        .filter(|(gpu, fit)| fit.count > 0 && gives(gpu))
        .max_by_key(|(_, fit)| (fit.memory_bytes, fit.cores_millis, fit.count));
    match best {
        Some((gpu, Fit { resource_name, count, memory_bytes, cores_millis })) => {
            let of = if resource_name.is_empty() { "" } else { " of " };
            let size = size(*memory_bytes, *cores_millis);
            format!("{count} × {resource_name}{of}{size} on GPU {}", gpu.index)
        }
        None => "nothing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(spec: &Value, status: &Value) -> Pending {
        let pod = json!({ "metadata": { "name": "chat", "namespace": "team" }, "spec": spec, "status": status });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let known = fleet::Fleet::default();
        answer(&pod, &asked(&pod, &known), &known, None, Vec::new())
    }

    fn asking(count: &str) -> Value {
        json!({ "resources": { "limits": { "tessera.dev/gpu": count, "cpu": "250m" } } })
    }

    #[test]
    fn containers_ask_together_and_an_init_container_for_its_own_time() {
        let pending = json!({ "phase": "Pending" });
        let spec =
            json!({ "containers": [asking("1"), asking("2")], "initContainers": [asking("2")] });
        assert_eq!(of(&spec, &pending).asks, ["3 × tessera.dev/gpu"]);
        let spec =
            json!({ "containers": [asking("1")], "initContainers": [asking("4"), asking("2")] });
        assert_eq!(of(&spec, &pending).asks, ["4 × tessera.dev/gpu"]);
    }

    #[test]
    fn a_pod_that_does_not_wait_for_us_is_said_to_be_so() {
        let spec = |node: &str| json!({ "nodeName": node, "containers": [asking("1")] });
        for (spec, phase, says) in [
            (spec("a"), "Pending", "it is Pending on node a"),
            (spec("a"), "Running", "it waits for no node: it is Running on node a"),
            (spec(""), "Failed", "it is Failed; see"),
            (json!({ "containers": [{}] }), "Pending", "no resource and no claim of Tessera"),
        ] {
            let pending = of(&spec, &json!({ "phase": phase }));
            assert!(!pending.waits && pending.state.contains(says), "{}", pending.state);
        }
    }

    const OURS: &str = "tessera.dev/gpu";

    fn replicas(free: u32) -> Gpu {
        let resource_name = OURS.to_owned();
        let fit = Fit {
            resource_name: OURS.into(),
            count: free,
            memory_bytes: 6 << 30,
            cores_millis: 250,
        };
        Gpu {
            state: "healthy".into(),
            replicas: vec![Replicas { resource_name, count: 4, free, ..Replicas::default() }],
            fits: vec![fit],
            ..Gpu::default()
        }
    }

    /// A GPU for claims with so much left.
    fn claimed(index: u32, memory_bytes: u64, cores_millis: u32) -> Gpu {
        let is_full = cores_millis == 0;
        let fit = Fit { count: 1, memory_bytes, cores_millis, ..Fit::default() };
        Gpu {
            index,
            state: "healthy".into(),
            front_end: FrontEnd::Dra.into_str().into(),
            no_room: if is_full { "GPU time".into() } else { String::new() },
            fits: if is_full { Vec::new() } else { vec![fit] },
            ..Gpu::default()
        }
    }

    fn room_of(gpus: Vec<Gpu>, asks: &[Ask]) -> NodeRoom {
        let view = View { gpus, ..View::default() };
        let entry = Entry { node: "a".into(), answers: true, view: Some(view), ..Entry::default() };
        room(&entry, asks)
    }

    #[test]
    fn what_is_left_of_a_resource_decides_and_the_largest_share_is_named() {
        let asks = |count| vec![Ask::Resource(OURS.into(), count)];
        let room = room_of(vec![replicas(1), replicas(2)], &asks(3));
        assert_eq!(
            (room.has_room, room.left),
            (Some(true), vec!["3 of 8 × tessera.dev/gpu".to_owned()])
        );
        assert_eq!(room.largest, "2 × tessera.dev/gpu of 6 GiB and 25% of a GPU on GPU 0");
        assert_eq!(room_of(vec![replicas(1), replicas(2)], &asks(4)).has_room, Some(false));
        let none = room_of(vec![Gpu::default()], &asks(1));
        assert_eq!((none.has_room, none.largest.as_str()), (Some(false), "nothing"));
    }

    #[test]
    fn gpus_that_are_cordoned_or_sick_are_named_and_are_not_the_largest() {
        let cordoned = Gpu { cordon: "cordoned by root: fans".into(), ..replicas(0) };
        let sick = Gpu {
            index: 1,
            state: "unhealthy".into(),
            state_reason: "XID 79".into(),
            state_waits_for: "a restart of the node".into(),
            ..replicas(4)
        };
        let room = room_of(vec![cordoned, sick], &[]);
        assert_eq!(
            room.amiss,
            [
                "GPU 0 is cordoned by root: fans",
                "GPU 1 is unhealthy: XID 79; it waits for a restart of the node"
            ]
        );
        assert_eq!(room.largest, "nothing");
    }

    #[test]
    fn what_claims_may_have_of_each_gpu_is_said_and_not_judged() {
        let gpus = || vec![claimed(0, 8 << 30, 500), claimed(1, 8 << 30, 0)];
        let left = ["8 GiB and 50% of a GPU on GPU 0", "too little GPU time on GPU 1"];
        // A resource that claims serve is one of them.
        for ask in [Ask::Claim("claim gpu".into()), Ask::Resource(OURS.into(), 2)] {
            let room = room_of(gpus(), &[ask]);
            assert_eq!((room.has_room, room.left), (None, left.map(str::to_owned).to_vec()));
        }
        assert_eq!(room_of(vec![claimed(0, 0, 0)], &[]).largest, "nothing");
        // What a resource lacks, a claim beside it does not give.
        let asks = [Ask::Claim("claim gpu".into()), Ask::Resource(OURS.into(), 5)];
        assert_eq!(room_of(vec![replicas(4)], &asks).has_room, Some(false));
        let entry = Entry { error: "it did not answer within 5 s".into(), ..Entry::default() };
        let room = room(&entry, &asks);
        assert_eq!((room.has_room, room.error.as_str()), (None, "it did not answer within 5 s"));
    }

    #[test]
    fn a_claim_is_ours_by_its_classes() {
        let ways = |one: Value| json!({ "spec": { "devices": { "requests": [one] } } });
        let exactly = ways(json!({ "exactly": { "deviceClassName": "gpu.tessera.dev" } }));
        let first = ways(json!({ "firstAvailable": [
            { "deviceClassName": "gpu.tessera.dev" }, { "deviceClassName": "other.dev" },
        ] }));
        assert_eq!(classes(&exactly), ["gpu.tessera.dev"].into());
        assert_eq!(classes(&first), ["gpu.tessera.dev", "other.dev"].into());
        assert!(is_ours("gpu.tessera.dev", None) && !is_ours("other.dev", None));
        let class = json!({ "spec": { "selectors": ["device.driver == 'gpu.tessera.dev'"] } });
        assert!(is_ours("other.dev", Some(&class)));
    }
}
