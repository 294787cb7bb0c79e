use tessera_view::explain::Explanations;
use tessera_view::narrow::{self, Rights};
use tessera_view::status::{
    Allocation, AllocationState, ComputePolicy, Gpu as AdminGpu, GpuState, Health,
};
use tessera_view::tenant::{self, Use};

use super::*;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Actor, Limits, What};
use tessera_model::placement_reason::PlacementReason;
use tessera_model::record::{Grant, Holder, State};
use tessera_model::sharing::{Compute, Placement, Split};
use tessera_model::steered::Override;

const GIB: u64 = 1 << 30;
const NOW: i64 = 1_795_336_321_000;
const CONFIG: &str = "[share]\nreplicas = 4\nmemory = \"8Gi\"\n";

fn id(resource: &str, replica: &str) -> AllocationId {
    AllocationId::of(resource, std::iter::once(replica))
}

fn holder(pod: &str) -> Holder {
    Holder { namespace: "prod".into(), pod: pod.into(), container: "server".into() }
}

fn grant(memory_limit_bytes: u64) -> Grant {
    Grant {
        uuid: "GPU-aaaa".into(),
        memory_limit_bytes,
        context_overhead_bytes: 512 << 20,
        cores_millis: 250,
        compute: Compute::Burst,
    }
}

fn record() -> Record {
    let replica = "GPU-aaaa::1".to_owned();
    let placed = PlacementReason::by_preference(
        &["GPU-aaaa::1".to_owned(), "GPU-bbbb::0".to_owned()],
        std::slice::from_ref(&replica),
        (Placement::Packed, Split::Reject),
        &|_| ", healthy, NUMA node 0".to_owned(),
    );
    Record {
        resource: "tessera.dev/gpu".into(),
        generation: 7,
        replicas: vec![replica],
        grants: vec![grant(8 * GIB)],
        allocated_unix_ms: NOW - 600_000,
        started_unix_ms: NOW - 590_000,
        holder: Some(holder("llama-0")),
        shim: Some("5eed".into()),
        placed: Some(placed),
        state: State::Started,
        ..Record::new(id("tessera.dev/gpu", "GPU-aaaa::1"), 1, Vec::new())
    }
}

fn refused(times: u64, ago_s: i64) -> Event {
    let (bytes, charged_bytes, limit_bytes) = (GIB, 7 * GIB, 8 * GIB);
    let what = What::RefusedMemory { bytes, charged_bytes, limit_bytes };
    Event::of(&record(), what, NOW - ago_s * 1000).times(times)
}

/// A pod that lives, one that is gone, and their GPU.
fn facts() -> Facts {
    let gone = Record { generation: 3, holder: None, ..record() };
    let was = Record { holder: Some(holder("batch-9")), ..gone.clone() };
    let reason = "GPU-aaaa::1 as preferred of 8 free replicas";
    let trail = vec![
        Event::of(&gone, What::Allocated, NOW - 90_000_000).because(reason),
        Event::of(&was, What::Released, NOW - 80_000_000),
        Event::of(&Record { holder: None, ..record() }, What::Allocated, NOW - 600_000),
        refused(1, 300),
        refused(12, 200),
        Event::of_gpu("GPU-aaaa", What::Cordoned, "for repair".into(), NOW - 1000),
    ];
    let status = Status {
        gpus: vec![AdminGpu {
            uuid: "GPU-aaaa".into(),
            name: "NVIDIA L4".into(),
            numa_node: Some(0),
            health: Health::Healthy,
            state: GpuState::Healthy,
            ..AdminGpu::default()
        }],
        allocations: vec![Allocation {
            id: record().id.to_string(),
            generation: 7,
            state: AllocationState::Started,
            holder: Some(holder("llama-0")),
            gpus: vec![Use {
                gpu_uuid: "GPU-aaaa".into(),
                memory_limit_bytes: 8 * GIB,
                memory_charged_bytes: 7 * GIB,
                memory_overhead_bytes: 64 << 20,
                cores_millis: 250,
                policy: ComputePolicy::Burst,
                ..Use::default()
            }],
            ..Allocation::default()
        }],
        warnings: vec!["prod/llama-0 (server): floods its gate socket".into(), "other".into()],
        at_unix_ms: NOW,
        ..Status::default()
    };
    Facts {
        status,
        records: vec![Arc::new(record())],
        trail: Lines {
            since_unix_ms: trail.first().map(|event| event.at_unix_ms),
            events: trail,
            ..Lines::default()
        },
        config: Arc::new(Config::parse(CONFIG).unwrap()),
        gpus: vec![Gpu::example("GPU-aaaa", 0)],
        page_versions: [(record().id.to_string(), 2)].into(),
        remarks: Vec::new(),
    }
}

