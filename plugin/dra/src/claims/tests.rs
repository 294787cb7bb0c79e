use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_cluster::k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_model::record::Record;
use tessera_model::sharing::Compute;

use super::*;
use crate::fixtures::{catalogue, claim_record, compute, configured, parameters, share};

/// One that counts these capacities.
fn result(capacity: &[(&str, &str)]) -> DeviceResult {
    let amount = |(name, value): &(&str, &str)| ((*name).into(), Amount((*value).into()));
    let consumed_capacity = Some(capacity.iter().map(amount).collect());
    DeviceResult { consumed_capacity, ..share("gpu", "gpu-a", "s", "", "") }
}

fn claim(results: Vec<DeviceResult>) -> ResourceClaim {
    crate::fixtures::claim("chat", "u", results)
}

/// What the author of a claim asked for, as JSON.
fn asking(mut claim: ResourceClaim, requests: Value) -> ResourceClaim {
    claim.spec = serde_json::from_value(json!({ "devices": { "requests": requests } })).unwrap();
    claim
}

fn asked() -> ClaimRef {
    ClaimRef { namespace: "team".into(), name: "chat".into(), uid: "u".into() }
}

fn decided(claim: &ResourceClaim, records: &[Arc<Record>]) -> Result<Decision, String> {
    decided_on(&catalogue(&["GPU-a", "GPU-b"]), claim, records)
}

fn decided_on(
    catalogue: &Catalogue,
    claim: &ResourceClaim,
    records: &[Arc<Record>],
) -> Result<Decision, String> {
    let node = Node { pool: "node", catalogue, records, is_on: true };
    decide(&asked(), Some(claim), node)
}

fn new(decision: &Decision, at: usize) -> &Record {
    let Ask::Share(ask) = &decision.asks[at] else { panic!("{decision:?}") };
    ask
}

fn limits(ask: &Record) -> Vec<(&str, u64, u32, Compute)> {
    let rows = ask.grants.iter();
    rows.map(|one| (one.uuid.as_str(), one.memory_limit_bytes, one.cores_millis, one.compute))
        .collect()
}

#[test]
fn a_share_is_what_the_scheduler_counts() {
    let capacity = json!({ "requests": { "memory": "1500Mi" } });
    let requests = json!([
        { "name": "nic", "exactly": { "deviceClassName": "nics" } },
        { "name": "gpu", "exactly": { "deviceClassName": "shares", "capacity": capacity } },
    ]);
    let claim = asking(claim(vec![share("gpu", "gpu-a", "s", "1536Mi", "30")]), requests);
    let decision = decided(&claim, &[]).unwrap();
    assert_eq!(limits(new(&decision, 0)), [("GPU-a", 1536 << 20, 300, Compute::Burst)]);
    let origin = new(&decision, 0).origin.claim().unwrap();
    assert_eq!((origin.uid.as_str(), origin.request.as_str()), ("u", "gpu"));
    // For people: it is rounded up to the GPU's step.
    assert_eq!(origin.asked["memory"], "1500Mi");
    assert_eq!(new(&decision, 0).id, origin.allocation_id());
    let device = Device {
        request_names: vec!["gpu".into()],
        pool_name: "node".into(),
        device_name: "gpu-a".into(),
        cdi_device_ids: vec![],
        share_id: Some("s".into()),
    };
    assert_eq!((decision.devices, decision.stale), (vec![(device, Gives::Share(0))], vec![]));
}

