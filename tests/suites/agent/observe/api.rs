//! The JSON API of a running plugin, over root's socket: its figures are those of `status`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tessera_harness::gate_tenants::work;
use tessera_harness::plugin::{GPU, TestNode, admin, bounded, id_of, pod, stderr, tessera};
use tessera_view::change::CordonRequest;
use tessera_view::trace::{Event, Trace};
use tessera_web::Source;
use tessera_web::client::{Client, ClientError};

/// Fields that the API has under other names than `status -o json`, or that only one of them has: of a GPU.
const OTHER_OF_GPU: &[&str] = &["lease", "replicas", "fits", "withheld"];
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
    let client = admin(node.dir.path());
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
                break (serde_json::to_value(&after).unwrap(), api);
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
    let client = admin(dir.path());
    let error = client.get::<Value>("/api/v1/node").await.unwrap_err();
    assert!(matches!(error, ClientError::Missing(_)) && error.exit() == 69, "{error}");
}

/// Two pods on one GPU, which want all of it until the flag is set.
async fn two_backlogs(node: &TestNode) -> (Arc<AtomicBool>, Vec<std::thread::JoinHandle<()>>) {
    let cordon = CordonRequest { gpu: "1".into(), ..Default::default() };
    admin(node.dir.path()).call(&cordon).await.unwrap();
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut workers = Vec::new();
    for name in ["one-0", "two-0"] {
        let ids = bounded(node.kubelet.run(&pod(name, 1))).await.unwrap().remove(0).device_ids;
        let (pages, stopped, id) = (node.pages(&ids), Arc::clone(&stop), id_of(&ids).to_string());
        workers.push(std::thread::spawn(move || work(&pages, &stopped)));
        node.status_until(|status| {
            let one = status.allocations.iter().find(|one| one.id == id && one.holder.is_some())?;
            (one.compute.as_ref()?.leased_us > 0).then_some(())
        })
        .await;
    }
    (stop, workers)
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
    let (stop, workers) = two_backlogs(&node).await;
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
    let traced = bounded(async {
        loop {
            let (config, file) = (config.clone(), file.clone());
            let output = tokio::task::spawn_blocking(move || {
                let mut command = tessera();
                command.arg("-c").arg(config).args(["trace", "--seconds", "1", "-o"]).arg(file);
                command.output().unwrap()
            });
            let output = output.await.unwrap();
            // Until the plugin has seen that the others are gone.
            match stderr(&output).contains("others trace this node already") {
                true => tokio::time::sleep(Duration::from_millis(20)).await,
                false => break output,
            }
        }
    })
    .await;
    assert!(traced.status.success(), "{}", stderr(&traced));
    let said = String::from_utf8(traced.stdout).unwrap();
    assert!(said.contains("trace.json: 1.0 s, GPUs: 1, tenants: 2, events: "), "{said}");
    stop.store(true, Ordering::Relaxed);
    let joined =
        tokio::task::spawn_blocking(|| workers.into_iter().for_each(|w| w.join().unwrap()));
    joined.await.unwrap();

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
    node.agent().allocations().arbiter().unwrap().stop();
    let silent = client.get::<Trace>("/api/v1/trace?seconds=1").await.unwrap_err();
    assert_eq!((silent.exit(), silent.to_string().contains("arbiter does not answer")), (69, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_that_cannot_be_is_refused_before_it_begins() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    let admin = dir.path().join("admin.sock");
    std::fs::write(&config, format!("[paths]\nadmin = {admin:?}\n")).unwrap();
    let trace = |args: &[&str]| {
        let mut command = tessera();
        command.current_dir(dir.path()).arg("-c").arg(&config).arg("trace").args(args);
        let output = command.output().unwrap();
        (output.status.code(), stderr(&output))
    };
    for seconds in ["0", "31", "many"] {
        let (code, said) = trace(&["--seconds", seconds]);
        assert!(code == Some(64) && said.contains("--seconds"), "{seconds}: {said}");
    }
    let (code, said) = trace(&["-o", "none/trace.json"]);
    assert!(code == Some(1) && said.contains("none/trace.json: No such file"), "{said}");
    let (code, said) = trace(&[]);
    assert!(code == Some(69) && said.contains("Tessera"), "{said}");
    assert!(!dir.path().join("trace.json").exists());
}
