//! What of a fleet is shown: the tenants of a namespace, and what subjects mean. Pure.

use tessera_view::fleet::Fleet;

/// Leaves the tenants of a namespace; empty for all.
pub(super) fn narrowed(mut fleet: Fleet, namespace: &str) -> Fleet {
    if !namespace.is_empty() {
        for view in fleet.nodes.iter_mut().filter_map(|entry| entry.view.as_mut()) {
            view.tenants.retain(|tenant| tenant.namespace == namespace);
        }
    }
    fleet
}

/// A subject in full: a bare name is a pod's in the namespace, where it is no GPU's or allocation's.
pub(super) fn subject(asked: &str, namespace: &str) -> String {
    let is_gpu = asked.starts_with("GPU-") || asked.starts_with("MIG-");
    match asked.contains('/') || is_gpu || namespace.is_empty() {
        true => asked.to_owned(),
        false => format!("{namespace}/{asked}"),
    }
}

/// Sentences on nodes that do not answer, and whether any does.
pub(super) fn silent(fleet: &Fleet) -> (Vec<String>, bool) {
    let silent = fleet.nodes.iter().filter(|entry| !entry.answers);
    let sentence =
        |entry: &tessera_view::fleet::Entry| format!("node {}: {}", entry.node, entry.error);
    (silent.map(sentence).collect(), fleet.nodes.iter().any(|entry| entry.answers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_is_a_pods_of_the_namespace() {
        assert_eq!(subject("chat", "team"), "team/chat");
        assert_eq!(subject("other/chat", "team"), "other/chat");
        assert_eq!(subject("GPU-1234", "team"), "GPU-1234");
        assert_eq!(subject("chat", ""), "chat");
    }
}
