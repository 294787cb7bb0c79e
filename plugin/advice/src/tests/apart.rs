//! A container with several allocations: advice for each, by a name that means one.

use proptest::prelude::*;
use tessera_config::Advice;
use tessera_view::tenant::Tenant;

use super::{lines, recommend, says, waste};
use crate::fixtures::{EIGHTH, Hour, Made, busy};

/// What a tenant is called.
#[derive(Clone, Debug)]
struct Called {
    id: String,
    pod: &'static str,
    container: &'static str,
    claim: &'static str,
    request: &'static str,
    other: &'static str,
}

fn claim(id: &str, request: &'static str, claim: &'static str) -> Called {
    Called { id: id.repeat(4), pod: "chat-0", container: "main", claim, request, other: "" }
}

/// A live tenant with these hours.
fn add(made: Made, called: &Called, hours: &[Hour]) -> Made {
    let mut made = made.pod(called.pod, EIGHTH, hours);
    let tenant = made.node.tenants.last_mut().unwrap();
    tenant.id.clone_from(&called.id);
    tenant.container = called.container.into();
    if !called.claim.is_empty() {
        tenant.resource_name.clear();
        tenant.claim = format!("team/{}", called.claim);
        tenant.request = called.request.into();
    }
    if !called.other.is_empty() {
        tenant.other_holders = vec![format!("team/{}", called.other)];
    }
    let series = made.history.tenants.last_mut().unwrap();
    series.id.clone_from(&called.id);
    series.container = called.container.into();
    made
}

#[test]
fn two_requests_of_a_container_are_judged_apart() {
    let made = Made::new();
    let made = add(made, &claim("0c1d2e3f", "small", "x"), &[busy(1024, 36.0, 0.0); 30]);
    let made = add(made, &claim("abcd2e3f", "large", "x"), &[busy(6500, 1800.0, 900.0); 30]);
    let all = recommend(&[made]).workloads;
    let [large, small] = all.as_slice() else { panic!("{all:#?}") };
    assert_eq!((&*large.container, &*large.part), ("main", "request large"));
    assert_eq!(small.container_and_part(), "main, request small");
    assert!(small.memory_bytes < 2 << 30 && large.memory_bytes >= 6500 << 20, "{all:#?}");
    says(&lines(small), "tessera quota set 0c1d2e3f0c1d --memory 1216MiB --cores 2");
    says(&lines(large), "tessera quota set abcd2e3fabcd --cores ");
    says(&small.evidence, "the container holds several allocations");
    assert!(lines(small).iter().all(|line| !line.contains("request large")), "{small:?}");
}

#[test]
fn requests_of_one_name_are_distinguished_by_their_ids() {
    let made = Made::new();
    let made = add(made, &claim("0c1d2e3f", "gpu", "x"), &[busy(1024, 36.0, 0.0); 30]);
    let made = add(made, &claim("0c1d2e3e", "gpu", "y"), &[busy(2048, 36.0, 0.0); 30]);
    let all = recommend(&[made]).workloads;
    let containers: Vec<_> = all.iter().map(|one| one.container_and_part()).collect();
    let ids = ["0c1d2e3e", "0c1d2e3f"].map(|id| format!("main, allocation {}", id.repeat(4)));
    assert_eq!(containers, ids);
    says(&lines(&all[1]), "tessera quota set 0c1d2e3f0c1d --memory");
}

#[test]
fn pods_of_a_workload_are_judged_together_and_those_that_are_gone_are_left_out() {
    let mut made = Made::new();
    for (pod, ids) in [("chat-0", ["0a", "0b"]), ("chat-1", ["0c", "0d"])] {
        for (id, (request, mib)) in ids.into_iter().zip([("a", 1024), ("b", 3000)]) {
            let called = Called { pod, id: id.repeat(16), ..claim("", request, pod) };
            made = add(made, &called, &[busy(mib, 36.0, 0.0); 30]);
        }
    }
    made.gone("chat-2", EIGHTH, &[busy(7000, 36.0, 0.0); 30]);
    let all = recommend(&[made]).workloads;
    let [a, b] = all.as_slice() else { panic!("{all:#?}") };
    assert_eq!((a.pods.len(), b.pods.len(), &*a.part), (2, 2, "request a"));
    assert!(b.memory_bytes < 4 << 30, "{b:?}");
    says(&b.evidence, "pods that have ended are left out");
}

#[test]
fn a_claim_that_containers_share_is_named_by_its_id() {
    let made = Made::new();
    let shared = Called { container: "side", other: "chat-0/main", ..claim("0a0b0c0d", "a", "x") };
    let made = add(made, &shared, &[busy(1024, 36.0, 0.0); 30]);
    let made = add(made, &claim("1a0b0c0d", "b", "y"), &[busy(1024, 36.0, 0.0); 30]);
    let all = recommend(&[made]).workloads;
    says(&lines(&all[0]), "tessera quota set 1a0b0c0d1a0b --memory");
    says(&lines(&all[1]), "tessera quota set team/chat-0 --container side --memory");
}

