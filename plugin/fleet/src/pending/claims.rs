//! The pod's claims: which there are, where they lie, and where what they ask would fit.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tessera_cluster::user::objects::{Node, NodeSelector, Pod};
use tessera_model::counted::plural;
use tessera_model::printable;
use tessera_model::quantity::Quantity;
use tessera_rules::front_end::FrontEnd;
use tessera_rules::room::Left;
use tessera_view::gpu::Gpu;
use tessera_view::node::Node as View;

use super::holds::Holds;
use super::{Block, BlockKind, Known, affinity, block, ours};
use crate::answer::quoted;

/// The domain of our driver's classes.
const DOMAIN: &str = "tessera.dev";
/// Longest word of a plugin that is passed on.
const LONGEST: usize = 60;
/// What the name of a class follows in the resource that every class has.
const IMPLICIT: &str = "deviceclass.resource.kubernetes.io/";

/// A claim of the pod, as far as it could be read.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Its name within the pod.
    pub name: String,
    /// Its own name; absent while there is none.
    pub object_name: Option<String>,
    /// The object; `None` where there is none of that name.
    pub object: Known<Option<Value>>,
}

/// Device classes by name; `None` for one that there is not.
pub type Classes = BTreeMap<String, Known<Option<Value>>>;

/// One way in which a request can be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub class: String,
    pub memory_bytes: u64,
    pub cores_millis: u32,
    pub count: u64,
}

