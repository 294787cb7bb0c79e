//! What to call an allocation, so that `tessera quota` on its node takes it and means no other.

use tessera_model::allocation_id::AllocationId;
use tessera_view::tenant::Tenant;

use crate::Observed;
use crate::parts::Part;

/// Fewest characters of an id that are written.
const SHORTEST: usize = 12;

/// An allocation in a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named<'a> {
    /// The only one of a container: namespace, pod, container.
    Container(&'a str, &'a str, &'a str),
    /// By the beginning of its id.
    Allocation(&'a str),
}

/// The name of a tenant on its node, by its container where `part` is all that the container has; `None` where every
/// name that it has is another's, too.
pub(crate) fn named<'a>(
    tenant: &'a Tenant,
    part: Part<'_>,
    observed: &[Observed<'_>],
) -> Option<Named<'a>> {
    let is_its_node =
        |one: &&Observed<'_>| one.node.tenants.iter().any(|other| std::ptr::eq(other, tenant));
    let on = observed.iter().find(is_its_node)?;
    let live = || on.node.tenants.iter().filter(|one| one.state != "parked");
    let (namespace, pod, container) = (&*tenant.namespace, &*tenant.pod, &*tenant.container);
    let is_called_so = |one: &&Tenant| {
        let is_claim = container.is_empty() && one.claim == format!("{namespace}/{pod}");
        is_claim
            || holders(one).any(|(of, held_by, name)| {
                (of, held_by) == (namespace, pod) && (container.is_empty() || name == container)
            })
    };
    // No name of Kubernetes begins so, and a command would take it for an option.
    let is_option = [namespace, container].iter().any(|name| name.starts_with('-'));
    if part == Part::Whole && !is_option && live().filter(is_called_so).count() == 1 {
        return Some(Named::Container(namespace, pod, container));
    }
    AllocationId::parse(&tenant.id)?;
    // A pod or a claim may be called as an id begins, and goes before it.
    let is_free = |written: &&str| {
        let is_anothers = |one: &Tenant| {
            holders(one).any(|(_, pod, _)| pod == *written)
                || one.claim.split_once('/').is_some_and(|(_, claim)| claim == *written)
        };
        !on.node.tenants.iter().any(is_anothers)
            && live().filter(|one| one.id.starts_with(*written)).count() == 1
    };
    let beginnings = (SHORTEST..=tenant.id.len()).map(|length| &tenant.id[..length]);
    beginnings.into_iter().find(is_free).map(Named::Allocation)
}

/// All containers that hold it: namespace, pod, container.
fn holders(tenant: &Tenant) -> impl Iterator<Item = (&str, &str, &str)> {
    let first = (&*tenant.namespace, &*tenant.pod, &*tenant.container);
    let others = tenant.other_holders.iter().filter_map(|other| {
        let (namespace, rest) = other.split_once('/')?;
        let (pod, container) = rest.split_once('/')?;
        Some((namespace, pod, container))
    });
    std::iter::once(first).chain(others)
}
