//! The plugin's process with its DRA driver on, beside the stand-ins for kubelet and the API server: how long claims
//! take, how soon the slices say what happened to a GPU, how large the plugin is, and what it asks of the API server.

mod node;
mod rest;

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::sleep;

use self::node::{Node, Setup};
use self::rest::Requests;
pub use self::rest::{REST, Resting};
use crate::logged;
use crate::plugin;
use crate::soak;
use crate::stats::Sample;
use crate::world::World;

/// GPUs of the machine whose claims are prepared.
const GPUS: usize = 4;
/// Calls of one claim, calls of a batch, and the same with the disk's fsync; after some that warm up.
const CALLS: usize = 1000;
const BATCHES: usize = 200;
const CALLS_FSYNC: usize = 300;
const WARM_UP: usize = 20;
/// Claims of a batch.
const BATCH: usize = 16;
/// Claims that are there at a start, and how often it starts.
const KEPT: usize = 64;
const STARTS: usize = 10;
/// Specs that are removed.
const REPAIRS: usize = 20;
/// Changes of health.
const CHANGES: usize = 4;
/// Scrapes before memory is looked at.
const SCRAPES: usize = 10;
/// How long requests of claims are waited for: their devices' status comes later.
const STATUS: Duration = Duration::from_secs(3);
/// The machine of the slices: GPUs, and instances of each, as many as the simulator has.
const MIG: (usize, usize) = (16, 4);

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    /// NodePrepareResources of one claim, and of 16, milliseconds, without the disk's fsync.
    pub prepare_ms: Sample,
    /// See above.
    pub prepare_16_ms: Sample,
    /// Of one claim, with the disk's fsync.
    pub fsync_ms: Sample,
    /// From what happens to a GPU until the API server has its taint, milliseconds.
    pub publish_ms: Sample,
    /// From spawn to registered, with 64 claims whose pages and CDI specs are gone, milliseconds.
    pub rebuild_ms: Sample,
    /// From the removal of a claim's CDI spec until it is there again, milliseconds, beside 63 other claims.
    pub repair_ms: Sample,
    /// Resident memory, KiB, with the driver and metrics on, after all claims of above: in all, and its own.
    pub rss_kib: (u64, u64),
    /// Slices and devices of 16 GPUs with four MIG instances each: without a taint, and with one.
    pub slices: [(usize, usize); 2],
    /// Requests to the API server for each claim, by verb and resource, from Prepare to Unprepare.
    pub requests: Requests,
    /// Claims of those.
    pub claims: usize,
}

/// Measures all of it but the requests at rest: [`Resting`] does.
///
/// # Errors
/// A plugin that does not start, register, publish or answer.
pub fn run(world: &World) -> anyhow::Result<Figures> {
    // The stand-ins answer on threads of their own, as kubelet and the API server would.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build()?.block_on(measure(world))
}

async fn measure(world: &World) -> anyhow::Result<Figures> {
    let gpus = "[[gpu]]\nmemory = \"80GiB\"\n".repeat(GPUS);
    let setup = Setup::new(world, "dra", &gpus, GPUS)?;
    let mut node = Node::start(&setup).await?;
    let address = logged::address(|| node.log(), logged::METRICS).await?;
    let prepare_ms = prepare(&mut node, CALLS, 1).await?;
    let prepare_16_ms = prepare(&mut node, BATCHES, BATCH).await?;
    for _ in 0..SCRAPES {
        soak::scrape(address).await?;
    }
    plugin::ask(&node.endpoints().await?).await?;
    let rss_kib = node.process()?.rss_kib()?;
    let publish_ms = publish(&node, &setup).await?;
    node.end().await;

    let mut synced = setup.clone();
    synced.fsync = true;
    let mut node = Node::start(&synced).await?;
    let fsync_ms = prepare(&mut node, CALLS_FSYNC, 1).await?;
    node.end().await;

    let mut node = Node::start(&setup).await?;
    let (requests, claims) = requests(&mut node).await?;
    let rebuild_ms = rebuild(&mut node).await?;
    let repair_ms = repair(&mut node).await?;
    node.end().await;
    let slices = slices(world).await?;
    Ok(Figures {
        prepare_ms,
        prepare_16_ms,
        fsync_ms,
        publish_ms,
        rebuild_ms,
        repair_ms,
        rss_kib,
        slices,
        requests,
        claims,
    })
}

