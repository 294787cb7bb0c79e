//! A thousand series scraped again and again while pods come and go and the clock and the API server are of
//! no help: nothing lost, memory flat. The long form is in `make bench` (`docs/benchmarks.md`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tessera_harness::alone;

use tessera_harness::exposition::Exposition;
use tessera_harness::metrics::{address, scrape, scrape_until, settings};
use tessera_harness::plugin::*;

const PODS: usize = 64;
/// What is read from a container's page.
const MEMORY: [&str; 3] = [
    "tessera_container_memory_used_bytes",
    "tessera_container_memory_peak_bytes",
    "tessera_container_processes",
];

/// Samples by the pod that they name.
fn of_pods(metrics: &Exposition, is_one: impl Fn(Option<&str>) -> bool) -> usize {
    let pods = metrics.samples.iter().map(|s| s.labels.get("pod").map(String::as_str));
    pods.filter(|pod| is_one(*pod)).count()
}

#[tokio::test]
async fn a_thousand_series_under_churn_stay_bounded_and_lose_nothing() {
    let _alone = alone();
    let node = TestNode::without_plugin(&settings(
        "[share]\nreplicas = 32\n[gpus]\nreserve = 0\ncontext_overhead = \"16Mi\"\n[ledger]\nfsync = false\n",
    ))
    .await;
    *node.gpus.gpus.lock().unwrap() = (0..3).map(gpu).collect();
    let mut node = node;
    node.start_plugin().await;
    let address = address(&node).await;
    let stay: Vec<_> = (0..PODS).map(|n| pod(&format!("stay-{n}"), 1)).collect();
    for pod in &stay {
        node.kubelet.admit(pod).await.unwrap();
        node.kubelet.start_container(pod, "main").await.unwrap();
    }
    let infos = |metrics: &Exposition, prefix: &str| {
        metrics.of("tessera_container_info").filter(|s| s.labels["pod"].starts_with(prefix)).count()
    };
    // Of the node and its GPUs, and of pods that come and go.
    let (of_node, of_churn) = (
        |metrics: &Exposition| of_pods(metrics, |pod| pod.is_none()),
        |metrics: &Exposition| of_pods(metrics, |pod| pod.is_some_and(|p| p.starts_with("churn-"))),
    );
    let (series, nodes) = scrape_until(address, |metrics| {
        let complete = infos(metrics, "stay-") == PODS
            && MEMORY.iter().all(|name| metrics.of(name).count() == PODS);
        complete.then(|| (metrics.samples.len(), of_node(metrics)))
    })
    .await;
    assert!(series >= 1000, "{series} series");

    // 32 free replicas, in ever new pods, while it is scraped as fast as it answers.
    let done = Arc::new(AtomicBool::new(false));
    let (until_done, allocated) = (Arc::clone(&done), PODS);
    let churn = async {
        let (mut count, end) = (0, Instant::now() + Duration::from_secs(3));
        while Instant::now() < end {
            let some: Vec<_> = (0..8).map(|n| pod(&format!("churn-{count}-{n}"), 1)).collect();
            for pod in &some {
                node.kubelet.admit(pod).await.unwrap();
                node.kubelet.start_container(pod, "main").await.unwrap();
            }
            some.iter().for_each(|pod| node.kubelet.remove(&pod.namespace, &pod.name));
            count += 1;
        }
        until_done.store(true, Ordering::Relaxed);
        count * 8
    };
    let scraping = async {
        let (mut scrapes, mut most) = (0, 0);
        while !done.load(Ordering::Relaxed) {
            let metrics = scrape(address).await;
            assert_eq!(infos(&metrics, "stay-"), PODS, "a pod that stays has its series");
            most = most.max(metrics.samples.len());
            scrapes += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        (scrapes, most)
    };
    let (churned, (scrapes, most)) = tokio::join!(churn, scraping);
    assert!(scrapes > 3 && churned > 0, "{scrapes} scrapes, {churned} pods");
    // At most as many containers as there are replicas, however many have come and gone.
    assert!(most <= series + (96 - PODS) * (series / PODS), "{most} series");

    // All calls were counted, and those who went have left nothing.
    scrape_until(address, |metrics| {
        (of_churn(metrics) == 0 && of_node(metrics) <= nodes + 16).then_some(())
    })
    .await;
    let ok = [("outcome", "ok")];
    let want = (allocated + churned) as f64;
    // A text may be a second old.
    let metrics = scrape_until(address, |metrics| {
        let counted =
            |call: &str| metrics.sum(&format!("tessera_{call}_duration_seconds_count"), &ok);
        (counted("allocate") + counted("pre_start") >= 2.0 * want).then(|| metrics.clone())
    })
    .await;
    assert_eq!(metrics.sum("tessera_allocate_duration_seconds_count", &ok), want);
    assert_eq!(metrics.sum("tessera_pre_start_duration_seconds_count", &ok), want);
    assert_eq!(metrics.sum("tessera_ledger_commits_total", &[("outcome", "failed")]), 0.0);
    node.stop_plugin().await;
}
