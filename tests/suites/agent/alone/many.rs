//! A node of 16 GPUs with 64 replicas each and 1,000 sessions: what must not grow with them. Counted, not
//! timed: messages, descriptors, threads, bytes read.

use nix::sys::socket::{MsgFlags, recv, send};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tessera_config::Config;
use tessera_daemon::{self as app, Timing};
use tessera_gpu::health::Observation;
use tessera_harness::in_own_process;
use tessera_harness::plugin::*;
use tessera_kubelet_api::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use tessera_region::session::Message;
use tessera_region::usage::{OwnedSlot, UsageMap};

const GPUS: u32 = 16;
const REPLICAS: u32 = 64;
const MANY: usize = 1000;

const SETTINGS: &str = "[share]\nreplicas = 64\n[gpus]\nreserve = 0\ncontext_overhead = \"16Mi\"\n\
                        [ledger]\nfsync = false\n";

/// A process's hold on its allocation, all of them in this one.
struct Session {
    _slot: OwnedSlot,
    _socket: std::os::fd::OwnedFd,
}

fn session(dir: &Path) -> Session {
    let usage = UsageMap::attach(dir).unwrap();
    let slot = usage.claim().unwrap();
    let socket = connect(dir);
    let hello = Message::Hello {
        slot: u32::try_from(slot.index()).unwrap(),
        pid: std::process::id(),
        generation: generation(dir),
    };
    send(socket.as_raw_fd(), &hello.encode(), MsgFlags::empty()).unwrap();
    let mut welcome = [0; 64];
    recv(socket.as_raw_fd(), &mut welcome, MsgFlags::empty()).unwrap();
    Session { _slot: slot, _socket: socket }
}

fn entries(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Bytes that a thread of this process, or all, have read (proc_pid_io(5)).
fn read_bytes(task: &Path) -> u64 {
    let io = std::fs::read_to_string(task.join("io")).unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// The thread that observes.
fn observing() -> PathBuf {
    let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let is_it = |task: &PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "observe")
    };
    tasks.find(is_it).unwrap()
}

#[tokio::test]
async fn a_thousand_sessions_cost_no_messages_no_threads_and_no_needless_reading() {
    let this = "many::a_thousand_sessions_cost_no_messages_no_threads_and_no_needless_reading";
    if !in_own_process(this) {
        return;
    }
    app::raise_file_limit();
    let node = TestNode::without_plugin(SETTINGS).await;
    *node.gpus.gpus.lock().unwrap() = (0..GPUS).map(gpu).collect();
    // What is due every 10 s is not what is looked at here.
    let hour = Duration::from_secs(3600);
    let timing = Timing { reconcile: hour, release_grace: Some(hour), ..Timing::default() };
    let config = Config::parse(&node.config_text()).unwrap();
    let app = app::start(config, Arc::clone(&node.gpus) as Arc<_>, timing).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(app.run_until(async {
        let _ = stopped.await;
    }));
    let all = usize::try_from(GPUS * REPLICAS).unwrap();
    bounded(node.kubelet.wait_allocatable(GPU, all)).await;
    let ids: Vec<String> =
        (0..REPLICAS).flat_map(|n| (0..GPUS).map(move |gpu| replica(gpu, n))).take(MANY).collect();
    let (lists, descriptors) = (node.kubelet.lists(), entries("/proc/self/fd"));

    let mut client = node.client().await;
    for ids in ids.chunks(100) {
        let container = |id: &String| ContainerAllocateRequest { device_ids: vec![id.clone()] };
        let container_requests = ids.iter().map(container).collect();
        client.allocate(AllocateRequest { container_requests }).await.unwrap();
    }
    let pages = ids.iter().map(|id| node.pages(std::slice::from_ref(id)));
    let mut sessions = Vec::new();
    for dir in pages {
        // Blocks, and the plugin runs here too.
        sessions.push(tokio::task::spawn_blocking(move || session(&dir)).await.unwrap());
    }
    assert_eq!(node.kubelet.lists(), lists, "kubelet was sent what it did itself");
    // Page and two listeners, for sessions and for the gate; the session and its process's death; and the
    // other end of the session.
    let taken = entries("/proc/self/fd") - descriptors;
    assert!(taken <= 6 * MANY + 64, "{taken} descriptors");
    let threads = entries("/proc/self/task");
    // Two that run tests, eight that block, health, observation, the arbiter, and one at its work.
    assert!(threads <= 17, "{threads} threads");

    // A look at a GPU reads what its 63 tenants use, not 132 KiB of each of them twice.
    let (observing, looks) = (observing(), || node.gpus.looks.load(Ordering::Relaxed));
    let (read, looked) = (read_bytes(&observing), looks());
    let dir = node.pages(&ids[..1]);
    sessions.push(tokio::task::spawn_blocking(move || session(&dir)).await.unwrap());
    until(|| (looks() >= looked + 3).then_some(())).await;
    let each = (read_bytes(&observing) - read) / (looks() - looked);
    assert!((1024..1 << 20).contains(&each), "{each} bytes for each look");

    // The start of a container looks at its own pages, and brings a round forward that reads no others.
    let (read, asked) = (read_bytes(Path::new("/proc/self")), node.kubelet.pod_lists());
    node.pre_start(&ids[..1]).await.unwrap();
    until(|| (node.kubelet.pod_lists() > asked).then_some(())).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let read = read_bytes(Path::new("/proc/self")) - read;
    assert!(read < 32 << 20, "{read} bytes for a container's start");
    assert_eq!(node.kubelet.lists(), lists);

    // A GPU falls ill: one message, whatever it holds.
    node.gpus.report(Observation::Xid { uuid: gpu(0).uuid, xid: 79 });
    let well = usize::try_from((GPUS - 1) * REPLICAS).unwrap();
    bounded(node.kubelet.wait_allocatable(GPU, well)).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(node.kubelet.lists(), lists + 1);

    let _ = stop.send(());
    running.await.unwrap().unwrap();
}
