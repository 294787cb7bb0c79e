//! Which pod to ask for which node, and on which nodes a subject is now. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cluster::user::objects::Pod;
use tessera_model::written_name::{is_written, written_so};
use tessera_view::fleet::{Entry, Fleet};

use crate::ask::{AskError, PORT, Why};

/// A node and the plugin's pod on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The node, as the API server has it.
    pub node: String,
    /// The pod's namespace.
    pub namespace: String,
    pub pod: String,
    /// The port of its JSON API, as its container port `api` says; the usual one where it says none.
    pub port: u16,
    /// Why the pod cannot answer; empty where it runs.
    pub away: String,
}

/// The place of a node.
pub fn on<'a>(places: &'a [Place], node: &str) -> Result<&'a Place, AskError> {
    places.iter().find(|place| place.node == node).ok_or_else(|| {
        let known: Vec<&str> = places.iter().take(12).map(|place| place.node.as_str()).collect();
        let more = if places.len() > known.len() { ", …" } else { "" };
        Why::NoPlugin.says(format!(
            "no plugin is on a node called {node}; there is one on {}{more}",
            known.join(", ")
        ))
    })
}

/// One place for each node with a pod of a DaemonSet. Of several pods on a node, as during an update, the one that
/// runs and stays.
pub(crate) fn of(pods: &[Pod]) -> Vec<Place> {
    let mut best: BTreeMap<&str, (&Pod, (bool, bool, bool))> = BTreeMap::new();
    for pod in pods {
        let is_plugin = pod.metadata.owner_references.iter().any(|owner| owner.kind == "DaemonSet");
        if !is_plugin || pod.spec.node_name.is_empty() {
            continue;
        }
        let ready =
            pod.status.conditions.iter().any(|one| one.kind == "Ready" && one.status == "True");
        let stays = pod.metadata.deletion_timestamp.is_none();
        let rank = (pod.status.phase == "Running", stays, ready);
        let known = best.get(pod.spec.node_name.as_str());
        if known.is_none_or(|(_, other)| rank > *other) {
            best.insert(&pod.spec.node_name, (pod, rank));
        }
    }
    let place = |(node, (pod, _)): (&str, (&Pod, _))| Place {
        node: node.to_owned(),
        namespace: pod.metadata.namespace.clone(),
        pod: pod.metadata.name.clone(),
        port: port(pod),
        away: away(pod),
    };
    best.into_iter().map(place).collect()
}

fn port(pod: &Pod) -> u16 {
    let mut ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    ports.find(|port| port.name == "api").map_or(PORT, |port| port.container_port)
}

/// Why it is in its phase, behind that, as far as the API server has it.
pub(crate) fn why(pod: &Pod) -> String {
    let why = [&pod.status.reason, &pod.status.message].into_iter().filter(|text| !text.is_empty());
    why.map(|text| format!(", {text}")).collect()
}

fn away(pod: &Pod) -> String {
    if pod.status.phase == "Running" {
        return String::new();
    }
    let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
    let phase = if pod.status.phase.is_empty() { "not started" } else { &pod.status.phase };
    format!(
        "the plugin's pod {name} is {phase}{}; see `kubectl describe pod -n {} {}`",
        why(pod),
        pod.metadata.namespace,
        pod.metadata.name
    )
}

/// Nodes where something that lives is called so: a pod (`NAME`, `NAMESPACE/NAME`, also with a container), an
/// allocation, a claim or a GPU by its UUID. Empty where there is none: of what is gone, nodes themselves know.
pub(crate) fn nodes(fleet: &Fleet, namespace: &str, subject: &str) -> BTreeSet<String> {
    let parts: Vec<&str> = subject.split('/').collect();
    let mut nodes = BTreeSet::new();
    for entry in &fleet.nodes {
        let Some(view) = &entry.view else { continue };
        let tenant = view.tenants.iter().any(|tenant| {
            let named = match parts.as_slice() {
                [pod] => {
                    (namespace.is_empty() || tenant.namespace == namespace)
                        && (tenant.pod == *pod
                            || tenant.container == *pod
                            || tenant.workload == *pod)
                }
                [namespace, pod, ..] => tenant.namespace == *namespace && tenant.pod == *pod,
                [] => false,
            };
            named
                || tenant.claim == subject
                || is_written(&tenant.id, subject)
                || tenant
                    .other_holders
                    .iter()
                    .any(|holder| holder == subject || holder.starts_with(&format!("{subject}/")))
        });
        if tenant || view.gpus.iter().any(|gpu| is_written(&gpu.uuid, subject)) {
            nodes.insert(entry.node.clone());
        }
    }
    nodes
}