#[test]
fn a_pod_is_found_by_each_of_its_names() {
    let id = record().id.to_string();
    for subject in ["llama-0", "prod/llama-0", "prod/llama-0/server", &id, &id[..6], " llama-0 "] {
        let explained = answer(&facts(), subject).unwrap();
        assert_eq!(
            (explained.allocations[0].generation, explained.gpus.len()),
            (7, 0),
            "{subject}"
        );
    }
    assert_eq!(answer(&facts(), "server").unwrap().allocations.len(), 2, "both generations");
    for subject in ["GPU-aaaa", "GPU-a", "0"] {
        assert_eq!(answer(&facts(), subject).unwrap().gpus.len(), 1, "{subject}");
    }
}

#[test]
fn what_is_unknown_or_ambiguous_is_answered_with_what_there_is() {
    let error = answer(&facts(), "lama").unwrap_err().to_string();
    assert!(error.contains("\"lama\"") && error.contains("prod/llama-0"), "{error}");
    let error = answer(&facts(), "zzz").unwrap_err().to_string();
    assert!(error.contains("prod/batch-9") && error.contains("GPU-aaaa"), "{error}");
    let mut facts = facts();
    facts.status.gpus.push(AdminGpu { uuid: "GPU-aabb".into(), index: 1, ..AdminGpu::default() });
    let error = answer(&facts, "GPU-aa").unwrap_err().to_string();
    assert!(error.contains("GPU-aaaa, GPU-aabb"), "{error}");
    assert!(answer(&facts, "").is_err());
}