/// The ways in which each request of a claim can be met: one must be, of each.
pub(super) fn requests(claim: &Value) -> Vec<Vec<Wanted>> {
    let requests = claim["spec"]["devices"]["requests"].as_array();
    let ways = |request: &Value| -> Vec<Wanted> {
        if let Some(ways) = request["firstAvailable"].as_array() {
            return ways.iter().map(wanted).collect();
        }
        // v1 has one more level than v1beta1.
        vec![wanted(request.get("exactly").unwrap_or(request))]
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

/// Whether a class is of our driver, by its selectors or else its name.
pub(super) fn is_ours(class: &str, classes: &Classes) -> bool {
    match classes.get(class) {
        Some(Ok(Some(object))) => object.to_string().contains(DOMAIN),
        _ => class.ends_with(DOMAIN),
    }
}

/// Resources that the scheduler meets by claims where no device plugin offers them: of each class its own name for
/// one, and the name that every class has.
pub(super) fn extended(classes: &[Value]) -> BTreeSet<String> {
    let named = classes.iter().filter_map(|class| class["spec"]["extendedResourceName"].as_str());
    let implicit = classes.iter().filter_map(|class| class["metadata"]["name"].as_str());
    let implicit = implicit.map(|name| format!("{IMPLICIT}{name}"));
    named.filter(|name| !name.is_empty()).map(str::to_owned).chain(implicit).collect()
}

/// What keeps a claim from any node.
pub(super) fn everywhere(pod: &Pod, claim: &Claim, classes: &Classes) -> Vec<Block> {
    let namespace = &pod.metadata.namespace;
    let template = pod.spec.resource_claims.iter().find(|one| one.name == claim.name);
    let template = template.and_then(|one| one.resource_claim_template_name.clone());
    let Some(name) = &claim.object_name else {
        let of = template.map(|name| format!(" of the template {name}")).unwrap_or_default();
        let text = format!(
            "its claim \"{}\" is not made{of} yet: does the template exist, does a ResourceQuota of the namespace forbid \
             it (`kubectl describe quota`, and events of the pod), and is kube-controller-manager's resource claim \
             controller on?",
            claim.name
        );
        return vec![block(BlockKind::Claim, text)];
    };
    let Ok(object) = &claim.object else { return Vec::new() };
    let Some(object) = object else {
        let text = format!("there is no claim {namespace}/{name}, which it names");
        return vec![block(BlockKind::Claim, text)];
    };
    if object["metadata"]["deletionTimestamp"].is_string() {
        return vec![block(
            BlockKind::Claim,
            format!("the claim {namespace}/{name} is being deleted"),
        )];
    }
    if is_allocated(object) {
        return Vec::new();
    }
    let missing = |ways: &Vec<Wanted>| -> Option<Block> {
        let gone = |way: &Wanted| matches!(classes.get(&way.class), Some(Ok(None)));
        let first = ways.first().filter(|_| ways.iter().all(gone))?;
        let text = format!(
            "there is no device class {}, which the claim {namespace}/{name} names; the chart makes it with \
             dra.deviceClasses",
            printable::line(&first.class)
        );
        Some(block(BlockKind::Class, text))
    };
    requests(object).iter().filter_map(missing).collect()
}

pub(super) fn is_allocated(claim: &Value) -> bool {
    claim["status"]["allocation"].is_object()
}

/// What keeps a claim from this node; and what leaves that open.
pub(super) fn here(
    claim: &Claim,
    classes: &Classes,
    node: &Node,
    view: Option<&View>,
) -> (Vec<Block>, Vec<String>) {
    let (Some(name), Ok(Some(object))) = (&claim.object_name, &claim.object) else {
        return (Vec::new(), Vec::new());
    };
    if is_allocated(object) {
        let selector = &object["status"]["allocation"]["nodeSelector"];
        let selector: Result<Option<NodeSelector>, _> = serde_json::from_value(selector.clone());
        let here = match selector {
            Ok(selector) => {
                selector.map_or(Holds::Yes, |selector| affinity::selects(&selector, node))
            }
            Err(_) => Holds::Open,
        };
        return match here {
            Holds::Yes => (Vec::new(), Vec::new()),
            Holds::Open => {
                (Vec::new(), vec![format!("where the claim {name} is allocated is not judged")])
            }
            Holds::No => {
                let text = format!("the claim {name} is allocated on another node");
                (vec![block(BlockKind::Claim, text)], Vec::new())
            }
        };
    }
    let (mut blocks, mut open) = (Vec::new(), Vec::new());
    for ways in requests(object) {
        let mine: Vec<&Wanted> = ways.iter().filter(|way| is_ours(&way.class, classes)).collect();
        if mine.len() < ways.len() || ways.is_empty() {
            open.push(format!(
                "claim {name} may be met by devices of another driver, which are not judged"
            ));
            continue;
        }
        let Some(view) = view else { continue };
        if !mine.iter().any(|way| room(view, way) >= way.count) {
            let asks: Vec<String> = mine.iter().map(|way| way.words()).collect();
            let asks = asks.join(" or ");
            blocks.extend(view.gpus.iter().filter_map(ours::out_of_service));
            blocks.push(block(
                BlockKind::Capacity,
                format!("claim {name} asks for {asks}: {}", lacking(view, &mine)),
            ));
        } else {
            open.push(format!("selectors of the claim {name} and its class are not judged"));
        }
    }
    (blocks, open)
}

impl Wanted {
    pub(super) fn words(&self) -> String {
        let size = match (self.memory_bytes, self.cores_millis) {
            (0, 0) => "one share".to_owned(),
            (memory, cores) => ours::size(memory, cores),
        };
        match self.count {
            1 => size,
            count => format!("{count} × {size}"),
        }
    }
}

/// One share of the size that a claim gets which states none.
pub(super) const SHARE: Wanted =
    Wanted { class: String::new(), memory_bytes: 0, cores_millis: 0, count: 1 };

/// GPUs that are claimed and could give something.
pub(super) fn in_service(view: &View) -> impl Iterator<Item = &Gpu> {
    let claimed = view.gpus.iter().filter(|gpu| gpu.front_end == FrontEnd::Dra.as_str());
    claimed.filter(|gpu| ours::out_of_service(gpu).is_none())
}

/// On how many of a node's GPUs something fits. Each share of one claim is of another GPU.
pub(super) fn room(view: &View, way: &Wanted) -> u64 {
    let fits = in_service(view).filter(|gpu| lack(gpu, way).is_none());
    u64::try_from(fits.count()).unwrap_or(u64::MAX)
}

/// What of a GPU is missing for it.
fn lack(gpu: &Gpu, way: &Wanted) -> Option<String> {
    let Some(fit) = gpu.fits.iter().find(|fit| fit.resource_name.is_empty() && fit.count > 0)
    else {
        let lack = if gpu.no_room.is_empty() { "room" } else { &gpu.no_room };
        return Some(quoted(lack, LONGEST));
    };
    let or = |asked, default| if asked == 0 { default } else { asked };
    let left = Left { memory_bytes: fit.memory_bytes, cores_millis: fit.cores_millis };
    let memory_bytes = or(way.memory_bytes, gpu.default_memory_bytes);
    let cores_millis = or(u64::from(way.cores_millis), u64::from(gpu.default_cores_millis));
    let cores_millis = u32::try_from(cores_millis).unwrap_or(u32::MAX);
    left.lack(memory_bytes, cores_millis).map(|lack| lack.to_string())
}

/// Which GPUs have too little of what, for each way.
pub(super) fn lacking(view: &View, ways: &[&Wanted]) -> String {
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
