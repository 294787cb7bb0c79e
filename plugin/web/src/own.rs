//! What a bare name means to a reader of some namespaces: one of the reader's own, whatever others call theirs. So
//! another's name neither hides what is the reader's nor shows by what it hides that it is there.

use std::collections::BTreeSet;

use tessera_model::written_name::is_written;
use tessera_view::explain::{Explanation, Explanations};
use tessera_view::fleet::Fleet;
use tessera_view::narrow::Rights;
use tessera_view::tenant::Tenant;

/// Namespaces that are looked through for what is not held now, at most.
const NAMESPACES: usize = 8;

/// How a source is asked for a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    AsWritten,
    /// As something in each of these namespaces. With none of them it is not there.
    In(Vec<String>),
}

/// What `subject` means to a reader with `rights`. Nothing of tenants that the reader may not see counts.
pub(crate) fn meaning(fleet: &Fleet, rights: &Rights, subject: &str) -> Meaning {
    let Rights::Namespaces(namespaces) = rights else { return Meaning::AsWritten };
    // A whole name is not mistaken for another.
    if subject.is_empty() || subject.contains('/') {
        return Meaning::AsWritten;
    }
    let is_called_so = |tenant: &&Tenant| {
        let claim = tenant.claim.split_once('/').map(|(_, name)| name);
        [Some(tenant.pod.as_str()), claim, Some(tenant.container.as_str())].contains(&Some(subject))
            || is_written(&tenant.id, subject)
    };
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let own =
        views.flat_map(|view| &view.tenants).filter(|tenant| rights.may_see(&tenant.namespace));
    let called_so = own.filter(is_called_so).map(|tenant| tenant.namespace.clone());
    let found: BTreeSet<String> = called_so.collect();
    if !found.is_empty() {
        return Meaning::In(found.into_iter().collect());
    }
    if is_gpu(fleet, subject) {
        return Meaning::AsWritten;
    }
    let named = named(namespaces);
    match named.len() {
        ..=NAMESPACES => Meaning::In(named),
        _ => Meaning::In(Vec::new()),
    }
}

/// As [`meaning`], of a history. Everything, and a GPU's history, are asked for by the reader's namespaces: the length of
/// buckets and what of the events is kept would tell how much others have there. A reader of many namespaces is not asked
/// for one by one.
pub(crate) fn remembered(fleet: &Fleet, rights: &Rights, subject: &str) -> Meaning {
    let means = meaning(fleet, rights, subject);
    let Rights::Namespaces(namespaces) = rights else { return means };
    let is_of_all = subject.is_empty() || is_gpu(fleet, subject);
    let named = named(namespaces);
    match means {
        Meaning::AsWritten if is_of_all && named.len() <= NAMESPACES => Meaning::In(named),
        means => means,
    }
}

/// Tenants that nobody named are in none.
fn named(namespaces: &BTreeSet<String>) -> Vec<String> {
    namespaces.iter().filter(|namespace| !namespace.is_empty()).cloned().collect()
}

/// Whether a subject is a GPU by UUID, a beginning of it, or index.
pub(crate) fn is_gpu(fleet: &Fleet, subject: &str) -> bool {
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let mut gpus = views.flat_map(|view| &view.gpus);
    gpus.any(|gpu| gpu.index.to_string() == subject || is_written(&gpu.uuid, subject))
}

/// Two explanations as one.
pub(crate) fn explained(mut all: Explanations, more: Explanations) -> Explanations {
    for one in more.nodes {
        let Some(same) = all.nodes.iter_mut().find(|same| same.node == one.node) else {
            all.nodes.push(one);
            continue;
        };
        let Explanation { allocations, gpus, left_out, remarks, .. } = one.explanation;
        let into = &mut same.explanation;
        into.allocations.extend(allocations);
        into.gpus.extend(gpus);
        into.left_out = into.left_out.saturating_add(left_out);
        let new = remarks.into_iter().filter(|remark| !into.remarks.contains(remark));
        let new: Vec<String> = new.collect();
        into.remarks.extend(new);
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_view::fleet::Entry;
    use tessera_view::gpu::Gpu;
    use tessera_view::node::Node;

    use super::*;

    const NAMES: &[&str] = &["main", "chat", "chat-0", "0", "GPU-aaaa", "GPU-", "0c1d", "abcd"];

    fn tenant(namespace: &'static [&'static str]) -> impl Strategy<Value = Tenant> {
        let name = || prop::sample::select(NAMES).prop_map(str::to_owned);
        let id = prop::sample::select(&["0c1d", "abcd", "0c1e"][..]);
        (prop::sample::select(namespace), name(), name(), name(), id).prop_map(
            |(namespace, pod, container, claim, id)| Tenant {
                namespace: namespace.into(),
                id: format!("{id}{:0>28}", container.len()),
                claim: format!("{namespace}/{claim}"),
                pod,
                container,
                ..Tenant::default()
            },
        )
    }

    fn fleet(tenants: Vec<Tenant>) -> Fleet {
        let gpus = vec![Gpu { uuid: "GPU-aaaa-1".into(), ..Gpu::default() }];
        let view = Some(Node { tenants, gpus, ..Node::default() });
        Fleet { nodes: vec![Entry { view, ..Entry::default() }], ..Fleet::default() }
    }

    proptest! {
        #[test]
        fn what_others_call_theirs_changes_nothing(
            own in prop::collection::vec(tenant(&["ann", "bob"]), 0..6),
            others in prop::collection::vec(tenant(&["eve", "mallory", ""]), 0..12),
            subject in prop::sample::select(NAMES),
        ) {
            let rights = Rights::Namespaces(["ann".to_owned(), "bob".to_owned()].into());
            let alone = meaning(&fleet(own.clone()), &rights, subject);
            let all = others.into_iter().chain(own).collect();
            prop_assert_eq!(&meaning(&fleet(all), &rights, subject), &alone);
            if let Meaning::In(namespaces) = alone {
                prop_assert!(namespaces.iter().all(|one| one == "ann" || one == "bob"));
            }
        }
    }

    #[test]
    fn what_is_the_readers_own_goes_before_gpus() {
        let rights = Rights::Namespaces(["ann".to_owned()].into());
        let of =
            |tenants: &[Tenant], subject: &str| meaning(&fleet(tenants.to_vec()), &rights, subject);
        let id = format!("0c1d{}", "0".repeat(28));
        let one = Tenant {
            namespace: "ann".into(),
            pod: "chat".into(),
            container: "0".into(),
            id: id.clone(),
            ..Tenant::default()
        };
        let own = Meaning::In(vec!["ann".to_owned()]);
        let tenants = [one];
        assert_eq!(of(&tenants, "chat"), own);
        assert_eq!(of(&tenants, "0"), own, "a container before GPU 0");
        assert_eq!(of(&[], "0"), Meaning::AsWritten, "GPU 0");
        assert_eq!((of(&tenants, "0c1d"), of(&tenants, &id)), (own.clone(), own.clone()));
        assert_eq!(of(&[], &id), own, "it may have been the reader's");
        assert_eq!(of(&tenants, "gone-0"), own, "it may have been the reader's");
        assert_eq!(of(&tenants, "eve/pod"), Meaning::AsWritten);
        assert_eq!(meaning(&fleet(vec![]), &Rights::All, "chat"), Meaning::AsWritten);
    }
}
