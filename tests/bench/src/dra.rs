//! The plugin's process with its DRA driver on, beside the stand-ins for kubelet and the API server: how long a claim
//! takes, and how large the plugin is.

use std::fs;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use tessera_cluster::fixtures::ApiServer;
use tessera_fake_kubelet::dra::{AllocatedClaim, ClaimName, DraKubelet};
use tessera_harness::artefacts;
use tokio::time::{Instant, sleep};

use crate::node::{Node, Setup};
use crate::plugin;
use crate::report::Report;
use crate::soak;
use crate::stats::Sample;
use crate::world::World;

/// As in slices and claims.
const DRIVER: &str = "gpu.tessera.dev";
/// The node of the stand-in for the API server.
const NODE: &str = "n1";
/// How long the plugin may take until its devices are published.
const PATIENCE: Duration = Duration::from_secs(60);
/// GPUs of the machine whose claims are prepared.
const GPUS: usize = 4;
/// Calls of one claim, after some that warm up.
const CALLS: usize = 1000;
const WARM_UP: usize = 20;
/// Scrapes before memory is looked at.
const SCRAPES: usize = 10;

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    // The stand-ins answer on threads of their own, as kubelet and the API server would.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build()?.block_on(measure(world, report))
}

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
async fn measure(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let mut claims = Claims::start(world).await?;
    let mut values = Vec::new();
    for call in 0..CALLS + WARM_UP {
        values.push(claims.prepare(call).await?.as_secs_f64() * 1e3);
    }
    let prepared = Sample::new(values.split_off(WARM_UP));
    report.p99("dra_prepare_p99_ms", "NodePrepareResources, p99", &prepared, 10.0);
    let node = claims.node;
    let metrics = node.metrics().await?;
    for _ in 0..SCRAPES {
        soak::scrape(metrics).await?;
    }
    plugin::ask(&node.api().await?).await?;
    let rss = node.process()?.rss_kib()?.0 as f64 / 1024.0;
    node.end().await;
    report.figure("plugin_rss_mib_dra", "plugin's RSS, DRA and metrics on", "MiB", rss, 24.0);
    Ok(())
}

struct Claims {
    node: Node,
    kubelet: DraKubelet,
    api: ApiServer,
}

impl Claims {
    /// Starts all three, and waits until kubelet has registered the driver and its devices are published.
    async fn start(world: &World) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("tessera-bench-dra.").tempdir()?;
        let kubelet = DraKubelet::start(&dir.path().join("kubelet"), DRIVER)?;
        let api = ApiServer::start(dir.path());
        let kubeconfig = dir.path().join("kubeconfig");
        fs::write(&kubeconfig, api.kubeconfig())?;
        // No replica is sold that kubelet could list.
        let setup = Setup::new(world, "dra", GPUS, 8)?;
        let mut setup = Setup { gpus: 0, tls: true, dra: true, ..setup };
        setup.envs.push(("LD_LIBRARY_PATH", artefacts().sim_dir()));
        setup.envs.extend([("KUBECONFIG", kubeconfig), ("NODE_NAME", NODE.into())]);
        let node = Node::start_in(dir, &setup).await?;
        let claims = Self { node, kubelet, api };
        let published = async {
            claims.kubelet.wait_registered().await;
            while claims.devices().len() < GPUS {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, published).await;
        waited.with_context(|| format!("not published; the log:\n{}", claims.node.log()))?;
        Ok(claims)
    }

    fn devices(&self) -> Vec<Value> {
        let of_slice =
            |slice: &Value| slice["spec"]["devices"].as_array().cloned().unwrap_or_default();
        self.api.with(|store| store.slices(Some(DRIVER), Some(NODE)).flat_map(of_slice).collect())
    }

    /// Prepares a new claim of 256 MiB and 1 % of one of the devices, and unprepares it; how long the first took.
    async fn prepare(&mut self, number: usize) -> anyhow::Result<Duration> {
        let device = self.devices()[number % GPUS]["name"].as_str().context("no name")?.to_owned();
        let (name, uid) = (format!("claim-{number}"), format!("uid-{number}"));
        let name = ClaimName { namespace: "bench".to_owned(), name, uid };
        let claim = AllocatedClaim::new(name, DRIVER, NODE).asking("gpu", &device, "256Mi", "1");
        self.api.with(|store| store.put_claim(claim.object("pod")));
        let claims = [claim.name()];
        let began = Instant::now();
        let answer = self.kubelet.call_prepare(&claims).await?;
        let took = began.elapsed();
        for (uid, devices) in answer {
            devices.map_err(|error| anyhow::anyhow!("{uid}: {error}"))?;
        }
        let answer = self.kubelet.call_unprepare(&claims).await?;
        anyhow::ensure!(answer.values().all(String::is_empty), "not unprepared: {answer:?}");
        self.api.with(|store| store.remove_claim("bench", &claims[0].name));
        Ok(took)
    }
}
