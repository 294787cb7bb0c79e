//! A scenario: tenants on a machine for a while, and what the judge saw.

use std::time::Duration;

use anyhow::Context;
use tessera_config::Leases;

use super::host::{Counted, Host};
use super::judge::{self, Observation};
use super::machine::{Costs, Machine};
use super::tenant::{Gate, Spec, Tenant, Under};
use crate::world::Artefacts;

/// Before the judge looks, everybody has been at it for this long.
const WARM_UP: Duration = Duration::from_millis(500);

/// Backlogged tenants begin with one launch in flight for so long: who comes first is alone, hence
/// not bounded, and would have a thousand in flight before the next one is there.
pub const SHALLOW_MS: u64 = 300;

/// Where scenarios take place.
#[derive(Clone, Debug)]
pub struct Place {
    /// The files under measurement.
    pub artefacts: Artefacts,
    /// What things cost on the simulated GPU.
    pub costs: Costs,
    /// How the arbiter is configured.
    pub leases: Leases,
}

/// A machine with running tenants.
pub struct Stage {
    /// In the order of their specifications.
    pub tenants: Vec<Tenant>,
    machine: Machine,
    /// After the tenants, so that these end first.
    host: Option<Host>,
}

/// What was seen of a stretch of time.
#[derive(Clone, Debug)]
pub struct Seen {
    /// By the judge.
    pub account: Observation,
    /// By the shims, since the tenants started.
    pub counted: Counted,
    /// CPU time of the arbiter's thread, percent of a core.
    pub arbiter_percent: f64,
}

impl Stage {
    /// Starts tenants and waits until all launch.
    ///
    /// # Errors
    /// One that does not start.
    pub fn set(place: &Place, tenants: &[Spec], gate: Gate) -> anyhow::Result<Self> {
        let machine = Machine::new(&place.artefacts, place.costs)?;
        let mut host = match gate {
            Gate::Tessera => Some(Host::start(&machine.runtime_dir(), &place.leases)?),
            Gate::Bare | Gate::Run => None,
        };
        let mut running = Vec::new();
        for spec in tenants {
            let pages = host.as_mut().map(|host| host.admit(spec)).transpose()?;
            let under = match (&pages, gate) {
                (Some(pages), _) => Under::Pages(pages),
                (None, Gate::Run) => Under::Run,
                (None, _) => Under::Nothing,
            };
            running.push(Tenant::start(&machine, spec, under)?);
        }
        for (index, tenant) in running.iter_mut().enumerate() {
            let processes = usize::try_from(tenant.spec.processes)?;
            tenant.hear("ready", processes).with_context(|| format!("tenant {index}"))?;
        }
        std::thread::sleep(WARM_UP);
        Ok(Self { tenants: running, machine, host })
    }

    /// Starts one more tenant, which is at work when this returns.
    ///
    /// # Errors
    /// It does not start.
    pub fn join(&mut self, spec: &Spec) -> anyhow::Result<()> {
        let pages = self.host.as_mut().map(|host| host.admit(spec)).transpose()?;
        let under = pages.as_deref().map_or(Under::Nothing, Under::Pages);
        let mut tenant = Tenant::start(&self.machine, spec, under)?;
        tenant.hear("ready", usize::try_from(spec.processes)?)?;
        self.tenants.push(tenant);
        Ok(())
    }

    /// Looks on for `length`.
    ///
    /// # Errors
    /// The judge saw no work at all.
    pub fn look(&self, length: Duration) -> anyhow::Result<Seen> {
        let cpu = || self.host.as_ref().map_or(Ok(0), Host::arbiter_cpu_ns);
        let before = cpu()?;
        let account = judge::observe(&self.machine, &self.tenants, length);
        let arbiter_percent =
            Duration::from_nanos(cpu()? - before).as_secs_f64() / account.seconds() * 100.0;
        anyhow::ensure!(account.rates().iter().any(|&r| r > 0.0), "nothing ran");
        Ok(Seen { account, counted: self.counted()?, arbiter_percent })
    }

    /// What the shims counted so far.
    ///
    /// # Errors
    /// The file system's.
    pub fn counted(&self) -> anyhow::Result<Counted> {
        self.host.as_ref().map_or(Ok(Counted::default()), Host::counted)
    }

    /// How the arbiter says it stands, where this process hosts one.
    pub fn view(&self) -> Option<tessera_arbiter::View> {
        self.host.as_ref()?.view()
    }
}

/// Starts the tenants, looks on, and ends them.
///
/// # Errors
/// A tenant that does not start.
pub fn watch(
    place: &Place,
    tenants: &[Spec],
    gate: Gate,
    length: Duration,
) -> anyhow::Result<Seen> {
    Stage::set(place, tenants, gate)?.look(length)
}
