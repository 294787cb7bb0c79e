//! The plugin's process (`tessera serve`) under the stand-in for kubelet: how soon it is registered,
//! how long Allocate takes, and how large it is after the load.

use std::time::Duration;

use tessera_web::Route;
use tessera_web::client::{Client, Endpoint};

use crate::node::{self, NAMESPACE, Node, RESOURCE, Setup};
use crate::report::Report;
use crate::soak;
use crate::stats::Sample;
use crate::world::World;

/// Replicas of the only GPU: as many pods as a node runs.
const REPLICAS: usize = 64;
const STARTS: usize = 20;
/// Allocates, after some that warm up.
const ALLOCATES: usize = 3000;
const WARM_UP: usize = 100;
/// Before memory is looked at: time for a look and a store of the history, scrapes, and questions of each kind.
const RECORDED: Duration = Duration::from_secs(61);
const LOOKS: usize = 10;

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let setup = Setup::new(world, "plugin", 1, REPLICAS)?;
    let setup = Setup { tls: true, ..setup };
    let (register, allocate, rss) = node::runtime()?.block_on(async {
        let mut register = Vec::new();
        for _ in 0..STARTS {
            let node = Node::start(&setup).await?;
            register.push(node.registered.as_secs_f64() * 1e3);
            node.end().await;
        }
        let node = Node::start(&setup).await?;
        let allocate = allocate(&node, ALLOCATES).await?;
        tokio::time::sleep(RECORDED).await;
        see(&node).await?;
        let rss = node.process()?.rss_kib()?.0;
        node.end().await;
        anyhow::Ok((Sample::new(register), allocate, rss))
    })?;
    report.p99("allocate_p99_ms", "Allocate, p99, no fsync", &allocate, 2.0);
    let rss = rss as f64 / 1024.0;
    report.figure("plugin_rss_mib", "plugin's RSS after the load", "MiB", rss, 24.0);
    report.median("register_ms", "start to registered", &register, 20.0);
    Ok(())
}

/// Scrapes metrics, and asks for everything that the JSON API has: what only answers need is resident then, too.
async fn see(node: &Node) -> anyhow::Result<()> {
    let metrics = node.metrics().await?;
    for _ in 0..LOOKS {
        soak::scrape(metrics).await?;
    }
    ask(&node.api().await?).await
}

pub async fn ask(endpoints: &[Endpoint]) -> anyhow::Result<()> {
    let whole = Route::ALL.into_iter().filter(|r| !r.lasts() && *r != Route::Explain);
    for route in whole.cycle().take(LOOKS * Route::ALL.len()) {
        for endpoint in endpoints {
            let client = Client::new(endpoint.clone());
            client.bytes(route.path(), "application/json").await?;
        }
    }
    Ok(())
}

/// Allocates through gRPC as kubelet does when pods come and go: a pod through the stand-in
/// first, then each replica again and again, pairs among them.
async fn allocate(node: &Node, calls: usize) -> anyhow::Result<Sample> {
    node::run(node, "pod").await?;
    node.kubelet.remove(NAMESPACE, "pod");
    let ids: Vec<String> = node.kubelet.devices(RESOURCE).into_iter().map(|d| d.id).collect();
    let requests = (0..calls + WARM_UP).map(|call| {
        let first = call % REPLICAS;
        let pair = call % 8 == 7;
        ids[first..(first + 1 + usize::from(pair)).min(REPLICAS)].to_vec()
    });
    node::allocate(node, requests, WARM_UP).await
}
