//! What the gate costs a launch while the tenant holds the lease: each launch is timed alone, so that
//! the median is one without a marker, and the mean has the markers' part.
//!
//! The gate stays OPEN throughout, of an arbiter that the bench scripts. Kernels, events and markers take no GPU time, so that calls are measured and nothing else.

use std::path::Path;
use std::process::{Command, Stdio};

use tessera_region::layout::PAGES_DIR_ENV;

use super::host::make_pages;
use super::{Report, backlog};
use crate::machine;
use crate::stats::{Pair, Sample};
use crate::world::World;

/// Rounds of each, alternating.
const ROUNDS: usize = 15;
/// As the arbiter's defaults have it.
const WINDOW: (u32, u32) = (64, 1000);

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    crate::note("launches at an open gate");
    let dir = tempfile::Builder::new().prefix("tessera-bench-open.").tempdir()?;
    make_pages(dir.path(), &backlog(100.0, "0"));
    let arbiter = tessera_harness::Arbiter::again(dir.path());
    arbiter.quota.set_window(0, WINDOW.0, WINDOW.1);
    arbiter.open();
    let (median, mean) = alternate(world, dir.path())?;
    report.pair("launch_open_overhead_ns", "hooked launch, open gate", "ns", &median, 60.0);
    report.pair("launch_open_marked_ns", "· with its part of markers", "ns", &mean, 150.0);
    Ok(())
}

/// Median and mean of a launch.
fn alternate(world: &World, pages: &Path) -> anyhow::Result<(Pair, Pair)> {
    let (mut bare, mut hooked) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
    for round in 0..ROUNDS {
        let order = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with_shim in order {
            let mut command = world.bare(&["launch-each"])?;
            if with_shim {
                let shim = world.artefacts.path("libtessera.so");
                command.env("LD_PRELOAD", shim).env(PAGES_DIR_ENV, pages);
            }
            let (median, mean) = one(command)?;
            let to = if with_shim { &mut hooked } else { &mut bare };
            to.0.push(median);
            to.1.push(mean);
        }
    }
    Ok((Pair::new(bare.0, hooked.0), Pair::new(bare.1, hooked.1)))
}

fn one(mut command: Command) -> anyhow::Result<(f64, f64)> {
    let output = command.stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [median, mean] => Ok((median, mean)),
        _ => anyhow::bail!("{command:?} printed {text:?}"),
    }
}

/// The child's part: launches that are timed one by one. Prints median and mean in nanoseconds, the
/// clock's own cost included.
pub fn launch_each(
    mut launch: impl FnMut() -> anyhow::Result<()>,
    mut wait: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    /// Launches between two waits, which are not timed.
    const BATCH: usize = 512;
    const BATCHES: usize = 200;
    let mut values = Vec::with_capacity(BATCH * BATCHES);
    for batch in 0..BATCHES + BATCHES / 10 {
        for _ in 0..BATCH {
            let start = machine::now_ns();
            launch()?;
            let elapsed = machine::now_ns() - start;
            // The first ones warm up, and let the window learn how long operations take.
            if batch >= BATCHES / 10 {
                #[allow(clippy::cast_precision_loss, reason = "nanoseconds of one call")]
                values.push(elapsed as f64);
            }
        }
        wait()?;
    }
    // A launch that was preempted says nothing about launches.
    let sample = Sample::new(values);
    println!("{} {}", sample.median(), sample.trimmed_mean(0.005));
    Ok(())
}
