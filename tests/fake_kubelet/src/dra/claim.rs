//! Claims as the scheduler leaves them.

use serde_json::{Value, json};

use super::ClaimName;

/// An allocated claim that is being put together.
#[derive(Clone, Debug)]
pub struct AllocatedClaim {
    name: ClaimName,
    driver: &'static str,
    node: String,
    requests: Vec<Value>,
    results: Vec<Value>,
}

impl AllocatedClaim {
    /// Without a request, of devices of this driver on this node.
    pub fn new(name: ClaimName, driver: &'static str, node: &str) -> Self {
        Self { name, driver, node: node.to_owned(), requests: Vec::new(), results: Vec::new() }
    }

    #[must_use]
    pub fn asking(mut self, request: &str, device: &str, memory: &str, cores: &str) -> Self {
        let capacity = json!({ "memory": memory, "cores": cores });
        self.requests.push(json!({
            "name": request,
            "exactly": {
                "deviceClassName": self.driver, "count": 1, "capacity": { "requests": capacity },
            },
        }));
        let share = format!("{}-{}", self.name.uid, self.results.len());
        self.results.push(json!({
            "request": request, "driver": self.driver, "pool": self.node, "device": device,
            "shareID": share, "consumedCapacity": capacity,
        }));
        self
    }

    /// As kubelet names it.
    pub fn name(&self) -> ClaimName {
        self.name.clone()
    }

    /// As the API server has it, reserved for this pod.
    pub fn object(&self, pod: &str) -> Value {
        let ClaimName { namespace, name, uid } = &self.name;
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "namespace": namespace, "name": name, "uid": uid },
            "spec": { "devices": { "requests": self.requests } },
            "status": {
                "reservedFor": [{ "resource": "pods", "name": pod, "uid": format!("pod-{uid}") }],
                "allocation": { "devices": { "results": self.results } },
            },
        })
    }
}