#[test]
fn a_living_pod_is_explained_from_placement_to_refusals() {
    let explained = answer(&facts(), "llama-0").unwrap();
    let story = &explained.allocations[0];
    let placement = story.placement.as_ref().unwrap();
    assert!(placement.as_preferred);
    assert!(
        placement.reason.contains("GPU-aaaa had 1 free, healthy, NUMA node 0"),
        "{placement:?}"
    );
    assert_eq!(story.limits[0].memory_origin, "1 × share.memory (line 3)");
    let how = story.enforcement.as_ref().unwrap();
    assert_eq!((how.shim.as_str(), how.page_version), ("5eed", 2));
    assert_eq!(how.warnings, ["prod/llama-0 (server): floods its gate socket"]);
    let [incident] = story.incidents.as_slice() else { panic!("{:?}", story.incidents) };
    assert_eq!((incident.what.as_str(), incident.times), ("refused-memory", 13));
    assert_eq!(incident.last_unix_ms - incident.first_unix_ms, 100_000);
    let text = explained.text();
    for part in [
        "prod/llama-0 (server): started",
        "NVIDIA L4, NUMA node 0",
        "memory 8 GiB, 1 × share.memory",
        "charged 7 GiB",
        "overhead observed 64 MiB",
        "refused-memory 13 times",
        "kubelet allocated it",
        "[kubelet]",
        "(12 times)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_pod_that_is_gone_is_explained_from_the_trail() {
    let explained = answer(&facts(), "batch-9").unwrap();
    let story = &explained.allocations[0];
    assert_eq!(
        (story.generation, story.now.is_none(), story.enforcement.is_none()),
        (3, true, true)
    );
    assert_eq!(story.released_unix_ms, NOW - 80_000_000);
    let text = explained.text();
    assert!(text.contains("prod/batch-9 (server): released"), "{text}");
    assert!(text.contains("why there  GPU-aaaa::1 as preferred of 8 free replicas"), "{text}");
}

#[test]
fn a_quota_that_somebody_set_is_shown_with_who_and_when() {
    let mut facts = facts();
    let limits = |memory| vec![Limits::from(&grant(memory))];
    let (before, after, forced) = (limits(8 * GIB), limits(4 * GIB), false);
    let by = Actor::Admin {
        uid: 0,
        pid: 9,
        login_uid: Some(1000),
        user: None,
        login: None,
        command: "quota set x".into(),
    };
    let set = What::QuotaSet { before: before.clone(), after: after.clone(), forced };
    facts.trail.events.push(Event::of(&record(), set, NOW - 5000).by(by.clone()));
    let limit = |facts: &Facts| answer(facts, "llama-0").unwrap().allocations[0].limits[0].clone();
    let origin = limit(&facts).memory_origin;
    assert_eq!(
        origin,
        "set 2026-11-22 08:31:56 by uid 0 (logged in as uid 1000) pid 9: quota set x"
    );
    let mut forgotten = facts.clone();
    forgotten.trail.events.pop();
    let (allocated, owed) = (vec![grant(8 * GIB)], BTreeMap::new());
    let overridden = Some(Box::new(Override { allocated, owed }));
    let changed = Record { grants: vec![grant(4 * GIB)], overridden, ..record() };
    forgotten.records = vec![Arc::new(changed)];
    assert_eq!(limit(&forgotten).memory_origin, "set; the trail has lost by whom");
    let reset = What::QuotaReset { before: after, after: before };
    facts.trail.events.push(Event::of(&record(), reset, NOW).by(by));
    assert_eq!(limit(&facts).memory_origin, "1 × share.memory (line 3)");
}

#[test]
fn limits_that_the_configuration_would_not_give_today_are_marked() {
    let mut facts = facts();
    facts.config = Arc::new(Config::parse("[share]\nreplicas = 4\nmemory = \"4Gi\"\n").unwrap());
    let explained = answer(&facts, "llama-0").unwrap();
    let origin = &explained.allocations[0].limits[0].memory_origin;
    assert_eq!(origin, "as of its Allocate; share.memory (line 3) would give 4 GiB now");
    facts.gpus.clear();
    let explained = answer(&facts, "llama-0").unwrap();
    assert!(explained.allocations[0].limits[0].memory_origin.contains("the GPU is gone"));
}

#[test]
fn a_layout_is_named_by_its_key() {
    let mut facts = facts();
    let layout = "[[layout]]\ngpus = [\"GPU-aaaa\"]\nshares = [{ resource = \"x.dev/a\" }, \
                  { resource = \"tessera.dev/gpu\", memory = \"8Gi\", cores = \"25%\" }]\n";
    facts.config = Arc::new(Config::parse(layout).unwrap());
    let explained = answer(&facts, "llama-0").unwrap();
    assert_eq!(
        explained.allocations[0].limits[0].memory_origin,
        "1 × layout[0].shares[1].memory (line 3)"
    );
    let cut = &answer(&facts, "0").unwrap().gpus[0].cut;
    assert!(cut[1].starts_with("1 × tessera.dev/gpu: 8 GiB and 25% burst each"), "{cut:?}");
}

#[test]
fn a_gpu_is_explained_with_what_happened_on_it() {
    let explained = answer(&facts(), "GPU-aaaa").unwrap();
    let whats: Vec<&str> = explained.gpus[0].trail.iter().map(|line| line.what.as_str()).collect();
    assert_eq!(whats, ["allocated", "refused-memory", "refused-memory", "cordoned"]);
    let text = explained.text();
    assert!(text.contains("GPU 0, GPU-aaaa, NVIDIA L4: healthy"), "{text}");
    assert!(text.contains("the GPU is cordoned, and new pods do not get it: for repair"), "{text}");
}

#[test]
fn a_slow_pod_is_told_who_had_its_gpu_and_what_ails_it() {
    let mut facts = facts();
    let gpu = &mut facts.status.gpus[0];
    (gpu.health, gpu.state) = (Health::Unhealthy, GpuState::Unhealthy);
    gpu.state_reason = "XID 79".into();
    let had = |got_10s_millis| Some(tenant::Compute { got_10s_millis, ..Default::default() });
    let mine = &mut facts.status.allocations[0];
    mine.compute = had(100);
    let theirs = Holder { namespace: "theirs".into(), ..holder("train") };
    let other =
        Allocation { id: "b".repeat(32), holder: Some(theirs), compute: had(800), ..mine.clone() };
    facts.status.allocations.push(other);
    let text = answer(&facts, "llama-0").unwrap().text();
    let ails = "GPU 0 is unhealthy: XID 79. New pods do not get this GPU.";
    assert!(text.contains(ails), "{text}");
    let meanwhile = "in the last 10 s it had leased 10% (its share: 25%), theirs/train 80%";
    assert!(text.contains(meanwhile), "{text}");
    let mine = Rights::Namespaces(["prod".to_owned()].into());
    let all = Explanations::of(vec![("n".into(), answer(&facts, "llama-0").unwrap())]);
    let text = narrow::explanations(all, &mine).unwrap().text();
    assert!(text.contains("another pod 80%") && !text.contains("theirs"), "{text}");
    // Of the GPU, pods and not ids.
    let text = answer(&facts, "0").unwrap().text();
    assert!(text.contains("theirs/train (server): 0 B of 8 GiB, 25% burst"), "{text}");
    assert!(!text.contains("bbbb"), "{text}");
}

#[test]
fn many_generations_are_cut_short_and_counted() {
    let mut facts = facts();
    for generation in 100..150 {
        let one = Record { generation, ..record() };
        facts.trail.events.push(Event::of(&one, What::Released, NOW));
    }
    let explained = answer(&facts, "llama-0").unwrap();
    assert_eq!((explained.allocations.len(), explained.left_out), (STORIES, 43));
    assert_eq!(explained.allocations[0].generation, 7, "what lives comes first");
    assert_eq!(explained.allocations[1].generation, 149, "then the newest");
}

#[test]
fn a_clock_that_was_set_back_changes_no_order_and_makes_no_ages() {
    let mut facts = facts();
    let event = |what: What, at| Event::of(&record(), what, at).because("r");
    facts.trail.events.push(event(What::DriverRefused, NOW + 18_000_000));
    facts.trail.events.push(event(What::Rationed, NOW - 18_000_000));
    let mut moved = record();
    (moved.allocated_unix_ms, moved.started_unix_ms) = (NOW + 36_000_000, NOW + 400);
    facts.records = vec![Arc::new(moved)];
    let explained = answer(&facts, "llama-0").unwrap();
    let story = &explained.allocations[0];
    let whats: Vec<&str> = story.incidents.iter().map(|i| i.what.as_str()).collect();
    assert_eq!(whats, ["rationed", "driver-refused", "refused-memory"], "the latest first");
    let whats: Vec<&str> = story.trail.iter().rev().map(|line| line.what.as_str()).collect();
    assert_eq!(&whats[..2], ["rationed", "driver-refused"], "as it was written");
    let text = explained.text();
    let allocated = text.lines().find(|line| line.contains("allocated  ")).unwrap();
    assert!(allocated.ends_with("(the node's clock was set back since)"), "{allocated}");
    let started = text.lines().find(|line| line.contains("started  ")).unwrap();
    assert!(started.ends_with("(0s ago)"), "{started}");
}
