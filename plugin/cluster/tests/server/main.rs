//! The client against an API server on a port: slices, claims, the watch, versions, and servers that are away,
//! silent, slow, forbidding or of another version.

mod connection;
mod kubeconfig;
mod node;
mod objects;
mod reviews;
mod watch;

use std::time::Duration;

use serde_json::{Value, json};
use tessera_cluster::fixtures::ApiServer;
use tessera_cluster::k8s_openapi::api::resource::v1::ResourceSlice;
use tessera_cluster::resource::{ResourceClient, Timing};

const DRIVER: &str = "gpu.tessera.dev";

/// Short pauses. The limit is what a test of a silent server takes, and more than a busy machine needs to answer.
fn timing() -> Timing {
    Timing {
        limit: Duration::from_secs(3),
        pause: [Duration::from_millis(10), Duration::from_millis(80)],
        watch: Duration::from_secs(60),
        silence: Duration::from_secs(60),
    }
}

/// A server, its client, and the directory of the token.
struct World {
    server: ApiServer,
    client: ResourceClient,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        World::with(timing())
    }

    fn with(timing: Timing) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::start(dir.path());
        let client = ResourceClient::new(server.access(), DRIVER, "n1", timing);
        World { server, client, dir }
    }
}

/// A slice of a driver on a node, with one shared device.
fn slice_of(driver: &str, node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": { "generateName": format!("{node}-") },
        "spec": {
            "driver": driver, "nodeName": node,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{
                "name": "gpu-a", "allowMultipleAllocations": true,
                "attributes": { "uuid": { "string": "GPU-a" } },
                "capacity": { "memory": { "value": "24Gi", "requestPolicy": { "default": "6Gi" } } },
                "taints": [{ "key": "tessera.dev/sick", "effect": "NoSchedule" }],
            }],
        },
    })
}

fn slice() -> ResourceSlice {
    serde_json::from_value(slice_of(DRIVER, "n1")).unwrap()
}

async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..12_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not within a minute");
}
