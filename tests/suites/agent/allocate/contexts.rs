//! What a bare context takes: measured of those that come, kept by driver and product, and charged to pods
//! that come later.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::Ordering;

use redb::{ReadableDatabase, TableDefinition};
use serde_json::Value;
use tessera_harness::Owned;
use tessera_harness::plugin::*;
use tessera_region::quota::QuotaReader;

const MIB: u64 = 1 << 20;
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");

/// What a new pod is charged for a context on GPU 0, and why.
type Said = (u64, String);

fn said(bytes: u64, source: &str) -> Said {
    (bytes, source.to_owned())
}

/// Two GPUs whose contexts are 400 MiB by the formula.
async fn start() -> TestNode {
    start_with(SETTINGS).await
}

async fn start_with(settings: &str) -> TestNode {
    let mut node = TestNode::without_plugin(settings).await;
    node.gpus.gpus.lock().unwrap().iter_mut().for_each(|g| g.context_bytes = Some(400 * MIB));
    *node.gpus.driver.lock().unwrap() = Some("570.1".into());
    node.start_plugin().await;
    node
}

async fn context(node: &TestNode, index: usize) -> Said {
    let gpu = node.status().await.gpus.remove(index);
    (gpu.context_overhead_bytes, gpu.context_overhead_source)
}

async fn until_context(node: &TestNode, wanted: Said) {
    node.status_until(|status| {
        let gpu = &status.gpus[0];
        ((gpu.context_overhead_bytes, &gpu.context_overhead_source) == (wanted.0, &wanted.1))
            .then_some(())
    })
    .await;
}

fn constant(pages: &Path) -> u64 {
    QuotaReader::attach(pages).unwrap().context_overhead(0)
}

/// A pod with a process that has made a context, of which the driver shows so much.
async fn bare(node: &TestNode, name: &str, bytes: u64) -> (Tenant, std::path::PathBuf) {
    let pages = node.start_pod(name, 1).await.pages;
    let tenant = Tenant::with_context(&pages);
    show(node, &[(tenant.pid(), bytes)]);
    // As the shim does when a context is made: the driver may have been asked already.
    drop(connect(&pages));
    (tenant, pages)
}

fn show(node: &TestNode, processes: &[(u32, u64)]) {
    for index in [0, 1] {
        let shown = processes.iter().map(|&(pid, bytes)| uses(pid, bytes)).collect();
        node.gpus.processes.lock().unwrap().insert(gpu(index).uuid, shown);
    }
}

/// Waits until the plugin has looked at a process more often than it looks at a bare one. While nothing moves it asks
/// the driver every ten seconds: each look follows a connection, which is news.
async fn looks(node: &TestNode, pages: &Path) {
    for _ in 0..6 {
        let from = node.gpus.looks.load(Ordering::Relaxed);
        drop(connect(pages));
        until(|| (node.gpus.looks.load(Ordering::Relaxed) > from).then_some(())).await;
    }
}

fn meta(path: &Path, key: &str) -> Option<u64> {
    let db = redb::Database::open(path).unwrap();
    let read = db.begin_read().unwrap();
    read.open_table(META).unwrap().get(key).unwrap().map(|value| value.value())
}

#[tokio::test]
async fn a_bare_context_is_measured_and_charged_to_pods_that_come_later() {
    let mut node = start().await;
    assert_eq!(context(&node, 0).await, said(400 * MIB, "formula"));
    let (first, pages) = bare(&node, "a", 450 * MIB - 7).await;
    until_context(&node, said(450 * MIB, "measured")).await;
    assert_eq!(context(&node, 1).await.0, 450 * MIB, "another of the same product");
    assert_eq!(constant(&pages), 400 * MIB, "who runs keeps what he was given");
    drop(first);

    // Less counts, more does not.
    let (second, second_pages) = bare(&node, "b", 430 * MIB).await;
    assert_eq!(constant(&second_pages), 450 * MIB);
    until_context(&node, said(430 * MIB, "measured")).await;
    drop(second);
    let (third, third_pages) = bare(&node, "c", 470 * MIB).await;
    looks(&node, &third_pages).await;
    assert_eq!(context(&node, 0).await, said(430 * MIB, "measured"));

    // It outlives the plugin, and running pods keep theirs.
    node.stop_plugin().await;
    assert_eq!(meta(&node.ledger(), "context/570.1/Example"), Some(430 * MIB));
    node.start_plugin().await;
    assert_eq!(context(&node, 0).await, said(430 * MIB, "measured"));
    assert_eq!((constant(&pages), constant(&second_pages)), (400 * MIB, 450 * MIB));
    drop(third);
}

