//! Explanations in which everybody is named, wherever somebody can be.

use tessera_view::explain::{
    Behind, Enforcement, Explanation, GpuStory, Incident, Limit, Neighbour, Placement, Stand,
    Story, TrailLine,
};
use tessera_view::status::{Allocation, Claim, Gpu, Holder};
use tessera_view::tenant::Compute;

use crate::world::{NAMESPACES, NOBODY, everybody};

/// An allocation of this namespace, or of a tenant that nobody named.
pub fn behind(namespace: &str) -> Behind {
    let mark = if namespace.is_empty() { NOBODY } else { namespace };
    let pod = if namespace.is_empty() { String::new() } else { format!("{mark} pod") };
    Behind { allocation_id: format!("{mark} id"), namespace: namespace.to_owned(), pod }
}

fn all_behind() -> Vec<Behind> {
    NAMESPACES.into_iter().chain([""]).map(behind).collect()
}

fn holder(namespace: &str) -> Holder {
    let mark = if namespace.is_empty() { NOBODY } else { namespace };
    Holder {
        namespace: namespace.to_owned(),
        pod: format!("{mark} pod"),
        container: format!("{mark} container"),
    }
}

fn claim(namespace: &str) -> Claim {
    let name = format!("{namespace} claim");
    Claim { namespace: namespace.to_owned(), name, ..Claim::default() }
}

fn lines(namespace: &str) -> Vec<TrailLine> {
    let others = NAMESPACES.iter().map(|name| holder(name));
    let of_others = others.map(|holder| TrailLine { holder: Some(holder), ..TrailLine::default() });
    let common = TrailLine { reason: everybody(), by: everybody(), ..TrailLine::default() };
    let own =
        TrailLine { reason: format!("{namespace} own"), reason_is_own: true, ..common.clone() };
    let behind = all_behind().into_iter();
    let behind = behind.map(|other| TrailLine { behind: Some(other), ..own.clone() });
    of_others.chain([common, own.clone()]).chain(behind).collect()
}

fn incidents(namespace: &str) -> Vec<Incident> {
    let common = Incident { reason: everybody(), ..Incident::default() };
    let own =
        Incident { reason: format!("{namespace} own"), reason_is_own: true, ..common.clone() };
    let behind = all_behind().into_iter();
    let behind = behind.map(|other| Incident { behind: Some(other), ..own.clone() });
    [common].into_iter().chain(behind).collect()
}

fn placement() -> Placement {
    let cordoned = Stand { cordon: everybody(), ..Stand::default() };
    let withheld = Stand { withheld: everybody(), ..Stand::default() };
    let stands = vec![cordoned, withheld];
    let gpus = stands.iter().map(Stand::sentence).collect();
    Placement { stands, gpus, ..Placement::default() }
}

pub fn story(namespace: &str) -> Story {
    let now = Allocation {
        holder: Some(holder(namespace)),
        other_holders: NAMESPACES.iter().map(|name| holder(name)).collect(),
        claim: Some(claim(namespace)),
        compute: Some(Compute::default()),
        ..Allocation::default()
    };
    let neighbour = |who| Neighbour { who, ..Neighbour::default() };
    let limit = Limit {
        set_unix_ms: 1,
        set_by: everybody(),
        memory_origin: Limit::set(1, &everybody()),
        cores_origin: Limit::set(1, &everybody()),
        ..Limit::default()
    };
    Story {
        holder: Some(holder(namespace)),
        now: Some(now),
        placement: Some(placement()),
        limits: vec![limit],
        neighbours: all_behind().into_iter().map(neighbour).collect(),
        enforcement: Some(Enforcement { warnings: vec![everybody()], ..Enforcement::default() }),
        incidents: incidents(namespace),
        trail: lines(namespace),
        ..Story::default()
    }
}

pub fn explanation(allocations: Vec<Story>, about_gpu: bool) -> Explanation {
    let gpu = Gpu { cordon: everybody(), lease_holder: everybody(), ..Gpu::default() };
    let gpu = GpuStory { gpu: Some(gpu), trail: lines(""), ..GpuStory::default() };
    Explanation {
        allocations,
        gpus: about_gpu.then_some(gpu).into_iter().collect(),
        remarks: vec![everybody()],
        apart: true,
        ..Explanation::default()
    }
}
