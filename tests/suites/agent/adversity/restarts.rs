//! The plugin killed in the middle of what it does, and replaced by another version.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use tessera_harness::artefacts;
use tessera_harness::plugin::*;
use tessera_region::abi;
use tessera_region::quota::abi_in;

/// Replicas of live allocations, and the bytes that these may hold per GPU.
fn sold(status: &Value) -> (Vec<String>, u64) {
    let mut replicas = Vec::new();
    let mut bytes = 0;
    for allocation in status["allocations"].as_array().unwrap() {
        if allocation["state"] == "parked" {
            continue;
        }
        replicas.extend(allocation["replica_ids"].as_array().unwrap().iter().map(Value::to_string));
        bytes += allocation["gpus"][0]["memory_limit_bytes"].as_u64().unwrap();
    }
    (replicas, bytes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_moment_of_allocate_it_sells_nothing_twice_and_loses_nothing() {
    let mut node = Simulated::new("replicas = 4").await;
    node.serve().await;
    let (mut interrupted, mut admitted) = (0, 0);
    for round in 0..6u32 {
        let (ledger, pages) = (node.dir.path().join("ledger.redb"), node.dir.path().join("pages"));
        let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
        let before = (changed(&ledger), changed(&pages));
        let name = format!("pod-{round}");
        let kubelet = node.kubelet.clone();
        let asked = tokio::spawn(async move { kubelet.run(&pod(&name, 1)).await.is_ok() });
        // While it commits; once it makes pages; a little later, up to after its answer.
        let begun = Instant::now();
        let moment = Duration::from_micros(u64::from(round) * 700);
        tokio::task::block_in_place(|| {
            while begun.elapsed() < Duration::from_secs(5) {
                let now = (changed(&ledger), changed(&pages));
                let due = match round % 3 {
                    0 => now.0 != before.0,
                    1 => now.1 != before.1,
                    _ => begun.elapsed() > moment,
                };
                if due {
                    break;
                }
            }
        });
        node.kill();
        let answered = asked.await.unwrap();
        interrupted += u32::from(!answered);
        admitted += u32::from(answered);
        bounded(node.kubelet.wait_allocatable(GPU, 0)).await;
        // All that it has is whole before it registers.
        node.serve().await;
        let status = node.json();
        let (mut replicas, bytes) = sold(&status);
        let room = &status["gpus"][0];
        let room = room["memory_total_bytes"].as_u64().unwrap()
            - room["memory_reserve_bytes"].as_u64().unwrap();
        assert!(bytes <= 2 * room, "{bytes} sold of 2 * {room}");
        replicas.sort();
        let count = replicas.len();
        replicas.dedup();
        assert_eq!(replicas.len(), count, "sold twice: {status}");
        for allocation in status["allocations"].as_array().unwrap() {
            let dir = PathBuf::from(allocation["pages_dir"].as_str().unwrap());
            assert_eq!(limit(&dir), allocation["gpus"][0]["memory_limit_bytes"].as_u64().unwrap());
        }
        // Kubelet owns assignment: a pod that was not admitted is no longer of concern.
        node.kubelet.remove("default", &format!("pod-{round}"));
        let again = node.start_pod("again", 1).await;
        let dir = again.pages;
        let most = limit(&dir);
        Tenant::hold(&dir, most);
        node.kubelet.remove("default", "again");
    }
    assert!(interrupted > 0, "no Allocate was interrupted, {admitted} were answered");
    node.terminate().await;
}

/// A copy of a program that speaks another version of the pages, as an upgrade would bring.
fn raised(from: &Path, to: &Path) {
    let mut bytes = std::fs::read(from).unwrap();
    let own = [&b"tessera page abi"[..], &abi::version().to_le_bytes()].concat();
    let at = bytes.windows(own.len()).position(|found| found == own).expect("a mark");
    bytes[at + own.len() - 4..at + own.len()].copy_from_slice(&(abi::version() + 1).to_le_bytes());
    std::fs::write(to, bytes).unwrap();
    std::fs::set_permissions(to, std::fs::metadata(from).unwrap().permissions()).unwrap();
}

#[tokio::test]
async fn an_upgrade_to_another_page_version_leaves_running_and_restarting_containers_theirs() {
    let own = abi::version();
    let mut node = Simulated::new("replicas = 4").await;
    let shim = node.dir.path().join("libtessera.so");
    let marked = |abi: u32| [&b"\x7fELF tessera page abi"[..], &abi.to_le_bytes()].concat();
    std::fs::write(&shim, marked(own)).unwrap();
    node.serve().await;
    let root = node.dir.path().join("pages");
    let pages = |ids: &[String]| root.join(id_of(ids).as_str());
    let old = node.kubelet.run(&pod("old", 1)).await.unwrap().remove(0);
    let old = pages(&old.device_ids);
    let lost = node.kubelet.run(&pod("lost", 1)).await.unwrap().remove(0);
    let lost = pages(&lost.device_ids);
    let tenant = Tenant::hold(&old, 1 << 30);
    assert_eq!(abi_in(&old), Some(own));

    node.terminate().await;
    let next = node.dir.path().join("tessera-next");
    raised(&node.program, &next);
    node.program = next;
    std::fs::write(&shim, marked(own + 1)).unwrap();
    std::fs::remove_dir_all(&lost).unwrap();
    node.serve().await;

    // The running process goes on, is counted, and is seen to die.
    assert_eq!(abi_in(&old), Some(own));
    let charged = |node: &Simulated| {
        let status = node.json();
        let all = status["allocations"].as_array().unwrap().clone();
        let of = |a: &Value| a["gpus"][0]["memory_charged_bytes"].as_u64().unwrap();
        all.iter().map(of).sum::<u64>()
    };
    assert_eq!(charged(&node), 1 << 30);
    let another = Tenant::hold(&old, 1 << 30);
    assert_eq!(charged(&node), 2 << 30);
    let sessions = node.json().to_string().matches("\"host_pid\"").count();
    assert_eq!(sessions, 2, "its hello is understood: {}", node.json());
    drop((tenant, another));
    until(|| (charged(&node) == 0).then_some(())).await;

    // What starts again has the shim of before, and pages that this can read; also lost ones.
    assert_eq!(abi_in(&lost), Some(own), "made before it registered");
    for name in ["old", "lost"] {
        node.kubelet.start_container(&pod(name, 1), "main").await.unwrap();
    }
    assert_eq!((abi_in(&old), abi_in(&lost)), (Some(own), Some(own)));
    drop(Tenant::hold(&lost, 1 << 30));

    // What comes gets today's, also on a replica that had yesterday's.
    let new = node.start_pod("new", 1).await;
    assert_eq!(abi_in(&pages(&new.ids)), Some(own + 1));
    for name in ["old", "lost", "new"] {
        node.kubelet.remove("default", name);
    }
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        let next = node.start_pod(name, 1).await;
        assert_eq!(abi_in(&pages(&next.ids)), Some(own + 1), "{name}");
    }

    // Yesterday's plugin does not speak today's version: it leaves those pages as they are.
    node.terminate().await;
    node.program = artefacts().tessera();
    node.serve().await;
    assert_eq!(abi_in(&pages(&new.ids)), Some(own + 1));
    let status = node.json();
    assert!(status["warnings"].to_string().contains("page ABI"), "{}", status["warnings"]);
    let error = node.kubelet.start_container(&pod("a", 1), "main").await.unwrap_err();
    assert!(error.to_string().contains("update the older side"), "{error}");
    node.terminate().await;
}
