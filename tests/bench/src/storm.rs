//! The plugin's process when everything around it misbehaves at once: the wall clock jumps by hours every few
//! seconds, the API server accepts and never answers, quotas change as fast as they are taken, and pods come
//! and go. What is judged is whether its own memory stays what it was, and that nothing was lost.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tessera_view::change::{SetQuotaRequest, Target};
use tessera_web::client::Client;
use tokio::time::sleep;

use crate::node::{self, Node};
use crate::report::Report;
use crate::soak::{PODS, address, churn, scrape, setup, start};
use crate::world::World;

/// How long it lasts, of which memory is not looked at yet, and between two jumps, in seconds.
const SECONDS: u64 = 60;
const WARM_UP: u64 = 20;
const JUMP_EVERY: u64 = 5;
/// Where the clock jumps, seconds from the machine's.
const JUMPS: [i64; 4] = [5 * 3600, -9 * 3600, 26 * 3600, -26 * 3600];
/// Pods whose quotas change.
const STEERED: usize = 8;

/// Measures it.
///
/// # Errors
/// A plugin that does not start or answer, or one that lost something.
#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let (library, shared) = (world.path("around.so"), world.path("around"));
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../programs/around.c");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg("-ldl");
    anyhow::ensure!(cc.status()?.success(), "{} does not compile", source.display());
    std::fs::write(&shared, [0; 16])?;
    let credentials = world.path("credentials");
    std::fs::create_dir_all(&credentials)?;
    std::fs::write(credentials.join("token"), "secret")?;
    std::fs::write(credentials.join("ca.crt"), "")?;
    // Connections wait in its queue for ever.
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let mut setup = setup(world, "storm")?;
    setup.envs.extend([
        ("LD_PRELOAD", library),
        ("AROUND", shared.clone()),
        ("CREDENTIALS", credentials),
        ("KUBERNETES_SERVICE_HOST", "127.0.0.1".into()),
        ("KUBERNETES_SERVICE_PORT", silent.local_addr()?.port().to_string().into()),
    ]);
    let clock = std::fs::File::options().write(true).open(shared)?;
    let (before, after) = node::runtime()?.block_on(async {
        let node = Node::start(&setup).await?;
        let address = address(&node).await?;
        for n in 0..PODS {
            start(&node, &format!("stay-{n}")).await?;
        }
        named(address).await?;
        let memory = storm(&node, address, &clock).await?;
        node.end().await;
        anyhow::Ok(memory)
    })?;
    let what = "own memory, growth under jumps, churn and quotas";
    report.figure("plugin_growth_kib_storm", what, "KiB", after as f64 - before as f64, 1024.0);
    Ok(())
}

/// Memory that no file backs, KiB: after the first seconds, and at the end.
async fn storm(
    node: &Node,
    address: SocketAddr,
    clock: &std::fs::File,
) -> anyhow::Result<(u64, u64)> {
    let stop = Arc::new(AtomicBool::new(false));
    let admin = Client::at(&node.dir().join("admin.sock"));
    let steering = tokio::spawn(steer(admin, Arc::clone(&stop)));
    let (mut before, mut churned) = (0, 0);
    for second in 0..SECONDS {
        let began = Instant::now();
        if second % JUMP_EVERY == 0 {
            let to = JUMPS[usize::try_from(second / JUMP_EVERY)? % JUMPS.len()];
            clock.write_all_at(&to.to_ne_bytes(), 0)?;
        }
        let text = scrape(address).await?;
        anyhow::ensure!(staying(&text) == PODS, "{} of {PODS} pods have series", staying(&text));
        if second == WARM_UP {
            before = node.process()?.rss_kib()?.1;
        }
        churned += churn(node, began, churned).await?;
    }
    stop.store(true, Ordering::Relaxed);
    let limits = steering.await??;
    sleep(Duration::from_secs(3)).await;
    let after = node.process()?.rss_kib()?.1;
    let text = scrape(address).await?;
    for (n, bytes) in limits.into_iter().enumerate() {
        let pod = format!("pod=\"stay-{n}\"");
        let shown = value(&text, "tessera_container_memory_limit_bytes", &pod);
        anyhow::ensure!(shown == Some(bytes), "stay-{n}: {shown:?} instead of {bytes}");
    }
    let failed = value(&text, "tessera_ledger_commits_total", "failed");
    anyhow::ensure!(failed == Some(0), "the ledger failed: {failed:?}");
    Ok((before, after))
}

/// Changes quotas until `stop` is set; which is the last of each pod.
async fn steer(admin: Client, stop: Arc<AtomicBool>) -> anyhow::Result<Vec<u64>> {
    let (mut changed, mut limits) = (0u64, vec![0; STEERED]);
    while !stop.load(Ordering::Relaxed) || changed < STEERED as u64 {
        let at = usize::try_from(changed)? % STEERED;
        let bytes = (1 << 30) + (changed % 1000) * (1 << 20);
        let name = format!("bench/stay-{at}");
        let target = Target { name, ..Target::default() };
        let memory_limit_bytes = Some(bytes);
        let request = SetQuotaRequest { target, memory_limit_bytes, ..Default::default() };
        admin.call(&request).await?;
        limits[at] = bytes;
        changed += 1;
        sleep(Duration::from_millis(10)).await;
    }
    Ok(limits)
}

/// Waits until kubelet has named them all.
async fn named(address: SocketAddr) -> anyhow::Result<()> {
    for _ in 0..60 {
        if staying(&scrape(address).await?) == PODS {
            return Ok(());
        }
        sleep(Duration::from_millis(500)).await;
    }
    anyhow::bail!("pods have no names")
}

fn staying(text: &str) -> usize {
    let infos = text.lines().filter(|line| line.starts_with("tessera_container_info{"));
    infos.filter(|line| line.contains("pod=\"stay-")).count()
}

/// Of the first series of this name with that among its labels.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts and bytes")]
fn value(text: &str, name: &str, label: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(name));
    let line = lines.find(|line| line.contains(label))?;
    line.rsplit(' ').next()?.parse().ok().map(|value: f64| value as u64)
}
