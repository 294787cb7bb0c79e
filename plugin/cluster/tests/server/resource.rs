//! Slices, claims, and the watch of the driver's own slices.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_cluster::fixtures::Temper;
use tessera_cluster::k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use tessera_cluster::k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use tessera_cluster::resource::{ClaimRef, SliceEvent, Timing};
use tessera_cluster::{ApiError, Kind, Retry, Verb};
use tokio::sync::mpsc::Receiver;
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
    let own = world.client.own_slices().await.unwrap();
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
    assert!(matches!(error, ApiError::Conflict { .. }), "{error}");
    assert_eq!(error.retry(), Retry::Reread);
    let error = client.create_slice(&made).await.unwrap_err();
    assert!(matches!(error, ApiError::Exists { .. }), "{error}");
    let name = made.metadata.name.as_deref().unwrap();
    client.delete_slice(name).await.unwrap();
    client.delete_slice(name).await.unwrap();
    let error = client.update_slice(&made).await.unwrap_err();
    assert!(matches!(error, ApiError::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn an_object_that_is_not_valid_names_the_field_and_is_not_tried_again() {
    let World { client, .. } = &World::new();
    let mut made = client.create_slice(&slice()).await.unwrap();
    made.spec.node_name = Some("n2".into());
    let error = client.update_slice(&made).await.unwrap_err();
    let ApiError::Invalid { field, .. } = &error else { panic!("{error}") };
    assert_eq!(field.as_deref(), Some("spec.nodeName"));
    assert_eq!(error.retry(), Retry::Never);
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
    assert!(matches!(error, ApiError::NotFound { .. }), "{error}");
    let error = world.client.set_device_status(claim, &[status("s3", 1)]).await.unwrap_err();
    assert!(
        matches!(&error, ApiError::Invalid { field: Some(field), .. } if field.starts_with("status.devices[")),
        "{error}"
    );
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
    assert!(matches!(error, ApiError::Forbidden { .. }));
    assert_eq!(
        (error.call().verb, error.call().kind, error.retry()),
        (Verb::Patch, Kind::ClaimStatus, Retry::Later)
    );
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

#[tokio::test]
async fn a_server_without_dra_is_said_so_and_asked_again() {
    let world = World::new();
    world.client.create_slice(&slice()).await.unwrap();
    world.server.serve_dra(false);
    let error = world.client.own_slices().await.unwrap_err();
    assert!(matches!(error, ApiError::NotServed { .. }), "{error}");
    assert!(error.to_string().contains("Kubernetes 1.36"), "{error}");
    world.server.serve_dra(true);
    assert_eq!(world.client.own_slices().await.unwrap().len(), 1);
}

// === The watch ===

async fn next(watch: &mut Receiver<SliceEvent>) -> SliceEvent {
    timeout(Duration::from_secs(60), watch.recv()).await.expect("in time").expect("it goes on")
}

async fn silent(watch: &mut Receiver<SliceEvent>) {
    let event = timeout(Duration::from_millis(100), watch.recv()).await;
    assert!(event.is_err(), "{event:?}");
}

#[tokio::test]
async fn own_slices_are_followed_and_others_are_not() {
    let world = World::new();
    let made = world.client.create_slice(&slice()).await.unwrap();
    let name = made.metadata.name.clone().unwrap();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    // What there is already is said, too.
    let changed = |made: &tessera_cluster::k8s_openapi::api::resource::v1::ResourceSlice| {
        let resource_version = made.metadata.resource_version.clone().unwrap();
        SliceEvent::Changed { name: made.metadata.name.clone().unwrap(), resource_version }
    };
    assert_eq!(next(&mut watch).await, changed(&made));
    let newer = world.client.update_slice(&made).await.unwrap();
    assert_eq!(next(&mut watch).await, changed(&newer));
    world.server.with(|store| {
        store.create_slice(slice_of("nic", "n1")).unwrap();
        store.create_slice(slice_of(DRIVER, "n2")).unwrap();
    });
    silent(&mut watch).await;
    // Kubelet starts: all drivers' slices of the node go.
    assert_eq!(world.server.with(|store| store.wipe_slices("n1")), 2);
    assert_eq!(next(&mut watch).await, SliceEvent::Removed { name });
    silent(&mut watch).await;
    let asked = world.server.asked();
    let watched = asked.iter().find(|asked| asked.target.contains("watch=true")).unwrap();
    assert!(watched.headers["accept"].contains("PartialObjectMetadata"), "{watched:?}");
}

#[tokio::test]
async fn a_watch_whose_time_is_over_goes_on_where_it_was() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.client.create_slice(&slice()).await.unwrap();
    assert!(matches!(next(&mut watch).await, SliceEvent::Changed { .. }));
    world.server.end_watches();
    let name = world.client.create_slice(&slice()).await.unwrap().metadata.name.unwrap();
    let event = next(&mut watch).await;
    assert!(
        matches!(&event, SliceEvent::Changed { name: changed, .. } if *changed == name),
        "{event:?}"
    );
    silent(&mut watch).await;
}

#[tokio::test]
async fn a_gap_that_the_server_does_not_remember_begins_the_watch_again() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.client.create_slice(&slice()).await.unwrap();
    assert!(matches!(next(&mut watch).await, SliceEvent::Changed { .. }));
    world.server.with(|store| store.wipe_slices("n1"));
    next(&mut watch).await;
    world.server.with(|store| store.create_slice(slice_of("nic", "n1")).unwrap());
    world.server.forget_changes();
    world.server.end_watches();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    silent(&mut watch).await;
}

#[tokio::test]
async fn a_server_that_fails_is_said_once_and_asked_with_growing_pauses() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.server.set_temper(Temper::Answers(500, "etcd".into()));
    let event = next(&mut watch).await;
    assert!(matches!(event, SliceEvent::Failed(ApiError::Busy { .. })), "{event:?}");
    let (begun, before) = (Instant::now(), world.server.asked().len());
    until(|| world.server.asked().len() >= before + 6).await;
    // 10, 20 and 40 ms, then 80 each.
    let asked = world.server.asked().len() - before;
    let most = 4 + begun.elapsed().as_millis() / 80;
    assert!(asked as u128 <= most, "{asked} requests in {:?}", begun.elapsed());
    silent(&mut watch).await;
    world.server.set_temper(Temper::Works);
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
}

