//! The verdict. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::user::asked;
use tessera_cluster::user::objects::{Node, Pod};
use tessera_model::printable;
use tessera_model::quantity::Quantity;
use tessera_view::API_VERSION;

use super::ours::{self, Absent};
use super::{Block, BlockKind, Facts, Fit, NodeVerdict, Verdict, affinity, block, claims};
use crate::answer::quoted;

type Amounts = BTreeMap<String, u128>;

/// Why the pod waits, on each node. A node [`Fit::Fits`] only where nothing is left open: the scheduler's rules on
/// resources, taints, labels and claims, with these facts, would place the pod there.
#[must_use]
pub fn judge(facts: &Facts) -> Verdict {
    let pod = &facts.pod;
    let resources = ours::resources(&facts.fleet);
    let mut verdict = Verdict {
        api_version: API_VERSION.to_owned(),
        pod: format!("{}/{}", pod.metadata.namespace, pod.metadata.name),
        scheduler_says: scheduled(pod),
        ..Verdict::default()
    };
    let (wanted, unreadable) = match asked(pod, amount) {
        Ok(wanted) => (wanted, None),
        Err(error) => (Amounts::new(), Some(error)),
    };
    let mine: Amounts = wanted
        .iter()
        .filter(|(name, amount)| **amount > 0 && ours::is_ours(&resources, name))
        .map(|(name, amount)| (name.clone(), *amount))
        .collect();
    verdict.asks = mine.iter().map(|(name, amount)| format!("{amount} × {name}")).collect();
    verdict.asks.extend(facts.claims.iter().flat_map(claimed));
    verdict.state = state(pod, verdict.asks.is_empty());
    verdict.waits = pod.spec.node_name.is_empty() && is_alive(pod) && !verdict.asks.is_empty();
    if !verdict.waits {
        return verdict;
    }
    let gates = pod.spec.scheduling_gates.iter().map(|gate| {
        block(
            BlockKind::Gate,
            format!("its scheduling gate {} is not lifted", printable::line(&gate.name)),
        )
    });
    verdict.blocks.extend(gates);
    for claim in &facts.claims {
        verdict.blocks.extend(claims::everywhere(pod, claim, &facts.classes));
        if let Err(error) = &claim.object {
            verdict.unread.push(format!("claim \"{}\": {error}", claim.name));
        }
    }
    let mut open = not_judged(pod);
    open.extend(unreadable.map(|error| format!("what it asks cannot be summed: {error}")));
    open.extend(
        facts
            .claims
            .iter()
            .filter(|claim| claim.object.is_err())
            .map(|claim| format!("the claim \"{}\" could not be read", claim.name)),
    );
    if let Some(error) = &facts.fleet_error {
        verdict.unread.push(format!("the plugins: {error}"));
    }
    let used = match &facts.pods {
        Ok(pods) => Ok(used(pods)),
        Err(error) => {
            verdict.unread.push(format!(
                "pods of other namespaces ({error}): what they leave of CPU and memory is not known"
            ));
            Err(())
        }
    };
    let nodes = match &facts.nodes {
        Ok(nodes) => nodes.clone(),
        Err(error) => {
            verdict
                .unread
                .push(format!("nodes ({error}): their taints, labels and sizes are not judged"));
            let bare = |entry: &tessera_view::fleet::Entry| {
                let mut node = Node::default();
                node.metadata.name.clone_from(&entry.node);
                node
            };
            open.push("the node itself could not be read".to_owned());
            facts.fleet.nodes.iter().map(bare).collect()
        }
    };
    let question = Question {
        facts,
        wanted: &wanted,
        mine: &mine,
        used: used.as_ref().ok(),
        reads_nodes: facts.nodes.is_ok(),
        open: &open,
        blocked: !verdict.blocks.is_empty(),
    };
    verdict.nodes = nodes.iter().map(|node| question.judge(node)).collect();
    verdict.nodes.sort_by(|a, b| {
        let key = |one: &NodeVerdict| {
            let far = one.blocks.iter().any(|one| one.kind == BlockKind::NoPlugin);
            (one.fit, far, one.blocks.len())
        };
        key(a).cmp(&key(b)).then_with(|| a.node.cmp(&b.node))
    });
    verdict
}

