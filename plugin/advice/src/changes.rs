//! The exact change: commands, or lines of a manifest; and what to call an allocation in them.

use std::collections::{BTreeMap, BTreeSet};

use tessera_model::allocation_id::AllocationId;
use tessera_model::quantity::format_bytes;
use tessera_view::advice::{Ask, What};
use tessera_view::gpu::Gpu;
use tessera_view::tenant::Tenant;

use crate::Observed;
use crate::workloads::{Part, Workload};

/// Most commands that are written out.
const COMMANDS: usize = 8;

/// What a container should have of each of its GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Memory, whole MiB where it is to change.
    pub memory_bytes: u64,
    pub cores_millis: u32,
    pub memory_changes: bool,
    pub cores_change: bool,
    /// GPU time is divided, so the share means something.
    pub divided: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub lines: Vec<What>,
    /// Why a manifest's line is missing.
    pub evidence: Vec<String>,
}

/// Replicas of one resource, as a GPU is cut into them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Offer<'a> {
    resource: &'a str,
    memory_bytes: u64,
    cores_millis: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice<'a> {
    offer: Offer<'a>,
    count: u32,
}

impl Choice<'_> {
    fn memory_bytes(&self) -> u64 {
        self.offer.memory_bytes.saturating_mul(self.count.into())
    }

    fn cores_millis(&self) -> u32 {
        self.offer.cores_millis.saturating_mul(self.count)
    }

    fn text(&self) -> String {
        let Choice { offer, count } = self;
        format!("{count} × {} of {}", offer.resource, format_bytes(offer.memory_bytes))
    }
}

/// For one container of a workload, or the part of it that is labelled so.
pub(crate) fn changes(
    target: Target,
    workload: &Workload<'_>,
    (container, part): (&str, Part<'_>),
    observed: &[Observed<'_>],
) -> Changes {
    let mut changes = Changes::default();
    if !target.memory_changes && !target.cores_change {
        return changes;
    }
    let (lines, nameless) = commands(target, &workload.live, part, observed);
    changes.lines = lines;
    if nameless > 0 {
        changes.evidence.push(format!(
            "{nameless} of its pods have no name that is theirs alone: tessera status has the ids of their \
             allocations, and tessera quota set takes one"
        ));
    }
    let claims: BTreeSet<(&str, &str)> = workload
        .live
        .iter()
        .filter(|tenant| !tenant.claim.is_empty())
        .map(|tenant| (tenant.claim.as_str(), tenant.request.as_str()))
        .collect();
    if !claims.is_empty() {
        let requests: BTreeSet<&str> = claims.into_iter().map(|(_, request)| request).collect();
        changes.lines.extend(requests.into_iter().map(|request| capacity(target, request)));
        return changes;
    }
    let (offers, uneven) = offers(observed);
    if !uneven.is_empty() {
        let names: Vec<&str> = uneven.into_iter().collect();
        changes.evidence.push(format!(
            "shares of {} are not equally large on all GPUs here: no number of them is advised",
            names.join(", ")
        ));
    }
    if offers.is_empty() {
        return changes;
    }
    // Each of several GPUs gives as many.
    let gpus = workload.live.iter().map(|tenant| tenant.gpus.len()).max().unwrap_or(1).max(1);
    let now = workload.live.iter().find_map(|tenant| held(tenant, &offers));
    match smallest(target, &offers) {
        Some(best) if Some(best) == now => {
            let text = format!("no share here comes closer than what it asks for: {}", best.text());
            changes.evidence.push(text);
        }
        Some(best) => {
            changes.lines.push(limits(best, now, gpus, container));
            changes.evidence.extend(dearer(target, best, now));
        }
        None => changes.evidence.push(format!(
            "no share of a GPU here has {}: change [share] or [[layout]], or claim it (docs/dra.md)",
            what(target)
        )),
    }
    changes
}

/// Why less memory is advised, and shares that bring more of it.
fn dearer(target: Target, best: Choice<'_>, now: Option<Choice<'_>>) -> Option<String> {
    let has = now?.memory_bytes();
    (target.memory_bytes <= has && best.memory_bytes() > has).then(|| {
        format!(
            "{} bring {} of memory, more than it has: here GPU time comes with memory. tessera quota set gives the time \
             alone while the pod lives; a claim gives any size of both (docs/dra.md)",
            best.text(),
            format_bytes(best.memory_bytes())
        )
    })
}

fn what(target: Target) -> String {
    let memory = format_bytes(target.memory_bytes);
    match target.divided {
        true => {
            format!("{memory} and {}", tessera_model::percent::format_cores(target.cores_millis))
        }
        false => memory,
    }
}

/// `tessera quota set` for each pod: it takes effect at once, and ends with the pod. And how many have no name for it.
fn commands(
    target: Target,
    live: &[&Tenant],
    part: Part<'_>,
    observed: &[Observed<'_>],
) -> (Vec<What>, usize) {
    let differs = |tenant: &&&Tenant| {
        tenant.gpus.iter().any(|used| {
            target.memory_changes && used.memory_limit_bytes != target.memory_bytes
                || target.cores_change && used.cores_millis != target.cores_millis
        })
    };
    let live: Vec<&&Tenant> = live.iter().filter(differs).collect();
    let first = live.iter().take(COMMANDS);
    let names = first.filter_map(|tenant| named(tenant, part, observed));
    let mut lines: Vec<What> = names.map(|name| quota(target, name)).collect();
    let nameless = live.len().min(COMMANDS) - lines.len();
    if let Some(count) = live.len().checked_sub(COMMANDS).filter(|count| *count > 0) {
        lines.push(What::More(count as u64));
    }
    (lines, nameless)
}

fn quota(target: Target, (of, container): (String, &str)) -> What {
    What::Quota {
        of,
        container: container.to_owned(),
        memory_bytes: target.memory_changes.then_some(target.memory_bytes),
        cores_millis: target.cores_change.then_some(target.cores_millis),
    }
}

/// Of the claim, or its template.
fn capacity(target: Target, request: &str) -> What {
    What::Capacity {
        request: request.to_owned(),
        memory_bytes: target.memory_bytes,
        cores_millis: target.divided.then_some(target.cores_millis),
    }
}

/// Of the pod template.
fn limits(best: Choice<'_>, now: Option<Choice<'_>>, gpus: usize, container: &str) -> What {
    let ask = |choice: Choice<'_>| Ask {
        resource: choice.offer.resource.to_owned(),
        count: u64::from(choice.count).saturating_mul(gpus as u64),
    };
    What::Limits { container: container.to_owned(), ask: ask(best), now: now.map(ask) }
}

/// What GPUs are cut into, with the most replicas that one GPU has of it; and resources whose replicas differ in size,
/// of which a number says nothing.
fn offers<'a>(observed: &[Observed<'a>]) -> (BTreeMap<Offer<'a>, u32>, BTreeSet<&'a str>) {
    let mut offers: BTreeMap<Offer<'a>, u32> = BTreeMap::new();
    let gpus = observed.iter().flat_map(|one| &one.node.gpus);
    for cut in gpus.flat_map(|gpu: &'a Gpu| &gpu.replicas) {
        let offer = Offer {
            resource: &cut.resource_name,
            memory_bytes: cut.memory_limit_bytes,
            cores_millis: cut.cores_millis,
        };
        if cut.count > 0 && offer.memory_bytes > 0 {
            let most = offers.entry(offer).or_insert(0);
            *most = cut.count.max(*most);
        }
    }
    let mut names = BTreeSet::new();
    let is_again = |offer: &&Offer<'a>| !names.insert(offer.resource);
    let uneven: BTreeSet<&str> = offers.keys().filter(is_again).map(|one| one.resource).collect();
    offers.retain(|offer, _| !uneven.contains(offer.resource));
    (offers, uneven)
}

