//! Rules of the scheduler that are not judged here. A pod with one of them has room nowhere for sure.

use serde_json::Value;
use tessera_cluster::user::objects::{Container, Pod, PodAffinity, PodSpec, Volume};

/// What of the pod leaves the verdict open on every node.
pub(super) fn rules(pod: &Pod) -> Vec<String> {
    let spec = &pod.spec;
    let mut open: Vec<String> =
        set(spec).into_iter().map(|rule| format!("{rule} not judged")).collect();
    open.extend(spec.volumes.iter().flat_map(|volume| storage(pod, volume)));
    open.extend(unknown(spec).into_iter().map(|field| {
        format!("its field {field} is not judged: this program does not know what the scheduler makes of it")
    }));
    open
}

fn set(spec: &PodSpec) -> Vec<&'static str> {
    let affinity = spec.affinity.clone().unwrap_or_default();
    let required = |one: Option<PodAffinity>| {
        one.is_some_and(|one| !one.required_during_scheduling_ignored_during_execution.is_empty())
    };
    let spreads = |constraint: &Value| constraint["whenUnsatisfiable"] != "ScheduleAnyway";
    let restarts = |container: &Container| {
        // This one restarts a container and asks nothing of the node.
        container.restart_policy_rules.iter().any(|rule| rule.action != "Restart")
    };
    let rules = [
        (required(affinity.pod_affinity), "pod affinity"),
        (required(affinity.pod_anti_affinity), "pod anti-affinity"),
        (spec.topology_spread_constraints.iter().any(spreads), "topology spread"),
        (
            !matches!(spec.scheduler_name.as_str(), "" | "default-scheduler"),
            "the rules of its own scheduler",
        ),
        (
            spec.host_network && spec.host_users == Some(false),
            "whether the node has user namespaces in the host's network",
        ),
        (
            spec.containers.iter().chain(&spec.init_containers).any(restarts),
            "whether the node restarts all containers with one",
        ),
    ];
    rules.into_iter().filter(|(set, _)| *set).map(|(_, rule)| rule).collect()
}

/// Claims of storage have to be bound and to reach the node; a node takes so many volumes.
fn storage(pod: &Pod, volume: &Volume) -> Vec<String> {
    let name = &volume.name;
    let claim = |claim: &str| {
        format!(
            "volume \"{name}\" is not judged: whether its claim {claim} is bound, reaches the node and can be \
             attached"
        )
    };
    let mut open: Vec<String> =
        volume.persistent_volume_claim.iter().map(|one| claim(&one.claim_name)).collect();
    for kind in &volume.kinds {
        open.push(match kind.as_str() {
            "ephemeral" => claim(&format!("{}-{name}", pod.metadata.name)),
            kind => {
                format!("volume \"{name}\" is not judged: whether the node can have its {kind}")
            }
        });
    }
    open
}

/// Paths of fields that this program does not know.
fn unknown(spec: &PodSpec) -> Vec<String> {
    let mut paths: Vec<String> = spec.unknown.iter().cloned().collect();
    let containers = [("containers", &spec.containers), ("initContainers", &spec.init_containers)];
    for (list, containers) in containers {
        let names = containers.iter().flat_map(|one| &one.unknown);
        paths.extend(names.map(|field| format!("{list}[].{field}")));
    }
    if let Some(affinity) = &spec.affinity {
        paths.extend(affinity.unknown.iter().map(|field| format!("affinity.{field}")));
        let kinds = [
            ("nodeAffinity", affinity.node_affinity.as_ref().map(|one| &one.unknown)),
            ("podAffinity", affinity.pod_affinity.as_ref().map(|one| &one.unknown)),
            ("podAntiAffinity", affinity.pod_anti_affinity.as_ref().map(|one| &one.unknown)),
        ];
        for (kind, names) in kinds {
            let names = names.into_iter().flatten();
            paths.extend(names.map(|field| format!("affinity.{kind}.{field}")));
        }
    }
    paths.sort();
    paths.dedup();
    paths
}