/// Prepares and unprepares new claims, so many a call, each of the next GPU.
async fn prepare(node: &mut Node, calls: usize, batch: usize) -> anyhow::Result<Sample> {
    let mut values = Vec::new();
    for call in 0..calls + WARM_UP {
        let claims = (0..batch).map(|at| node.claim((call + at) % GPUS));
        let claims = claims.collect::<anyhow::Result<Vec<_>>>()?;
        values.push(millis(node.prepare(&claims).await?));
        node.unprepare(&claims).await?;
    }
    Ok(Sample::new(values.split_off(WARM_UP)))
}

/// GPUs are lost one after the other, each with a pause in which the driver may write again.
async fn publish(node: &Node, setup: &Setup) -> anyhow::Result<Sample> {
    let tainted = |device: &&Value| device["taints"].as_array().is_some_and(|all| !all.is_empty());
    let mut values = Vec::new();
    for gpu in 0..CHANGES {
        sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        setup.control(&["xid", &gpu.to_string(), "79"]).await?;
        node.published(|devices| devices.iter().filter(tainted).count() == gpu + 1).await?;
        values.push(millis(began.elapsed()));
    }
    Ok(Sample::new(values))
}

/// What the API server is asked for claims that come and stay.
async fn requests(node: &mut Node) -> anyhow::Result<(Requests, usize)> {
    sleep(STATUS).await;
    let before = node.api.asked().len();
    let claims = rest::claims(node).await?;
    sleep(STATUS).await;
    let requests = rest::counted(&node.api.asked()[before..]);
    node.unprepare(&claims).await?;
    Ok((requests, claims.len()))
}

/// Starts with claims whose pages and CDI specs a reboot took.
async fn rebuild(node: &mut Node) -> anyhow::Result<Sample> {
    let claims = (0..KEPT).map(|at| node.claim(at % GPUS)).collect::<anyhow::Result<Vec<_>>>()?;
    node.prepare(&claims).await?;
    let mut values = Vec::new();
    for _ in 0..STARTS {
        let clear = |node: &Node| {
            for dir in node.delivered() {
                for entry in fs::read_dir(dir)? {
                    let path = entry?.path();
                    if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
                }
            }
            Ok(())
        };
        node.restart(clear).await?;
        values.push(millis(node.registered));
        let [specs, pages] = node.delivered();
        let specs = count(&specs, |name| name.starts_with("tessera.dev-share"))?;
        let pages = count(&pages, |name| name.len() == 32)?;
        anyhow::ensure!((specs, pages) == (KEPT, KEPT), "{specs} specs and {pages} pages");
    }
    node.unprepare(&claims).await?;
    Ok(Sample::new(values))
}

/// Removes the CDI spec of one claim after the other, each with a pause in which the driver rests.
async fn repair(node: &mut Node) -> anyhow::Result<Sample> {
    let claims = (0..KEPT).map(|at| node.claim(at % GPUS)).collect::<anyhow::Result<Vec<_>>>()?;
    node.prepare(&claims).await?;
    let [specs, _] = node.delivered();
    let mut paths =
        fs::read_dir(specs)?.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    let mut values = Vec::new();
    for path in paths.iter().take(REPAIRS) {
        sleep(Duration::from_millis(500)).await;
        fs::remove_file(path)?;
        let began = Instant::now();
        while !path.exists() {
            anyhow::ensure!(began.elapsed() < node::PATIENCE, "{} stays away", path.display());
            sleep(Duration::from_micros(200)).await;
        }
        values.push(millis(began.elapsed()));
    }
    node.unprepare(&claims).await?;
    Ok(Sample::new(values))
}

fn count(dir: &std::path::Path, is_one: impl Fn(&str) -> bool) -> anyhow::Result<usize> {
    let names = fs::read_dir(dir)?.flatten().map(|entry| entry.file_name());
    Ok(names.filter(|name| name.to_str().is_some_and(&is_one)).count())
}

/// A large node's slices and devices: without a taint, and with one.
async fn slices(world: &World) -> anyhow::Result<[(usize, usize); 2]> {
    let (gpus, instances) = MIG;
    let profiles = vec!["\"1g.20gb\""; instances].join(", ");
    let machine = format!("[[gpu]]\nmemory = \"80GiB\"\nmig = [{profiles}]\n").repeat(gpus);
    let setup = Setup::new(world, "dra-mig", &machine, gpus * instances)?;
    let node = Node::start(&setup).await?;
    let plain = (node.slices(), node.devices().len());
    setup.control(&["xid", "0", "79"]).await?;
    node.published(|devices| devices.iter().any(|device| device["taints"].is_array())).await?;
    // The rest of the pool follows.
    node.published(|devices| devices.len() == gpus * instances).await?;
    let tainted = (node.slices(), node.devices().len());
    node.end().await;
    Ok([plain, tainted])
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
