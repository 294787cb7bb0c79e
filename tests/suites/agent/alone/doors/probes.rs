//! Kubelet's probes while others flood the port that they go to. Each is made once: kubelet, too, counts every
//! one.

use super::attack::{ALL, Flood, Manner, get, probe};
use super::serving;
use tessera_harness::alone;
use tessera_harness::plugin::{GPU, bounded, pod};

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
    bounded(node.kubelet.run(&pod("beside", 1))).await.unwrap();
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
    use std::io::{Read, Write};
    let (node, address) = serving().await;
    let mut scrape = std::net::TcpStream::connect(address).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    // Read is what of the request matters; the answer waits for its reader.
    std::thread::sleep(std::time::Duration::from_millis(500));
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

/// Slow readers of many addresses, or of one, take scrapes from nobody else for longer than they last; and
/// what the plugin keeps for them is bounded.
#[tokio::test]
async fn after_a_flood_everything_is_as_before() {
    let _alone = alone();
    let (node, address) = serving().await;
    let before = super::open_descriptors(&node);
    let flood = Flood::start(address, RATE, &ALL);
    flood.reached(3 * RATE);
    drop(flood);
    tessera_harness::plugin::until(|| (super::open_descriptors(&node) <= before + 2).then_some(()))
        .await;
    // An address that has asked too often is answered again within a second or so.
    tessera_harness::plugin::until(|| {
        get(address, "/metrics").unwrap().starts_with("HTTP/1.1 200").then_some(())
    })
    .await;
}