fn called() -> impl Strategy<Value = Called> {
    let pods = &["chat-0", "chat-1", "0c1d2e3f0c1d", "0c1d2e3f0c1d2"][..];
    let names = &["a", "b", "0c1d2e3f0c1d", "chat-0"][..];
    let others = &["", "", "chat-0/main", "chat-1/side", "0c1d2e3f0c1d/main"][..];
    let of = |names: &'static [&'static str]| prop::sample::select(names);
    let id = "0c1d2e3f0c1d[12]{2}[0-3]{18}";
    (id, of(pods), of(&["main", "side"]), of(&["", "x", "0c1d2e3f0c1d1"]), of(names), of(others))
        .prop_map(|(id, pod, container, claim, request, other)| Called {
            id,
            pod,
            container,
            claim,
            request,
            other,
        })
}

/// Live tenants that `tessera quota set` takes such words for, as its server does.
fn meant<'a>(tenants: &'a [Tenant], words: &[&str]) -> Vec<&'a Tenant> {
    let name = words[3];
    let container = words.iter().position(|word| *word == "--container").map(|at| words[at + 1]);
    let (namespace, pod) = match name.split_once('/') {
        Some((namespace, pod)) => (Some(namespace), pod),
        None => (None, name),
    };
    let is_called_so = |one: &&Tenant| {
        let holders = [format!("{}/{}/{}", one.namespace, one.pod, one.container)];
        let mut holders = holders.iter().chain(&one.other_holders);
        let (of, claim) = one.claim.split_once('/').unwrap_or_default();
        one.id == name
            || !claim.is_empty()
                && claim == pod
                && namespace.is_none_or(|name| name == of)
                && container.is_none()
            || holders.any(|holder| {
                let parts: Vec<&str> = holder.split('/').collect();
                namespace.is_none_or(|name| name == parts[0])
                    && parts[1] == pod
                    && container.is_none_or(|name| name == parts[2])
            })
    };
    let found: Vec<&Tenant> = tenants.iter().filter(is_called_so).collect();
    match found.is_empty() {
        true => tenants.iter().filter(|one| one.id.starts_with(name)).collect(),
        false => found,
    }
}

proptest! {
    #[test]
    fn every_command_means_one_allocation_that_was_judged(
        tenants in prop::collection::vec((called(), 1u64..8000), 1..8),
    ) {
        let mut made = Made::new();
        let mut ids = std::collections::BTreeSet::new();
        // A node has an id once.
        for (called, mib) in tenants.iter().filter(|(called, _)| ids.insert(&called.id)) {
            made = add(made, called, &[busy(*mib, 36.0, 0.0); 3]);
        }
        let live = made.node.tenants.clone();
        let advice = recommend(&[made]).workloads;
        let mut labels = std::collections::BTreeSet::new();
        for one in &advice {
            prop_assert!(labels.insert((&one.workload, &one.container, &one.part)), "{advice:#?}");
            let all = lines(one);
            let commands = all.iter().filter(|line| line.starts_with("tessera"));
            let mut hit = std::collections::BTreeSet::new();
            for line in commands {
                let words: Vec<&str> = line.split(' ').collect();
                let meant = meant(&live, &words);
                prop_assert_eq!(meant.len(), 1, "{} {:#?}", line, live);
                prop_assert!(one.pods.contains(&meant[0].pod), "{line}");
                prop_assert!(hit.insert(&meant[0].id), "{line} {live:#?}");
            }
        }
    }

    #[test]
    fn waste_does_not_depend_on_how_allocations_are_told_apart(
        tenants in prop::collection::vec((called(), 1u64..8000), 1..8),
    ) {
        let sums = |of: &dyn Fn(&Called) -> Called| {
            let add = |made, (called, mib): &(Called, u64)| add(made, &of(called), &[busy(*mib, 36.0, 0.0); 3]);
            let made = tenants.iter().fold(Made::new(), add);
            let waste = waste(&[made], &Advice::default());
            let sum = |of: fn(&tessera_view::advice::NamespaceWaste) -> f64| waste.namespaces.iter().map(of).sum::<f64>();
            (sum(|one| one.asked_gpu_hours), sum(|one| one.used_gpu_hours))
        };
        let apart = sums(&Clone::clone);
        let alike = sums(&|called| Called { claim: "x", request: "gpu", other: "", ..called.clone() });
        prop_assert_eq!(apart, alike);
    }
}
