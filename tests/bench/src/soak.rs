//! The plugin's process scraped once a second while 64 pods stay and others come and go: what a scrape
//! takes. And what it costs at rest.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_fake_kubelet::{Container, Pod};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;

use crate::node::{self, Api, Node, RESOURCE, Setup};
use crate::report::Report;
use crate::stats::Sample;
use crate::world::World;

/// GPUs, and replicas of each; pods that stay.
const GPUS: usize = 3;
const REPLICAS: usize = 32;
pub(crate) const PODS: usize = 64;
/// At rest: how long, and between scrapes.
const REST: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_secs(15);
/// Scrapes under load, one a second.
const SCRAPES: usize = 60;

/// Measures both.
///
/// # Errors
/// A plugin that does not start, register or answer.
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let setup = setup(world, "soak")?;
    let (idle, scrapes) = node::runtime()?.block_on(async {
        let node = Node::start(&setup).await?;
        let address = address(&node).await?;
        start(&node, "stay-0").await?;
        let idle = rest(&node, address).await?;
        for n in 1..PODS {
            start(&node, &format!("stay-{n}")).await?;
        }
        let scrapes = load(&node, address).await?;
        node.end().await;
        anyhow::Ok((idle, scrapes))
    })?;
    report.figure("idle_cpu_pct", "CPU at rest, scraped every 15 s", "%", idle, 0.2);
    report.p99("metrics_scrape_ms_1000", "scrape of 1,000 series, p99", &scrapes, 10.0);
    Ok(())
}

/// The plugin on a machine of its own, of this name.
pub(crate) fn setup(world: &World, name: &str) -> anyhow::Result<Setup> {
    let config = "[[gpu]]\nmemory = \"80GiB\"\n".repeat(GPUS)
        + "[memory]\nreserved = \"128MiB\"\ncontext_overhead = \"32MiB\"\n";
    let file = world.path(&format!("{name}.toml"));
    std::fs::write(&file, config)?;
    let state = world.path(&format!("{name}.state"));
    Ok(Setup {
        artefacts: world.artefacts.clone(),
        envs: vec![("SIMGPU_CONFIG", file), ("SIMGPU_STATE", state)],
        gpus: GPUS,
        replicas: REPLICAS,
        memory: (256 << 20, 32 << 20),
        fsync: false,
        log: "warn,tessera_api::metrics=info",
        api: Api::Plain,
        history: true,
    })
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

/// Scrapes, milliseconds from the request to the last byte.
async fn load(node: &Node, address: SocketAddr) -> anyhow::Result<Sample> {
    let (mut times, mut churned) = (Vec::new(), 0);
    for _ in 0..SCRAPES {
        let began = Instant::now();
        scrape(address).await?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        churned += churn(node, began, churned).await?;
    }
    Ok(Sample::new(times))
}

/// Pods that come and go, numbered from `first`, until a second after `began`; how many.
pub(crate) async fn churn(node: &Node, began: Instant, first: usize) -> anyhow::Result<usize> {
    let mut count = 0;
    while began.elapsed() < Duration::from_secs(1) {
        let name = format!("churn-{}", first + count);
        start(node, &name).await?;
        node.kubelet.remove("bench", &name);
        count += 1;
        sleep(Duration::from_millis(50)).await;
    }
    Ok(count)
}

pub(crate) async fn start(node: &Node, name: &str) -> anyhow::Result<()> {
    let pod = Pod::new("bench", name).with(Container::new("main").asking(RESOURCE, 1));
    node.kubelet.run(&pod).await?;
    Ok(())
}

/// The same; where its pages are.
pub(crate) async fn start_at(node: &Node, name: &str) -> anyhow::Result<std::path::PathBuf> {
    let pod = Pod::new("bench", name).with(Container::new("main").asking(RESOURCE, 1));
    let admitted = node.kubelet.run(&pod).await?;
    let ids = admitted.first().map(|admitted| admitted.device_ids.clone()).unwrap_or_default();
    Ok(node.pages(&ids))
}

/// Where the plugin says that its metrics are.
pub(crate) async fn address(node: &Node) -> anyhow::Result<SocketAddr> {
    node::address(|| node.log(), node::METRICS).await
}

pub(crate) async fn scrape(address: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = "GET /metrics HTTP/1.1\r\nHost: bench\r\nAccept: application/openmetrics-text\r\n\
                   Connection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    anyhow::ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(body.to_owned())
}
