//! Single workloads, and what is said of them.

use proptest::prelude::*;
use tessera_config::Advice;
use tessera_view::advice::Scope;
use tessera_view::history::Answer;
use tessera_view::tenant::{ComputePolicy, Tenant};

use super::{lines, only, recommend, says};
use crate::fixtures::{EIGHTH, GIB, Hour, Limits, MIDNIGHT, Made, busy};

const HALF: Limits =
    Limits { memory_bytes: 40 * GIB, cores_millis: 500, policy: ComputePolicy::Burst };

#[test]
fn a_large_share_that_is_hardly_used_becomes_a_small_one() {
    let mut made = Made::new().pod("chat-7c9d8f6b5-x2v4q", HALF, &[busy(4096, 180.0, 36.0); 30]);
    made.node.tenants[0].resource_name = "tessera.dev/gpu-large".into();
    let advice = only(&[made]);
    assert_eq!((&*advice.workload, &*advice.container), ("chat", "main"));
    // 4 GiB and 15 %, in steps of 64 MiB; 6 % wanted and 15 % of that, in whole percent.
    assert_eq!(advice.memory_bytes, 4736 << 20);
    assert_eq!(advice.recommended_cores_millis, 70);
    assert_eq!(advice.saves_memory_bytes, (40 << 30) - (4736 << 20));
    assert_eq!(advice.saves_cores_millis, 430);
    assert_eq!(advice.confidence, "medium");
    assert_eq!(
        lines(&advice),
        [
            "tessera quota set team/chat-7c9d8f6b5-x2v4q --container main --memory 4736MiB --cores 7",
            "limits: {tessera.dev/gpu: 1}  # container main, now tessera.dev/gpu-large: 1",
        ]
    );
    says(&advice.evidence, "at most 4 GiB of 40 GiB");
    says(&advice.evidence, "used 5% on average, 5% at most in ten seconds");
    says(&advice.evidence, "99% of the time no more than 4 GiB, with 15% on top 4.6 GiB");
}

#[test]
fn shares_that_bring_more_memory_than_is_advised_say_so() {
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[busy(2048, 450.0, 900.0); 30])]);
    assert!(advice.memory_bytes < 8 * GIB && advice.recommended_cores_millis > 250, "{advice:?}");
    says(&lines(&advice), "limits: {tessera.dev/gpu: ");
    says(&advice.evidence, "of memory, more than it has");
    // More memory is wanted: nothing to explain.
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[busy(12 << 10, 300.0, 0.0); 30])]);
    assert!(advice.evidence.iter().all(|text| !text.contains("more than it has")));
    says(&lines(&advice), "limits: {tessera.dev/gpu: 2}  # container main, now tessera.dev/gpu: 1");
    says(&lines(&advice), "--memory 14144MiB");
    assert!(advice.saves_memory_bytes < 0);
}

#[test]
fn what_fits_stays_and_says_so() {
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[busy(7000, 375.0, 0.0); 30])]);
    assert_eq!((advice.memory_bytes, advice.recommended_cores_millis), (8 * GIB, 125));
    assert!(advice.changes.is_empty(), "{advice:?}");
    says(&advice.evidence, "nothing to change");
    assert_eq!((advice.saves_memory_bytes, advice.saves_cores_millis), (0, 0));
}

#[test]
fn refused_memory_is_never_less() {
    let refused = Hour { refusals: 3, ..busy(2048, 36.0, 0.0) };
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[refused; 30])]);
    assert!(advice.memory_bytes > 9 * GIB, "{advice:?}");
    says(&advice.evidence, "90 requests for memory refused at a limit of 8 GiB");
    // A whole GPU is the most that there is.
    let whole = Limits { memory_bytes: 79 * GIB, ..EIGHTH };
    let advice = only(&[Made::new().pod("chat-0", whole, &[refused; 30])]);
    assert_eq!(advice.memory_bytes, 79 * GIB);
    says(&advice.evidence, "it has all that a GPU here can give");
}

#[test]
fn a_capped_tenant_is_said_to_be_capped() {
    let strict = Limits { policy: ComputePolicy::Strict, ..EIGHTH };
    let hours = [busy(7000, 450.0, 900.0); 80];
    let capped = only(&[Made::new().pod("chat-0", strict, &hours)]);
    let free = only(&[Made::new().pod("chat-0", EIGHTH, &hours)]);
    assert_eq!((&*capped.confidence, &*free.confidence), ("medium", "high"));
    says(&capped.evidence, "its share of 12.5% is also a cap");
    // 37.5 % wanted and 15 % of that.
    assert_eq!(capped.recommended_cores_millis, 440);
}

