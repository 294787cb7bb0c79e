//! Changing what a running container may use, and cordoning GPUs, over the admin socket; who asks there, and what is
//! refused.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tessera_harness::plugin::*;
use tessera_harness::{Owned, settles, workspace};
use tessera_model::audit::{Actor, Event, What};
use tessera_region::quota::{Policy, QuotaReader};
use tessera_view::change::{
    Call, CordonRequest, PlanRequest, QuotaResponse, ResetQuotaRequest, SetQuotaRequest,
    UncordonRequest,
};
use tessera_view::status::{ComputePolicy, Health, LIVE, STATUS, Status};
use tessera_web::client::ClientError;
use tonic::Code;

/// 40 GiB, and 4 replicas of 8 GiB: 8 GiB are nobody's.
const ROOMY: &str = "[share]\nreplicas = 4\nmemory = \"8Gi\"\n[gpus]\nreserve = 0\n";

fn memory(name: &str, bytes: u64) -> SetQuotaRequest {
    let memory_limit_bytes = Some(bytes);
    SetQuotaRequest { target: target(name), memory_limit_bytes, ..Default::default() }
}

async fn set(node: &TestNode, request: SetQuotaRequest) -> Result<QuotaResponse, ClientError> {
    admin(node.dir.path()).call(&request).await
}

async fn reset(node: &TestNode, name: &str) -> Result<QuotaResponse, ClientError> {
    let request = ResetQuotaRequest { target: target(name), ..Default::default() };
    admin(node.dir.path()).call(&request).await
}

async fn cordon(node: &TestNode, gpu: &str, again: bool) -> Result<Vec<String>, ClientError> {
    let (all, each) = (gpu.starts_with("--all"), gpu.ends_with("--each"));
    let (gpu, reason, admin) = (gpu.to_owned(), "fans".to_owned(), admin(node.dir.path()));
    let answer = match again {
        true => admin.call(&UncordonRequest { gpu, all, each, reason }).await,
        false => admin.call(&CordonRequest { gpu, all, reason }).await,
    };
    Ok(answer?.cordoned)
}

/// A container that runs: its replicas. Waits until it can be named.
async fn running(node: &TestNode, name: &str, replicas: usize) -> Vec<String> {
    let ids = node.start_pod(name, replicas).await.ids;
    node.all_named().await;
    ids
}

#[tokio::test]
async fn limits_change_under_a_running_container_and_last_as_long_as_its_allocation() {
    let mut node = TestNode::start_with(ROOMY).await;
    let ids = running(&node, "llm", 1).await;
    let pages = node.pages(&ids);
    let inode =
        |file: &str| std::os::unix::fs::MetadataExt::ino(&pages.join(file).metadata().unwrap());
    let before = (inode("quota"), inode("usage"));
    let request = SetQuotaRequest {
        cores_millis: Some(400),
        policy: Some(ComputePolicy::Strict),
        reason: "peak hours".into(),
        ..memory("default/llm", 12 * GIB)
    };

    // Judged first, and nothing changed.
    let dry = set(&node, SetQuotaRequest { dry_run: true, ..request.clone() }).await.unwrap();
    assert!(dry.changed && limit(&pages) == 8 * GIB);

    let answer = set(&node, request.clone()).await.unwrap();
    assert_eq!(answer.gpus, dry.gpus);
    let change = &answer.gpus[0];
    assert_eq!(change.before.memory_limit_bytes, 8 * GIB);
    assert_eq!(change.after.memory_limit_bytes, 12 * GIB);
    assert_eq!(change.memory_in_use_bytes, Some(0));
    let holds = |pages: &std::path::Path, gib: u64, cores: u32, policy: Policy| {
        let quota = QuotaReader::attach(pages).unwrap();
        let found = (quota.memory_limit(0) / GIB, quota.cores_millis(0), quota.policy(0));
        assert_eq!(found, (gib, cores, policy));
    };
    holds(&pages, 12, 400, Policy::Strict);
    assert!(!set(&node, request).await.unwrap().changed, "it has them already");

    // Status tells both.
    let used = node.allocation(&ids).await.unwrap().gpus.remove(0);
    assert_eq!((used.memory_limit_bytes, used.cores_millis), (12 * GIB, 400));
    let allocated = used.allocated.unwrap();
    assert_eq!((allocated.memory_limit_bytes, allocated.cores_millis), (8 * GIB, 250));

    // The plugin and the container start again, and the pages are lost.
    node.stop_plugin().await;
    node.start_plugin().await;
    holds(&pages, 12, 400, Policy::Strict);
    assert_eq!((inode("quota"), inode("usage")), before, "as a container has them mounted");
    node.kubelet.start_container(&pod("llm", 1), "main").await.unwrap();
    holds(&pages, 12, 400, Policy::Strict);
    node.stop_plugin().await;
    std::fs::remove_dir_all(&pages).unwrap();
    node.start_plugin().await;
    holds(&pages, 12, 400, Policy::Strict);

    // Another pod gets what is configured.
    node.all_named().await;
    node.allocate(&ids).await.unwrap();
    holds(&pages, 8, 250, Policy::Burst);
    assert_eq!(node.allocation(&ids).await.unwrap().gpus[0].allocated, None);

    node.stop_plugin().await;
    let events = crate::trail(&node.ledger());
    let sets: Vec<&Event> = events.iter().filter(|e| e.what.into_str() == "quota-set").collect();
    let [event] = sets[..] else { panic!("{events:?}") };
    let What::QuotaSet { before, after, forced: false } = &event.what else { panic!("{event:?}") };
    assert_eq!((before[0].cores_millis, after[0].cores_millis), (250, 400));
    assert_eq!(event.reason.as_deref(), Some("peak hours"));
    assert_eq!(event.holder.as_ref().unwrap().pod, "llm");
    let Some(Actor::Admin { uid, pid, command, .. }) = &event.by else { panic!("{event:?}") };
    assert_eq!((*uid, *pid), (nix::unistd::getuid().as_raw(), std::process::id()));
    let expected = "quota set default/llm --memory 12GiB --cores 40 --policy strict";
    assert_eq!(command, &format!("{expected} --reason \"peak hours\""));
    assert!(events.iter().all(|event| event.by.is_some()), "{events:?}");
}

