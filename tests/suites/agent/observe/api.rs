//! The JSON API of a running plugin, over root's socket; and what no view may show.

use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use serde_json::Value;
use tessera_harness::Background;
use tessera_harness::gate_tenants::working;
use tessera_harness::metrics::{address, scrape, settings};
use tessera_harness::plugin::{
    GIB, GPU, Held, SETTINGS, Tenant, TestNode, admin, bounded, stderr, tessera, until_async,
};
use tessera_region::layout::{Past, USAGE_BYTES, USAGE_FILE, UsageHeader};
use tessera_view::change::CordonRequest;
use tessera_view::status::Allocation;
use tessera_view::trace::{Event, Trace};
use tessera_web::Source;
use tessera_web::client::Client;

async fn node() -> (TestNode, Client) {
    let node = TestNode::start().await;
    let client = admin(node.dir.path());
    (node, client)
}

/// Two pods on one GPU, which want all of it.
async fn two_backlogs(node: &TestNode) -> Vec<Background> {
    let cordon = CordonRequest { gpu: "1".into(), ..Default::default() };
    admin(node.dir.path()).call(&cordon).await.unwrap();
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let mut workers = Vec::new();
    for name in ["one-0", "two-0"] {
        let Held { ids, pages } = node.start_pod(name, 1).await;
        workers.push(working(&pages));
        let works = |one: &Allocation| one.compute.as_ref().is_some_and(|c| c.leased_us > 0);
        node.allocation_until(&ids, |one| one.holder.is_some() && works(one)).await;
    }
    workers
}

/// Its intervals of these names on the first GPU: the tenant, from when and to when, in their order.
fn intervals(trace: &Trace, names: &[&str]) -> Vec<(f64, f64, u32)> {
    let of = |event: &&Event| event.pid == 1 && names.contains(&event.name.as_str());
    let all = trace.events.iter().filter(of);
    let mut all: Vec<_> = all.map(|one| (one.ts, one.ts + one.dur.unwrap(), one.tid)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_shows_both_tenants_of_a_gpu_in_turns_and_ends_with_whoever_asked() {
    let (node, client) = node().await;
    let workers = two_backlogs(&node).await;
    // More that go before their answer comes than there may be at a time.
    for _ in 0..6 {
        let brief = client.clone().with_limit(Duration::from_millis(20));
        brief.get::<Trace>("/api/v1/trace?seconds=30").await.unwrap_err();
        let source = node.source();
        let hour = tokio::time::timeout(Duration::from_millis(20), source.trace("", 3600));
        assert!(!matches!(hour.await, Ok(Ok(_))));
    }
    let config = node.dir.path().join("asking.toml");
    let admin = node.dir.path().join("admin.sock");
    std::fs::write(&config, format!("[paths]\nadmin = {admin:?}\n")).unwrap();
    let file = node.dir.path().join("trace.json");
    let traced = until_async(async || {
        let (config, file) = (config.clone(), file.clone());
        let output = tokio::task::spawn_blocking(move || {
            let mut command = tessera();
            command.arg("-c").arg(config).args(["trace", "--seconds", "1", "-o"]).arg(file);
            command.output().unwrap()
        });
        let output = output.await.unwrap();
        // Until the plugin has seen that the last one is gone.
        (!stderr(&output).contains("another traces this node already")).then_some(output)
    })
    .await;
    assert!(traced.status.success(), "{}", stderr(&traced));
    let said = String::from_utf8(traced.stdout).unwrap();
    assert!(said.contains("trace.json: 1.") && said.contains(" GPUs: 1, tenants: 2,"), "{said}");
    tokio::task::spawn_blocking(|| drop(workers)).await.unwrap();

    let text = std::fs::read(&file).unwrap();
    let trace: Trace = serde_json::from_slice(&text).unwrap();
    let raw: Value = serde_json::from_slice(&text).unwrap();
    for event in raw["traceEvents"].as_array().unwrap() {
        let is_timed = event["ts"].is_number() && event["pid"].is_u64() && event["tid"].is_u64();
        let phase = event["ph"].as_str().unwrap();
        assert!(is_timed && ["X", "i", "M"].contains(&phase), "{event}");
        assert_eq!(event["dur"].as_f64().is_some_and(|dur| dur >= 0.0), phase == "X", "{event}");
    }
    let leases = intervals(&trace, &["lease"]);
    let of = |tid: u32| leases.iter().filter(|one| one.2 == tid).count();
    let mut tenants: Vec<u32> = leases.iter().map(|one| one.2).collect();
    tenants.sort_unstable();
    tenants.dedup();
    assert_eq!(tenants.len(), 2);
    assert!(tenants.iter().all(|tid| of(*tid) > 3), "{leases:?}");
    if trace.events.iter().all(|event| event.name != "late") {
        let held = intervals(&trace, &["lease", "drain"]);
        for pair in held.windows(2) {
            // Times have three places after the point.
            assert!(pair[0].1 <= pair[1].0 + 0.001, "{pair:?}");
        }
    }
    assert!(!intervals(&trace, &["wait"]).is_empty());
    let name = |kind: &str, tid: u32| {
        let is = |event: &&Event| event.name == kind && event.pid == 1 && event.tid == tid;
        trace.events.iter().find(is).unwrap().args.clone().unwrap().name
    };
    assert!(name("process_name", 0).starts_with("GPU 0: "));
    let names: Vec<String> = tenants.iter().map(|tid| name("thread_name", *tid)).collect();
    assert!(names[0].contains("/one-0, ") && names[1].contains("/two-0, "), "{names:?}");
    let refused = client.get::<Trace>("/api/v1/trace?seconds=31").await.unwrap_err();
    assert_eq!((refused.exit(), refused.to_string().contains("1 to 30 seconds")), (64, true));
    node.agent().allocations.arbiter().unwrap().stop();
    let silent = client.get::<Trace>("/api/v1/trace?seconds=1").await.unwrap_err();
    assert_eq!((silent.exit(), silent.to_string().contains("arbiter does not answer")), (69, true));
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Number(number) => number.as_f64().into_iter().collect(),
        Value::Array(all) => all.iter().flat_map(numbers).collect(),
        Value::Object(all) => all.values().flat_map(numbers).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_all_ones_is_no_figure_anywhere() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let Held { ids, pages } = node.start_pod("ones-0", 1).await;
    let dir = pages.clone();
    let hold = move || Tenant::hold(&dir, GIB);
    let _tenant = tokio::task::spawn_blocking(hold).await.unwrap();
    let past = offset_of!(UsageHeader, past);
    for ones in [past..past + size_of::<Past>(), 0..USAGE_BYTES] {
        let is_whole = ones.len() == USAGE_BYTES;
        let usage = File::options().write(true).open(pages.join(USAGE_FILE)).unwrap();
        usage.write_all_at(&vec![0xff; ones.len()], ones.start as u64).unwrap();
        let is_seen = |one: &Allocation| is_whole == (one.tamperings > 0);
        node.allocation_until(&ids, is_seen).await;
        let cli = serde_json::to_value(node.status().await).unwrap();
        let api: Value = admin(node.dir.path()).get("/api/v1/fleet").await.unwrap();
        let metrics = scrape(address(&node).await).await;
        // Milliseconds since 1970 and bytes of a GPU are less.
        let most = 1e15;
        for (view, shown) in [("status", cli), ("JSON", api)] {
            let found = numbers(&shown).into_iter().find(|found| !(0.0..most).contains(found));
            assert_eq!(found, None, "{view}: {shown:#}");
        }
        for sample in &metrics.samples {
            assert!((0.0..most).contains(&sample.value), "{sample:?}");
        }
    }
}
