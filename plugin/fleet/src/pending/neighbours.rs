//! Other pods, as the scheduler counts them on nodes: what they ask, which ports of the node they have, and whom they
//! keep away.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tessera_cluster::user::asked;
use tessera_cluster::user::objects::{
    Container, ContainerStatus, Node, Pod, PodTerm, Port, Quantities,
};
use tessera_model::quantity::Quantity;

use super::affinity;
use super::holds::Holds;

pub(super) type Amounts = BTreeMap<String, u128>;

/// Amounts as the scheduler counts them: CPU in thousandths, all else in whole units, rounded up.
pub(super) fn amount(name: &str, text: &str) -> Result<u128, String> {
    let quantity = Quantity::parse(text);
    let amount = quantity.and_then(|quantity| match name {
        "cpu" => quantity.millis(),
        _ => quantity.units(),
    });
    amount.map(u128::from).map_err(|error| format!("{name}: {text}: {error}"))
}

pub(super) fn is_alive(pod: &Pod) -> bool {
    !matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}

/// The pods that count on each node, for one pod.
pub(super) struct Neighbours<'a> {
    pod: &'a Pod,
    on: BTreeMap<&'a str, Vec<&'a Pod>>,
    /// What they ask, and how many they are; `None` where a request cannot be read.
    used: BTreeMap<&'a str, Option<Amounts>>,
    keepers: Vec<Keeper<'a>>,
}

/// A pod that keeps the pod away from nodes with the same value of a label.
struct Keeper<'a> {
    name: String,
    key: &'a str,
    value: &'a str,
    /// Whether the pod is one of those that it keeps away.
    holds: Holds,
}

impl<'a> Neighbours<'a> {
    /// For `pod`, of all `pods` and `nodes`.
    pub(super) fn new(pod: &'a Pod, pods: &'a [Pod], nodes: &'a [Node]) -> Self {
        let mut on: BTreeMap<&str, Vec<&Pod>> = BTreeMap::new();
        for other in pods {
            if let Some(node) = counted_on(pod, other) {
                on.entry(node).or_default().push(other);
            }
        }
        let used = on.iter().map(|(node, pods)| (*node, used(pods).ok())).collect();
        let labels = |name: &str| nodes.iter().find(|node| node.metadata.name == name);
        let mut keepers = Vec::new();
        for (node, pods) in &on {
            let with_terms = pods.iter().filter(|other| !anti_affinity(other).is_empty());
            let mut with_terms = with_terms.peekable();
            // Of a node that is gone there is no label.
            let Some(node) = with_terms.peek().and_then(|_| labels(node)) else { continue };
            keepers.extend(with_terms.flat_map(|other| keeps(pod, other, node)));
        }
        Neighbours { pod, on, used, keepers }
    }

    /// What of a resource the pods on a node ask; `None` where a request cannot be read. For `pods`, their number.
    pub(super) fn taken(&self, node: &str, resource: &str) -> Option<u128> {
        match self.used.get(node) {
            None => Some(0),
            Some(None) => None,
            Some(Some(amounts)) => Some(amounts.get(resource).copied().unwrap_or(0)),
        }
    }

    /// Ports of a node that the pod asks for and another pod has, each with that pod.
    pub(super) fn ports(&self, node: &str) -> Vec<String> {
        let others = self.on.get(node).into_iter().flatten();
        let held = others.flat_map(|other| host_ports(other).map(move |port| (*other, port)));
        let held: Vec<(&Pod, &Port)> = held.collect();
        let clash = |wanted: &Port| {
            let (other, _) = held.iter().find(|(_, port)| clashes(wanted, port))?;
            Some(format!(
                "port {}/{} of the node is taken by {}",
                wanted.host_port,
                protocol(wanted),
                full_name(other)
            ))
        };
        host_ports(self.pod).filter_map(clash).collect()
    }

    /// Pods whose anti-affinity keeps the pod from a node, in words; and whether it surely does.
    pub(super) fn kept_away(&self, node: &Node) -> Vec<(String, Holds)> {
        let labels = &node.metadata.labels;
        let here =
            |keeper: &&Keeper| labels.get(keeper.key).is_some_and(|value| value == keeper.value);
        let words = |keeper: &Keeper| {
            (format!("pod {} ({}={})", keeper.name, keeper.key, keeper.value), keeper.holds)
        };
        self.keepers.iter().filter(here).map(words).collect()
    }
}

/// Whether a pod asks for ports of the node.
pub(super) fn has_host_ports(pod: &Pod) -> bool {
    host_ports(pod).next().is_some()
}

/// The node on which the scheduler counts `other` when it places `pod`: its own, or that for which it is nominated, if
/// it comes no later than `pod`.
fn counted_on<'a>(pod: &Pod, other: &'a Pod) -> Option<&'a str> {
    let is_same = other.metadata.name == pod.metadata.name
        && other.metadata.namespace == pod.metadata.namespace;
    if !is_alive(other) || is_same {
        return None;
    }
    let nominated = other.status.nominated_node_name.as_str();
    match other.spec.node_name.as_str() {
        "" if nominated.is_empty() || other.spec.priority < pod.spec.priority => None,
        "" => Some(nominated),
        node => Some(node),
    }
}