#[tokio::test]
async fn memory_grows_within_the_capacity_rule_and_free_replicas_make_room() {
    let node = TestNode::start_with(&format!("{ROOMY}{HELD}")).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    let ids = running(&node, "a", 1).await;
    // 8 GiB that nobody had.
    let answer = set(&node, memory("a", 16 * GIB)).await.unwrap();
    assert_eq!(answer.notes, Vec::<String>::new());
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    // One replica more than that.
    let answer = set(&node, memory("a", 17 * GIB)).await.unwrap();
    assert_eq!(answer.notes, ["1 replica given out no more while the limits are so large"]);
    bounded(node.kubelet.wait_allocatable(GPU, 7)).await;
    // Kubelet has not heard of it, and asks all the same.
    let free: Vec<String> = (0..4).map(|n| replica(0, n)).filter(|id| !ids.contains(id)).collect();
    node.allocate(&free[..1]).await.unwrap();
    node.allocate(&free[1..2]).await.unwrap();
    let refused = node.allocate(&free[2..]).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    // Nothing is left but what it has: 40 - 8 - 8.
    let refused = set(&node, memory("a", 25 * GIB)).await.unwrap_err();
    assert_eq!(refused.code(), Some(422));
    assert!(refused.to_string().contains("at most 24 GiB are possible"), "{refused}");
    assert_eq!(limit(&node.pages(&ids)), 17 * GIB);
    set(&node, memory("a", 24 * GIB)).await.unwrap();

    let answer = reset(&node, "a").await.unwrap();
    assert_eq!(answer.notes, ["1 replica given out again"]);
    assert_eq!(limit(&node.pages(&ids)), 8 * GIB);
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    assert!(!reset(&node, "a").await.unwrap().changed);
}

