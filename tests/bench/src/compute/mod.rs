//! How GPU time is divided, judged by the simulator's own account.
//!
//! Tenants are `tessera-tenant load`s on a simulated machine of their own ([`machine`]), under the shim
//! and the plugin's arbiter, which this process hosts ([`host`]), or without both. What each got is
//! read from the simulator ([`judge`]); of the shim and the arbiter only what they counted is read.

mod caps;
mod host;
mod judge;
mod machine;
mod open;
mod scenario;
mod shares;
mod tenant;
mod tied;

pub use self::open::launch_each;
use self::scenario::SHALLOW_MS;
use self::tenant::{Gate, Spec};
use crate::report::Report;
use crate::world::World;

/// What [`run`] can measure alone.
pub const SCENARIOS: [&str; 7] = ["open", "shares", "caps", "late", "busy", "tied", "interfere"];

/// Time-outs of all runs: in none of them anything fails.
#[derive(Debug, Default)]
struct Timeouts(u64);

pub fn run(
    world: &World,
    report: &mut Report,
    wanted: &dyn Fn(&str) -> bool,
) -> anyhow::Result<()> {
    let mut timeouts = Timeouts::default();
    for name in SCENARIOS.into_iter().filter(|name| wanted(name)) {
        match name {
            "open" => open::run(world, report)?,
            "shares" => shares::run(report, &mut timeouts)?,
            "caps" => caps::run(report, &mut timeouts)?,
            "late" => caps::late(report, &mut timeouts)?,
            "busy" => shares::busy(report)?,
            "tied" => tied::run(report)?,
            _ => shares::interfere(report)?,
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a count")]
    let count = timeouts.0 as f64;
    report.figure("gate_timeouts", "gates opened by time-out", "", count, 0.0);
    Ok(())
}

/// A tenant that never has enough: kernels of these microseconds, in turn.
fn backlog(cores: f64, kernel_us: &str) -> Spec {
    let shallow = format!("--shallow-ms={SHALLOW_MS}");
    Spec::new(cores, &[&format!("--kernel-us={kernel_us}"), &shallow])
}

/// A tenant that never has enough of graphs of 8 ms.
fn graphs(cores: f64) -> Spec {
    let shallow = format!("--shallow-ms={SHALLOW_MS}");
    Spec::new(cores, &["--graph", "--kernel-us=500", "--kernels=16", &shallow])
}