#[test]
fn ten_busy_seconds_of_an_hour_count() {
    let mut hours = [busy(7000, 36.0, 0.0); 80];
    hours[50].busiest = 420;
    let advice = only(&[Made::new().pod("chat-0", HALF, &hours)]);
    assert_eq!((advice.recommended_cores_millis, &*advice.confidence), (420, "high"));
    says(&advice.evidence, "used 1% on average, 42% at most in ten seconds");
}

#[test]
fn time_that_others_left_idle_is_named() {
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[busy(7000, 1800.0, 0.0); 30])]);
    says(
        &advice.evidence,
        "more than its share of 12.5%, in time that others left idle: no change",
    );
    assert!(advice.recommended_cores_millis >= 500);
    assert_eq!(lines(&advice), [""; 0]);
    // What it waited for, others had.
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[busy(7000, 1800.0, 900.0); 30])]);
    says(&lines(&advice), "--cores ");
}

#[test]
fn no_change_is_written_before_an_hour_was_seen() {
    let mut made = Made::new().pod("chat-0", HALF, &[busy(2048, 36.0, 0.0)]);
    made.history.tenants[0].points[0].seconds = 3599.0;
    let advice = only(&[made.clone()]);
    assert!(advice.memory_bytes < 4 * GIB && advice.confidence == "low", "{advice:?}");
    assert_eq!(lines(&advice), [""; 0]);
    says(&advice.evidence, "less than an hour was seen");
    made.history.tenants[0].points[0].seconds = 3600.0;
    says(&lines(&only(&[made])), "--memory");
}

#[test]
fn a_number_of_shares_is_advised_where_they_are_equally_large_on_all_gpus() {
    let mut made = Made::new().pod("chat-0", HALF, &[busy(6500, 36.0, 0.0); 30]);
    made.node.tenants[0].resource_name = "tessera.dev/gpu-large".into();
    says(&lines(&only(&[made.clone()])), "limits: {tessera.dev/gpu: 1}");
    // A MIG instance beside it is cut into smaller shares of the same resource.
    let mut instance = made.node.gpus[0].clone();
    instance.uuid = "MIG-a".into();
    for replicas in &mut instance.replicas {
        replicas.memory_limit_bytes /= 4;
    }
    made.node.gpus.push(instance);
    let advice = only(&[made]);
    assert!(lines(&advice).iter().all(|line| !line.starts_with("limits")), "{advice:?}");
    says(
        &advice.evidence,
        "shares of tessera.dev/gpu, tessera.dev/gpu-large are not equally large",
    );
}

#[test]
fn undivided_time_gets_no_advice() {
    let none = Limits { policy: ComputePolicy::None, ..EIGHTH };
    let advice = only(&[Made::new().pod("chat-0", none, &[busy(2048, 0.0, 0.0); 30])]);
    assert_eq!(advice.recommended_cores_millis, 125);
    says(&advice.evidence, "nobody divides it here");
    assert!(!lines(&advice).iter().any(|line| line.contains("--cores")), "{advice:?}");
}

#[test]
fn claims_get_a_capacity() {
    let mut made = Made::new().pod("chat-0", EIGHTH, &[busy(2048, 36.0, 0.0); 30]);
    made.node.tenants[0].resource_name.clear();
    made.node.tenants[0].claim = "team/gpu-x".into();
    made.node.tenants[0].request = "gpu".into();
    let advice = only(&[made]);
    says(&lines(&advice), "capacity: {requests: {memory: 2368Mi, cores: \"2\"}}  # request gpu");
}

#[test]
fn what_fits_no_share_says_what_to_do() {
    let mut made = Made::new().pod("chat-0", EIGHTH, &[busy(60 << 10, 36.0, 0.0); 30]);
    made.node.gpus[0].replicas.truncate(1);
    made.node.gpus[0].replicas[0].count = 4;
    let advice = only(&[made]);
    says(&advice.evidence, "no share of a GPU here has 69 GiB");
    says(&advice.evidence, "[[layout]]");
}

#[test]
fn a_workload_is_judged_by_all_its_pods_on_all_nodes() {
    let here = Made::new().pod("chat-0", EIGHTH, &[busy(2048, 36.0, 0.0); 30]);
    let mut there = Made::new().pod("chat-1", EIGHTH, &[busy(3000, 36.0, 0.0); 30]);
    there.gone("chat-2", EIGHTH, &[busy(6000, 36.0, 0.0); 2]);
    there.node.node = "n2".into();
    // As in buckets of five minutes.
    there.history.step_seconds = 300;
    let here = Made { history: Answer { step_seconds: 300, ..here.history }, ..here };
    there.history.remarks.push("a file is gone".into());
    let both = recommend(&[here, there]);
    assert_eq!(both.remarks, ["n2: a file is gone"]);
    let advice = &both.workloads[0];
    assert_eq!(advice.pods, ["chat-0", "chat-1", "chat-2"]);
    assert!(advice.memory_bytes >= 6000 << 20);
    assert_eq!(advice.confidence, "high");
    let is_command = |line: &&String| line.starts_with("tessera quota set");
    assert_eq!(lines(advice).iter().filter(is_command).count(), 2, "{advice:?}");
}

