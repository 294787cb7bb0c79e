//! A tenant that comes and goes: how long it takes to get its share back.

use std::time::Duration;

use serde_json::Value;

use super::{Gate, Place, Report, Spec, backlog};
use crate::compute::scenario::Stage;

const LENGTH: Duration = Duration::from_secs(10);

/// Kernels of `kernel_us` for `burst_ms`, then nothing for about `pause_ms`.
pub fn bursty(cores: f64, kernel_us: &str, burst_ms: u64, pause_ms: u64) -> Spec {
    Spec::new(
        cores,
        &[
            &format!("--kernel-us={kernel_us}"),
            &format!("--burst-ms={burst_ms}"),
            &format!("--pause-ms={pause_ms}"),
        ],
    )
}

/// What the bursty tenant says of its first operations beside a neighbour.
///
/// # Errors
/// A tenant that does not start.
pub fn round(
    place: &Place,
    bursty: &Spec,
    neighbour: &Spec,
    gate: Gate,
    length: Duration,
) -> anyhow::Result<Value> {
    let mut stage = Stage::set(place, &[bursty.clone(), neighbour.clone()], gate)?;
    std::thread::sleep(length);
    stage.tenants[0].signal(libc::SIGTERM);
    Ok(stage.tenants[0].hear("done", 1)?.remove(0))
}

/// Measures it with kernels of 200 µs.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, report: &mut Report) -> anyhow::Result<()> {
    crate::note("reclaim");
    let bursty = bursty(50.0, "200", 10, 40);
    let neighbour = backlog(50.0, "200");
    let bare = round(place, &bursty, &neighbour, Gate::Bare, LENGTH / 3)?;
    let seen = round(place, &bursty, &neighbour, Gate::Tessera, LENGTH)?;
    let window = u32::try_from(place.leases.window_time.as_micros()).unwrap_or(u32::MAX);
    // The window, the longest operation, and 100 µs.
    let most = f64::from(window) + 200.0 + 100.0;
    let p99 = seen["p99_us"].as_f64().unwrap_or(f64::NAN);
    report.figure(
        "reclaim_p99_us",
        "a bursty tenant gets the GPU back, p99",
        "µs",
        p99,
        Some(most),
    );
    report.put("reclaim_detail", serde_json::json!({ "tessera": seen, "bare": bare }));
    Ok(())
}