#[tokio::test]
async fn memory_does_not_shrink_below_its_use_unless_forced_and_what_is_held_is_not_sold() {
    let node = TestNode::start_with(&format!("{ROOMY}{HELD}")).await;
    let ids = running(&node, "a", 1).await;
    let pages = node.pages(&ids);
    let tenant = Tenant::hold(&pages, 6 * GIB);
    let refused = set(&node, memory("a", 5 * GIB)).await.unwrap_err();
    assert_eq!(refused.code(), Some(409));
    assert!(refused.to_string().contains("uses 6 GiB"), "{refused}");
    assert!(refused.to_string().contains("--force"), "{refused}");
    assert_eq!(limit(&pages), 8 * GIB, "the page is as before");
    set(&node, memory("a", 6 * GIB)).await.unwrap();

    let answer = set(&node, SetQuotaRequest { force: true, ..memory("a", GIB) }).await.unwrap();
    assert!(answer.notes[0].contains("holds 5 GiB more"), "{:?}", answer.notes);
    assert_eq!(limit(&pages), GIB);
    assert_eq!(node.allocation(&ids).await.unwrap().gpus[0].memory_owed_bytes, 5 * GIB);
    // The room is what its processes have left: 40 - 6.
    let others: Vec<String> =
        (0..4).map(|n| replica(0, n)).filter(|id| !ids.contains(id)).collect();
    node.allocate(&others[..1]).await.unwrap();
    let other = id_of(&others[..1]).to_string();
    let refused = set(&node, memory(&other, 35 * GIB)).await.unwrap_err();
    assert!(refused.to_string().contains("at most 34 GiB are possible"), "{refused}");
    // It ends, and the room is there.
    tenant.kill();
    until_async(async || set(&node, memory(&other, 39 * GIB)).await.ok()).await;
    assert_eq!(node.allocation(&ids).await.unwrap().gpus[0].memory_owed_bytes, 0);
    assert_eq!(limit(&pages), GIB, "changed is changed");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_with_what_to_do() {
    let node = TestNode::start_with(ROOMY).await;
    running(&node, "a", 1).await;
    let refused = async |request| {
        let status = set(&node, request).await.unwrap_err();
        (status.code(), status.to_string())
    };
    let nothing = SetQuotaRequest { target: target("a"), ..Default::default() };
    let (code, text) = refused(nothing.clone()).await;
    assert!(code == Some(400) && text.contains("--memory"), "{text}");
    let (code, text) = refused(memory("b", GIB)).await;
    assert!(code == Some(404) && text.contains("these do: default/a"), "{text}");
    let (code, text) = refused(memory("a", 1 << 20)).await;
    assert!(code == Some(400) && text.contains("one CUDA context"), "{text}");
    let (code, _) = refused(SetQuotaRequest { cores_millis: Some(1001), ..nothing.clone() }).await;
    assert_eq!(code, Some(400));
    let (code, text) = refused(SetQuotaRequest { gpu: "7".into(), ..memory("a", GIB) }).await;
    assert!(code == Some(404) && text.contains(&gpu(0).uuid), "{text}");
    assert_eq!(cordon(&node, "7", false).await.unwrap_err().code(), Some(404));
    assert_eq!(cordon(&node, "", false).await.unwrap_err().code(), Some(400));
}

#[tokio::test]
async fn each_gpu_of_a_container_may_have_its_own_memory() {
    let node = TestNode::start_with(&format!("[share]\nsplit = \"spread\"\n{}", &ROOMY[8..])).await;
    let ids = [replica(0, 0), replica(1, 0)];
    node.allocate(&ids).await.unwrap();
    node.pre_start(&ids).await.unwrap();
    let id = id_of(&ids).to_string();
    set(&node, SetQuotaRequest { gpu: "1".into(), ..memory(&id, 12 * GIB) }).await.unwrap();
    let quota = QuotaReader::attach(&node.pages(&ids)).unwrap();
    assert_eq!((quota.memory_limit(0), quota.memory_limit(1)), (8 * GIB, 12 * GIB));
    let cores = SetQuotaRequest { cores_millis: Some(100), gpu: "1".into(), ..memory(&id, GIB) };
    let refused = set(&node, cores).await.unwrap_err();
    assert!(refused.to_string().contains("leased together"), "{refused}");
    set(&node, memory(&id, 10 * GIB)).await.unwrap();
    assert_eq!((quota.memory_limit(0), quota.memory_limit(1)), (10 * GIB, 10 * GIB));
}

#[tokio::test]
async fn a_cordoned_gpu_goes_to_nobody_else_and_its_containers_go_on() {
    let mut node = TestNode::start_with(ROOMY).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    let ids = running(&node, "a", 1).await;
    let index = usize::from(!ids[0].starts_with(&gpu(0).uuid));
    let uuid = gpu(u32::try_from(index).unwrap()).uuid;
    let cordoned = cordon(&node, &index.to_string(), false).await.unwrap();
    assert_eq!(cordoned, std::slice::from_ref(&uuid));
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    // What kubelet asks for that has not heard of it.
    let refused = node.allocate(&ids).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("cordoned by") && refused.message().contains("fans"));
    // The running container goes on, starts again, and may still be steered.
    node.kubelet.start_container(&pod("a", 1), "main").await.unwrap();
    set(&node, memory("a", 9 * GIB)).await.unwrap();

    node.stop_plugin().await;
    node.launch_plugin();
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    let status = node.status().await;
    let shown = status.gpus.iter().find(|g| g.uuid == uuid).unwrap();
    assert!(shown.cordon.ends_with(": fans"), "{}", shown.cordon);
    // A cordon is no illness: it keeps its replicas back, and stands for itself.
    assert_eq!((shown.health, &*shown.health_reason), (Health::Healthy, ""));
    assert!(!shown.cordoned_with_node);
    assert!(shown.replicas.iter().all(|replica| replica.health_reason == shown.cordon));
    assert_eq!(limit(&node.pages(&ids)), 9 * GIB);
    // Its replica is free, and goes to no successor.
    running(&node, "b", 1).await;
    node.kubelet.remove("default", "a");
    node.status_until(|status| (status.allocations.len() == 1).then_some(())).await;
    assert_eq!(node.kubelet.allocatable(GPU), 4);

    assert_eq!(cordon(&node, &uuid, true).await.unwrap(), Vec::<String>::new());
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    node.stop_plugin().await;
    let events = crate::trail(&node.ledger());
    let cordons = events.iter().filter(|event| event.gpu.is_some());
    let lines: Vec<_> = cordons.map(|e| (e.what.into_str(), e.reason.clone().unwrap())).collect();
    let fans = || "fans".to_owned();
    assert_eq!(lines, [("cordoned", fans()), ("uncordoned", fans())]);
}

