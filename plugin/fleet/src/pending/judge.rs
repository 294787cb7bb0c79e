//! The verdict. Pure.

use std::collections::BTreeSet;

use tessera_cluster::user::asked;
use tessera_cluster::user::objects::{Node, Pod};
use tessera_model::printable;
use tessera_view::API_VERSION;
use tessera_view::node::Node as View;

use super::holds::Holds;
use super::neighbours::{self, Amounts, Neighbours, amount, has_host_ports, is_alive};
use super::ours::{self, Absent};
use super::{BlockKind, Facts, Fit, NodeVerdict, Verdict, affinity, block, claims, unjudged};
use crate::answer::quoted;

/// Why the pod waits, on each node. A node [`Fit::Fits`] only where nothing is left open: the scheduler's rules on
/// resources, taints, labels and claims, with these facts, would place the pod there.
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
    verdict.waits = pod.spec.node_name.is_empty()
        && is_alive(pod)
        && !is_deleted(pod)
        && !verdict.asks.is_empty();
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
    let mut open = unjudged::rules(pod);
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
    if let Err(error) = &facts.pods {
        verdict.unread.push(format!(
            "pods of other namespaces ({error}): what they leave of CPU and memory is not known"
        ));
    }
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
    let pods = facts.pods.as_ref().ok();
    let question = Question {
        facts,
        wanted: &wanted,
        mine: &mine,
        neighbours: pods.map(|pods| Neighbours::new(pod, pods, &nodes)),
        reads_nodes: facts.nodes.is_ok(),
        open: &open,
        blocked: !verdict.blocks.is_empty(),
    };
    let is_asked = |node: &&Node| facts.only.is_empty() || facts.only.contains(&node.metadata.name);
    verdict.nodes = nodes.iter().filter(is_asked).map(|node| question.judge(node)).collect();
    verdict.nodes.sort_by(|a, b| {
        let key = |one: &NodeVerdict| {
            let far = one.blocks.iter().any(|one| one.kind == BlockKind::NoPlugin);
            (one.fit, far, one.blocks.len())
        };
        key(a).cmp(&key(b)).then_with(|| a.node.cmp(&b.node))
    });
    verdict
}

