//! What the history costs: the plugin's CPU time with it and without, and a simulated month of 64 busy tenants.

use std::time::{Duration, Instant};

use tessera_history::{Context, GpuLook, History, Look, Options, TenantLook, UseLook};
use tessera_view::history::Query;
use tokio::time::sleep;

use crate::clock;
use crate::node::{Api, Node};
use crate::stats::Pair;
use crate::tenants;
use crate::world::World;

/// Tenants, and GPUs that they are on.
const TENANTS: u64 = tenants::TENANTS as u64;
const GPUS: u64 = tenants::GPUS as u64;
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

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    /// CPU time of the plugin without the history and with it, percent of a core.
    pub cpu_percent: Pair,
    /// CPU time of folding and storing in the simulated month, percent of a core.
    pub stored_percent: f64,
    /// The largest that the month's file ever was, bytes.
    pub bytes: u64,
    /// Hours that buckets of ten seconds go back at the month's end.
    pub fine_hours: f64,
    /// A day of one pod, and six hours of everything: milliseconds.
    pub asked_ms: (f64, f64),
}

/// Measures all of it.
///
/// # Errors
/// A plugin that does not start, or a disk that refuses.
pub fn run(world: &World) -> anyhow::Result<Figures> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let cpu_percent = runtime.block_on(watched(world))?;
    month(cpu_percent)
}

/// Plugins with a history and plugins without run side by side, so that whatever else the machine does is in both; one
/// of each is a pair.
async fn watched(world: &World) -> anyhow::Result<Pair> {
    let mut nodes = Vec::new();
    for number in 0..PAIRS * 2 {
        let setup = tenants::setup(world, &format!("history-{number}"), Api::Off, number % 2 == 1)?;
        nodes.push(tenants::start(&setup).await?);
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
    Ok((node.process()?.cpu_ns()?, clock::now_ns()))
}

/// Everything at one second: each tenant does something else all the time.
fn look(second: u64) -> Look {
    let noise = |n: u64| {
        let mut z = (second / 10 * 64 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    };
    let uuid = |n: u64| format!("GPU-{n:08}-33f3-99dd-e08b-ea4beb0e0d28");
    let tenant = |n: u64| {
        let (generation, noise) = ((second + n * 2700) / LIFE, noise(n));
        let used = (6 << 30) + noise % (3 << 30);
        TenantLook {
            id: format!("{n:032x}"),
            generation,
            namespace: format!("team-{}", n % 5),
            pod: format!("model-{n}-7c9d8f6b5-{generation:05}"),
            container: "server".into(),
            read: true,
            uses: vec![UseLook {
                gpu_uuid: uuid(n % GPUS),
                memory_used_bytes: used,
                process_peak_bytes: 8 << 30,
                memory_limit_bytes: 10 << 30,
                memory_overhead_bytes: 300 << 20,
                cores_millis: 125,
            }],
            unheard: false,
            // A tenth of the time on average, and twice that waited.
            leased_us: second * 100_000 + noise % 400_000,
            waited_us: second * 200_000 + noise % 700_000,
            used_us: second * 100_000 + noise % 400_000,
            measured_us: second * 100_000 + noise % 400_000,
            rations: 0,
            refusals: second / 3600,
            launches: second * 900 + noise % 900,
        }
    };
    let gpu = |n: u64| GpuLook {
        uuid: uuid(n),
        memory_used_bytes: (60 << 30) + noise(n) % (4 << 30),
        memory_limits_bytes: 80 << 30,
        healthy: true,
        cordoned: false,
    };
    Look {
        at_unix_ms: i64::try_from((T0 + second) * 1000).unwrap_or(i64::MAX),
        monotonic_ms: second * 1000,
        gpus: (0..GPUS).map(gpu).collect(),
        tenants: (0..TENANTS).map(tenant).collect(),
    }
}

fn month(cpu_percent: Pair) -> anyhow::Result<Figures> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("history.redb");
    let defaults = tessera_config::History::default();
    let (bound, keep) = (defaults.size_bytes, defaults.keep_seconds());
    let history = History::new(Options { path: path.clone(), bound, keep, sync: false });
    let (mut busy, mut bytes) = (0, 0);
    for second in (0..=MONTH).step_by(10) {
        let look = look(second);
        let begun = clock::thread_cpu_ns();
        history.look(&look);
        // As often as the plugin does.
        if second % 60 == 0 {
            history.flush(false)?;
            bytes = bytes.max(std::fs::metadata(&path)?.len());
        }
        busy += clock::thread_cpu_ns() - begun;
    }
    let now_unix_ms = i64::try_from((T0 + MONTH) * 1000)?;
    let context = Context { now_unix_ms, ..Context::default() };
    let asked = |query: &Query| {
        let begun = Instant::now();
        let answer = history.answer(query, &context)?;
        anyhow::Ok((begun.elapsed().as_secs_f64() * 1e3, answer))
    };
    let fine = Query { since_unix_ms: now_unix_ms - 60_000, step_seconds: 10, ..Query::default() };
    let fine_hours = (now_unix_ms - asked(&fine)?.1.since_unix_ms) as f64 / 3.6e6;
    let since_unix_ms = now_unix_ms - 86_400_000;
    let subject = "0000000000000000000000000000002a".to_owned();
    let day = asked(&Query { subject, since_unix_ms, ..Query::default() })?.0;
    let since_unix_ms = now_unix_ms - 6 * 3_600_000;
    let all = asked(&Query { since_unix_ms, ..Query::default() })?.0;
    let stored_percent = busy as f64 / 1e9 / MONTH as f64 * 100.0;
    Ok(Figures { cpu_percent, stored_percent, bytes, fine_hours, asked_ms: (day, all) })
}
