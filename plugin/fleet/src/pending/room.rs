//! What of a pod's wishes a node's GPUs have. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;
use tessera_model::counted::plural;
use tessera_model::percent::format_cores;
use tessera_model::quantity::{Quantity, format_bytes};
use tessera_rules::front_end::FrontEnd;
use tessera_rules::room::Left;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::gpu::{Fit, Gpu, Replicas};
use tessera_view::node::Node as View;

/// The domain of our driver's classes.
const CLASSES: &str = "tessera.dev";
/// The domain of resources that a plugin sells if its configuration names none.
pub(super) const DOMAIN: &str = "tessera.dev/";
/// One share of the size that a claim gets which states none.
const SHARE: Wanted = Wanted { class: String::new(), memory_bytes: 0, cores_millis: 0, count: 1 };

/// A node with the plugin, for a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeRoom {
    pub node: String,
    /// Whether its GPUs have what the pod asks; absent where that is not known.
    pub has_room: Option<bool>,
    /// What is left of what the pod asks, or what is missing, in words.
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
pub(super) enum Ask {
    /// So many of a resource.
    Resource(String, u64),
    /// A request of the claim of this name, and the ways to meet it.
    Claim(String, Vec<Wanted>),
    /// A claim of which no size is known, in words.
    Nothing(String),
}

/// One way to meet a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub class: String,
    memory_bytes: u64,
    cores_millis: u32,
    count: u64,
}

impl Ask {
    pub(super) fn words(&self) -> String {
        match self {
            Ask::Resource(name, count) => format!("{count} × {name}"),
            Ask::Claim(name, ways) => {
                let ways = ways.iter().map(|way| format!("{} of {}", way.words(), way.class));
                format!("claim {name}: {}", ways.collect::<Vec<_>>().join(" or "))
            }
            Ask::Nothing(words) => words.clone(),
        }
    }
}

impl Wanted {
    fn words(&self) -> String {
        let size = match (self.memory_bytes, self.cores_millis) {
            (0, 0) => "one share".to_owned(),
            (memory, cores) => size(memory, cores),
        };
        match self.count {
            1 => size,
            count => format!("{count} × {size}"),
        }
    }
}

/// Each request of a claim, with the ways to meet it.
pub(super) fn requests(claim: &Value) -> Vec<Vec<Wanted>> {
    let requests = claim["spec"]["devices"]["requests"].as_array();
    let ways = |request: &Value| match request["firstAvailable"].as_array() {
        Some(ways) => ways.iter().map(wanted).collect(),
        // v1 has one more level than v1beta1.
        None => vec![wanted(request.get("exactly").unwrap_or(request))],
    };
    requests.into_iter().flatten().map(ways).collect()
}

fn wanted(request: &Value) -> Wanted {
    let asked = &request["capacity"]["requests"];
    let quantity = |name: &str| asked[name].as_str().and_then(|text| Quantity::parse(text).ok());
    let memory = quantity("memory").and_then(|quantity| quantity.units().ok()).unwrap_or(0);
    // Percent of a GPU.
    let cores = quantity("cores").and_then(|quantity| quantity.millis().ok()).unwrap_or(0) / 100;
    Wanted {
        class: request["deviceClassName"].as_str().unwrap_or_default().to_owned(),
        memory_bytes: memory,
        cores_millis: u32::try_from(cores).unwrap_or(u32::MAX),
        count: request["count"].as_u64().unwrap_or(1),
    }
}

/// Whether a device class is of our driver, by its selectors or else its name.
pub(super) fn is_ours(name: &str, class: Option<&Value>) -> bool {
    class.map_or_else(|| name.ends_with(CLASSES), |class| class.to_string().contains(CLASSES))
}

