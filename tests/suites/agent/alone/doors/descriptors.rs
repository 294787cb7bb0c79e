//! Few descriptors, and many who want them: nobody's flood takes them from the others, and least of all from
//! kubelet's calls.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tessera_harness::alone;

use super::attack::{ALL, Flood, probe};
use super::{open_descriptors, serving_with, ticks};
use tessera_harness::plugin::{Simulated, connect, stderr, until};

/// The issue's: the plugin itself takes about thirty.
const FEW: u32 = 128;

/// What can be said on a connection of gRPC before there is a request.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fn say_and_stay(socket: &Path, count: usize, bytes: &[u8]) -> Vec<UnixStream> {
    use std::io::Write;
    let one = |_| {
        // A full backlog is refused to a client that does not wait.
        let mut stream = UnixStream::connect(socket).ok()?;
        let _ = stream.write_all(bytes);
        Some(stream)
    };
    (0..count).filter_map(one).collect()
}

/// Pods come, the node says how it is, and no core is spun on.
async fn all_is_well(node: &Simulated, pods: &str) {
    for n in 0..4 {
        node.start_pod(&format!("{pods}-{n}"), 1).await;
        node.kubelet.remove("default", &format!("{pods}-{n}"));
    }
    for command in [&["status", "--live"][..], &["status", "--ready"], &["status"]] {
        let output = node.run(command);
        assert!(output.status.success(), "{command:?}: {}", stderr(&output));
    }
    // Of 2 s, a quarter is much: 100 ticks are a second. A spin is in each of these windows; the work for
    // pods that have ended is in one.
    let mut least = u64::MAX;
    for _ in 0..3 {
        let before = ticks(node);
        tokio::time::sleep(Duration::from_secs(2)).await;
        least = least.min(ticks(node) - before);
        if least < 50 {
            return;
        }
    }
    panic!("{least} ticks of 200 at rest");
}

/// So many connections each, which are more than there are descriptors, that say nothing, that do not end their
/// head, and whose body never comes.
#[tokio::test]
async fn admin_connections_that_ask_nothing_leave_descriptors_for_allocate() {
    let _alone = alone();
    let (node, address) = serving_with(Some(FEW)).await;
    let manners: [&[u8]; 3] = [
        b"",
        b"GET /api/v1/status HTTP/1.1\r\n",
        b"POST /api/v1/plan HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n",
    ];
    let socket = node.dir.path().join("admin.sock");
    let flood = move || manners.map(|bytes| say_and_stay(&socket, 130, bytes));
    let held = tokio::task::spawn_blocking(flood).await.unwrap();
    all_is_well(&node, "admin").await;
    probe(address, "/healthz").unwrap();
    let open = open_descriptors(&node);
    assert!(open <= FEW as usize - 32, "{open} of {FEW} descriptors, and Allocate needs some");
    drop(held);
}

#[tokio::test]
async fn silent_connections_to_kubelets_socket_leave_the_plugin_registered() {
    let _alone = alone();
    let (node, address) = serving_with(Some(FEW)).await;
    let endpoint = node.kubelet.endpoint(tessera_harness::plugin::GPU).unwrap();
    let socket: PathBuf = node.kubelet.device_plugins_dir().join(endpoint);
    let flood = move || [&b""[..], PREFACE].map(|bytes| say_and_stay(&socket, 150, bytes));
    let held = tokio::task::spawn_blocking(flood).await.unwrap();
    all_is_well(&node, "kubelet").await;
    probe(address, "/readyz").unwrap();
    assert_eq!(node.kubelet.registrations(), 1, "its own connection is not what goes");
    drop(held);
}

/// Containers open what they can: sessions and the gate of their own allocation.
#[tokio::test]
async fn containers_that_connect_without_end_leave_descriptors_for_allocate() {
    let _alone = alone();
    let (node, address) = serving_with(Some(FEW)).await;
    let mut held = Vec::new();
    let mut streams = Vec::new();
    for n in 0..8 {
        let pages = node.start_pod(&format!("bad-{n}"), 1).await.pages;
        for _ in 0..40 {
            held.push(connect(&pages));
            streams.push(gate(&pages));
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    all_is_well(&node, "good").await;
    probe(address, "/healthz").unwrap();
}

fn gate(pages: &Path) -> std::os::fd::OwnedFd {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
    let socket = socket(AddressFamily::Unix, kind, flags, None).unwrap();
    let _ = connect(socket.as_raw_fd(), &UnixAddr::new(&pages.join("gate.sock")).unwrap());
    socket
}

#[tokio::test]
async fn a_flood_at_every_door_at_once_starves_none() {
    let _alone = alone();
    let (node, address) = serving_with(Some(FEW)).await;
    let flood = Flood::start(address, 1000, &ALL);
    let admin = node.dir.path().join("admin.sock");
    let held =
        tokio::task::spawn_blocking(move || say_and_stay(&admin, 300, PREFACE)).await.unwrap();
    flood.reached(1000);
    for n in 0..4 {
        node.start_pod(&format!("p-{n}"), 1).await;
        let output = node.run(&["status", "--live"]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
    drop((flood, held));
    // All of it is given back.
    until(|| probe(address, "/healthz").is_ok().then_some(())).await;
    until(|| (open_descriptors(&node) < 64).then_some(())).await;
}
