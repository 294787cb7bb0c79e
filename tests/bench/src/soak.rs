//! The plugin's process scraped once a second while 64 pods stay and others come and go: what a scrape
//! takes. And what it costs at rest.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tessera_harness::metrics::get;
use tokio::time::sleep;

use crate::node::{self, NAMESPACE, Node, Setup};
use crate::report::Report;
use crate::stats::Sample;
use crate::world::World;

/// GPUs, and replicas of each; pods that stay.
const GPUS: usize = 3;
const REPLICAS: usize = 32;
const PODS: usize = 64;
/// At rest: how long, and between scrapes.
const REST: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_secs(15);
/// Scrapes under load, one a second.
const SCRAPES: usize = 60;

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let setup = Setup::new(world, "soak", GPUS, REPLICAS)?;
    let (idle, scrapes) = node::runtime()?.block_on(async {
        let node = Node::start(&setup).await?;
        let address = node.metrics().await?;
        node::run(&node, "stay-0").await?;
        let idle = rest(&node, address).await?;
        for n in 1..PODS {
            node::run(&node, &format!("stay-{n}")).await?;
        }
        let scrapes = load(&node, address).await?;
        node.end().await;
        anyhow::Ok((idle, scrapes))
    })?;
    report.figure("idle_cpu_pct", "CPU at rest, scraped every 15 s", "%", idle, 0.2);
    report.p99("metrics_scrape_ms_1000", "scrape of 1,000 series, p99", &scrapes, 10.0);
    Ok(())
}

/// CPU time while next to nothing happens, percent of a core.
async fn rest(node: &Node, address: SocketAddr) -> anyhow::Result<f64> {
    sleep(Duration::from_secs(3)).await;
    let (before, began) = (node.process()?.cpu_ns()?, Instant::now());
    while began.elapsed() < REST {
        scrape(address).await?;
        sleep(INTERVAL).await;
    }
    #[allow(clippy::cast_precision_loss, reason = "nanoseconds of a minute")]
    let used = (node.process()?.cpu_ns()? - before) as f64;
    Ok(used / began.elapsed().as_secs_f64() / 1e7)
}

/// Scrapes while pods come and go, milliseconds from the request to the last byte.
async fn load(node: &Node, address: SocketAddr) -> anyhow::Result<Sample> {
    let (mut times, mut churned) = (Vec::new(), 0);
    for _ in 0..SCRAPES {
        let began = Instant::now();
        scrape(address).await?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        while began.elapsed() < Duration::from_secs(1) {
            let name = format!("churn-{churned}");
            node::run(node, &name).await?;
            node.kubelet.remove(NAMESPACE, &name);
            churned += 1;
            sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(Sample::new(times))
}

pub(crate) async fn scrape(address: SocketAddr) -> anyhow::Result<()> {
    let answer = get(address, "/metrics").await;
    anyhow::ensure!(answer.status == 200, "{}", answer.head);
    Ok(())
}