/// What a tenant has, as it was allocated.
fn held<'a>(tenant: &Tenant, offers: &BTreeMap<Offer<'a>, u32>) -> Option<Choice<'a>> {
    let used = tenant.gpus.first().filter(|used| !used.changed)?;
    let of = |(offer, most): (&Offer<'a>, &u32)| {
        let count = u32::try_from(used.memory_limit_bytes / offer.memory_bytes).ok()?;
        let choice = Choice { offer: *offer, count };
        let same = offer.resource == tenant.resource_name
            && choice.memory_bytes() == used.memory_limit_bytes
            && (1..=*most).contains(&count);
        same.then_some(choice)
    };
    offers.iter().find_map(of)
}

/// Of everything that is large enough, what leaves the least unused; among equals, fewer replicas.
fn smallest<'a>(target: Target, offers: &BTreeMap<Offer<'a>, u32>) -> Option<Choice<'a>> {
    let cores = if target.divided { target.cores_millis } else { 0 };
    let fits = offers.iter().filter_map(|(offer, most)| {
        let for_memory = target.memory_bytes.div_ceil(offer.memory_bytes);
        let for_cores = match (cores, offer.cores_millis) {
            (0, _) => 1,
            (_, 0) => return None,
            (cores, each) => u64::from(cores.div_ceil(each)),
        };
        let count = u32::try_from(for_memory.max(for_cores).max(1)).ok()?;
        (count <= *most).then_some(Choice { offer: *offer, count })
    });
    fits.min_by_key(|choice| {
        (choice.memory_bytes(), choice.cores_millis(), choice.count, choice.offer)
    })
}

/// Fewest characters of an id that are written.
const SHORTEST: usize = 12;

/// What a command takes for a tenant on its node: pod and container where `part` is all that the container has, else the
/// beginning of its id; `None` where every name that it has is another's, too.
fn named<'a>(
    tenant: &'a Tenant,
    part: Part<'_>,
    observed: &[Observed<'_>],
) -> Option<(String, &'a str)> {
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
        return Some((format!("{namespace}/{pod}"), container));
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
    beginnings.into_iter().find(is_free).map(|id| (id.to_owned(), ""))
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