/// Amounts as the scheduler counts them: CPU in thousandths, all else in whole units, rounded up.
fn amount(name: &str, text: &str) -> Result<u128, String> {
    let quantity = Quantity::parse(text);
    let amount = quantity.and_then(|quantity| match name {
        "cpu" => quantity.millis(),
        _ => quantity.units(),
    });
    amount.map(u128::from).map_err(|error| format!("{name}: {text}: {error}"))
}

fn is_alive(pod: &Pod) -> bool {
    !matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}

fn scheduled(pod: &Pod) -> String {
    let condition = pod.status.conditions.iter().find(|one| one.kind == "PodScheduled");
    condition.filter(|one| one.status != "True").map(|one| one.message.clone()).unwrap_or_default()
}

fn state(pod: &Pod, asks_nothing: bool) -> String {
    let status = &pod.status;
    if !is_alive(pod) {
        let why = [&status.reason, &status.message].into_iter().filter(|text| !text.is_empty());
        let why: String = why.map(|text| format!(", {text}")).collect();
        return format!("it has ended: {}{why}", status.phase);
    }
    match pod.spec.node_name.as_str() {
        "" if asks_nothing => {
            "it waits for a node, and asks for no resource and no claim of Tessera".to_owned()
        }
        "" => "it waits for a node".to_owned(),
        node if status.phase == "Pending" => {
            format!(
                "it has node {node} and waits there for its containers: see `kubectl describe pod`"
            )
        }
        node => format!("it does not wait: it is {} on node {node}", status.phase),
    }
}

/// What a claim of the pod asks, in words.
fn claimed(claim: &claims::Claim) -> Vec<String> {
    let Ok(Some(object)) = &claim.object else {
        return vec![format!("claim \"{}\"", claim.name)];
    };
    let words = |ways: Vec<claims::Wanted>| {
        let ways: Vec<String> =
            ways.iter().map(|way| format!("{} of {}", way.words(), way.class)).collect();
        format!("claim \"{}\": {}", claim.name, ways.join(", or "))
    };
    claims::requests(object).into_iter().map(words).collect()
}

/// Rules of the scheduler that are not judged here.
fn not_judged(pod: &Pod) -> Vec<String> {
    let affinity = pod.spec.affinity.clone().unwrap_or_default();
    let required = |one: Option<tessera_cluster::user::objects::PodAffinity>| {
        one.is_some_and(|one| !one.required_during_scheduling_ignored_during_execution.is_empty())
    };
    let ports =
        pod.spec.containers.iter().flat_map(|one| &one.ports).any(|port| port.host_port > 0);
    let rules = [
        (required(affinity.pod_affinity), "pod affinity"),
        (required(affinity.pod_anti_affinity), "pod anti-affinity"),
        (!pod.spec.topology_spread_constraints.is_empty(), "topology spread"),
        (ports, "host ports"),
        (
            !matches!(pod.spec.scheduler_name.as_str(), "" | "default-scheduler"),
            "the rules of its own scheduler",
        ),
    ];
    rules
        .into_iter()
        .filter(|(set, _)| *set)
        .map(|(_, rule)| format!("{rule} not judged"))
        .collect()
}

