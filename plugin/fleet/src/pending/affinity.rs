//! The scheduler's rules on labels and taints.

use std::collections::BTreeMap;

use tessera_cluster::user::objects::{
    Node, NodeSelector, Pod, Requirement, Taint, Term, Toleration,
};

/// The taint that stands for a cordon.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Taints that keep the pod away, as `key=value:effect`.
pub(super) fn taints(pod: &Pod, node: &Node) -> Vec<String> {
    let keeps = |taint: &&Taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
            && !pod.spec.tolerations.iter().any(|toleration| tolerates(toleration, taint))
    };
    let name = |taint: &Taint| match taint.value.as_str() {
        "" => format!("{}:{}", taint.key, taint.effect),
        value => format!("{}={value}:{}", taint.key, taint.effect),
    };
    node.spec.taints.iter().filter(keeps).map(name).collect()
}

/// Whether the node is cordoned and the pod does not tolerate that.
pub(super) fn cordoned(pod: &Pod, node: &Node) -> bool {
    let taint = Taint {
        key: UNSCHEDULABLE.to_owned(),
        value: String::new(),
        effect: "NoSchedule".to_owned(),
    };
    node.spec.unschedulable && !pod.spec.tolerations.iter().any(|one| tolerates(one, &taint))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    if !toleration.effect.is_empty() && toleration.effect != taint.effect {
        return false;
    }
    match toleration.operator.as_str() {
        "Exists" => toleration.key.is_empty() || toleration.key == taint.key,
        "" | "Equal" => toleration.key == taint.key && toleration.value == taint.value,
        // Newer than this program.
        _ => false,
    }
}

/// Labels of the pod's node selector that the node lacks, as `key=value`.
pub(super) fn lacking(pod: &Pod, node: &Node) -> Vec<String> {
    let wanted = pod.spec.node_selector.iter();
    wanted
        .filter(|(key, value)| node.metadata.labels.get(*key) != Some(*value))
        .map(|(key, value)| format!("{key}={value}"))
        .collect()
}

/// Whether the pod's required node affinity holds.
pub(super) fn holds(pod: &Pod, node: &Node) -> bool {
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|required| selects(required, node))
}

/// Whether one of the terms holds.
pub(super) fn selects(selector: &NodeSelector, node: &Node) -> bool {
    selector.node_selector_terms.iter().any(|term| term_holds(term, node))
}

fn term_holds(term: &Term, node: &Node) -> bool {
    if term.match_expressions.is_empty() && term.match_fields.is_empty() {
        return false;
    }
    let fields = BTreeMap::from([("metadata.name".to_owned(), node.metadata.name.clone())]);
    term.match_expressions.iter().all(|one| requirement_holds(one, &node.metadata.labels))
        && term.match_fields.iter().all(|one| requirement_holds(one, &fields))
}

fn requirement_holds(requirement: &Requirement, labels: &BTreeMap<String, String>) -> bool {
    let Requirement { key, operator, values } = requirement;
    let label = labels.get(key);
    let numbers = || -> Option<(i64, i64)> {
        let [value] = values.as_slice() else { return None };
        Some((label?.parse().ok()?, value.parse().ok()?))
    };
    match operator.as_str() {
        "In" => label.is_some_and(|label| values.contains(label)),
        "NotIn" => label.is_none_or(|label| !values.contains(label)),
        "Exists" => label.is_some(),
        "DoesNotExist" => label.is_none(),
        "Gt" => numbers().is_some_and(|(label, value)| label > value),
        "Lt" => numbers().is_some_and(|(label, value)| label < value),
        // Newer than this program.
        _ => false,
    }
}
