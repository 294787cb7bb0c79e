//! What the history costs: the plugin's CPU time with it and without, and a simulated month of 64 busy tenants.

use std::collections::HashSet;
use std::time::Duration;

use tessera_history::{History, Options};
use tessera_view::status::{Allocation, Gpu, GpuState, Holder, Status};
use tessera_view::tenant::{Compute, Use};
use tokio::time::sleep;

use crate::machine;
use crate::node::{self, Api, Node};
use crate::report::Report;
use crate::stats::Pair;
use crate::world::World;

/// Tenants, and GPUs that they are on.
const TENANTS: u64 = node::TENANTS as u64;
const GPUS: u64 = node::TENANTS_GPUS as u64;
/// Pairs of plugins, one with the history and one without.
const PAIRS: usize = 2;
/// How long they are watched for one figure of each, and how often: six looks and one store are in each minute.
const WATCHED: Duration = Duration::from_secs(60);
const ROUNDS: usize = 3;
/// After this, pods are named and the history's file is open.
const SETTLE: Duration = Duration::from_secs(15);
/// What is simulated, seconds, and where it begins.
const MONTH: u64 = 30 * 86_400;
const T0: u64 = 1_750_032_000;
/// Each of the simulated tenants is replaced after so long: seconds.
const LIFE: u64 = 2 * 86_400;

/// Measures both.
///
/// # Errors
/// A plugin that does not start, or a disk that refuses.
#[allow(clippy::cast_precision_loss, reason = "bytes far below 2^53")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let cpu = node::runtime()?.block_on(watched(world))?;
    report.paired("history_cpu_pct", "64 tenants: CPU of the history", "%", &cpu, 0.1);
    // redb doubles a file that is full.
    let bound = 2 * tessera_config::History::default().size_bytes;
    let what = "· its file in a month, at most";
    report.figure("history_bytes", what, "", month()? as f64, bound as f64);
    Ok(())
}

/// Plugins with a history and plugins without run side by side, so that whatever else the machine does is in both; one
/// of each is a pair.
async fn watched(world: &World) -> anyhow::Result<Pair> {
    let mut nodes = Vec::new();
    for number in 0..PAIRS * 2 {
        let setup = node::tenants(world, &format!("history-{number}"), Api::Off, number % 2 == 1)?;
        nodes.push(node::start_tenants(&setup).await?);
    }
    sleep(SETTLE).await;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    let mut before = nodes.iter().map(used).collect::<anyhow::Result<Vec<_>>>()?;
    for _ in 0..ROUNDS {
        sleep(WATCHED).await;
        let now = nodes.iter().map(used).collect::<anyhow::Result<Vec<_>>>()?;
        for (number, (now, before)) in now.iter().zip(&before).enumerate() {
            let percent = (now.0 - before.0) as f64 / (now.1 - before.1) as f64 * 100.0;
            if number % 2 == 1 { with.push(percent) } else { without.push(percent) }
        }
        before = now;
    }
    for node in nodes {
        node.end().await;
    }
    Ok(Pair::new(without, with))
}

/// CPU time of a plugin, and when: nanoseconds.
fn used(node: &Node) -> anyhow::Result<(u64, u64)> {
    Ok((node.process()?.cpu_ns()?, machine::now_ns()))
}

/// Everything at one second: each tenant does something else all the time.
fn status(second: u64) -> Status {
    let noise = |n: u64| {
        let mut z = (second / 10 * 64 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    };
    let uuid = |n: u64| format!("GPU-{n:08}-33f3-99dd-e08b-ea4beb0e0d28");
    let tenant = |n: u64| {
        let (generation, noise) = ((second + n * 2700) / LIFE, noise(n));
        let used = (6 << 30) + noise % (3 << 30);
        Allocation {
            id: format!("{n:032x}"),
            generation,
            holder: Some(Holder {
                namespace: format!("team-{}", n % 5),
                pod: format!("model-{n}-7c9d8f6b5-{generation:05}"),
                container: "server".into(),
            }),
            gpus: vec![Use {
                gpu_uuid: uuid(n % GPUS),
                memory_used_bytes: used,
                memory_peak_bytes: 8 << 30,
                memory_limit_bytes: 10 << 30,
                memory_overhead_bytes: 300 << 20,
                cores_millis: 125,
                ..Use::default()
            }],
            // A tenth of the time on average, and twice that waited.
            compute: Some(Compute {
                leased_us: second * 100_000 + noise % 400_000,
                waited_us: second * 200_000 + noise % 700_000,
                used_us: second * 100_000 + noise % 400_000,
                measured_us: second * 100_000 + noise % 400_000,
                ..Compute::default()
            }),
            refusals: second / 3600,
            launches: second * 900 + noise % 900,
            ..Allocation::default()
        }
    };
    let gpu = |n: u64| Gpu {
        uuid: uuid(n),
        memory_total_bytes: 80 << 30,
        memory_used_bytes: (60 << 30) + noise(n) % (4 << 30),
        memory_limits_bytes: 80 << 30,
        state: GpuState::Healthy,
        ..Gpu::default()
    };
    Status {
        at_unix_ms: i64::try_from((T0 + second) * 1000).unwrap_or(i64::MAX),
        gpus: (0..GPUS).map(gpu).collect(),
        allocations: (0..TENANTS).map(tenant).collect(),
        ..Status::default()
    }
}

/// The largest that the month's file ever is, bytes.
fn month() -> anyhow::Result<u64> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("history.redb");
    let defaults = tessera_config::History::default();
    let (bound, keep) = (defaults.size_bytes, defaults.keep_seconds());
    let history = History::new(Options { path: path.clone(), bound, keep, sync: false });
    let mut bytes = 0;
    for second in (0..=MONTH).step_by(10) {
        history.look(&status(second), &HashSet::new(), second * 1000);
        // As often as the plugin does.
        if second % 60 == 0 {
            history.flush(false)?;
            bytes = bytes.max(std::fs::metadata(&path)?.len());
        }
    }
    Ok(bytes)
}