/// What the pods of each node ask, and how many they are. A pod whose request cannot be read makes the node's sum
/// unknown.
fn used(pods: &[Pod]) -> BTreeMap<String, Option<Amounts>> {
    let mut nodes: BTreeMap<String, Option<Amounts>> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| is_alive(pod) && !pod.spec.node_name.is_empty()) {
        let sum = nodes.entry(pod.spec.node_name.clone()).or_insert_with(|| Some(Amounts::new()));
        let Some(amounts) = sum else { continue };
        let Ok(mut asked) = asked(pod, amount) else {
            *sum = None;
            continue;
        };
        asked.insert("pods".to_owned(), 1);
        for (name, amount) in asked {
            let all = amounts.entry(name).or_default();
            *all = all.saturating_add(amount);
        }
    }
    nodes
}

struct Question<'a> {
    facts: &'a Facts,
    /// All that the pod asks.
    wanted: &'a Amounts,
    /// What of it is ours.
    mine: &'a Amounts,
    /// What other pods ask; `None` where that cannot be read.
    used: Option<&'a BTreeMap<String, Option<Amounts>>>,
    reads_nodes: bool,
    /// What is open on every node.
    open: &'a [String],
    /// Something is in the way everywhere.
    blocked: bool,
}

impl Question<'_> {
    fn judge(&self, node: &Node) -> NodeVerdict {
        let name = &node.metadata.name;
        let pod = &self.facts.pod;
        let mut one = NodeVerdict {
            node: name.clone(),
            fit: Fit::Not,
            blocks: Vec::new(),
            left: Vec::new(),
            largest: String::new(),
            open: self.open.to_vec(),
        };
        if self.reads_nodes {
            one.blocks.extend(node_itself(pod, node));
        }
        let view = ours::view(&self.facts.fleet, name);
        let offers = |resource: &str| self.allocatable(node, resource) > 0;
        match &view {
            Ok(view) => one.largest = ours::largest(view),
            Err(Absent::NoPlugin) if self.facts.fleet_error.is_none() => {
                if !self.mine.keys().any(|resource| offers(resource)) {
                    one.blocks.push(block(BlockKind::NoPlugin, "no plugin runs on it"));
                }
            }
            Err(Absent::NoPlugin) => {}
            Err(Absent::Silent(error)) => {
                one.open.push(format!("its plugin does not answer: {error}"));
            }
        }
        let view = view.ok();
        for (resource, amount) in self.wanted.iter().filter(|(_, amount)| **amount > 0) {
            match self.mine.contains_key(resource) {
                true => self.our_resource(&mut one, node, resource, *amount, view),
                false => self.other_resource(&mut one, node, resource, *amount),
            }
        }
        if self.reads_nodes {
            self.other_resource(&mut one, node, "pods", 1);
        }
        for claim in &self.facts.claims {
            let (blocks, open) = claims::here(claim, &self.facts.classes, node, view);
            one.blocks.extend(blocks);
            one.open.extend(open);
        }
        if !self.facts.claims.is_empty() && view.is_none() {
            one.open.push("what claims may have of it is not known".to_owned());
        }
        let mut seen = BTreeSet::new();
        one.blocks.retain(|block| seen.insert((block.kind, block.text.clone())));
        one.fit = match (one.blocks.is_empty() && !self.blocked, one.open.is_empty()) {
            (true, true) => Fit::Fits,
            (true, false) => Fit::May,
            (false, _) => Fit::Not,
        };
        one
    }

    fn allocatable(&self, node: &Node, resource: &str) -> u128 {
        let text = node.status.allocatable.get(resource);
        text.and_then(|text| amount(resource, text).ok()).unwrap_or(0)
    }

    /// What other pods ask on a node; `None` where that is not known.
    fn taken(&self, node: &Node, resource: &str) -> Option<u128> {
        match self.used?.get(&node.metadata.name) {
            None => Some(0),
            Some(None) => None,
            Some(Some(amounts)) => Some(amounts.get(resource).copied().unwrap_or(0)),
        }
    }

    fn other_resource(&self, one: &mut NodeVerdict, node: &Node, resource: &str, amount: u128) {
        if !self.reads_nodes {
            return;
        }
        let all = self.allocatable(node, resource);
        let unit = if resource == "cpu" { "m" } else { "" };
        match self.taken(node, resource) {
            Some(taken) if all.saturating_sub(taken) < amount => {
                let left = all.saturating_sub(taken);
                one.blocks.push(block(
                    BlockKind::Resource,
                    format!("{resource}: asks {amount}{unit}, {left}{unit} of {all}{unit} is left"),
                ));
            }
            None if all < amount => one.blocks.push(block(
                BlockKind::Resource,
                format!("{resource}: asks {amount}{unit}, the node has {all}{unit} in all"),
            )),
            None => one.open.push(format!("what other pods leave of {resource} is not known")),
            Some(_) => {}
        }
    }

    fn our_resource(
        &self,
        one: &mut NodeVerdict,
        node: &Node,
        resource: &str,
        amount: u128,
        view: Option<&tessera_view::node::Node>,
    ) {
        let free = view.map(|view| u128::from(ours::free(view, resource)));
        let held = view.map(|view| u128::from(ours::held(view, resource)));
        let (all, is_known) = match self.reads_nodes {
            true => (self.allocatable(node, resource), true),
            false => (0, false),
        };
        let taken = self.taken(node, resource);
        let scheduler = is_known.then(|| all.saturating_sub(taken.or(held).unwrap_or(0)));
        if taken.is_none() && is_known {
            one.open
                .push(format!("pods that are bound and have no {resource} yet are not counted"));
        }
        // What both the scheduler and the plugin would give.
        let left = match (scheduler, free) {
            (Some(scheduler), Some(free)) => Some(scheduler.min(free)),
            (Some(left), None) | (None, Some(left)) => Some(left),
            (None, None) => None,
        };
        let Some(left) = left else { return };
        let whole = if is_known { format!(" of {all}") } else { String::new() };
        one.left.push(format!("{left}{whole} × {resource}"));
        if left >= amount {
            return;
        }
        let has_plugin = !one.blocks.iter().any(|block| block.kind == BlockKind::NoPlugin);
        if !has_plugin {
            return;
        }
        let withheld = view.map(|view| ours::withheld(view, resource)).unwrap_or_default();
        one.blocks.extend(withheld);
        let text = match (all, free) {
            (0, None | Some(0)) if is_known => format!("{resource}: the node offers none"),
            _ => format!("{resource}: asks {amount}, {left}{whole} is left"),
        };
        one.blocks.push(block(BlockKind::Capacity, text));
    }
}

