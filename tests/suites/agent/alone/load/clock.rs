//! The wall clock is set by hours and days, forward and back, while the plugin serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tessera_harness::alone;

use tessera_model::audit::Event;
use tessera_region::quota::QuotaReader;
use tessera_store::{Filter, Ledger};

use super::plugin::*;
use tessera_harness::gate_tenants::work;
use tessera_harness::plugin::{admin, bounded, pod, stderr, until};

/// Where the clock stands, one after the other.
const JUMPS: [i64; 2] = [5 * HOUR, -9 * HOUR];

fn machine_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis().try_into().unwrap()
}

/// Two containers that want the same GPU all the time.
struct Wanting {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Wanting {
    fn new(pages: &[std::path::PathBuf]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let one = |pages: &std::path::PathBuf| {
            let (pages, stop) = (pages.clone(), Arc::clone(&stop));
            std::thread::spawn(move || work(&pages, &stop))
        };
        let threads = pages.iter().map(one).collect();
        Wanting { stop, threads }
    }
}

impl Drop for Wanting {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_jumps_by_hours_stops_nothing_and_loses_nothing() {
    let _alone = alone();
    let mut plugin = Plugin::new().await;
    let clock = Clock::new(plugin.node.dir.path());
    plugin.node.envs = clock.envs();
    let address = plugin.serve().await;
    let stay: Vec<String> = (0..=JUMPS.len()).map(|n| format!("stay-{n}")).collect();
    let mut pages = Vec::new();
    for name in &stay {
        pages.push(plugin.run(name).await);
    }
    plugin.named(&stay).await;
    let wanting = Wanting::new(&pages[..2]);
    let admin = admin(plugin.node.dir.path());
    let generations: Vec<u64> =
        pages.iter().map(|dir| QuotaReader::attach(dir).unwrap().generation()).collect();
    for (n, jump) in JUMPS.into_iter().enumerate() {
        let leases = |metrics: &tessera_harness::exposition::Exposition| {
            ["stay-0", "stay-1"]
                .map(|name| metrics.sum("tessera_container_leases_total", &[("pod", name)]))
        };
        clock.set(jump);
        let before = scrape(address).await;
        assert_eq!(pods_of(&before), stay, "no series is lost");
        // The plugin does live by that clock: nothing else here would notice if it did not.
        let status = plugin.node.json();
        let behind = status["at_unix_ms"].as_i64().unwrap() - jump * 1000 - machine_ms();
        assert!(behind.abs() < 60_000, "{behind} ms");

        // Signs of life and leases go on by another.
        let page = QuotaReader::attach(&pages[2]).unwrap();
        let (beat, arbiter) = (page.heartbeat_ns(), page.arbiter_ns());
        until(|| (page.heartbeat_ns() > beat && page.arbiter_ns() > arbiter).then_some(())).await;
        scrape_until(address, |metrics| {
            let (old, new) = (leases(&before), leases(metrics));
            (new[0] > old[0] && new[1] > old[1]).then_some(())
        })
        .await;

        // A pod comes, and goes.
        let guest = format!("guest-{n}");
        plugin.run(&guest).await;
        plugin.named(&[stay.clone(), vec![guest.clone()]].concat()).await;
        plugin.node.kubelet.remove("default", &guest);

        // Quotas are set, and the trail has it.
        let request = memory("stay-0", (300 + n as u64) * MIB, &format!("jump-{n}"));
        assert!(set(&admin, request).await.unwrap().changed);

        // A file is read when it has changed, and judged.
        let file = plugin.node.file();
        let good = std::fs::read_to_string(&file).unwrap();
        let refused = |metrics: &tessera_harness::exposition::Exposition| {
            metrics.sum("tessera_config_reloads_total", &[("outcome", "refused")])
        };
        let earlier = refused(&scrape(address).await);
        std::fs::write(&file, good.replace("replicas = 32", "replicas = 999")).unwrap();
        scrape_until(address, |metrics| (refused(metrics) > earlier).then_some(())).await;
        std::fs::write(&file, &good).unwrap();

        // A GPU falls ill and is well again.
        plugin.node.control(&["xid", "1", "144"]);
        let state = |metrics: &tessera_harness::exposition::Exposition, state: &str| {
            metrics.sum("tessera_gpu_health", &[("gpu", "1"), ("state", state)])
        };
        scrape_until(address, |metrics| (state(metrics, "healthy") == 1.0).then_some(())).await;
        let status = plugin.node.json();
        let now = status["at_unix_ms"].as_i64().unwrap();
        for gpu in status["gpus"].as_array().unwrap() {
            let since = gpu["state_since_unix_ms"].as_i64().unwrap();
            let age = if since == 0 { 0 } else { now - since };
            assert!((0..120_000).contains(&age), "a GPU's state is {age} ms old: {gpu}");
        }
        // What has gone is released in its time, and what stays is not.
        plugin.named(&stay).await;
    }
    drop(wanting);
    clock.set(-26 * HOUR);
    let metrics = scrape(address).await;
    assert_eq!(metrics.sum("tessera_ledger_commits_total", &[("outcome", "failed")]), 0.0);
    let now: Vec<u64> =
        pages.iter().map(|dir| QuotaReader::attach(dir).unwrap().generation()).collect();
    assert_eq!(now, generations, "each has the allocation that it was given");

    // The trail is in the order in which it happened, whatever the clock said.
    let story = plugin.explain("stay-0")["allocations"][0].clone();
    let reasons: Vec<&str> =
        story["trail"].as_array().unwrap().iter().filter_map(|l| l["reason"].as_str()).collect();
    let wanted: Vec<String> = (0..JUMPS.len()).map(|n| format!("jump-{n}")).collect();
    let sets: Vec<&str> = reasons.into_iter().filter(|r| r.starts_with("jump-")).collect();
    assert_eq!(sets, wanted);
    let text =
        String::from_utf8(plugin.node.run(&["explain", "stay-0", "-o", "wide"]).stdout).unwrap();
    assert!(text.contains("(the node's clock was set back since)"), "{text}");
    let shown = plugin.node.run(&["status"]);
    assert!(shown.status.success(), "{}", stderr(&shown));

    // Killed and started at another time, it has all of them, and takes new ones.
    plugin.node.kill();
    clock.set(-40 * HOUR);
    let address = plugin.serve().await;
    plugin.named(&stay).await;
    scrape_until(address, |metrics| (pods_of(metrics) == stay).then_some(())).await;
    bounded(plugin.node.kubelet.run(&pod("late", 1))).await.unwrap();
    assert_eq!(plugin.node.terminate().await, Some(0));
    let (mut ledger, _) = Ledger::open(&plugin.node.dir.path().join("ledger.redb"), false).unwrap();
    let trail = ledger.lines(&Filter::all()).unwrap().events;
    let of_jumps = |e: &&Event| e.reason.as_ref().is_some_and(|r| r.starts_with("jump-"));
    let sets = trail.iter().filter(of_jumps);
    let hours: Vec<i64> = sets
        .map(|event| (event.at_unix_ms - machine_ms() + 900_000).div_euclid(1_800_000))
        .collect();
    let wanted: Vec<i64> = JUMPS.iter().map(|jump| jump / (HOUR / 2)).collect();
    assert_eq!(hours, wanted, "half hours by the clock of their time");
    let last = trail.iter().rfind(|event| event.what.name() == "allocated").unwrap();
    assert!((last.at_unix_ms - machine_ms() + 40 * HOUR * 1000).abs() < 120_000, "{last:?}");
}
