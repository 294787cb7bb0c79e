//! Claims as the scheduler leaves them.

use serde_json::{Value, json};
use tessera_fake_kubelet::dra::ClaimName;

use super::node::{DRIVER, NODE};

/// A claim that is being put together.
#[derive(Clone, Debug)]
pub struct Claim {
    name: ClaimName,
    requests: Vec<Value>,
    results: Vec<Value>,
}

/// A claim of this name and UID without a request.
pub fn claim(name: &str) -> Claim {
    let name =
        ClaimName { namespace: "team".into(), name: name.into(), uid: format!("uid-of-{name}") };
    Claim { name, requests: Vec::new(), results: Vec::new() }
}

/// A claim of this name with one request, `gpu`.
pub fn one(name: &str, device: &str, memory: &str, cores: &str) -> Claim {
    claim(name).asking("gpu", device, memory, cores)
}

impl Claim {
    /// One more request, which was allocated this much of this device.
    pub fn asking(mut self, request: &str, device: &str, memory: &str, cores: &str) -> Self {
        let capacity = json!({ "memory": memory, "cores": cores });
        self.requests.push(json!({
            "name": request,
            "exactly": { "deviceClassName": DRIVER, "count": 1, "capacity": { "requests": capacity } },
        }));
        let share = format!("{}-{}", self.name.uid, self.results.len());
        self.results.push(json!({
            "request": request, "driver": DRIVER, "pool": NODE, "device": device, "shareID": share,
            "consumedCapacity": capacity,
        }));
        self
    }

    /// As kubelet names it.
    pub fn name(&self) -> ClaimName {
        self.name.clone()
    }

    /// As the API server has it.
    pub fn object(&self) -> Value {
        let ClaimName { namespace, name, uid } = &self.name;
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "namespace": namespace, "name": name, "uid": uid },
            "spec": { "devices": { "requests": self.requests } },
            "status": {
                "reservedFor": [{ "resource": "pods", "name": name, "uid": format!("pod-{uid}") }],
                "allocation": { "devices": { "results": self.results } },
            },
        })
    }
}
