//! What the plugin listens at, under floods, with few descriptors, and beside a second plugin: the plugin as a
//! process of its own, so that what is counted is its own.

mod attack;
mod descriptors;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use attack::{ALL, Flood, Manner, probe};
use tessera_harness::alone;
use tessera_harness::plugin::{GPU, Simulated};

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
    let address = node.metrics().await;
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

/// Every probe of `count` is answered beside a flood in which each manner has hundreds of connections at any time, more
/// than the plugin has room for; and nothing is left of it.
async fn answers_beside(rate: u64, count: usize) {
    let (mut node, address) = serving().await;
    let flood = Flood::start(address, rate, &ALL);
    flood.reached(rate);
    let missed: Vec<String> = tokio::task::spawn_blocking(move || {
        let one =
            |n: usize| probe(address, if n.is_multiple_of(2) { "/healthz" } else { "/readyz" });
        (0..count).filter_map(|n| one(n).err()).collect()
    })
    .await
    .unwrap();
    assert!(missed.is_empty(), "{} of {count} missed: {missed:#?}", missed.len());
    // Kubelet's own calls go on.
    node.start_pod("beside", 1).await;
    drop(flood);
    assert_eq!(node.terminate().await, Some(0));
}

#[tokio::test]
async fn probes_are_answered_beside_every_manner_at_once() {
    let _alone = alone();
    answers_beside(RATE, 40).await;
    answers_beside(3 * RATE, 20).await;
}

/// A scrape that has begun is not what makes room for others.
#[tokio::test]
async fn a_scrape_under_way_is_never_given_up_for_silent_connections() {
    let _alone = alone();
    let (node, address) = serving().await;
    let mut scrape = TcpStream::connect(address).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    // Read is what of the request matters; the answer waits for its reader.
    thread::sleep(Duration::from_millis(500));
    let flood = Flood::start(address, RATE, &[Manner::Silent]);
    flood.reached(2 * RATE);
    let mut text = String::new();
    scrape.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 200") && text.contains("# EOF") | text.contains("tessera_ready")
    );
    drop(flood);
    assert_eq!(node.kubelet.allocatable(GPU), 32);
}
