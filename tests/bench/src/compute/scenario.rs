//! A scenario: tenants on a machine for a while, and what the judge saw.

use std::time::Duration;

use anyhow::Context;

use super::host::Host;
use super::judge::{self, Observation};
use super::machine::Machine;
use super::tenant::{Gate, Spec, Tenant};

/// Before the judge looks, everybody has been at it for this long.
const WARM_UP: Duration = Duration::from_millis(500);

/// Backlogged tenants begin with one launch in flight for so long: who comes first is alone, hence
/// not bounded, and would have a thousand in flight before the next one is there.
pub const SHALLOW_MS: u64 = 300;

pub struct Stage {
    /// In the order of their specifications.
    pub tenants: Vec<Tenant>,
    machine: Machine,
    /// After the tenants, so that these end first.
    host: Option<Host>,
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub account: Observation,
    /// Times that a process rationed itself because the arbiter was silent, since the tenants started.
    pub timeouts: u64,
    /// CPU time of the arbiter's thread, percent of a core.
    pub arbiter_percent: f64,
}

impl Stage {
    /// Starts tenants and waits until all launch.
    pub fn set(tenants: &[Spec], gate: Gate) -> anyhow::Result<Self> {
        let machine = Machine::new()?;
        let mut host = match gate {
            Gate::Tessera => Some(Host::start(machine.dir())?),
            Gate::Bare => None,
        };
        let mut running = Vec::new();
        for spec in tenants {
            let pages = host.as_mut().map(|host| host.admit(spec)).transpose()?;
            running.push(Tenant::start(&machine, spec, pages.as_deref())?);
        }
        for (index, tenant) in running.iter_mut().enumerate() {
            let processes = usize::try_from(tenant.spec.processes)?;
            tenant.hear("ready", processes).with_context(|| format!("tenant {index}"))?;
        }
        std::thread::sleep(WARM_UP);
        Ok(Self { tenants: running, machine, host })
    }

    /// Starts one more tenant, which is at work when this returns.
    pub fn join(&mut self, spec: &Spec) -> anyhow::Result<()> {
        let pages = self.host.as_mut().map(|host| host.admit(spec)).transpose()?;
        let mut tenant = Tenant::start(&self.machine, spec, pages.as_deref())?;
        tenant.hear("ready", usize::try_from(spec.processes)?)?;
        self.tenants.push(tenant);
        Ok(())
    }

    pub fn look(&self, length: Duration) -> anyhow::Result<Seen> {
        let cpu = || self.host.as_ref().map_or(Ok(0), Host::arbiter_cpu_ns);
        let before = cpu()?;
        let account = judge::observe(&self.machine, &self.tenants, length);
        let used = Duration::from_nanos(cpu()? - before);
        let arbiter_percent = used.as_secs_f64() / length.as_secs_f64() * 100.0;
        anyhow::ensure!(account.rates().iter().any(|&r| r > 0.0), "nothing ran");
        let timeouts = self.host.as_ref().map_or(Ok(0), Host::timeouts)?;
        Ok(Seen { account, timeouts, arbiter_percent })
    }
}

pub fn watch(tenants: &[Spec], gate: Gate, length: Duration) -> anyhow::Result<Seen> {
    Stage::set(tenants, gate)?.look(length)
}
