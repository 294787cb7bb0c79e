//! API servers that are away, silent, slow, or forbid: what is lost is events.

use std::time::Duration;
use tessera_harness::alone;

use tessera_store::{Filter, Ledger};
use tokio::time::timeout;

use super::plugin::*;
use super::world::{Api, Clock, Temper};
use tessera_harness::plugin::pod;

/// Rounds in which four pods come and go and four quotas change; the first of them warm up.
const ROUNDS: u64 = 10;
const WARM_UP: u64 = 4;
/// Half of what the plugin waits for the API server.
const SOON: Duration = Duration::from_secs(5);
/// What the process may have grown by in the meantime: the lists of what waits to be sent are bounded.
const GROWTH: u64 = MIB;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_of_any_temper_costs_events_and_nothing_else() {
    let _alone = alone();
    let tempers = [Temper::Absent, Temper::Silent, Temper::Slow, Temper::Forbids];
    for task in tempers.map(|temper| tokio::spawn(bears(temper))) {
        task.await.unwrap();
    }
}

async fn bears(temper: Temper) {
    let mut plugin = Plugin::new().await;
    let clock = Clock::new(plugin.node.dir.path());
    let api = Api::start(plugin.node.dir.path(), temper);
    plugin.node.envs = [clock.envs(), api.envs()].concat();
    let address = plugin.serve().await;
    let stay: Vec<String> = (0..4).map(|n| format!("stay-{n}")).collect();
    for name in &stay {
        plugin.run(name).await;
    }
    plugin.named(&stay).await;
    let admin = admin(plugin.node.dir.path());
    let mut before = 0;
    for round in 0..ROUNDS {
        if round == WARM_UP {
            before = plugin.anonymous();
        }
        let guests: Vec<_> = (0..4).map(|n| pod(&format!("guest-{round}-{n}"), 1)).collect();
        for guest in &guests {
            timeout(SOON, plugin.node.kubelet.run(guest)).await.expect("in time").unwrap();
        }
        for name in &stay {
            let request = memory(name, (300 + round) * MIB, "sent to nobody");
            let changed = timeout(SOON, admin.call(&request)).await.expect("in time").unwrap();
            assert!(changed.changed);
        }
        let metrics = timeout(SOON, scrape(address)).await.expect("in time");
        let has = pods_of(&metrics);
        assert!(stay.iter().all(|name| has.contains(name)), "{temper:?}: {has:?}");
        guests.iter().for_each(|pod| plugin.node.kubelet.remove(&pod.namespace, &pod.name));
    }
    let after = plugin.anonymous();
    println!("{temper:?}: {} KiB, then {} KiB", before >> 10, after >> 10);
    assert!(after < before + GROWTH, "{temper:?}: {before} bytes, then {after}");

    let metrics =
        scrape_until(address, |metrics| (events(metrics)[1] >= 1.0).then(|| metrics.clone())).await;
    assert_eq!(events(&metrics)[0], 0.0, "{temper:?}: sent");
    assert_eq!(metrics.sum("tessera_ledger_commits_total", &[("outcome", "failed")]), 0.0);
    // A text may be a second old.
    let allocated = (4 + 4 * ROUNDS) as f64;
    scrape_until(address, |metrics| {
        let ok = metrics.sum("tessera_allocate_duration_seconds_count", &[("outcome", "ok")]);
        (ok == allocated).then_some(())
    })
    .await;
    let warnings = plugin.node.json()["warnings"].to_string();
    assert!(warnings.contains("Kubernetes events"), "{temper:?}: {warnings}");
    assert_eq!(api.asked().is_empty(), matches!(temper, Temper::Absent | Temper::Silent));
    assert_eq!(plugin.node.terminate().await, Some(0));
    let (mut ledger, _) = Ledger::open(&plugin.node.dir.path().join("ledger.redb"), false).unwrap();
    let trail = ledger.lines(&Filter::all()).unwrap().events;
    let sets = trail.iter().filter(|event| event.what.name() == "quota-set").count();
    assert_eq!(sets as u64, 4 * ROUNDS, "{temper:?}: the trail has them all");
}
