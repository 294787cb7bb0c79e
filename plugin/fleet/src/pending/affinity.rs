//! The scheduler's rules on labels and taints.

use std::collections::BTreeMap;

use tessera_cluster::user::objects::{
    LabelSelector, Node, NodeSelector, Pod, Requirement, Taint, Term, Toleration,
};

use super::holds::Holds;

/// The taint that stands for a cordon.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// The taints that stand for a node that is not ready.
const AWAY: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// Taints of a node, and whether the pod tolerates them: only those that it does not surely tolerate.
pub(super) fn untolerated<'a>(
    pod: &'a Pod,
    node: &'a Node,
) -> impl Iterator<Item = (&'a Taint, Holds)> {
    let judged = node.spec.taints.iter().map(|taint| {
        let tolerated = tolerated(pod, taint);
        match taint.effect.as_str() {
            "NoSchedule" | "NoExecute" => (taint, tolerated),
            "PreferNoSchedule" => (taint, Holds::Yes),
            // Newer than this program.
            _ => (taint, tolerated.max(Holds::Open)),
        }
    });
    judged.filter(|(_, tolerated)| *tolerated < Holds::Yes)
}

/// A taint as `key=value:effect`.
pub(super) fn name(taint: &Taint) -> String {
    match taint.value.as_str() {
        "" => format!("{}:{}", taint.key, taint.effect),
        value => format!("{}={value}:{}", taint.key, taint.effect),
    }
}

/// Whether a taint says what the node's condition `Ready` says.
pub(super) fn is_away(taint: &Taint) -> bool {
    AWAY.contains(&taint.key.as_str())
}

/// Whether a taint says what the node's cordon says.
pub(super) fn is_cordon(taint: &Taint) -> bool {
    taint.key == UNSCHEDULABLE
}

/// Whether the pod tolerates a cordon.
pub(super) fn tolerates_cordon(pod: &Pod) -> Holds {
    let (key, effect) = (UNSCHEDULABLE.to_owned(), "NoSchedule".to_owned());
    tolerated(pod, &Taint { key, value: String::new(), effect })
}

fn tolerated(pod: &Pod, taint: &Taint) -> Holds {
    Holds::any(pod.spec.tolerations.iter().map(|toleration| tolerates(toleration, taint)))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> Holds {
    let is_other = |asked: &str, given: &str| !asked.is_empty() && asked != given;
    if is_other(&toleration.effect, &taint.effect) || is_other(&toleration.key, &taint.key) {
        return Holds::No;
    }
    let holds = match toleration.operator.as_str() {
        "Exists" => Holds::Yes,
        "" | "Equal" => Holds::from(toleration.value == taint.value),
        // These hold only in clusters with the feature TaintTolerationComparisonOperators.
        operator @ ("Gt" | "Lt") => match (decimal(&taint.value), decimal(&toleration.value)) {
            (Some(taint), Some(asked)) if operator == "Gt" && taint > asked => Holds::Open,
            (Some(taint), Some(asked)) if operator == "Lt" && taint < asked => Holds::Open,
            _ => Holds::No,
        },
        // Newer than this program.
        _ => Holds::Open,
    };
    if toleration.unknown.is_empty() { holds } else { holds.min(Holds::Open) }
}

/// An integer in its one way to be written.
fn decimal(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number: &i64| number.to_string() == text)
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
pub(super) fn holds(pod: &Pod, node: &Node) -> Holds {
    let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    required.map_or(Holds::Yes, |required| selects(required, node))
}

/// Whether one of the terms holds.
pub(super) fn selects(selector: &NodeSelector, node: &Node) -> Holds {
    Holds::any(selector.node_selector_terms.iter().map(|term| term_holds(term, node)))
}

fn term_holds(term: &Term, node: &Node) -> Holds {
    if term.match_expressions.is_empty() && term.match_fields.is_empty() {
        return Holds::No;
    }
    let labels =
        term.match_expressions.iter().map(|one| requirement_holds(one, &node.metadata.labels));
    let fields = term.match_fields.iter().map(|one| field_holds(one, node));
    Holds::all(labels.chain(fields))
}

/// Whether labels match. The scheduler ignores a selector that it cannot read.
pub(super) fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> Holds {
    let plain = selector.match_labels.iter();
    let plain = plain.map(|(key, value)| Holds::from(labels.get(key) == Some(value)));
    let expressions = selector.match_expressions.iter();
    Holds::all(plain.chain(expressions.map(|one| requirement_holds(one, labels))))
}

fn field_holds(requirement: &Requirement, node: &Node) -> Holds {
    match (requirement.key.as_str(), requirement.operator.as_str(), requirement.values.as_slice()) {
        ("metadata.name", "In", [name]) => Holds::from(*name == node.metadata.name),
        ("metadata.name", "NotIn", [name]) => Holds::from(*name != node.metadata.name),
        // The scheduler takes one value.
        ("metadata.name", "In" | "NotIn", _) => Holds::No,
        // Newer than this program.
        _ => Holds::Open,
    }
}

fn requirement_holds(requirement: &Requirement, labels: &BTreeMap<String, String>) -> Holds {
    let Requirement { key, operator, values } = requirement;
    let label = labels.get(key);
    let numbers = || -> Option<(i64, i64)> {
        let [value] = values.as_slice() else { return None };
        Some((label?.parse().ok()?, value.parse().ok()?))
    };
    Holds::from(match operator.as_str() {
        "In" => label.is_some_and(|label| values.contains(label)),
        "NotIn" => label.is_none_or(|label| !values.contains(label)),
        "Exists" => label.is_some(),
        "DoesNotExist" => label.is_none(),
        "Gt" => numbers().is_some_and(|(label, value)| label > value),
        "Lt" => numbers().is_some_and(|(label, value)| label < value),
        // Newer than this program.
        _ => return Holds::Open,
    })
}