#[test]
fn claims_that_are_not_what_kubelet_asked_for_are_distinguished() {
    let good = claim(vec![share("gpu", "gpu-a", "s", "1Gi", "10")]);
    let catalogue = catalogue(&[]);
    let node = Node { pool: "node", catalogue: &catalogue, records: &[], is_on: true };
    let error = decide(&asked(), None, node).unwrap_err();
    assert!(error.contains("not exist"), "{error}");
    let (mut again, mut free, mut deleting) = (good.clone(), good.clone(), good);
    again.metadata.uid = Some("v".into());
    free.status.as_mut().unwrap().allocation = None;
    deleting.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    let mut unused = deleting.clone();
    unused.status.as_mut().unwrap().reserved_for = None;
    for (claim, words) in [
        (again, "made again"),
        (unused, "being deleted"),
        (free, "status.allocation"),
        (claim(vec![]), "no device"),
    ] {
        let error = decided(&claim, &[]).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    // Its pod runs on: kubelet has restarted and asks again.
    assert!(decided(&deleting, &[]).is_ok());
}

#[test]
fn results_that_make_no_sense_name_request_device_and_field() {
    let far = DeviceResult { pool: "other".into(), ..share("gpu", "gpu-a", "s", "1Gi", "1") };
    for (result, words) in [
        (far, vec!["pool other", "this node's is node"]),
        (share("gpu", "gpu-z", "s", "1Gi", "1"), vec!["gpu-z", "not on this node"]),
        (result(&[]), vec!["consumedCapacity.memory", "DRAConsumableCapacity"]),
        (result(&[("memory", "1Gi")]), vec!["consumedCapacity.cores"]),
        (share("gpu", "gpu-a", "s", "lots", "1"), vec!["consumedCapacity.memory", "\"lots\""]),
        (share("gpu", "gpu-a", "s", "-1Gi", "1"), vec!["consumedCapacity.memory", "negative"]),
        (share("gpu", "gpu-a", "s", "0", "1"), vec!["consumedCapacity.memory", "some memory"]),
        (share("gpu", "gpu-a", "s", "1Gi", "0"), vec!["consumedCapacity.cores", "1 to 100"]),
        (share("gpu", "gpu-a", "s", "1Gi", "101"), vec!["consumedCapacity.cores", "\"101\""]),
        (share("gpu", "gpu-a", "s", "1Gi", "9E"), vec!["consumedCapacity.cores"]),
    ] {
        let error = decided(&claim(vec![result]), &[]).unwrap_err();
        let all = ["request gpu"].into_iter().chain(words);
        for word in all {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}

#[test]
fn a_recorded_share_stays_as_it_is_whatever_is_said_now() {
    let record = claim_record("u", "gpu", &[("gpu-a", Some("s"))]);
    let other = claim_record("u", "gpu", &[("gpu-a", Some("before"))]);
    let strangers = claim_record("v", "gpu", &[("gpu-a", Some("x"))]);
    let results = vec![result(&[("memory", "?")])];
    // The name is of namespace "team" in both; ids do not depend on it.
    let nonsense = configured("chat", "u", results, &[parameters(json!(7), false, &[])]);
    let records = [Arc::clone(&record), Arc::clone(&other), strangers];
    let decision = decided(&nonsense, &records).unwrap();
    assert_eq!(decision.asks, [Ask::Recorded(record.id.clone())]);
    assert_eq!(decision.stale, std::slice::from_ref(&other.id));
}

#[test]
fn monitors_see_and_hold_nothing() {
    let view = |request: &str, device: &str| DeviceResult {
        admin_access: Some(true),
        ..share(request, device, "s", "16Gi", "100")
    };
    let results = vec![view("all", "gpu-a"), view("all", "gpu-b"), view("all", "gpu-b")];
    let decision = decided(&claim(results), &[]).unwrap();
    assert!(decision.asks.is_empty());
    let gives: Vec<_> = decision.devices.into_iter().map(|(_, gives)| gives).collect();
    let view = |uuid: &str| Gives::View(uuid.into());
    assert_eq!(gives, [view("GPU-a"), view("GPU-b"), Gives::Nothing]);
}

/// Two requests of different classes, on a node that says `node` of its GPUs.
fn computes(
    node: Compute,
    config: Vec<DeviceAllocationConfiguration>,
) -> Result<[Compute; 2], String> {
    let results =
        vec![share("a", "gpu-a", "1", "1Gi", "1"), share("b/small", "gpu-a", "2", "1Gi", "1")];
    let requests = json!([
        { "name": "a", "exactly": { "deviceClassName": "plain" } },
        { "name": "b", "firstAvailable": [
            { "name": "large", "deviceClassName": "other" },
            { "name": "small", "deviceClassName": "held" },
        ] },
    ]);
    let claim = asking(configured("chat", "u", results, &config), requests);
    let mut catalogue = catalogue(&["GPU-a"]);
    catalogue.gpus.get_mut("GPU-a").unwrap().default_share.compute = node;
    let decision = decided_on(&catalogue, &claim, &[])?;
    Ok([0, 1].map(|at| new(&decision, at).grants[0].compute))
}

#[test]
fn parameters_of_the_claim_and_later_ones_take_precedence() {
    let (burst, strict, none) = (Compute::Burst, Compute::Strict, Compute::None);
    let with = |config| computes(none, config).unwrap();
    assert_eq!(with(vec![]), [none, none]);
    assert_eq!(with(vec![parameters(compute("strict"), true, &[])]), [strict, strict]);
    // For a request, its alternatives too; for an alternative, that alone.
    assert_eq!(with(vec![parameters(compute("strict"), false, &["b"])]), [none, strict]);
    assert_eq!(with(vec![parameters(compute("strict"), false, &["b/small"])]), [none, strict]);
    assert_eq!(with(vec![parameters(compute("strict"), false, &["b/large"])]), [none, none]);
    // The claim's before the class's, however they are listed.
    let claims = parameters(compute("strict"), false, &["a"]);
    let class = parameters(compute("burst"), true, &[]);
    assert_eq!(with(vec![claims.clone(), class.clone()]), [strict, burst]);
    assert_eq!(with(vec![class, claims]), [strict, burst]);
    let twice = [compute("strict"), compute("burst")];
    assert_eq!(with(twice.map(|c| parameters(c, false, &[])).to_vec()), [burst, burst]);
    // Saying nothing changes nothing, and other drivers' parameters are theirs.
    let silent = json!({ "apiVersion": "gpu.tessera.dev/v1", "kind": "ShareConfig" });
    let first = parameters(compute("strict"), false, &[]);
    let mut foreign = parameters(json!("nonsense"), false, &[]);
    foreign.opaque.as_mut().unwrap().driver = "other".into();
    assert_eq!(with(vec![first, parameters(silent, false, &[]), foreign]), [strict, strict]);
}

#[test]
fn a_looser_claim_is_told_who_says_what_and_what_to_write() {
    let class = parameters(compute("strict"), true, &["b/small"]);
    for said in ["none", "burst"] {
        let claims = parameters(compute(said), false, &["b"]);
        let error = computes(Compute::None, vec![class.clone(), claims]).unwrap_err();
        for word in ["request b/small: ", said, "DeviceClass held says strict", "write strict"] {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
    let error = computes(Compute::Burst, vec![parameters(compute("none"), false, &["a"])]);
    let error = error.unwrap_err();
    for word in ["request a: ", "configuration of node node", "says burst", "write burst or strict"]
    {
        assert!(error.contains(word), "{word}: {error}");
    }
}

fn any_compute() -> impl Strategy<Value = Compute> {
    prop::sample::select(&[Compute::None, Compute::Burst, Compute::Strict][..])
}

proptest! {
    /// Who grants a limit may loosen it, and nobody else.
    #[test]
    fn no_claim_is_looser_than_its_class_or_node(
        node in any_compute(),
        configs in prop::collection::vec((any_compute(), any::<bool>(), "a|b|b/small|b/large|"), 0..6),
    ) {
        // As the limits themselves are ordered: a cap is less than a weight, and a weight less than nothing.
        let tightness = |compute: Compute| match compute {
            Compute::None => 0,
            Compute::Burst => 1,
            Compute::Strict => 2,
        };
        let made = configs.iter().map(|(said, from_class, request)| {
            let requests = if request.is_empty() { vec![] } else { vec![request.as_str()] };
            parameters(compute(said.into_str()), *from_class, &requests)
        });
        let all: Vec<_> = made.collect();
        let is_class = |one: &&DeviceAllocationConfiguration| one.source == "FromClass";
        let classes = all.iter().filter(is_class).cloned().collect();
        let granted = computes(node, classes).unwrap();
        let of_class = |request: &str| all.iter().filter(is_class).any(|one| is_for(one, request));
        for (request, granted) in ["a", "b/small"].into_iter().zip(granted) {
            prop_assert!(of_class(request) || granted == node);
        }
        let last = |request: &str| {
            let its = configs.iter().zip(&all).filter(|(_, one)| !is_class(one) && is_for(one, request));
            its.rev().map(|((said, ..), _)| *said).next()
        };
        let asked = ["a", "b/small"].map(last);
        let is_looser = asked.iter().zip(granted).any(|(asked, granted)| {
            asked.is_some_and(|asked| tightness(asked) < tightness(granted))
        });
        match computes(node, all) {
            Ok(effective) => {
                prop_assert!(!is_looser);
                for ((effective, granted), asked) in effective.into_iter().zip(granted).zip(asked) {
                    prop_assert!(tightness(effective) >= tightness(granted));
                    prop_assert_eq!(effective, asked.unwrap_or(granted));
                }
            }
            Err(error) => prop_assert!(is_looser && error.contains("looser"), "{}", error),
        }
    }
}

#[test]
fn malformed_parameters_name_claim_and_field() {
    let good = |extra: Value| {
        let mut all = compute("burst");
        for (name, value) in extra.as_object().unwrap() {
            all[name] = value.clone();
        }
        all
    };
    let compute_of_class = parameters(compute("none"), true, &[]);
    for (said, words) in [
        (json!(7), "integer `7`"),
        (json!({}), "missing field `apiVersion`"),
        (good(json!({ "apiVersion": "v2" })), "v2 ShareConfig is not gpu.tessera.dev/v1"),
        (good(json!({ "kind": "Share" })), "is not gpu.tessera.dev/v1 ShareConfig"),
        (good(json!({ "compute": "fast" })), "`fast`, expected one of `none`, `burst`, `strict`"),
        (good(json!({ "compute": 7 })), "integer"),
        (good(json!({ "cores": 7 })), "unknown field `cores`"),
    ] {
        let config = [compute_of_class.clone(), parameters(said, false, &[])];
        let results = vec![share("gpu", "gpu-a", "s", "1Gi", "1")];
        let error = decided(&configured("chat", "u", results, &config), &[]).unwrap_err();
        for word in ["of the claim", "config[1]", "parameters: ", words] {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}

fn any_result() -> impl Strategy<Value = DeviceResult> {
    let device = prop_oneof![
        10 => "gpu-[ab]",
        1 => "[a-z]{0,8}",
    ];
    let quantity = prop_oneof![
        6 => (1u64..64).prop_map(|gib| format!("{gib}Gi")),
        4 => (0u64..120).prop_map(|n| n.to_string()),
        1 => "[-+.0-9a-zA-Z]{0,12}",
    ]
    .prop_map(Amount);
    let capacity = prop::collection::btree_map("memory|cores|other", quantity, 0..3);
    let request = prop_oneof!["[abc]", "[abc]/[xy]"];
    let share = prop::option::of("[0-9]{1,2}");
    let driver = prop_oneof![9 => Just(names::DRIVER), 1 => Just("other.example")];
    let pool = prop_oneof![30 => Just("node"), 1 => Just("elsewhere")];
    (request, driver, pool, device, share, capacity, prop::bool::weighted(0.1)).prop_map(
        |(request, driver, pool, device, share_id, consumed_capacity, admin_access)| DeviceResult {
            request,
            driver: driver.into(),
            pool: pool.into(),
            device,
            share_id,
            consumed_capacity: Some(consumed_capacity),
            admin_access: Some(admin_access),
            ..DeviceResult::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn whatever_is_allocated_is_refused_by_name_or_enforced_to_the_byte(
        results in prop::collection::vec(any_result(), 0..6),
    ) {
        let claim = claim(results.clone());
        let ours: Vec<_> = results.iter().filter(|r| r.driver == names::DRIVER).collect();
        let decision = match decided(&claim, &[]) {
            Ok(decision) => decision,
            Err(_) => return Ok(()),
        };
        // One device a result, in order, and one giver a request.
        prop_assert_eq!(decision.devices.len(), ours.len());
        let mut given = 0;
        for ((device, gives), result) in decision.devices.iter().zip(&ours) {
            prop_assert_eq!(&device.device_name, &result.device);
            prop_assert_eq!(&device.share_id, &result.share_id);
            prop_assert!(result.request.starts_with(&device.request_names[0]));
            if let Gives::Share(at) = gives {
                prop_assert_eq!(*at, given);
                given += 1;
            }
        }
        prop_assert_eq!(given, decision.asks.len());
        // What is enforced is what the scheduler counted.
        let counted = ours.iter().filter(|r| r.admin_access != Some(true)).count();
        let parts: Vec<_> = (0..given).flat_map(|at| new(&decision, at).grants.clone()).collect();
        prop_assert_eq!(parts.len(), counted);
        let memory = |result: &&&DeviceResult| {
            crate::fixtures::units(&result.consumed_capacity.as_ref().unwrap()["memory"])
        };
        let wanted: u64 = ours.iter().filter(|r| r.admin_access != Some(true)).map(|r| memory(&r)).sum();
        prop_assert_eq!(parts.iter().map(|part| part.memory_limit_bytes).sum::<u64>(), wanted);
        prop_assert!(parts.iter().all(|part| (1..=1000).contains(&part.cores_millis)));
        // The same again is the same allocation; it would be found in the ledger.
        let again = decided(&claim, &[]).unwrap();
        let ids = |decision: &Decision| -> Vec<_> {
            (0..decision.asks.len()).map(|at| new(decision, at).id.clone()).collect()
        };
        prop_assert_eq!(ids(&again), ids(&decision));
        let distinct: std::collections::BTreeSet<_> = ids(&decision).into_iter().collect();
        prop_assert_eq!(distinct.len(), given);
    }
}

#[test]
fn what_looks_alike_as_a_label_stays_apart() {
    assert_ne!(names::device("GPU_a"), names::device("GPU-a"));
    assert_ne!(names::device("GPU-a-"), names::device("GPU-a"));
    assert_ne!(names::device(&"a".repeat(70)), names::device(&"a".repeat(71)));
}

proptest! {
    #[test]
    fn every_name_is_a_dns_label(uuid in ".{0,80}") {
        let name = names::device(&uuid);
        prop_assert!(!name.is_empty() && name.len() <= 63, "{}", name);
        prop_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
        prop_assert!(!name.starts_with('-') && !name.ends_with('-'), "{}", name);
    }
}
