//! On which nodes a subject is now. Pure.

use std::collections::BTreeSet;

use tessera_model::written_name::{is_written, written_so};
use tessera_view::fleet::{Entry, Fleet};

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
    use super::*;
    use tessera_view::gpu::Gpu;
    use tessera_view::node::Node;
    use tessera_view::tenant::Tenant;

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
