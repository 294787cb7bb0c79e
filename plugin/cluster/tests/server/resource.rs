//! Slices, claims, and the watch of the driver's own slices.

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt, TryStreamExt};
use serde_json::{Value, json};
use tessera_cluster::fixtures::Temper;
use tessera_cluster::k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use tessera_cluster::k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use tessera_cluster::resource::{ClaimRef, SliceEvent, Timing};
use tessera_cluster::{ApiError, Failure, Kind, Retry, Verb};
use tokio::time::timeout;

use super::{DRIVER, World, slice, slice_of, timing, until};

#[tokio::test]
async fn slices_of_other_drivers_and_nodes_are_not_listed() {
    let world = World::new();
    world.server.with(|store| {
        for (driver, node) in [(DRIVER, "n2"), ("nic", "n1"), (DRIVER, "n1")] {
            store.create_slice(slice_of(driver, node)).unwrap();
        }
    });
    let (own, _) = world.client.own_slices().await.unwrap();
    assert_eq!(own.len(), 1);
    assert_eq!(
        (own[0].spec.driver.as_str(), own[0].spec.node_name.as_deref()),
        (DRIVER, Some("n1"))
    );
}

#[tokio::test]
async fn a_change_in_between_and_a_slice_that_is_gone_are_distinguished() {
    let World { client, .. } = &World::new();
    let made = client.create_slice(&slice()).await.unwrap();
    client.update_slice(&made).await.unwrap();
    let error = client.update_slice(&made).await.unwrap_err();
    assert_eq!((&error.failure, error.retry()), (&Failure::Conflict, Retry::Reread));
    let error = client.create_slice(&made).await.unwrap_err();
    assert_eq!(error.failure, Failure::Exists);
    let name = made.metadata.name.as_deref().unwrap();
    client.delete_slice(name).await.unwrap();
    client.delete_slice(name).await.unwrap();
    let error = client.update_slice(&made).await.unwrap_err();
    assert_eq!(error.failure, Failure::NotFound);
}

fn claim() -> Value {
    let result = |driver: &str, device: &str, share: Option<&str>| {
        let mut result =
            json!({ "request": "gpu", "driver": driver, "pool": "n1", "device": device });
        if let Some(share) = share {
            result["shareID"] = json!(share);
            result["consumedCapacity"] = json!({ "memory": "6Gi", "cores": "30" });
        }
        result
    };
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "namespace": "team", "name": "chat", "uid": "u" },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": {
            "deviceClassName": "shares", "capacity": { "requests": { "memory": "6Gi" } } } }] } },
        "status": { "allocation": { "devices": { "results": [
            result(DRIVER, "gpu-a", Some("s1")), result(DRIVER, "gpu-a", Some("s2")), result("nic", "nic-0", None),
        ] } } },
    })
}

fn status(share_id: &str, limit: u64) -> AllocatedDeviceStatus {
    AllocatedDeviceStatus {
        driver: DRIVER.into(),
        pool: "n1".into(),
        device: "gpu-a".into(),
        share_id: Some(share_id.into()),
        data: Some(RawExtension(json!({ "memoryBytes": limit }))),
        ..AllocatedDeviceStatus::default()
    }
}

#[tokio::test]
async fn a_claim_is_one_request_and_one_that_is_not_there_is_none() {
    let world = World::new();
    world.server.with(|store| store.put_claim(claim()));
    let read = world.client.claim("team", "chat").await.unwrap().unwrap();
    assert_eq!(read.metadata.uid.as_deref(), Some("u"));
    let results = read.status.unwrap().allocation.unwrap().devices.unwrap().results.unwrap();
    assert_eq!(results[1].share_id.as_deref(), Some("s2"));
    assert_eq!(world.client.claim("team", "other").await.unwrap(), None);
    assert_eq!(
        world.server.count("GET /apis/resource.k8s.io/v1/namespaces/team/resourceclaims/"),
        2
    );
    assert_eq!(world.server.asked().len(), 2);
}