fn used(pods: &[&Pod]) -> Result<Amounts, String> {
    let mut sum = Amounts::new();
    for pod in pods {
        let effective = effective(pod)?;
        let mut asked = asked(&effective, amount)?;
        asked.insert("pods".to_owned(), 1);
        for (name, amount) in asked {
            let all = sum.entry(name).or_default();
            *all = all.saturating_add(amount);
        }
    }
    Ok(sum)
}

/// A pod with what the scheduler counts for containers that are being resized.
fn effective(pod: &Pod) -> Result<Cow<'_, Pod>, String> {
    let status = &pod.status;
    if !status.node_allocatable_resource_claim_statuses.is_empty() {
        return Err("what its claims take of the node's CPU and memory is not counted".to_owned());
    }
    let statuses = [&status.container_statuses, &status.init_container_statuses];
    let is_plain = statuses.into_iter().flatten().all(|one| one.resources.is_none());
    if is_plain && status.resources.is_none() {
        return Ok(Cow::Borrowed(pod));
    }
    // Kubelet will not do it: what the pod asks is not counted then.
    let refused = |one: &tessera_cluster::user::objects::Condition| {
        one.kind == "PodResizePending" && one.reason == "Infeasible"
    };
    let counts_asked = !status.conditions.iter().any(refused);
    let mut whole = pod.clone();
    let resize = |containers: &mut Vec<Container>, statuses: &[ContainerStatus]| {
        for container in containers {
            let status = statuses.iter().find(|one| one.name == container.name);
            let Some(ContainerStatus {
                resources: Some(has), allocated_resources: granted, ..
            }) = status
            else {
                continue;
            };
            let asked = &container.resources.requests;
            let mut most = larger(&has.requests, granted)?;
            if counts_asked {
                most = larger(&most, asked)?;
            }
            container.resources.requests = most;
        }
        Ok::<(), String>(())
    };
    resize(&mut whole.spec.containers, &status.container_statuses)?;
    resize(&mut whole.spec.init_containers, &status.init_container_statuses)?;
    if let (Some(asked), Some(has)) = (&mut whole.spec.resources, &status.resources) {
        let most = larger(&has.requests, &status.allocated_resources)?;
        for (name, text) in &mut asked.requests {
            let most = most.get(name).cloned().into_iter().collect::<Vec<_>>();
            for other in most {
                if !counts_asked || amount(name, &other)? > amount(name, text)? {
                    *text = other;
                }
            }
        }
    }
    Ok(Cow::Owned(whole))
}

/// Of each resource, the larger amount.
fn larger(a: &Quantities, b: &Quantities) -> Result<Quantities, String> {
    let mut most = a.clone();
    for (name, text) in b {
        let is_more = match most.get(name) {
            Some(other) => amount(name, text)? > amount(name, other)?,
            None => true,
        };
        if is_more {
            most.insert(name.clone(), text.clone());
        }
    }
    Ok(most)
}

/// Ports of the node that a pod asks for, while it runs.
fn host_ports(pod: &Pod) -> impl Iterator<Item = &Port> {
    let beside = pod.spec.init_containers.iter().filter(|one| one.restart_policy == "Always");
    let all = pod.spec.containers.iter().chain(beside);
    all.flat_map(|one| &one.ports).filter(|port| port.host_port > 0)
}

fn protocol(port: &Port) -> &str {
    if port.protocol.is_empty() { "TCP" } else { &port.protocol }
}

fn clashes(a: &Port, b: &Port) -> bool {
    let every = |port: &Port| matches!(port.host_ip.as_str(), "" | "0.0.0.0");
    a.host_port == b.host_port
        && protocol(a) == protocol(b)
        && (every(a) || every(b) || a.host_ip == b.host_ip)
}

fn anti_affinity(pod: &Pod) -> &[PodTerm] {
    let rules = pod.spec.affinity.as_ref().and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    rules.map_or(&[], |rules| &rules.required_during_scheduling_ignored_during_execution)
}

/// How `other`, on `node`, keeps `pod` away.
fn keeps<'a>(pod: &Pod, other: &'a Pod, node: &'a Node) -> Vec<Keeper<'a>> {
    let keeper = |term: &'a PodTerm| {
        let value = node.metadata.labels.get(&term.topology_key)?;
        let holds = is_meant(pod, other, term);
        let key = &term.topology_key;
        (holds > Holds::No).then(|| Keeper { name: full_name(other), key, value, holds })
    };
    anti_affinity(other).iter().filter_map(keeper).collect()
}

/// Whether a term of `other` is about `pod`.
fn is_meant(pod: &Pod, other: &Pod, term: &PodTerm) -> Holds {
    let own = term.namespaces.is_empty() && term.namespace_selector.is_none();
    let named = match own {
        true => pod.metadata.namespace == other.metadata.namespace,
        false => term.namespaces.contains(&pod.metadata.namespace),
    };
    let selected = match &term.namespace_selector {
        None => Holds::No,
        Some(all) if all.match_labels.is_empty() && all.match_expressions.is_empty() => Holds::Yes,
        // Labels of namespaces are not read.
        Some(_) => Holds::Open,
    };
    let pods = term.label_selector.as_ref();
    let pods = pods.map_or(Holds::No, |pods| affinity::matches(pods, &pod.metadata.labels));
    let unknown = if term.unknown.is_empty() { Holds::Yes } else { Holds::Open };
    Holds::from(named).max(selected).min(pods).min(unknown)
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name)
}
