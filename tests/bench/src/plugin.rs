//! The plugin's process (`tessera serve`) under the stand-in for kubelet: how soon it is registered,
//! how long Allocate takes, and how large it is after the load.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use tessera_fake_kubelet::{Container, Pod};
use tessera_web::Route;
use tessera_web::client::{Client, Endpoint};

use crate::node::{self, Api, Node, RESOURCE, Setup};
use crate::soak;
use crate::stats::Sample;
use crate::world::{CONTEXT, RESERVED, World};

/// Replicas of the only GPU: as many pods as a node runs.
const REPLICAS: usize = 64;
/// Starts of the plugin.
const STARTS: usize = 20;
/// Allocates without and with the disk's fsync, after some that warm up.
const ALLOCATES: usize = 3000;
const ALLOCATES_FSYNC: usize = 400;
const WARM_UP: usize = 100;
/// Before memory is looked at: time for a look and a store of the history, scrapes, and questions of each kind.
const RECORDED: Duration = Duration::from_secs(61);
const LOOKS: usize = 10;

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Start to registered and all replicas listed, milliseconds.
    pub register_ms: Sample,
    /// Allocate, milliseconds, without the disk's fsync.
    pub allocate_ms: Sample,
    /// Allocate, milliseconds, with it.
    pub fsync_ms: Sample,
    /// One write and fsync of 4 KiB on the ledger's file system, milliseconds.
    pub disk_ms: Sample,
    /// Resident memory after the load, scrapes and questions to the JSON API, KiB: in all, and what is the process's own.
    pub rss_kib: (u64, u64),
    /// The same without the JSON API over TCP and without the history, after the load and the scrapes.
    pub rss_bare_kib: (u64, u64),
}

/// Measures all of it.
///
/// # Errors
/// A plugin that does not start, register or answer.
pub fn run(world: &World) -> anyhow::Result<Figures> {
    let plugin = world.artefacts.path("tessera");
    anyhow::ensure!(plugin.exists(), "{} is missing: run `make build`", plugin.display());
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut register = Vec::new();
        for _ in 0..STARTS {
            let node = Node::start(&setup(world, false)).await?;
            register.push(millis(node.registered));
            node.end().await;
        }
        let node = Node::start(&setup(world, false)).await?;
        let allocate_ms = allocate(&node, ALLOCATES).await?;
        let bare = Setup { api: Api::Off, history: false, ..setup(world, false) };
        let bare = Node::start(&bare).await?;
        allocate(&bare, ALLOCATES).await?;
        tokio::time::sleep(RECORDED).await;
        see(&node, Api::Tls).await?;
        see(&bare, Api::Off).await?;
        let (rss_kib, rss_bare_kib) = (node.process()?.rss_kib()?, bare.process()?.rss_kib()?);
        node.end().await;
        bare.end().await;
        let node = Node::start(&setup(world, true)).await?;
        let fsync_ms = allocate(&node, ALLOCATES_FSYNC).await?;
        let disk_ms = disk(node.dir())?;
        node.end().await;
        let register_ms = Sample::new(register);
        Ok(Figures { register_ms, allocate_ms, fsync_ms, disk_ms, rss_kib, rss_bare_kib })
    })
}

/// Scrapes metrics, and asks for everything that the JSON API has: what only answers need is resident then, too.
async fn see(node: &Node, api: Api) -> anyhow::Result<()> {
    let metrics = soak::address(node).await?;
    for _ in 0..LOOKS {
        soak::scrape(metrics).await?;
    }
    if api != Api::Off {
        ask(&node.api(api).await?).await?;
    }
    Ok(())
}

/// Asks for everything that the JSON API has.
///
/// # Errors
/// It does not answer.
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

/// The plugin on the machine of the other figures.
fn setup(world: &World, fsync: bool) -> Setup {
    Setup {
        artefacts: world.artefacts.clone(),
        envs: Vec::new(),
        gpus: 1,
        replicas: REPLICAS,
        memory: (RESERVED, CONTEXT),
        fsync,
        log: "warn,tessera_api::metrics=info,tessera_web=info",
        api: Api::Tls,
        history: true,
    }
}

/// Allocates through gRPC as kubelet does when pods come and go: a pod through the stand-in
/// first, then each replica again and again, pairs among them.
async fn allocate(node: &Node, calls: usize) -> anyhow::Result<Sample> {
    let pod = Pod::new("bench", "pod").with(Container::new("main").asking(RESOURCE, 1));
    node.kubelet.run(&pod).await?;
    node.kubelet.remove("bench", "pod");
    let ids: Vec<String> = node.kubelet.devices(RESOURCE).into_iter().map(|d| d.id).collect();
    let requests = (0..calls + WARM_UP).map(|call| {
        let first = call % REPLICAS;
        let pair = call % 8 == 7;
        ids[first..(first + 1 + usize::from(pair)).min(REPLICAS)].to_vec()
    });
    node::allocate(node, requests, WARM_UP).await
}

/// What one fsync costs where the ledger is.
fn disk(dir: &Path) -> anyhow::Result<Sample> {
    let file = fs::File::create(dir.join("fsync"))?;
    let page = [7u8; 4096];
    let mut values = Vec::new();
    for round in 0..100u64 {
        let start = Instant::now();
        file.write_all_at(&page, round * 4096)?;
        file.sync_data()?;
        values.push(millis(start.elapsed()));
    }
    Ok(Sample::new(values))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