/// Allocations that live and whose id is written so, in full or by its beginning: their nodes and ids.
pub(crate) fn allocations(fleet: &Fleet, written: &str) -> Vec<(String, String)> {
    let of = |entry: &Entry| {
        let tenants = entry.view.iter().flat_map(|view| &view.tenants);
        let ids = tenants.map(|tenant| tenant.id.clone());
        ids.map(|id| (entry.node.clone(), id)).collect::<Vec<_>>()
    };
    let all: BTreeSet<(String, String)> = fleet.nodes.iter().flat_map(of).collect();
    written_so(all, |(_, id)| id, written)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tessera_view::gpu::Gpu;
    use tessera_view::node::Node;
    use tessera_view::tenant::Tenant;

    use super::*;

    fn pod(name: &str, node: &str, phase: &str, owner: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name, "namespace": "tessera", "ownerReferences": [{ "kind": owner, "name": "t" }] },
            "spec": { "nodeName": node },
            "status": { "phase": phase },
        }))
        .unwrap()
    }

    #[test]
    fn a_pod_is_asked_on_the_port_that_its_container_calls_api() {
        let mut pod = pod("new", "a", "Running", "DaemonSet");
        assert_eq!(of(std::slice::from_ref(&pod))[0].port, 9481);
        let containers = json!([{ "name": "plugin", "ports": [
            { "name": "metrics", "containerPort": 9480 },
            { "name": "api", "containerPort": 19481 },
        ] }]);
        pod.spec.containers = serde_json::from_value(containers).unwrap();
        assert_eq!(of(&[pod])[0].port, 19481);
    }

    #[test]
    fn a_node_is_asked_through_the_daemonsets_pod_that_runs() {
        let pods = [
            pod("old", "a", "Failed", "DaemonSet"),
            pod("new", "a", "Running", "DaemonSet"),
            pod("stranger", "b", "Running", "ReplicaSet"),
            pod("unbound", "", "Pending", "DaemonSet"),
            pod("early", "c", "Pending", "DaemonSet"),
        ];
        let places = of(&pods);
        let names: Vec<_> =
            places.iter().map(|place| (place.node.as_str(), place.pod.as_str())).collect();
        assert_eq!(names, [("a", "new"), ("c", "early")]);
        assert!(places[0].away.is_empty());
        assert!(places[1].away.contains("tessera/early is Pending"), "{}", places[1].away);
    }

    fn entry(node: &str, namespace: &str, pod: &str) -> Entry {
        let tenant = Tenant {
            id: format!("id-{node}"),
            namespace: namespace.into(),
            pod: pod.into(),
            ..Tenant::default()
        };
        let gpu = Gpu { uuid: format!("GPU-{node}{node}{node}{node}"), ..Gpu::default() };
        let view = Node { tenants: vec![tenant], gpus: vec![gpu], ..Node::default() };
        Entry { node: node.into(), view: Some(view), ..Entry::default() }
    }

    #[test]
    fn a_subject_is_where_something_is_called_so() {
        let nodes_of = [entry("a", "x", "chat"), entry("b", "y", "chat"), entry("c", "y", "other")];
        let fleet = Fleet { nodes: nodes_of.into(), ..Fleet::default() };
        let at = |namespace: &str, subject: &str| {
            nodes(&fleet, namespace, subject).into_iter().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(at("", "chat"), "a b");
        assert_eq!(at("y", "chat"), "b");
        assert_eq!(at("", "x/chat"), "a");
        assert_eq!(at("", "id-c"), "c");
        assert_eq!(at("", "GPU-aa"), "a");
        assert_eq!(at("", "gone"), "");
    }

    #[test]
    fn an_id_is_found_by_its_beginning_on_every_node() {
        let nodes_of = [entry("a", "x", "chat"), entry("ab", "y", "chat")];
        let fleet = Fleet { nodes: nodes_of.into(), ..Fleet::default() };
        let found = |written: &str| {
            let found = allocations(&fleet, written).into_iter();
            found.map(|(node, id)| format!("{node}:{id}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found("id-ab"), "ab:id-ab");
        // In full goes before the beginning of another.
        assert_eq!(found("id-a"), "a:id-a");
        assert_eq!(found("id-"), "");
        assert_eq!(found("chat"), "");
    }
}