/// Names of resources that the plugins sell.
pub(super) fn resources(fleet: &Fleet) -> BTreeSet<&str> {
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let names = views.flat_map(|view| {
        let cut = view.gpus.iter().flat_map(|gpu| &gpu.replicas).map(|one| &one.resource_name);
        view.plugin.resources.iter().chain(cut)
    });
    names.map(String::as_str).filter(|name| !name.is_empty()).collect()
}

/// What the GPUs of a node have of it.
pub(super) fn room(entry: &Entry, asks: &[Ask]) -> NodeRoom {
    let mut node = NodeRoom { node: entry.node.clone(), ..NodeRoom::default() };
    let Some(view) = entry.view.as_ref().filter(|_| entry.answers) else {
        node.error.clone_from(&entry.error);
        return node;
    };
    let mut has_room = true;
    for ask in asks {
        let (enough, words) = match ask {
            Ask::Resource(name, count) => resource(view, name, *count),
            Ask::Claim(name, ways) => claim(view, name, ways),
            Ask::Nothing(_) => continue,
        };
        has_room &= enough;
        node.left.extend(words);
    }
    let sizes_known = !asks.iter().any(|ask| matches!(ask, Ask::Nothing(_)));
    node.has_room = (sizes_known || !has_room).then_some(has_room);
    node.largest = largest(view);
    node.amiss = view.gpus.iter().filter_map(trouble).collect();
    node
}

/// What is left of a resource, and whether that is so many.
fn resource(view: &View, name: &str, count: u64) -> (bool, Option<String>) {
    let replicas = view.gpus.iter().flat_map(|gpu| &gpu.replicas);
    let replicas: Vec<&Replicas> = replicas.filter(|one| one.resource_name == name).collect();
    if replicas.is_empty() && in_service(view).next().is_some() {
        // Each is a claim on one share of the default size, of another GPU.
        let left = gpus_for(view, &SHARE);
        let lacking =
            if left < count { format!(": {}", lacking(view, &[SHARE])) } else { String::new() };
        return (left >= count, Some(format!("{left} × {name} by claims{lacking}")));
    }
    let sum = |figure: fn(&Replicas) -> u32| {
        replicas.iter().map(|one| u64::from(figure(one))).sum::<u64>()
    };
    let (left, all): (u64, u64) = (sum(|one| one.free), sum(|one| one.count));
    (left >= count, Some(format!("{left} of {all} × {name}")))
}

/// Why a claim's request is met by none of these ways; nothing where it is.
fn claim(view: &View, name: &str, ways: &[Wanted]) -> (bool, Option<String>) {
    let enough = ways.iter().any(|way| gpus_for(view, way) >= way.count);
    (enough, (!enough).then(|| format!("for claim {name} {}", lacking(view, ways))))
}

/// GPUs that claims sell and that could give something.
fn in_service(view: &View) -> impl Iterator<Item = &Gpu> {
    let claimed = view.gpus.iter().filter(|gpu| gpu.front_end == FrontEnd::Dra.as_str());
    claimed.filter(|gpu| gives(gpu))
}

/// Neither a cordon nor its health keeps it from giving something.
fn gives(gpu: &Gpu) -> bool {
    gpu.cordon.is_empty() && !matches!(gpu.state.as_str(), "unhealthy" | "recovering")
}

/// On how many GPUs something fits. Each share of one claim is of another GPU.
fn gpus_for(view: &View, way: &Wanted) -> u64 {
    let fits = in_service(view).filter(|gpu| lack(gpu, way).is_none());
    u64::try_from(fits.count()).unwrap_or(u64::MAX)
}

/// What of a GPU is missing for it.
fn lack(gpu: &Gpu, way: &Wanted) -> Option<String> {
    let Some(fit) = gpu.fits.iter().find(|fit| fit.resource_name.is_empty() && fit.count > 0)
    else {
        return Some(if gpu.no_room.is_empty() { "room".to_owned() } else { gpu.no_room.clone() });
    };
    let left = Left { memory_bytes: fit.memory_bytes, cores_millis: fit.cores_millis };
    let memory = if way.memory_bytes == 0 { gpu.default_memory_bytes } else { way.memory_bytes };
    let cores = if way.cores_millis == 0 { gpu.default_cores_millis } else { way.cores_millis };
    left.lack(memory, cores).map(|lack| lack.to_string())
}

