//! What the plugin listens at, under floods, with few descriptors, and beside a second plugin: the plugin as a
//! process of its own, so that what is counted is its own.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tessera_harness::gate_tenants::Peer;
use tessera_harness::metrics::{get, say};
use tessera_harness::plugin::{Simulated, connect, stderr, until, until_async};
use tessera_harness::{Background, alone};

/// Metrics at a port of their own.
const METRICS: &str = "replicas = 16\nmemory = \"256Mi\"\n[ledger]\nfsync = false\n[metrics]\n\
    listen = \"127.0.0.1:0\"\n";

/// A plugin that serves, and where its metrics are.
async fn serving() -> (Simulated, SocketAddr) {
    serving_with(None).await
}

/// The same, with at most so many descriptors.
async fn serving_with(descriptors: Option<u32>) -> (Simulated, SocketAddr) {
    let mut node = Simulated::new(METRICS).await;
    if let Some(most) = descriptors {
        node.wrap(&format!("ulimit -n {most}; exec"));
    }
    node.serve().await;
    let address = node.address().await;
    (node, address)
}

/// CPU time of the plugin so far, in clock ticks (proc_pid_stat(5)).
fn ticks(node: &Simulated) -> u64 {
    let pid = node.plugin.as_ref().unwrap().id();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Descriptors that the plugin has open.
fn open_descriptors(node: &Simulated) -> usize {
    let pid = node.plugin.as_ref().unwrap().id();
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Kubelet's probes while others flood the port that they go to. Each is made once: kubelet, too, counts every one.
const RATE: u64 = 2000;

/// Beside floods in which each manner has hundreds of connections at any time, more than the plugin has room for; and
/// nothing is left of them.
#[tokio::test]
async fn probes_are_answered_beside_every_manner_at_once() {
    let _alone = alone();
    for (rate, count) in [(RATE, 40), (3 * RATE, 20)] {
        let (mut node, address) = serving().await;
        let flood = Flood::start(address, rate);
        flood.reached(rate);
        for n in 0..count {
            probe(address, if n % 2 == 0 { "/healthz" } else { "/readyz" }).await;
        }
        // Kubelet's own calls go on.
        node.start_pod("beside", 1).await;
        drop(flood);
        assert_eq!(node.terminate().await, Some(0));
    }
}

// Clients that mean no good, from a thread of their own, at a rate; and a request as kubelet makes it beside them: one
// connection, one answer, a time limit, no second try.

/// What a connection does once it is there.
struct Manner {
    /// What it says first.
    said: String,
    /// And each time that it has its turn.
    more: String,
    then: Then,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Reads,
    /// Asks, and reads nothing.
    Stares,
    /// Ends its side at once.
    HalfClosed,
    Gone,
}

/// Every manner; the first says nothing.
fn manners() -> Vec<Manner> {
    let request = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let metrics = request("/metrics");
    let y = "y".repeat(2000);
    let body = "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n";
    let all: [(&str, &str, Then); 11] = [
        ("", "", Then::Reads),
        // Half a request's head; a byte of one each time; one that never ends, as fast as it is read.
        ("GET /metrics HTTP/1.1\r\nHost: x\r\nX-Y: ", "", Then::Reads),
        ("G", "E", Then::Reads),
        (&format!("GET / HTTP/1.1\r\nX: {y}"), &y, Then::Reads),
        (&metrics, "", Then::Stares),
        // Keeps the connection.
        (&request("/healthz"), "", Then::Reads),
        // Much on one connection, one request behind the other.
        (&metrics.repeat(20), "", Then::Stares),
        ("", "", Then::HalfClosed),
        ("", "", Then::Gone),
        // No HTTP; and a body that never comes.
        ("\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\r\n\r\n", "", Then::Reads),
        (body, "", Then::Reads),
    ];
    let manner = |(said, more, then): (&str, &str, Then)| Manner {
        said: said.to_owned(),
        more: more.to_owned(),
        then,
    };
    all.map(manner).into()
}

/// Connections that one flood keeps open, the newest.
const KEPT: usize = 3000;
const TURN: Duration = Duration::from_millis(5);

/// A flood, until it is dropped.
struct Flood {
    connections: Arc<AtomicU64>,
    _thread: Background,
}

impl Flood {
    /// So many connections a second, which take all manners in turn.
    fn start(address: SocketAddr, rate: u64) -> Self {
        let connections: Arc<AtomicU64> = Arc::default();
        let count = Arc::clone(&connections);
        let run = move |stop: &AtomicBool| flood(address, rate, &manners(), stop, &count);
        Flood { connections, _thread: Background::new(run) }
    }

    /// Waits until there have been so many connections.
    fn reached(&self, count: u64) {
        let began = Instant::now();
        while self.connections.load(Ordering::Relaxed) < count {
            assert!(began.elapsed() < Duration::from_secs(120), "nobody can connect");
            std::thread::sleep(TURN);
        }
    }
}

fn flood(address: SocketAddr, rate: u64, manners: &[Manner], stop: &AtomicBool, count: &AtomicU64) {
    let mut open: VecDeque<(&Manner, TcpStream)> = VecDeque::new();
    let began = Instant::now();
    let mut made = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let due = u64::try_from(began.elapsed().as_millis()).unwrap() * rate / 1000;
        // A client that lags does not catch up with a burst of seconds.
        made = made.max(due.saturating_sub(rate / 10));
        while made < due {
            let manner = &manners[usize::try_from(made).unwrap() % manners.len()];
            made += 1;
            let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) else {
                continue;
            };
            count.fetch_add(1, Ordering::Relaxed);
            if stream.set_nonblocking(true).is_ok() && begin(manner, &stream) {
                open.push_back((manner, stream));
            }
        }
        while open.len() > KEPT {
            open.pop_front();
        }
        open.retain_mut(|(manner, stream)| go_on(manner, stream));
        std::thread::sleep(TURN);
    }
}

