//! What is asked for, and what comes back.

use serde_json::{Value, json};
use tessera_cluster::k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use tessera_cluster::k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use tessera_cluster::resource::ClaimRef;
use tessera_cluster::{ApiError, Kind, Retry, Verb};

use super::{DRIVER, World, slice, slice_of};

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