#[tokio::test]
async fn a_watch_that_is_forbidden_says_so_and_begins_when_it_is_granted() {
    let world = World::new();
    world.server.forbid("WATCH", "resourceslices", true);
    let mut watch = world.client.watch_own_slices();
    let event = next(&mut watch).await;
    let SliceEvent::Failed(error) = event else { panic!("{event:?}") };
    assert!(
        error.to_string().contains("resources: [\"resourceslices\"], verbs: [\"watch\"]"),
        "{error}"
    );
    world.server.forbid("WATCH", "resourceslices", false);
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
}

#[tokio::test]
async fn a_connection_that_is_silent_for_too_long_is_made_again() {
    let world = World::with(Timing { silence: Duration::from_millis(100), ..timing() });
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    let event = next(&mut watch).await;
    assert!(matches!(event, SliceEvent::Failed(ApiError::Slow { .. })), "{event:?}");
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
}

#[tokio::test]
async fn a_watch_goes_on_from_the_last_bookmark() {
    let world = World::new();
    world.server.set_bookmarks(Duration::from_millis(10));
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    // Nothing of its own happens: only a bookmark has the new version.
    let version = world.server.with(|store| {
        store.create_slice(slice_of("nic", "n1")).unwrap();
        store.version()
    });
    let from_there = format!("resourceVersion={version}");
    let mut looked = 0;
    until(|| {
        looked += 1;
        // A watch that is ended at once has had no bookmark, and the next one neither.
        if looked % 20 == 0 {
            world.server.end_watches();
        }
        let asked = world.server.asked();
        asked.last().is_some_and(|asked| asked.target.contains(&from_there))
    })
    .await;
}

#[tokio::test]
async fn a_watch_is_renewed_when_the_time_that_it_asked_for_is_over() {
    let world = World::with(Timing { watch: Duration::from_secs(1), ..timing() });
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    world.client.create_slice(&slice()).await.unwrap();
    assert!(matches!(next(&mut watch).await, SliceEvent::Changed { .. }));
    let renewed = "GET /apis/resource.k8s.io/v1/resourceslices?&watch=true";
    until(|| world.server.count(renewed) > 1).await;
    assert!(watch.try_recv().is_err(), "nothing was missed, so nothing is listed");
}

#[tokio::test]
async fn it_ends_with_its_listener_and_takes_the_connection_along() {
    let world = World::new();
    let mut watch = world.client.watch_own_slices();
    assert_eq!(next(&mut watch).await, SliceEvent::Restarted);
    assert!(world.server.open() > 0);
    drop(watch);
    until(|| world.server.with(|store| store.open_watches()) == 0).await;
}
