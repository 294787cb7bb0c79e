//! The goals of the division of GPU time, measured.

pub mod busy;
mod caps;
pub mod interfere;
pub mod late;
pub mod many;
pub mod open;
pub mod reclaim;
mod shares;
pub mod tied;

use tessera_config::Leases;

use super::machine::Costs;
use super::scenario::{Place, SHALLOW_MS};
use super::tenant::{Gate, Spec};
use crate::report::Report;
use crate::world::{Artefacts, World};

/// Time-outs of all runs: in none of them anything fails.
#[derive(Debug, Default)]
pub struct Timeouts(u64);

/// Measures everything.
///
/// # Errors
/// A tenant that does not start.
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let mut timeouts = Timeouts::default();
    let place = place(&world.artefacts);
    open::run(world, report)?;
    shares::run(&place, report, &mut timeouts)?;
    caps::run(&place, report, &mut timeouts)?;
    late::run(&place, report, &mut timeouts)?;
    busy::run(&place, report)?;
    tied::run(&world.artefacts, report)?;
    reclaim::run(&place, report)?;
    interfere::run(&place, report)?;
    many::run(report);
    #[allow(clippy::cast_precision_loss, reason = "a count")]
    let count = timeouts.0 as f64;
    report.figure("gate_timeouts", "gates opened by time-out", "", count, Some(0.0));
    Ok(())
}

/// The simulator's own costs, the arbiter's own settings.
fn place(artefacts: &Artefacts) -> Place {
    Place { artefacts: artefacts.clone(), costs: Costs::default(), leases: Leases::default() }
}

/// A tenant that never has enough: kernels of these microseconds, in turn.
pub fn backlog(cores: f64, kernel_us: &str) -> Spec {
    let shallow = format!("--shallow-ms={SHALLOW_MS}");
    Spec::new(cores, &[&format!("--kernel-us={kernel_us}"), &shallow])
}

/// A tenant that never has enough of graphs of 8 ms.
pub fn graphs(cores: f64) -> Spec {
    let shallow = format!("--shallow-ms={SHALLOW_MS}");
    Spec::new(cores, &["--graph", "--kernel-us=500", "--kernels=16", &shallow])
}
