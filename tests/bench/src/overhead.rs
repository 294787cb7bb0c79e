//! What the shim adds to single calls, and to a program that never uses CUDA.

use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use tessera_harness::artefacts;

use crate::report::Report;
use crate::world::{World, alternate, printed};

/// Rounds of each, alternating.
const ROUNDS: usize = 31;
/// Processes of each for `/bin/true`.
const TRUES: usize = 2000;
/// A limit that nothing here meets.
const AMPLE: u64 = 8 << 30;

/// Task of the child, key, what it is, unit, and most that it may cost. Calls are pairs but for launches,
/// `cuMemGetInfo` and batches of copies.
const CALLS: [(&str, &str, &str, &str, f64); 6] = [
    ("launch", "launch_overhead_ns", "hooked launch, alone", "ns", 8.0),
    ("alloc-free", "alloc_free_overhead_ns", "alloc + free", "ns", 250.0),
    ("alloc-async", "alloc_async_overhead_ns", "async alloc + free, warm pool", "ns", 250.0),
    ("array", "array_overhead_ns", "array create + destroy", "ns", 250.0),
    ("mem-get-info", "mem_get_info_overhead_ns", "cuMemGetInfo", "ns", 50.0),
    ("offload", "offload_batch_us", "a call with 8,192 copies", "µs", 100.0),
];

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    for (task, key, what, unit, most) in CALLS {
        crate::note(what);
        let pages = world.pages(AMPLE);
        let [pair] = alternate(ROUNDS, |with_shim| match with_shim {
            true => printed(world.hooked(&[task], &pages)?),
            false => printed(world.bare(&[task])?),
        })?;
        report.pair(key, what, unit, &pair, most);
    }
    crate::note("/bin/true");
    let shim = artefacts().shim();
    let [pair] = alternate(TRUES, |with_shim| {
        let mut command = Command::new("/bin/true");
        if with_shim {
            command.env("LD_PRELOAD", &shim);
        }
        let start = Instant::now();
        let status = command.status().context("cannot run /bin/true")?;
        let elapsed = start.elapsed().as_secs_f64() * 1e6;
        anyhow::ensure!(status.success(), "/bin/true failed under the shim: {status}");
        Ok([elapsed])
    })?;
    report.pair("true_overhead_us", "/bin/true", "µs", &pair, 100.0);
    Ok(())
}
