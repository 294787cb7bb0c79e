//! How soon a killed process's bytes can be had again, after the driver has them back, under `tessera run`,
//! which sees that.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use strum::VariantArray;
use tessera_harness::monotonic_ns;
use tessera_tenant_program::memory::Api;

use crate::report::Report;
use crate::stats::Sample;
use crate::world::{Account, CONTEXT, World};

/// Processes killed while they hold memory of one API.
const KILLS: usize = 10;
const HELD: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(5);

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let mut by_api = serde_json::Map::new();
    let mut worst = 0.0f64;
    for api in Api::VARIANTS.iter().copied() {
        let most = after_driver(world, api)
            .with_context(|| format!("where {} memory was held", api.into_str()))?
            .max();
        by_api.insert(api.into_str().into(), most.into());
        worst = worst.max(most);
    }
    report.figure("recovery_ms", "bytes back after the driver's", "ms", worst, 10.0);
    report.put("recovery_detail", by_api.into());
    Ok(())
}

/// Kills processes that fill their tenant's limit by `api` while another of the tenant asks for its bytes:
/// milliseconds from the driver's own release to the grant, negative where the ledger was sooner.
fn after_driver(world: &World, api: Api) -> anyhow::Result<Sample> {
    let account = Account::open()?;
    let pages = world.run_pages(2 * CONTEXT + HELD)?;
    let bytes = HELD.to_string();
    let mut taker = world
        .hooked(&["take", &bytes], &pages)?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(world.log()?)
        .spawn()?;
    let mut orders = taker.stdin.take().context("piped")?;
    let mut answers = BufReader::new(taker.stdout.take().context("piped")?);
    let mut line = String::new();
    answers.read_line(&mut line)?;
    anyhow::ensure!(line.trim() == "ready", "the taker did not start");

    let mut values = Vec::new();
    for _ in 0..KILLS {
        let mut holder = world
            .hooked(&["hold", api.into_str(), &bytes], &pages)?
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = BufReader::new(holder.stdout.take().context("piped")?);
        line.clear();
        said.read_line(&mut line)?;
        anyhow::ensure!(line.trim() == "holding", "the holder did not get its memory");
        writeln!(orders, "take")?;
        // The taker is refused for a while first: it must be asking already.
        std::thread::sleep(Duration::from_millis(20));

        // Not NVML's list of processes: requests for memory wait as long as somebody has that made.
        let before = account.used()?;
        holder.kill()?;
        let patience = Instant::now() + PATIENCE;
        while account.used()? >= before {
            anyhow::ensure!(Instant::now() < patience, "the driver keeps a dead process's bytes");
        }
        let released = monotonic_ns();
        holder.wait()?;
        line.clear();
        answers.read_line(&mut line)?;
        let granted: u64 = line.trim().parse().context("the taker did not get the bytes")?;
        values.push(millis(granted) - millis(released));
    }
    drop(orders);
    taker.wait()?;
    Ok(Sample::new(values))
}

#[allow(clippy::cast_precision_loss, reason = "nanoseconds of uptime stay below 2^53 for 104 days")]
fn millis(ns: u64) -> f64 {
    ns as f64 / 1e6
}
