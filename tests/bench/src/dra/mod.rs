//! The plugin's process with its DRA driver on, beside the stand-ins for kubelet and the API server: how long claims
//! take, how soon the slices say what happened to a GPU, how large the plugin is, and what it asks of the API server.

mod node;

use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::sleep;

use self::node::{Node, Setup};
use crate::node::{METRICS, address};
use crate::plugin;
use crate::report::Report;
use crate::soak;
use crate::stats::Sample;
use crate::world::World;

/// GPUs of the machine whose claims are prepared.
const GPUS: usize = 4;
/// Calls of one claim, and calls of a batch; after some that warm up.
const CALLS: usize = 1000;
const BATCHES: usize = 200;
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

/// Measures all of it.
///
/// # Errors
/// A plugin that does not start, register, publish or answer.
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    // The stand-ins answer on threads of their own, as kubelet and the API server would.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build()?.block_on(measure(world, report))
}

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
async fn measure(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let gpus = "[[gpu]]\nmemory = \"80GiB\"\n".repeat(GPUS);
    let setup = Setup::new(world, "dra", &gpus, GPUS)?;
    let mut node = Node::start(&setup).await?;
    let metrics = address(|| node.log(), METRICS).await?;
    let one = prepare(&mut node, CALLS, 1).await?;
    report.p99("dra_prepare_p99_ms", "NodePrepareResources, p99", &one, 10.0);
    let batch = prepare(&mut node, BATCHES, BATCH).await?;
    report.p99("dra_prepare_16_p99_ms", "· of 16 claims a call, p99", &batch, 50.0);
    for _ in 0..SCRAPES {
        soak::scrape(metrics).await?;
    }
    plugin::ask(&node.endpoints().await?).await?;
    let rss = node.process()?.rss_kib()?.0 as f64 / 1024.0;
    let taints = publish(&node, &setup).await?;
    report.median("dra_publish_ms", "XID to the slice's taint", &taints, 500.0);
    node.end().await;

    let mut node = Node::start(&setup).await?;
    let calls = calls(&mut node).await?;
    let rebuild = rebuild(&mut node).await?;
    let what = "start to registered, 64 claims' files gone";
    report.median("dra_rebuild_ms", what, &rebuild, 500.0);
    let repair = repair(&mut node).await?;
    report.median("repair_ms", "a claim's lost CDI spec is back", &repair, 500.0);
    node.end().await;
    report.figure("plugin_rss_mib_dra", "plugin's RSS, DRA and metrics on", "MiB", rss, 24.0);
    report.figure("dra_api_calls_per_claim", "API calls per claim", "", calls, 3.0);
    Ok(())
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

/// What the API server is asked for each claim that comes and stays.
#[allow(clippy::cast_precision_loss, reason = "a few requests")]
async fn calls(node: &mut Node) -> anyhow::Result<f64> {
    sleep(STATUS).await;
    let before = node.api.asked().len();
    let claims = (0..BATCH).map(|at| node.claim(at % GPUS)).collect::<anyhow::Result<Vec<_>>>()?;
    for claim in &claims {
        node.prepare(std::slice::from_ref(claim)).await?;
    }
    sleep(STATUS).await;
    let calls = node.api.asked().len() - before;
    node.unprepare(&claims).await?;
    Ok(calls as f64 / BATCH as f64)
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

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
