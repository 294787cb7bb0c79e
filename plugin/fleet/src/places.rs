//! Which pod to ask for which node. Pure.

use std::collections::BTreeMap;

use tessera_cluster::user::objects::Pod;

/// A node and the plugin's pod on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The node, as the API server has it.
    pub node: String,
    /// The pod's namespace.
    pub namespace: String,
    pub pod: String,
    /// The port of its JSON API, as its container port `api` says; 0 where it says none.
    pub port: u16,
    /// Why the pod cannot answer; empty where it runs.
    pub away: String,
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
    ports.find(|port| port.name == "api").map_or(0, |port| port.container_port)
}

fn away(pod: &Pod) -> String {
    if pod.status.phase == "Running" {
        return String::new();
    }
    let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
    let phase = if pod.status.phase.is_empty() { "not started" } else { &pod.status.phase };
    let why = [&pod.status.reason, &pod.status.message].into_iter().filter(|text| !text.is_empty());
    let why: String = why.map(|text| format!(", {text}")).collect();
    format!(
        "the plugin's pod {name} is {phase}{why}; see `kubectl describe pod -n {} {}`",
        pod.metadata.namespace, pod.metadata.name
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        assert_eq!(of(std::slice::from_ref(&pod))[0].port, 0);
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
}