/// What of the node itself is in the way.
fn node_itself(pod: &Pod, node: &Node) -> Vec<Block> {
    let mut blocks = Vec::new();
    let ready = node.status.conditions.iter().find(|one| one.kind == "Ready");
    if let Some(ready) = ready.filter(|one| one.status != "True") {
        let why = if ready.message.is_empty() { &ready.reason } else { &ready.message };
        let text = format!("kubelet is not ready: {}", quoted(why, 160));
        blocks.push(block(BlockKind::NotReady, text));
    }
    if affinity::cordoned(pod, node) {
        blocks.push(block(
            BlockKind::NodeCordon,
            "the node is cordoned: `kubectl uncordon` lifts it",
        ));
    }
    let taints = affinity::taints(pod, node).into_iter();
    // The cordon has said it.
    let taints = taints.filter(|taint| {
        !(node.spec.unschedulable && taint.starts_with("node.kubernetes.io/unschedulable"))
    });
    blocks.extend(
        taints.map(|taint| block(BlockKind::Taint, format!("it does not tolerate {taint}"))),
    );
    let lacking = affinity::lacking(pod, node);
    if !lacking.is_empty() {
        let text = format!("the node has no label {}", lacking.join(", "));
        blocks.push(block(BlockKind::Selector, text));
    }
    if !affinity::holds(pod, node) {
        blocks.push(block(BlockKind::Affinity, "its required node affinity excludes the node"));
    }
    blocks
}
