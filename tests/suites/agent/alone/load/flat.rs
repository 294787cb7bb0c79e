//! Memory of the process while pods come and go and it is scraped: what it keeps of each that went.

use tessera_harness::alone;
use tessera_model::audit::{Event, What};
use tessera_store::{Change, HISTORY_KEPT, Ledger};
use tokio::task::JoinSet;

use super::plugin::*;
use tessera_harness::plugin::{Simulated, pod};

/// Pods that come and go before memory is first looked at, and after that. The heap of a plugin that just started
/// grows until each of its caches and threads has been used, for up to 80 pods on a busy machine.
const WARM_UP: usize = 160;
const PODS: usize = 320;
/// What malloc may have handed out more at the end: 150 bytes of each of these pods. A record alone, with its
/// names, is several times that. (As measured, the heap breathes by 16 KiB and does not grow.)
const HEAP: u64 = 48 << 10;
/// And what the process may have grown by, which is pages: heap with its holes, and stacks. Coarse: what
/// starting needed is given back once, and taken again as it is needed.
const PAGES: u64 = MIB;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_come_and_go_leave_nothing_in_memory() {
    let _alone = alone();
    // The history keeps pods until it has stored them, once a minute; plugin/history/tests/memory.rs measures it.
    let settings = format!("{SHARE}[history]\nenabled = false\n");
    let mut plugin = Plugin { node: Simulated::new(&settings).await };
    let clock = Clock::new(plugin.node.dir.path());
    // Symbols of a backtrace stay in memory; and what glibc keeps for the next request of a thread would
    // count as handed out.
    let exact = [("RUST_BACKTRACE", "0"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")];
    plugin.node.envs = clock.envs();
    plugin.node.envs.extend(exact.map(|(name, value)| (name, value.into())));
    fill_trail(&plugin);
    let address = plugin.serve().await;
    let stay: Vec<String> = (0..16).map(|n| format!("stay-{n}")).collect();
    for name in &stay {
        plugin.run(name).await;
    }
    plugin.named(&stay).await;
    // Reads the whole trail: the ledger's cache is full now, which else takes a thousand pods.
    plugin.explain("stay-0");
    let mut looks = Vec::new();
    for batch in 0..(WARM_UP + PODS) / 16 {
        let mut guests = JoinSet::new();
        for n in 0..16 {
            let (kubelet, pod) =
                (plugin.node.kubelet.clone(), pod(&format!("guest-{batch}-{n}"), 1));
            guests.spawn(async move { kubelet.run(&pod).await.map(|_| pod) });
        }
        let guests = guests.join_all().await;
        let metrics = scrape(address).await;
        assert!(pods_of(&metrics).len() >= stay.len());
        for pod in guests {
            plugin.node.kubelet.remove("default", &pod.unwrap().name);
        }
        looks.push((clock.heap(), plugin.anonymous()));
    }
    // The least of several looks on either side: what a request holds for a moment is no growth.
    let least = |looks: &[(u64, u64)]| {
        let least = |of: fn(&(u64, u64)) -> u64| looks.iter().map(of).min().unwrap();
        (least(|look| look.0), least(|look| look.1))
    };
    let (warm, end) = (&looks[WARM_UP / 16 - 5..WARM_UP / 16], &looks[looks.len() - 5..]);
    let (before, after) = (least(warm), least(end));
    println!("heap and pages, bytes: {before:?}, after {PODS} more pods {after:?}");
    assert!(after.0 < before.0 + HEAP, "heap, bytes: {looks:?}");
    assert!(after.1 < before.1 + PAGES, "pages, bytes: {looks:?}");
}

/// As many lines as the trail keeps.
fn fill_trail(plugin: &Plugin) {
    let (mut ledger, _) = Ledger::open(&plugin.node.dir.path().join("ledger.redb"), false).unwrap();
    let line = |n: u64| Event::of_node(What::Cordoned, n as i64).because("x".repeat(200));
    let events = (1..=HISTORY_KEPT).map(line).collect();
    ledger.commit(&Change { events, ..Change::default() }).unwrap();
}