/// Which GPUs have too little of what.
fn lacking(view: &View, ways: &[Wanted]) -> String {
    let mut gpus: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for (gpu, way) in in_service(view).flat_map(|gpu| ways.iter().map(move |way| (gpu, way))) {
        if let Some(lack) = lack(gpu, way) {
            gpus.entry(lack).or_default().insert(gpu.index);
        }
    }
    if gpus.is_empty() {
        return match in_service(view).count() {
            0 => "no GPU is there for claims".to_owned(),
            there => format!("{} could give one share each", plural(there, "GPU")),
        };
    }
    let text = gpus.into_iter().map(|(lack, gpus)| {
        let gpus: Vec<String> = gpus.iter().map(u32::to_string).collect();
        format!("too little {lack} on GPU {}", gpus.join(", "))
    });
    text.collect::<Vec<_>>().join("; ")
}

/// What is wrong with a GPU; `None` for a healthy one without a cordon.
pub fn trouble(gpu: &Gpu) -> Option<String> {
    let index = gpu.index;
    match (gpu.cordon.as_str(), gpu.state.as_str()) {
        ("cordoned", _) => Some(format!("GPU {index} is cordoned")),
        ("", "" | "healthy") => None,
        ("", state) => {
            let waits = match gpu.state_waits_for.as_str() {
                "" => String::new(),
                text => format!("; it waits for {text}"),
            };
            Some(format!("GPU {index} is {state}: {}{waits}", gpu.state_reason))
        }
        (by, _) => Some(format!("GPU {index} is cordoned: {by}")),
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
        None if in_service(view).any(|gpu| !gpu.no_room.is_empty()) => {
            format!("nothing: {}", lacking(view, &[SHARE]))
        }
        None => "nothing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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

    /// A GPU for claims with so much left; a claim that states no size gets 2 GiB and a quarter of its time.
    fn claimed(index: u32, memory_bytes: u64, cores_millis: u32) -> Gpu {
        let is_full = cores_millis == 0;
        let fit = Fit { count: 1, memory_bytes, cores_millis, ..Fit::default() };
        Gpu {
            index,
            state: "healthy".into(),
            front_end: FrontEnd::Dra.as_str().into(),
            no_room: if is_full { "GPU time".into() } else { String::new() },
            default_memory_bytes: 2 << 30,
            default_cores_millis: 250,
            fits: if is_full { Vec::new() } else { vec![fit] },
            ..Gpu::default()
        }
    }

    fn of(gpus: Vec<Gpu>, asks: &[Ask]) -> NodeRoom {
        let view = View { gpus, ..View::default() };
        let entry = Entry { node: "a".into(), answers: true, view: Some(view), ..Entry::default() };
        room(&entry, asks)
    }

    fn claim(exactly: &Value) -> Ask {
        let object = json!({ "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": exactly }] } } });
        Ask::Claim("chat-gpu".into(), requests(&object).remove(0))
    }

    fn sized(memory: &str, cores: &str, count: u64) -> Ask {
        claim(&json!({ "deviceClassName": "gpu.tessera.dev", "count": count,
            "capacity": { "requests": { "memory": memory, "cores": cores } } }))
    }

    #[test]
    fn what_is_left_of_a_resource_decides_and_the_largest_share_is_named() {
        let asks = |count| vec![Ask::Resource(OURS.into(), count)];
        let room = of(vec![replicas(1), replicas(2)], &asks(3));
        assert_eq!(
            (room.has_room, room.left),
            (Some(true), vec!["3 of 8 × tessera.dev/gpu".to_owned()])
        );
        assert_eq!(room.largest, "2 × tessera.dev/gpu of 6 GiB and 25% of a GPU on GPU 0");
        assert_eq!(of(vec![replicas(1), replicas(2)], &asks(4)).has_room, Some(false));
        let none = of(vec![Gpu::default()], &asks(1));
        assert_eq!((none.has_room, none.largest.as_str()), (Some(false), "nothing"));
    }

    #[test]
    fn gpus_that_are_cordoned_or_sick_are_named_and_are_not_the_largest() {
        let cordoned = Gpu { cordon: "by root: fans".into(), ..replicas(0) };
        let sick = Gpu {
            index: 1,
            state: "unhealthy".into(),
            state_reason: "XID 79".into(),
            state_waits_for: "a restart of the node".into(),
            ..replicas(4)
        };
        let room = of(vec![cordoned, sick], &[]);
        assert_eq!(
            room.amiss,
            [
                "GPU 0 is cordoned: by root: fans",
                "GPU 1 is unhealthy: XID 79; it waits for a restart of the node"
            ]
        );
        assert_eq!(room.largest, "nothing");
    }

    #[test]
    fn a_claim_has_room_where_memory_and_time_are_left_and_what_is_missing_is_said() {
        let left =
            || vec![claimed(0, 8 << 30, 500), claimed(1, 1 << 30, 500), claimed(2, 8 << 30, 0)];
        assert_eq!(of(left(), &[sized("8Gi", "50", 1)]).has_room, Some(true));
        for (memory, cores, count, says) in [
            (
                "8193Mi",
                "50",
                1,
                "for claim chat-gpu too little GPU time on GPU 2; too little memory on GPU 0, 1",
            ),
            ("1Gi", "51", 1, "for claim chat-gpu too little GPU time on GPU 0, 1, 2"),
            ("1Gi", "1", 3, "for claim chat-gpu too little GPU time on GPU 2"),
        ] {
            let room = of(left(), &[sized(memory, cores, count)]);
            assert_eq!((room.has_room, room.left), (Some(false), vec![says.to_owned()]));
        }
        // Without a size it is one of the default size.
        let unsized_claim = claim(&json!({ "deviceClassName": "gpu.tessera.dev" }));
        assert_eq!(
            of(vec![claimed(0, 2 << 30, 250)], std::slice::from_ref(&unsized_claim)).has_room,
            Some(true)
        );
        assert_eq!(of(vec![claimed(0, 2 << 30, 249)], &[unsized_claim]).has_room, Some(false));
        assert_eq!(
            of(vec![claimed(0, 2 << 30, 0)], &[]).largest,
            "nothing: too little GPU time on GPU 0"
        );
    }

    #[test]
    fn a_resource_that_claims_serve_takes_a_gpu_for_each() {
        let gpus = || vec![claimed(0, 3 << 30, 500), claimed(1, 3 << 30, 500)];
        let asks = |count| vec![Ask::Resource(OURS.into(), count)];
        assert_eq!(of(gpus(), &asks(2)).has_room, Some(true));
        let room = of(gpus(), &asks(3));
        assert_eq!(
            (room.has_room, room.left),
            (
                Some(false),
                vec!["2 × tessera.dev/gpu by claims: 2 GPUs could give one share each".to_owned()]
            )
        );
    }

    #[test]
    fn what_is_not_known_is_neither_room_nor_none() {
        let unmade = Ask::Nothing("claim \"gpu\"".into());
        assert_eq!(of(vec![replicas(4)], std::slice::from_ref(&unmade)).has_room, None);
        let asks = [unmade, Ask::Resource(OURS.into(), 5)];
        assert_eq!(of(vec![replicas(4)], &asks).has_room, Some(false));
        let entry = Entry { error: "it did not answer within 5 s".into(), ..Entry::default() };
        let room = room(&entry, &asks);
        assert_eq!((room.has_room, room.error.as_str()), (None, "it did not answer within 5 s"));
    }
}
