//! Numbers are those of each node; a node that is gone is said so, and hides no other.

use serde_json::Value;
use tessera_harness::MIB;
use tessera_harness::plugin::until;

use super::nodes::{Cluster, Node};

fn entry<'a>(fleet: &'a Value, node: &str) -> &'a Value {
    fleet["nodes"].as_array().unwrap().iter().find(|entry| entry["node"] == node).unwrap()
}

/// The figures of both that have the same names, which are those of memory and GPU time.
fn assert_same(theirs: &Value, own: &Value, names: &[&str]) {
    for name in names {
        assert!(own[name].is_number(), "status has no {name}: {own}");
        assert_eq!(theirs[name], own[name], "{name}");
    }
}

/// Compares a node's part of the fleet with what the node itself says.
fn assert_is_of(fleet: &Value, node: &Node, own: &Value) {
    let entry = entry(fleet, &node.name);
    assert_eq!((&entry["answers"], &entry["error"]), (&true.into(), &"".into()), "{entry}");
    let view = &entry["view"];
    let [gpus, own_gpus] = [&view["gpus"], &own["gpus"]].map(|all| all.as_array().unwrap());
    assert_eq!(gpus.len(), own_gpus.len());
    for (gpu, own) in gpus.iter().zip(own_gpus) {
        assert_eq!(gpu["uuid"], own["uuid"]);
        let names = ["memory_total_bytes", "memory_used_bytes", "memory_limits_bytes"];
        assert_same(gpu, own, &names);
    }
    let [tenants, known] =
        [&view["tenants"], &own["allocations"]].map(|all| all.as_array().unwrap());
    assert_eq!(tenants.len(), known.len());
    for (tenant, own) in tenants.iter().zip(known) {
        assert_eq!((&tenant["id"], &tenant["pod"]), (&own["id"], &own["holder"]["pod"]));
        let names = ["memory_limit_bytes", "memory_charged_bytes", "cores_millis"];
        assert_same(&tenant["gpus"][0], &own["gpus"][0], &names);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_are_those_of_each_node_and_a_killed_one_hides_no_other() {
    let mut cluster = Cluster::start(&["n0", "n1", "n2"]).await;
    let mut tenants = Vec::new();
    for (index, node) in cluster.nodes.iter().enumerate() {
        tenants
            .push(node.run(&format!("chat-{index}"), index + 1, (100 + index as u64) * MIB).await);
    }
    until(|| {
        let before: Vec<Value> = cluster.nodes.iter().map(Node::status).collect();
        let fleet = cluster.fleet();
        let after = cluster.nodes.iter().map(Node::status);
        let is_still = before.iter().zip(after).all(|(before, after)| {
            before["gpus"] == after["gpus"] && before["allocations"] == after["allocations"]
        });
        if !is_still {
            return None;
        }
        for (node, own) in cluster.nodes.iter().zip(&before) {
            assert_is_of(&fleet, node, own);
        }
        Some(())
    })
    .await;
    let text = cluster.text(&["status"]);
    assert!(text.starts_with("c: 3 of 3 nodes answer, 6 GPUs, 3 tenants\n"), "{text}");
    let top = cluster.text(&["top", "--once", "-A", "--sort", "name"]);
    let pods: Vec<&str> = top.lines().filter(|line| line.contains("chat-")).collect();
    assert_eq!(pods.len(), 3, "{top}");
    for (index, row) in pods.iter().enumerate() {
        let used = format!(" {}M/", 100 + index);
        assert!(row.contains(&format!("chat-{index}")) && row.contains(&used), "{top}");
    }

    cluster.nodes[1].kill();
    let fleet = cluster.fleet();
    let gone = entry(&fleet, "n1");
    assert_eq!((&gone["answers"], &gone["view"]), (&false.into(), &Value::Null), "{gone}");
    let why = gone["error"].as_str().unwrap();
    assert!(
        why.to_lowercase().contains("connection refused") && why.contains("tessera/tessera-n1"),
        "{why}"
    );
    for at in [0, 2] {
        let node = &cluster.nodes[at];
        assert_is_of(&fleet, node, &node.status());
    }
    let text = cluster.text(&["status"]);
    assert!(
        text.starts_with("c: 2 of 3 nodes answer, 4 GPUs, 2 tenants\n! n1: does not answer: "),
        "{text}"
    );
    // A pod of a node that answers is found, and one of the other is not said to be nowhere.
    let explained = cluster.text(&["explain", "default/chat-2"]);
    assert!(explained.starts_with("On node n2:"), "{explained}");
    let lost = cluster.says(&["explain", "default/chat-1"]);
    let why = String::from_utf8(lost.stderr).unwrap();
    assert_eq!(lost.status.code(), Some(69), "{why}");
    assert!(why.contains("node n1: "), "{why}");
    // What it has not heard of it does not add up in silence.
    let waste = cluster.says(&["waste", "-A"]);
    let said = String::from_utf8(waste.stdout).unwrap();
    assert!(said.starts_with("note: node n1 is left out: "), "{said}");
}