#[tokio::test]
async fn no_container_makes_a_context_look_like_what_it_cannot_be() {
    let node = start().await;
    for (name, bytes) in [("a", 299 * MIB), ("b", 601 * MIB), ("c", 0)] {
        let (_tenant, pages) = bare(&node, name, bytes).await;
        looks(&node, &pages).await;
        assert_eq!(context(&node, 0).await, said(400 * MIB, "formula"), "{bytes}");
    }
    // As far as it can bring it: others' rest is observed, and counts against their quota as before.
    let (_tenant, _) = bare(&node, "d", 300 * MIB).await;
    until_context(&node, said(300 * MIB, "measured")).await;
}

#[tokio::test]
async fn what_would_leave_shares_without_room_is_not_charged() {
    let mut node = start_with("[share]\nreplicas = 90\nmemory = \"410Mi\"\n").await;
    let (tenant, pages) = bare(&node, "a", 420 * MIB).await;
    looks(&node, &pages).await;
    assert_eq!(context(&node, 0).await, said(400 * MIB, "formula"));
    drop(tenant);
    // Nor does it keep the plugin from starting again.
    node.stop_plugin().await;
    node.start_plugin().await;
    assert_eq!(context(&node, 0).await, said(400 * MIB, "formula"));
}

#[tokio::test]
async fn a_simulated_gpus_context_is_measured_by_a_program_that_makes_one() {
    // An L4, whose contexts are 174 MiB by the formula; this driver's take 200.
    let machine = "[memory]\ncontext_overhead = \"200MiB\"\n[[gpu]]\nname = \"NVIDIA L4\"\nsm_count = 58\n\
                   compute_capability = \"8.9\"\nmemory = \"24GiB\"\n";
    let mut node = Simulated::on(machine, "context_overhead = \"auto\"").await;
    node.serve().await;
    let context = |node: &Simulated| {
        let gpu = node.json()["gpus"][0].clone();
        let bytes = gpu["context_overhead_bytes"].as_u64().unwrap();
        (bytes / MIB, gpu["context_overhead_source"].as_str().unwrap().to_owned())
    };
    assert_eq!(context(&node), (174, "formula".to_owned()));
    let admitted = node.start_pod("a", 1).await;
    // It makes a context, and does nothing with it.
    let mut program = node.tenant(&admitted.ids);
    program.args(["hold", "--bytes", "0"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Owned(program.spawn().unwrap());
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")), "it has its context");
    until(|| (context(&node) == (200, "measured".to_owned())).then_some(())).await;
    let explained = String::from_utf8(node.run(&["explain", "0", "-o", "wide"]).stdout).unwrap();
    assert!(explained.contains("200 MiB each for new pods"), "{explained}");
    let next = node.start_pod("b", 1).await;
    let charged = |node: &Simulated, ids: &[String]| {
        let id = id_of(ids).to_string();
        let status: Value = node.json();
        let all = status["allocations"].as_array().unwrap().clone();
        let its = all.into_iter().find(|allocation| allocation["id"] == id.as_str()).unwrap();
        its["gpus"][0]["context_overhead_bytes"].as_u64().unwrap() / MIB
    };
    assert_eq!(charged(&node, &admitted.ids), 174, "who runs keeps what he was given");
    assert_eq!(charged(&node, &next.ids), 200);
    program.kill().unwrap();
    program.wait().unwrap();
    assert_eq!(node.terminate().await, Some(0));
    node.serve().await;
    assert_eq!(context(&node), (200, "measured".to_owned()));
    assert_eq!(charged(&node, &admitted.ids), 174);
}