#[tokio::test]
async fn a_node_is_cordoned_as_a_whole() {
    let node = TestNode::start_with(ROOMY).await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    cordon(&node, &gpu(1).uuid, false).await.unwrap();
    assert_eq!(cordon(&node, "--all", false).await.unwrap(), ["*".to_owned(), gpu(1).uuid]);
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
    let refused = cordon(&node, "0", true).await.unwrap_err();
    assert_eq!(refused.code(), Some(409));
    assert!(refused.to_string().contains("uncordon --all"), "{refused}");
    let status = node.status().await;
    let with_node = |index: u32| {
        let gpu = status.gpus.iter().find(|gpu| gpu.index == index).unwrap();
        gpu.cordoned_with_node
    };
    assert!(with_node(0) && !with_node(1));
    // The node's own is lifted, and that of the GPU stands.
    assert_eq!(cordon(&node, "--all", true).await.unwrap(), [gpu(1).uuid]);
    bounded(node.kubelet.wait_allocatable(GPU, 4)).await;
    assert_eq!(cordon(&node, "--all", true).await.unwrap(), [gpu(1).uuid], "nothing to do");
    // Under the node's cordon a GPU's own may be lifted, and the node's stands.
    cordon(&node, "--all", false).await.unwrap();
    assert_eq!(cordon(&node, "1", true).await.unwrap(), ["*"]);
    bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
    cordon(&node, &gpu(1).uuid, false).await.unwrap();
    let answer = cordon(&node, "--all --each", true).await.unwrap();
    assert!(answer.is_empty(), "{answer:?}");
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    assert!(cordon(&node, "--all", true).await.unwrap().is_empty(), "nothing to do");
}

/// What an HTTP client of one's own may send.
#[tokio::test]
async fn what_cannot_be_read_is_refused_and_changes_nothing() {
    use std::io::{Read, Write};
    let node = TestNode::start().await;
    let socket = node.dir.path().join("admin.sock");
    let ask = move |method: &str, path: &str, body: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: \r\nConnection: close\r\n");
        // What is too large is refused before it has all come.
        let _ = write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    };
    tokio::task::spawn_blocking(move || {
        let unknown = ask("POST", CordonRequest::PATH, "{\"all\": true, \"raeson\": \"fans\"}");
        assert!(unknown.starts_with("HTTP/1.1 400 ") && unknown.contains("raeson"), "{unknown}");
        for body in ["", "{", "[]", "null", "{\"all\": 7}"] {
            let answer = ask("POST", CordonRequest::PATH, body);
            assert!(answer.starts_with("HTTP/1.1 400 "), "{body}: {answer}");
        }
        let large = " ".repeat(5 << 20);
        let answer = ask("POST", PlanRequest::PATH, &large);
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(ask("GET", CordonRequest::PATH, "").starts_with("HTTP/1.1 405 "));
        assert!(ask("POST", STATUS, "{}").starts_with("HTTP/1.1 405 "));
        assert!(ask("GET", LIVE, "").starts_with("HTTP/1.1 200 "));
    })
    .await
    .unwrap();
    let status: Status = admin(node.dir.path()).get(STATUS).await.unwrap();
    assert!(status.gpus.iter().all(|gpu| gpu.cordon.is_empty()));
}