#[tokio::test]
async fn a_claims_status_is_applied_for_this_driver_alone() {
    let world = World::new();
    let mut object = claim();
    object["status"]["devices"] = json!([{ "driver": "nic", "pool": "n1", "device": "nic-0" }]);
    world.server.with(|store| store.put_claim(object));
    let claim = &ClaimRef { namespace: "team".into(), name: "chat".into(), uid: "u".into() };
    let devices = || {
        world.server.with(|store| store.claim("team", "chat").unwrap()["status"]["devices"].clone())
    };
    world.client.set_device_status(claim, &[status("s1", 1), status("s2", 2)]).await.unwrap();
    assert_eq!(devices().as_array().unwrap().len(), 3);
    let asked = world.server.asked().pop().unwrap();
    assert_eq!(asked.headers["content-type"], "application/apply-patch+yaml");
    assert!(
        asked.target.contains("fieldManager=gpu.tessera.dev")
            && asked.target.contains("force=true"),
        "{asked:?}"
    );
    world.client.set_device_status(claim, &[status("s2", 3)]).await.unwrap();
    let left = devices();
    assert_eq!((&left[0]["driver"], &left[1]["data"]["memoryBytes"]), (&json!("nic"), &json!(3)));
    assert_eq!(left.as_array().unwrap().len(), 2);
    // Another claim of that name, and a device that was not allocated.
    let other = ClaimRef { uid: "v".into(), ..claim.clone() };
    let error = world.client.set_device_status(&other, &[status("s1", 1)]).await.unwrap_err();
    assert_eq!(error.failure, Failure::NotFound);
    let error = world.client.set_device_status(claim, &[status("s3", 1)]).await.unwrap_err();
    assert_eq!(error.failure, Failure::Invalid(Some("status.devices[1]".to_owned())));
    world.client.set_device_status(claim, &[]).await.unwrap();
    assert_eq!(devices().as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn what_is_forbidden_says_which_rule_is_missing() {
    let world = World::new();
    world.server.with(|store| store.put_claim(claim()));
    world.server.forbid("PATCH", "resourceclaims", true);
    let claim = ClaimRef { namespace: "team".into(), name: "chat".into(), uid: "u".into() };
    let error = world.client.set_device_status(&claim, &[status("s1", 1)]).await.unwrap_err();
    assert_eq!((&error.failure, error.retry()), (&Failure::Forbidden, Retry::Later));
    assert_eq!((error.call.verb, error.call.kind), (Verb::Patch, Kind::CLAIM_STATUS));
    let text = error.to_string();
    assert!(text.contains("resources: [\"resourceclaims/status\"], verbs: [\"patch\"]"), "{text}");
    world.server.forbid("GET", "nodes", true);
    let text = world.client.node_uid().await.unwrap_err().to_string();
    assert!(text.contains("apiGroups: [\"\"], resources: [\"nodes\"], verbs: [\"get\"]"), "{text}");
    world.server.forbid("GET", "nodes", false);
    assert_eq!(world.client.node_uid().await.unwrap(), "uid-of-n1");
    let asked = world.server.asked().pop().unwrap();
    assert!(asked.headers["accept"].contains("PartialObjectMetadata"), "{asked:?}");
}

// === The watch ===

type Watch = Pin<Box<dyn Stream<Item = Result<SliceEvent, ApiError>>>>;

/// From what there is now.
async fn watch(world: &World) -> Watch {
    let (_, version) = world.client.own_slices().await.unwrap();
    Box::pin(world.client.watch_own_slices(&version).await.unwrap())
}

async fn next(watch: &mut Watch) -> Result<Option<SliceEvent>, ApiError> {
    timeout(Duration::from_secs(60), watch.try_next()).await.expect("in time")
}

async fn silent(watch: &mut Watch) {
    let event = timeout(Duration::from_millis(100), watch.next()).await;
    assert!(event.is_err(), "{event:?}");
}

#[tokio::test]
async fn own_slices_are_followed_from_a_list_on_and_others_are_not() {
    let world = World::new();
    let made = world.client.create_slice(&slice()).await.unwrap();
    let name = made.metadata.name.clone().unwrap();
    let (_, version) = world.client.own_slices().await.unwrap();
    let newer = world.client.update_slice(&made).await.unwrap();
    let mut watch: Watch = Box::pin(world.client.watch_own_slices(&version).await.unwrap());
    // What happened between both is said, too.
    let resource_version = newer.metadata.resource_version.clone().unwrap();
    let changed = SliceEvent::Changed { name: name.clone(), resource_version };
    assert_eq!(next(&mut watch).await, Ok(Some(changed)));
    world.server.with(|store| {
        store.create_slice(slice_of("nic", "n1")).unwrap();
        store.create_slice(slice_of(DRIVER, "n2")).unwrap();
    });
    silent(&mut watch).await;
    // Kubelet starts: all drivers' slices of the node go.
    assert_eq!(world.server.with(|store| store.wipe_slices("n1")), 2);
    assert_eq!(next(&mut watch).await, Ok(Some(SliceEvent::Removed { name })));
    silent(&mut watch).await;
    let asked = world.server.asked();
    let watched = asked.iter().find(|asked| asked.target.contains("watch=true")).unwrap();
    assert!(watched.headers["accept"].contains("PartialObjectMetadata"), "{watched:?}");
    // It ends with its listener, and takes the connection along.
    drop(watch);
    until(|| world.server.with(|store| store.open_watches()) == 0).await;
}

#[tokio::test]
async fn a_watch_ends_with_its_time_and_in_an_error_where_the_server_forgets_fails_or_forbids() {
    let world = World::with(Timing { watch: Duration::from_secs(1), ..timing() });
    let mut ended = watch(&world).await;
    assert_eq!(next(&mut ended).await, Ok(None));
    world.client.create_slice(&slice()).await.unwrap();
    world.server.forget_changes();
    let failure = |watch: Result<_, ApiError>| watch.err().unwrap().failure;
    assert_eq!(failure(world.client.watch_own_slices("0").await.map(drop)), Failure::Expired);
    world.server.set_temper(Temper::Answers(500, "etcd".into()));
    let busy = Failure::Busy { status: 500, after: None };
    assert_eq!(failure(world.client.watch_own_slices("0").await.map(drop)), busy);
    world.server.set_temper(Temper::Works);
    world.server.forbid("WATCH", "resourceslices", true);
    let error = world.client.watch_own_slices("").await.err().unwrap().to_string();
    assert!(error.contains("resources: [\"resourceslices\"], verbs: [\"watch\"]"), "{error}");
}

#[tokio::test]
async fn a_connection_that_is_silent_for_too_long_is_given_up_and_bookmarks_are_no_silence() {
    let silence = Duration::from_millis(200);
    let world = World::with(Timing { silence, ..timing() });
    let mut quiet = watch(&world).await;
    assert_eq!(next(&mut quiet).await.unwrap_err().failure, Failure::Slow(silence));
    world.server.set_bookmarks(Duration::from_millis(10));
    let mut alive = watch(&world).await;
    let event = timeout(silence * 3, alive.next()).await;
    assert!(event.is_err(), "{event:?}");
}
