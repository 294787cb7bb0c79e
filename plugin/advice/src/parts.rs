//! Which of a container's allocations: a container with several of them gets advice for each.

use std::collections::{BTreeMap, BTreeSet};

use tessera_view::tenant::Tenant;

use crate::Observed;
use crate::workloads::container;

/// What tells a container's allocations apart. The same for all pods of a workload, where that is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part<'a> {
    /// It has one.
    Whole,
    /// That of this request of a claim.
    Request(&'a str),
    Resource(&'a str),
    /// This one, where two are called the same.
    Allocation(&'a str),
}

impl<'a> Part<'a> {
    fn of(tenant: &'a Tenant) -> Self {
        match tenant.claim.is_empty() {
            true => Part::Resource(&tenant.resource_name),
            false => Part::Request(&tenant.request),
        }
    }

    fn is_named(&self) -> bool {
        !matches!(self, Part::Request("") | Part::Resource(""))
    }

    /// What tells this allocation of a container from the others; empty where it has one.
    pub fn words(&self) -> String {
        match self {
            Part::Whole => String::new(),
            Part::Request(name) => format!("request {name}"),
            Part::Resource(name) => format!("resource {name}"),
            Part::Allocation(id) => format!("allocation {id}"),
        }
    }
}

/// Namespace, workload, container.
type Of<'a> = (&'a str, &'a str, &'a str);
/// An allocation: the number of its node, its id, its pod.
type Held<'a> = (usize, &'a str, &'a str);

/// Containers with several allocations, and which part each live one is.
pub(crate) struct Parts<'a>(BTreeMap<Of<'a>, BTreeMap<Held<'a>, Part<'a>>>);

impl<'a> Parts<'a> {
    /// By what lives now: the history does not say what an allocation was asked for.
    pub fn of(observed: &[Observed<'a>]) -> Self {
        let mut containers: BTreeMap<Of<'a>, BTreeMap<Held<'a>, &'a Tenant>> = BTreeMap::new();
        for (at, Observed { node, .. }) in observed.iter().enumerate() {
            for tenant in node.tenants.iter().filter(|one| one.state != "parked") {
                let Some(of) = container(tenant) else { continue };
                let held = (at, tenant.id.as_str(), tenant.pod.as_str());
                containers.entry(of).or_default().insert(held, tenant);
            }
        }
        Parts(
            containers
                .into_iter()
                .filter_map(|(of, tenants)| Some((of, several(tenants)?)))
                .collect(),
        )
    }

    /// Which part of a container an allocation is. `None`: it has several, and nothing says which this one was.
    pub fn get(&self, of: Of<'_>, held: Held<'_>) -> Option<Part<'a>> {
        match self.0.get(&of) {
            None => Some(Part::Whole),
            Some(parts) => parts.get(&held).copied(),
        }
    }
}

/// `None` where each pod has one.
fn several<'a>(tenants: BTreeMap<Held<'a>, &'a Tenant>) -> Option<BTreeMap<Held<'a>, Part<'a>>> {
    let mut pods: BTreeMap<(usize, &str), Vec<Part<'_>>> = BTreeMap::new();
    for ((at, _, pod), tenant) in &tenants {
        pods.entry((*at, *pod)).or_default().push(Part::of(tenant));
    }
    if pods.values().all(|parts| parts.len() == 1) {
        return None;
    }
    let are_apart = pods.values().all(|parts| {
        let distinct: BTreeSet<&Part<'_>> = parts.iter().filter(|part| part.is_named()).collect();
        distinct.len() == parts.len()
    });
    let part = |id, tenant| if are_apart { Part::of(tenant) } else { Part::Allocation(id) };
    Some(tenants.into_iter().map(|(held, tenant)| (held, part(held.1, tenant))).collect())
}