// Under running processes: the plugin as it is shipped, steered from outside, and tenants under the shim.

/// A node of one GPU of which each of these pods has half.
async fn halves(pods: &[&str]) -> (Simulated, Vec<Held>) {
    let mut node = Simulated::on("[[gpu]]\nmemory = \"8GiB\"\n", "").await;
    node.serve().await;
    let mut held = Vec::new();
    for pod in pods {
        held.push(node.start_pod(pod, 1).await);
        node.named(pod).await;
    }
    (node, held)
}

/// The client that `docs/steering.md` names.
#[tokio::test]
async fn a_python_client_steers_as_the_documentation_says() {
    let client = workspace().join("tests/python/admin_client.py");
    let (node, _) = halves(&["llm"]).await;
    let run = |gibibytes: &str| -> Output {
        let mut command = Command::new("python3");
        command.arg("-B").arg(&client).arg(node.dir.path().join("admin.sock"));
        command.args(["llm", gibibytes]).output().unwrap()
    };
    let limit = |status: &serde_json::Value| {
        status["allocations"][0]["gpus"][0]["memory_limit_bytes"].clone()
    };
    let before = limit(&node.json());
    let said = run("2");
    assert!(said.status.success(), "{}", stderr(&said));
    let status = node.json();
    let uuid = status["gpus"][0]["uuid"].as_str().unwrap();
    let after = 2 * GIB;
    let want = format!("llm {uuid} {before}\n{uuid} {before} -> {after}\n");
    assert_eq!(String::from_utf8(said.stdout).unwrap(), want);
    assert_eq!(limit(&status), after);
    // A refusal has its code and says what is possible.
    let refused = run("4000");
    assert!(!refused.status.success());
    assert!(stderr(&refused).contains("422: "), "{}", stderr(&refused));
}

#[tokio::test(flavor = "multi_thread")]
async fn gpu_time_is_divided_again_and_capped_under_running_processes() {
    let (node, held) = halves(&["one", "two"]).await;
    let load = |held: &Held| {
        let mut load = node.tenant(&held.ids);
        load.args(["load", "--kernel-us=500", "--for=1000"]).stdout(Stdio::null());
        Owned(load.spawn().unwrap())
    };
    let (first, second) = (load(&held[0]), load(&held[1]));
    let pids = [first.id(), second.id()];
    // GPU time that both get in a while, nanoseconds.
    let worked = |length: Duration| {
        let look = || pids.map(|pid| node.worked(0, pid).ns);
        let before = look();
        std::thread::sleep(length);
        let after = look();
        [0, 1].map(|n: usize| after[n] - before[n])
    };
    let both_run = || !worked(Duration::from_millis(50)).contains(&0);
    until(|| both_run().then_some(())).await;
    // Of what the two get, the first's part in percent.
    let part = || {
        let got = worked(Duration::from_secs(1));
        got[0] * 100 / got.iter().sum::<u64>().max(1)
    };
    let set = |words: &[&str]| {
        let output = node.run(&[&["quota", "set"], words].concat());
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    };
    settles("percent, of 50", &(35..=65), part);
    set(&["two", "--cores", "10"]);
    set(&["one", "--cores", "90"]);
    settles("percent, of 90", &(75..=100), part);

    // A cap, with nobody in its way.
    drop(second);
    set(&["one", "--cores", "20", "--policy", "strict"]);
    let of_the_time = || {
        let begun = Instant::now();
        let before = node.worked(0, pids[0]).ns;
        std::thread::sleep(Duration::from_secs(1));
        let got = u128::from(node.worked(0, pids[0]).ns - before);
        u64::try_from(got * 100 / begun.elapsed().as_nanos()).unwrap()
    };
    settles("percent of the time, capped at 20", &(10..=30), of_the_time);
    // Nobody divides it; and again.
    set(&["one", "--policy", "none"]);
    settles("percent of the time, undivided", &(50..=100), of_the_time);
    set(&["one", "--policy", "strict"]);
    settles("percent of the time, after the second change of policy", &(10..=30), of_the_time);
}