/// What it says first; whether it stays.
fn begin(manner: &Manner, mut stream: &TcpStream) -> bool {
    if manner.then == Then::HalfClosed {
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
    let _ = stream.write_all(manner.said.as_bytes());
    manner.then != Then::Gone
}

/// Its next turn; whether it is still there.
fn go_on(manner: &Manner, stream: &mut TcpStream) -> bool {
    if manner.then == Then::Stares {
        return true;
    }
    let gone = |error: &std::io::Error| error.kind() != std::io::ErrorKind::WouldBlock;
    let more = manner.more.as_bytes();
    if !more.is_empty() && stream.write(more).is_err_and(|error| gone(&error)) {
        return false;
    }
    !matches!(stream.read(&mut [0; 256]), Ok(0) | Err(_)) || still_open(stream)
}

fn still_open(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0; 1]) {
        Ok(0) => false,
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

/// Longer than kubelet waits: a busy machine is slow. One that is given up, or waits in vain, is seen all the same.
const TIMEOUT: Duration = Duration::from_secs(30);

async fn probe(address: SocketAddr, path: &str) {
    let answer = tokio::time::timeout(TIMEOUT, get(address, path)).await.expect(path);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
}

// Few descriptors, and many who want them: nobody's flood takes them from the others, and least of all from
// kubelet's calls.

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
    probe(address, "/healthz").await;
    let open = open_descriptors(&node);
    assert!(open <= FEW as usize - 32, "{open} of {FEW} descriptors, and Allocate needs some");
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
            streams.extend(Peer::try_connect(&pages));
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    all_is_well(&node, "good").await;
    probe(address, "/healthz").await;
}

#[tokio::test]
async fn a_flood_at_every_door_at_once_starves_none() {
    let _alone = alone();
    let (node, address) = serving_with(Some(FEW)).await;
    let flood = Flood::start(address, 1000);
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
    until_async(async || {
        let request = b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n";
        let answer = say(address, request).await?;
        (answer.status == 200).then_some(())
    })
    .await;
    until(|| (open_descriptors(&node) < 64).then_some(())).await;
}
