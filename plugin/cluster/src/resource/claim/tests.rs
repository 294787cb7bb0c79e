use super::*;
use serde_json::json;

fn allocated() -> Value {
    json!({ "devices": {
        "results": [
            { "request": "gpu/half", "driver": "gpu.tessera.dev", "pool": "n1", "device": "gpu-a",
              "shareID": "7d5b3c1e-0f2a-4b6c-8d9e-aabbccddeeff",
              "consumedCapacity": { "memory": "6Gi", "cores": "30" } },
            { "request": "watch", "driver": "other", "pool": "n1", "device": "nic", "adminAccess": true },
        ],
        "config": [
            { "source": "FromClass", "opaque": { "driver": "gpu.tessera.dev", "parameters": { "a": 1 } } },
            { "source": "FromClaim", "requests": ["gpu"],
              "opaque": { "driver": "gpu.tessera.dev", "parameters": { "a": 2 } } },
        ],
    } })
}

fn object(requests: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "uid": "u", "namespace": "team", "name": "chat", "resourceVersion": "7",
                      "deletionTimestamp": "2026-11-22T09:45:00Z" },
        "spec": { "devices": { "requests": requests } },
        "status": {
            "allocation": allocated(),
            "reservedFor": [{ "resource": "pods", "name": "p", "uid": "pu" }],
            "devices": [{ "driver": "x" }],
        },
    })
}

#[test]
fn a_claim_is_read_as_far_as_a_driver_needs_it() {
    let requests = json!([
        { "name": "gpu", "firstAvailable": [
            { "name": "half", "deviceClassName": "l4", "capacity": { "requests": { "memory": "6Gi" } } },
            { "name": "quarter", "deviceClassName": "h100", "count": 2 },
        ] },
        { "name": "watch", "exactly": { "deviceClassName": "nics", "allocationMode": "All", "adminAccess": true } },
    ]);
    let claim = Claim::of_object(object(&requests)).unwrap();
    assert_eq!((claim.uid.as_str(), claim.resource_version.as_str()), ("u", "7"));
    assert!(claim.deleting);
    assert_eq!(claim.reserved_for[0].name, "p");
    let results = claim.allocated.as_ref().unwrap();
    assert_eq!(results[0].request, "gpu/half");
    assert_eq!(results[0].consumed_capacity["memory"], "6Gi");
    assert!(results[0].share_id.is_some() && !results[0].admin_access);
    assert!(results[1].admin_access && results[1].share_id.is_none());
    assert!(claim.config[0].from_class && claim.config[0].is_for("anything"));
    let second = &claim.config[1];
    assert!(!second.from_class && second.is_for("gpu/half") && !second.is_for("watch"));
    let asked: Vec<_> = claim.asked.iter().map(|a| (a.request.as_str(), a.count)).collect();
    assert_eq!(asked, [("gpu/half", Some(1)), ("gpu/quarter", Some(2)), ("watch", None)]);
    assert_eq!(claim.asked[0].capacity["memory"], "6Gi");
    assert!(claim.asked[2].admin_access);
}

#[test]
fn a_claim_without_allocation_or_with_a_broken_one_is_distinguished() {
    let mut claim = object(&json!([]));
    claim["status"] = json!({});
    assert_eq!(Claim::of_object(claim).unwrap().allocated, None);
    let mut claim = object(&json!([]));
    claim["status"]["allocation"]["devices"]["results"][0]["pool"] = json!(7);
    assert!(Claim::of_object(claim).unwrap_err().contains("invalid type"));
    let error = Claim::of_object(json!({ "metadata": {} })).unwrap_err();
    assert_eq!(error, "metadata.uid is missing");
}
