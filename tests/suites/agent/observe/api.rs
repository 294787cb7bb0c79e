//! The JSON API of a running plugin, over root's socket: its figures are those of `status`.

use serde_json::Value;
use tessera_api::admin;
use tessera_harness::plugin::{TestNode, bounded, pod};
use tessera_web::client::{Client, ClientError, Endpoint, socket_beside};

/// Fields that the API has under other names than `status -o json`, or that only one of them has: of a GPU.
const OTHER_OF_GPU: &[&str] = &["lease", "replicas", "fits", "withheld"];
/// Of a tenant.
const OTHER_OF_TENANT: &[&str] = &[
    "namespace",
    "pod",
    "container",
    "other_holders",
    "workload",
    "claim",
    "request",
    "gpus",
    "processes",
    "compute",
];

/// The API's object has these figures as the command line has them: every field but those that are named.
fn assert_same(api: &Value, cli: &Value, others: &[&str], what: &str) -> usize {
    let fields =
        api.as_object().unwrap().iter().filter(|(name, _)| !others.contains(&name.as_str()));
    let mut count = 0;
    for (name, value) in fields {
        let said = cli.get(name).unwrap_or_else(|| panic!("{what}: status has no {name}"));
        assert_eq!(value, said, "{what}: {name}");
        count += 1;
    }
    count
}

async fn node() -> (TestNode, Client) {
    let node = TestNode::start().await;
    let client = Client::new(Endpoint::Socket(socket_beside(&node.dir.path().join("admin.sock"))));
    (node, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_has_the_figures_of_the_command_line() {
    let (node, client) = node().await;
    bounded(node.kubelet.run(&pod("chat-0", 1))).await.unwrap();
    let same = async {
        loop {
            let before = node.status().await;
            let api: Value = client.get("/api/v1/node").await.unwrap();
            let after = node.status().await;
            let is_named = before.allocations.iter().all(|a| a.holder.is_some())
                && !before.allocations.is_empty();
            // The API may answer as of a moment ago.
            let is_between = api["at_unix_ms"].as_i64().unwrap() >= before.at_unix_ms;
            if is_between
                && is_named
                && before.allocations == after.allocations
                && before.gpus == after.gpus
            {
                break (admin::json(&after), api);
            }
        }
    };
    let (cli, api) = bounded(same).await;
    let mut count = 0;
    for (a, c) in api["gpus"].as_array().unwrap().iter().zip(cli["gpus"].as_array().unwrap()) {
        count += assert_same(a, c, OTHER_OF_GPU, "a GPU");
        let free =
            c["replicas"].as_array().unwrap().iter().filter(|r| r["allocation_id"] == "").count();
        assert_eq!(a["replicas"][0]["free"], free);
    }
    let tenants = api["tenants"].as_array().unwrap();
    let allocations = cli["allocations"].as_array().unwrap();
    assert_eq!((tenants.len(), allocations.len()), (1, 1));
    for (tenant, allocation) in tenants.iter().zip(allocations) {
        count += assert_same(tenant, allocation, OTHER_OF_TENANT, "a tenant");
        count +=
            assert_same(&tenant["gpus"][0], &allocation["gpus"][0], &["changed"], "a tenant's GPU");
        for name in ["namespace", "pod", "container"] {
            assert_eq!(tenant[name], allocation["holder"][name]);
        }
    }
    assert!(count > 40, "{count} figures");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_plugin_the_client_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let client = Client::beside(&dir.path().join("admin.sock"));
    let error = client.get::<Value>("/api/v1/node").await.unwrap_err();
    assert!(matches!(error, ClientError::Missing(_)) && error.exit() == 69, "{error}");
}