fn is_deleted(pod: &Pod) -> bool {
    pod.spec.node_name.is_empty() && pod.metadata.deletion_timestamp.is_some()
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
    if is_deleted(pod) {
        return "it is being deleted: the scheduler does not place it".to_owned();
    }
    match pod.spec.node_name.as_str() {
        "" if asks_nothing => {
            "it waits for a node, and asks for no resource and no claim of Tessera".to_owned()
        }
        "" => "it waits for a node".to_owned(),
        node if pod.metadata.deletion_timestamp.is_some() => {
            format!(
                "it is being deleted, and has not ended on node {node} yet: see `kubectl describe pod`"
            )
        }
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

struct Question<'a> {
    facts: &'a Facts,
    /// All that the pod asks.
    wanted: &'a Amounts,
    /// What of it is ours.
    mine: &'a Amounts,
    /// Other pods; `None` where they cannot be read.
    neighbours: Option<Neighbours<'a>>,
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
            node_itself(&mut one, pod, node);
            self.others(&mut one, node);
        }
        let view = ours::view(&self.facts.fleet, name);
        let offers = |resource: &str| self.allocatable(node, resource) > 0;
        match &view {
            Ok(view) => one.largest = ours::largest(view),
            Err(Absent::NoPlugin) if self.facts.fleet_error.is_none() => {
                match self.mine.keys().any(|resource| offers(resource)) {
                    true => one.open.push("no pod of the plugin runs on it".to_owned()),
                    false => one.blocks.push(block(BlockKind::NoPlugin, "no plugin runs on it")),
                }
            }
            Err(Absent::NoPlugin) => one.open.push("its plugin could not be asked".to_owned()),
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
        self.neighbours.as_ref()?.taken(&node.metadata.name, resource)
    }

    /// What leaves a resource open on this node because the scheduler may meet it by claims, as it does where no device
    /// plugin offers any.
    fn by_claims(&self, node: &Node, resource: &str, view: Option<&View>) -> Option<String> {
        let offers = match self.reads_nodes {
            true => self.allocatable(node, resource) > 0,
            // The plugin knows what it offers, whoever may not read nodes.
            false => view.is_none_or(|view| ours::is_offered(view, resource)),
        };
        let has = !resource.contains('/') || offers;
        match &self.facts.extended {
            _ if has => None,
            Ok(names) => names.contains(resource).then(|| {
                format!(
                    "{resource}: the node offers none; claims may serve it, which is not judged"
                )
            }),
            Err(error) => Some(format!(
                "{resource}: the node offers none; whether claims may serve it is not known: {error}"
            )),
        }
    }

    /// What other pods keep from it.
    fn others(&self, one: &mut NodeVerdict, node: &Node) {
        let Some(neighbours) = &self.neighbours else {
            if has_host_ports(&self.facts.pod) {
                one.open.push("which host ports other pods have is not known".to_owned());
            }
            return;
        };
        let ports = neighbours.ports(&node.metadata.name).into_iter();
        one.blocks.extend(ports.map(|text| block(BlockKind::HostPort, text)));
        for (by, holds) in neighbours.kept_away(node) {
            match holds {
                Holds::Yes => one.blocks.push(block(
                    BlockKind::PodAffinity,
                    format!("the anti-affinity of {by} keeps it away"),
                )),
                _ => one
                    .open
                    .push(format!("whether the anti-affinity of {by} keeps it away is not judged")),
            }
        }
    }

    fn other_resource(&self, one: &mut NodeVerdict, node: &Node, resource: &str, amount: u128) {
        if !self.reads_nodes {
            return;
        }
        let text = node.status.allocatable.get(resource);
        if let Some(Err(error)) = text.map(|text| neighbours::amount(resource, text)) {
            one.open.push(format!("what the node has cannot be read: {error}"));
            return;
        }
        if let Some(open) = self.by_claims(node, resource, None) {
            one.open.push(open);
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
        view: Option<&View>,
    ) {
        if let Some(open) = self.by_claims(node, resource, view) {
            claimed_resource(one, resource, amount, view, open.clone());
            // Whether claims serve it at all is not known then.
            if self.facts.extended.is_err() && !one.open.contains(&open) {
                one.open.push(open);
            }
            return;
        }
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

/// A resource of ours that claims may serve on this node: each is a claim on one share of the default size.
fn claimed_resource(
    one: &mut NodeVerdict,
    resource: &str,
    amount: u128,
    view: Option<&View>,
    open: String,
) {
    let left = view.map(|view| claims::room(view, &claims::SHARE));
    if let (Some(view), Some(left)) = (view, left.filter(|left| u128::from(*left) < amount)) {
        one.left.push(format!("{left} × {resource}"));
        one.blocks.extend(view.gpus.iter().filter_map(ours::out_of_service));
        let text = format!(
            "{resource}: asks {amount} by claims, each of another GPU: {}",
            claims::lacking(view, &[&claims::SHARE])
        );
        one.blocks.push(block(BlockKind::Capacity, text));
        return;
    }
    one.open.push(open);
}

/// What of the node itself is in the way, and what leaves that open.
fn node_itself(one: &mut NodeVerdict, pod: &Pod, node: &Node) {
    let is_cordoned = node.spec.unschedulable;
    let taints = affinity::untolerated(pod, node);
    // The cordon says it.
    let taints = taints.filter(|(taint, _)| !(is_cordoned && affinity::is_cordon(taint)));
    let taints: Vec<_> = taints.collect();
    let ready = node.status.conditions.iter().find(|one| one.kind == "Ready");
    if let Some(ready) = ready.filter(|one| one.status != "True") {
        let why = if ready.message.is_empty() { &ready.reason } else { &ready.message };
        let text = match why.as_str() {
            "" => "kubelet is not ready".to_owned(),
            why => format!("kubelet is not ready: {}", quoted(why, 160)),
        };
        // The scheduler goes by the taint.
        match taints.iter().any(|(taint, holds)| *holds == Holds::No && affinity::is_away(taint)) {
            true => one.blocks.push(block(BlockKind::NotReady, text)),
            false => one
                .open
                .push(format!("{text}; no taint keeps the pod away, and it would wait there")),
        }
    }
    match affinity::tolerates_cordon(pod) {
        _ if !is_cordoned => {}
        Holds::Yes => {}
        Holds::Open => {
            one.open.push("whether it tolerates the node's cordon is not judged".to_owned())
        }
        Holds::No => one.blocks.push(block(
            BlockKind::NodeCordon,
            "the node is cordoned: `kubectl uncordon` lifts it",
        )),
    }
    for (taint, holds) in taints {
        let name = affinity::name(taint);
        match holds {
            Holds::No => {
                one.blocks.push(block(BlockKind::Taint, format!("it does not tolerate {name}")));
            }
            _ => one.open.push(format!(
                "whether it tolerates {name} hangs on the cluster's version and features"
            )),
        }
    }
    let lacking = affinity::lacking(pod, node);
    if !lacking.is_empty() {
        let text = format!("the node has no label {}", lacking.join(", "));
        one.blocks.push(block(BlockKind::Selector, text));
    }
    match affinity::holds(pod, node) {
        Holds::Yes => {}
        Holds::Open => one.open.push(
            "its required node affinity is not judged: it has an operator that this program does not know".to_owned(),
        ),
        Holds::No => one.blocks.push(block(
            BlockKind::Affinity,
            "its required node affinity excludes the node",
        )),
    }
}
