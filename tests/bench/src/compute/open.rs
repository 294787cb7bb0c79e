//! What the gate costs a launch while the tenant holds the lease: each launch is timed alone, so that
//! the median is one without a marker, and the mean has the markers' part.
//!
//! The gate stays OPEN throughout, of an arbiter that the bench scripts. Kernels, events and markers take no GPU time, so that calls are measured and nothing else.

use tessera_harness::{artefacts, monotonic_ns};
use tessera_region::layout::PAGES_DIR_ENV;

use super::host::make_pages;
use super::{Report, backlog};
use crate::stats::Sample;
use crate::world::{World, alternate, printed};

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
    let shim = artefacts().shim();
    let [median, mean] = alternate(ROUNDS, |with_shim| {
        let mut command = world.bare(&["launch-each"])?;
        if with_shim {
            command.env("LD_PRELOAD", &shim).env(PAGES_DIR_ENV, dir.path());
        }
        printed(command)
    })?;
    report.pair("launch_open_overhead_ns", "hooked launch, open gate", "ns", &median, 60.0);
    report.pair("launch_open_marked_ns", "· with its part of markers", "ns", &mean, 150.0);
    Ok(())
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
            let start = monotonic_ns();
            launch()?;
            let elapsed = monotonic_ns() - start;
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