#[test]
fn without_data_nothing_is_advised() {
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[])]);
    says(&advice.evidence, "nothing was observed yet");
    assert_eq!((advice.memory_bytes, advice.confidence.as_str()), (8 * GIB, "low"));
    assert!(advice.changes.is_empty());
    assert!(recommend(&[Made::new()]).workloads.is_empty());
}

#[test]
fn a_question_narrows() {
    let made = Made::new()
        .pod("chat-0", EIGHTH, &[busy(2048, 36.0, 0.0); 3])
        .pod("chat-1", EIGHTH, &[busy(3072, 36.0, 0.0); 3])
        .pod("train-x2v4q", EIGHTH, &[busy(2048, 36.0, 0.0); 3]);
    let all = [made];
    let advised = |scope| crate::recommend(&super::observed(&all), &Advice::default(), &scope);
    let ask = |namespace: &str, pod: &str| {
        let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
        let workloads = advised(Scope { namespace, pod, since_unix_ms: 0 }).workloads;
        workloads.into_iter().map(|one| (one.workload, one.pods.len())).collect::<Vec<_>>()
    };
    let chat = vec![("chat".to_owned(), 2)];
    for pod in ["chat-0", "team/chat-1"] {
        assert_eq!(ask("", pod), chat, "{pod}");
    }
    assert!(ask("", "other/chat-0").is_empty() && ask("other", "").is_empty());
    assert_eq!(ask("team", "").len(), 2);
    // What was before the window is not looked at.
    let late = advised(Scope { since_unix_ms: MIDNIGHT + (100 << 32), ..Scope::default() });
    says(&late.workloads[0].evidence, "nothing was observed yet");
}

#[test]
fn the_smallest_share_stays_and_only_the_quota_changes() {
    let advice = only(&[Made::new().pod("chat-0", EIGHTH, &[busy(2048, 36.0, 0.0); 30])]);
    assert_eq!(
        lines(&advice),
        ["tessera quota set team/chat-0 --container main --memory 2368MiB --cores 2"]
    );
    says(
        &advice.evidence,
        "no share here comes closer than what it asks for: 1 × tessera.dev/gpu of 8 GiB",
    );
}

/// Alone on its GPU it has all of it leased, and works for a tenth of the time.
fn alone(measured: f64) -> crate::fixtures::Made {
    let mut made = Made::new().pod("chat-0", EIGHTH, &[busy(2048, 360.0, 0.0); 30]);
    for point in &mut made.history.tenants[0].points {
        point.got_seconds = 3600.0;
        point.measured_seconds = 3600.0 * measured;
        point.used_seconds = 360.0 * measured;
    }
    made
}

#[test]
fn time_that_nobody_else_wanted_is_not_used_and_asks_for_no_larger_share() {
    let advice = only(&[alone(1.0)]);
    assert_eq!(advice.recommended_cores_millis, 125, "{advice:?}");
    says(&advice.evidence, "used 10% on average");
    assert_eq!(only(&[alone(0.6)]).recommended_cores_millis, 125, "the rest was like it");
}

#[test]
fn where_nobody_measured_what_was_used_no_share_is_advised() {
    let advice = only(&[alone(0.0)]);
    assert_eq!(advice.recommended_cores_millis, 125);
    says(&advice.evidence, "nobody measured how much of what it had leased it used");
}

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
fn allocations_of_one_container_are_judged_apart_and_those_of_pods_that_are_gone_are_left_out() {
    let made = Made::new();
    let made = add(made, &claim("0c1d2e3f", "small", "x"), &[busy(1024, 36.0, 0.0); 30]);
    let mut made = add(made, &claim("abcd2e3f", "large", "x"), &[busy(6500, 1800.0, 900.0); 30]);
    made.gone("chat-2", EIGHTH, &[busy(7000, 36.0, 0.0); 30]);
    let all = recommend(&[made]).workloads;
    let [small, large] = all.as_slice() else { panic!("{all:#?}") };
    let part = format!("allocation {}", "abcd2e3f".repeat(4));
    assert_eq!((&*large.container, &large.part), ("main", &part));
    assert!(small.memory_bytes < 2 << 30 && large.memory_bytes >= 6500 << 20, "{all:#?}");
    says(&lines(small), "tessera quota set 0c1d2e3f0c1d --memory 1216MiB --cores 2");
    says(&lines(large), "tessera quota set abcd2e3fabcd --cores ");
    says(&small.evidence, "the container holds several allocations");
    says(&small.evidence, "pods that have ended are left out");
    assert!(lines(small).iter().all(|line| !line.contains("request large")), "{small:?}");
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
}
