//! A scenario: tenants on a machine for a while, and what the judge saw.

use std::time::Duration;

use anyhow::Context;

use super::judge::{self, Observation};
use super::machine::{Costs, Machine};
use super::tenant::{Gate, Spec, Tenant};
use crate::world::Artefacts;

/// Before the judge looks, everybody has been at it for this long.
const WARM_UP: Duration = Duration::from_millis(500);

/// Starts the tenants, lets them run, observes, and ends them.
///
/// # Errors
/// A tenant that does not start.
pub fn watch(
    artefacts: &Artefacts,
    costs: Costs,
    tenants: &[Spec],
    gate: Gate,
    length: Duration,
) -> anyhow::Result<Observation> {
    let machine = Machine::new(artefacts, costs)?;
    let running = start(&machine, tenants, gate)?;
    std::thread::sleep(WARM_UP);
    let observation = judge::observe(&machine, &running, length);
    let rates = observation.rates();
    anyhow::ensure!(rates.iter().any(|&r| r > 0.0), "nothing ran: the judge saw no work");
    Ok(observation)
}

/// Starts tenants and waits until all launch.
///
/// # Errors
/// One that does not start.
pub fn start(machine: &Machine, tenants: &[Spec], gate: Gate) -> anyhow::Result<Vec<Tenant>> {
    let mut running = Vec::new();
    for spec in tenants {
        running.push(Tenant::start(machine, spec, gate)?);
    }
    for (index, tenant) in running.iter_mut().enumerate() {
        let processes = usize::try_from(tenant.spec.processes)?;
        tenant.hear("ready", processes).with_context(|| format!("tenant {index}"))?;
    }
    Ok(running)
}
