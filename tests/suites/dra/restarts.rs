//! Plugins that are killed, and plugins that take over.

use std::time::{Duration, Instant};

use tessera_fake_kubelet::dra::DraError;
use tessera_harness::metrics::get;
use tessera_harness::plugin::{bounded, until};
use tessera_harness::{GIB, MIB, Random};

use super::node::{CONTEXT, Claim, Node, one};

/// Claims that come and go while the plugin is killed.
const CLAIMS: usize = 6;
const KILLS: usize = 8;

/// Prepares until a plugin is there that does it.
async fn prepared(node: &Node, claim: &Claim) -> super::node::Container {
    loop {
        match node.prepare(claim).await {
            Ok(container) => return container,
            Err(DraError::Claim { error, .. }) => panic!("{error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_killed_at_any_moment_loses_no_claim_and_oversells_none() {
    let Some(mut node) = Node::with_containers().await else { return };
    let stays = one("stays", &node.device(0), "2Gi", "20");
    let stays_in = node.prepare(&stays).await.unwrap();
    let mut tenant = node.tenant(&stays_in);
    tenant.must("retain 0");
    let held = tenant.must(&format!("alloc {GIB}"));
    let mut random = Random(7);
    for round in 0..KILLS {
        let claims: Vec<Claim> = (0..CLAIMS)
            .map(|n| one(&format!("c{round}-{n}"), &node.device(1), "1Gi", "10"))
            .collect();
        for claim in &claims {
            node.api.with(|store| store.put_claim(claim.object(&claim.name().name)));
        }
        let names: Vec<_> = claims.iter().map(Claim::name).collect();
        // Killed while it prepares them; kubelet's call fails, or has been answered.
        let calling = node.dra.clone();
        let batch = names.clone();
        let call = tokio::spawn(async move { calling.prepare("pod", &batch).await });
        tokio::time::sleep(Duration::from_micros(random.below(8000))).await;
        node.kill();
        let _ = bounded(call).await.unwrap();
        node.serve().await;
        let all = bounded(node.dra.prepare("pod", &names)).await.unwrap();
        assert_eq!(all.len(), CLAIMS);
        assert_eq!(node.delivered(), [CLAIMS + 1, CLAIMS + 1], "round {round}");
        let status = node.status();
        assert_eq!(status["gpus"][1]["memory_limits_bytes"], CLAIMS as u64 * GIB);
        // The share that was there is the same, and its tenant has not noticed.
        assert_eq!(tenant.ask("info").values, [GIB - CONTEXT, 2 * GIB]);
        let more = format!("alloc {GIB}");
        assert_ne!(tenant.ask(&more).result, 0, "beyond the quota after a restart");
        // Killed while it unprepares them.
        let calling = node.dra.clone();
        let call = tokio::spawn(async move { calling.unprepare("pod").await });
        tokio::time::sleep(Duration::from_micros(random.below(8000))).await;
        node.kill();
        let _ = bounded(call).await.unwrap();
        node.serve().await;
        bounded(node.dra.unprepare("pod")).await.unwrap();
        // Pages whose record went just before the kill are taken for an allocation of unknown origin, and released
        // after `ledger.release_after`.
        until(|| (node.delivered() == [1, 1]).then_some(())).await;
        assert_eq!(node.status()["gpus"][1]["memory_limits_bytes"], 0);
    }
    tenant.must(&format!("free {held}"));
    let again = node.prepare(&stays).await.unwrap();
    assert_eq!(again.shares, stays_in.shares);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_plugin_waits_ready_and_takes_over_with_all_claims() {
    let Some(mut node) = Node::with_containers().await else { return };
    let chat = one("chat", &node.device(0), "2Gi", "30");
    let container = node.prepare(&chat).await.unwrap();
    let mut tenant = node.tenant(&container);
    tenant.must("retain 0");
    tenant.must(&format!("alloc {GIB}"));

    let mut second = node.launch();
    let address = until(|| second.address()).await;
    assert_eq!(get(address, "/readyz").await.status, 200);
    assert_eq!(get(address, "/healthz").await.status, 200);
    assert_eq!(node.dra.plugins().len(), 1);
    // The first goes on meanwhile.
    let other = one("other", &node.device(0), "1Gi", "10");
    let other_in = node.prepare(&other).await.unwrap();
    assert!(second.ended().is_none(), "{}", second.log());

    let mut first = node.plugin.take().unwrap();
    let begun = Instant::now();
    let registrations = node.dra.registrations();
    first.terminate();
    bounded(node.dra.wait_until(|kubelet| kubelet.registrations() > registrations)).await;
    let took = begun.elapsed();
    assert!(until(|| first.ended()).await.success(), "{}", first.log());
    eprintln!("taken over after {} ms", took.as_millis());
    // A second, on a machine with nothing else to do.
    assert!(took < Duration::from_secs(20), "{took:?}");
    let ready = async {
        loop {
            if let Some(address) = second.address()
                && get(address, "/readyz").await.status == 200
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    bounded(ready).await;

    // Everything is as it was, and goes on.
    assert_eq!(tenant.ask("info").values, [GIB - CONTEXT, 2 * GIB]);
    assert_eq!(prepared(&node, &chat).await.shares, container.shares);
    assert_eq!(prepared(&node, &other).await.shares, other_in.shares);
    let mut late = node.tenant(&prepared(&node, &one("late", &node.device(1), "1Gi", "10")).await);
    late.must("retain 1");
    late.must(&format!("alloc {}", 512 * MIB));
    assert_eq!(node.devices().len(), 2);
    node.unprepare(&other).await;
    assert_eq!(node.delivered(), [2, 2]);
    drop(second);
}
