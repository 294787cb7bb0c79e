//! The page of a fleet that is made up: any number of nodes, no plugin.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use tessera_system::terminal;
use tessera_view::fixtures::{Layout as Fleet, MadeUp};
use tessera_web::fixtures::Fixture;

use super::console::{Console, INTERVAL};
use super::live::Ends;
use super::start::Layout;

/// As `docs/benchmarks.md` measures it: most nodes, and GPUs of each.
const MOST: (u32, u32) = (1000, 16);
/// Tenants of a GPU.
const TENANTS: usize = 10;
/// Time that histories go back, milliseconds.
const PAST_MS: i64 = 7 * 24 * 3_600_000;

/// Serves until it is asked to end.
///
/// # Errors
/// More nodes than a page shows, or no port.
pub async fn serve(layout: Layout, ends: &Ends) -> anyhow::Result<ExitCode> {
    let (nodes, gpus) = MOST;
    anyhow::ensure!(
        layout.nodes <= nodes && layout.gpus <= gpus,
        "a made-up fleet has at most {nodes} nodes of {gpus} GPUs, not {layout}"
    );
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
    let now = i64::try_from(now.as_millis())?;
    let fleet = Fleet {
        nodes: usize::try_from(layout.nodes)?,
        gpus: usize::try_from(layout.gpus)?,
        tenants: TENANTS,
        since_unix_ms: now - PAST_MS,
        ..Fleet::default()
    };
    let source = Fixture::new(MadeUp::new(fleet, now));
    source.run();
    let at = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
    let console = Console::of(Arc::new(source), at, INTERVAL).await?;
    terminal::print(&format!(
        "a made-up fleet of {layout}: nothing of it exists\n\npage  http://{}/\nAPI   curl -s http://{}/api/v1/fleet\n\n\
         Ctrl-C ends it.\n",
        console.address(),
        console.address()
    ))?;
    ends.wait().await;
    Ok(ExitCode::SUCCESS)
}
