//! The policy against simulated tenants and GPUs, in simulated time: which tenant gets how much, by the
//! simulation's own account. For tests, and for figures with more tenants than a machine can run.
//!
//! The simulated tenant keeps the shim's side of `docs/internals/compute.md`: it fills its window while its gate is
//! open, sends `want` and `drained` when closed and `idle` while YIELD; messages and commands take time. A
//! GPU serves all tenants with work in equal parts, as time slices do. Operations may wait for others that
//! are not launched yet and that the gate may hold back: such a tenant does not drain.

mod events;
mod figures;
mod op;
mod words;
mod world;

pub use figures::{Figures, TenantFigures};
pub use op::HostFunctions;
pub use world::World;

use tessera_arbiter::policy::{GpuIndex, Settings, Share};

/// The load of a simulated tenant.
#[derive(Clone, Debug)]
pub struct Load {
    /// Its GPUs.
    pub gpus: Vec<GpuIndex>,
    /// Its share.
    pub share: Share,
    /// Shortest and longest operation, nanoseconds.
    pub op: (u64, u64),
    /// Operations of a batch; at its end the tenant waits for all of them. 0: no batches.
    pub batch: u32,
    /// Shortest and longest pause after a batch, nanoseconds.
    pub think: (u64, u64),
    /// Operations that wait for each other, as the parts of a collective do: none of so many is served
    /// before all of them have been launched. 1: none waits.
    pub group: u32,
    /// Operations in flight while OPEN.
    pub window: usize,
    /// Nanoseconds of operations in flight while OPEN; two always may be.
    pub window_ns: u64,
    /// Whether it reports that it used nothing of its leases.
    pub lies: bool,
    /// Host functions among its operations.
    pub host: Option<HostFunctions>,
    /// While its gate is closed it reports nothing but wants.
    pub never_drains: bool,
    /// Processes that do all this at once, each with a window of its own.
    pub processes: u32,
    /// When its threads run.
    pub cpu: Option<Cpu>,
    /// When it begins.
    pub begin: u64,
}

impl Load {
    /// Always has work, in operations of this length on GPU 0, with the default window.
    #[must_use]
    pub fn backlogged(share: Share, op: (u64, u64)) -> Self {
        Self {
            gpus: vec![0],
            share,
            op,
            batch: 0,
            think: (0, 0),
            group: 1,
            window: 16,
            window_ns: 1_000_000,
            lies: false,
            host: None,
            never_drains: false,
            processes: 1,
            cpu: None,
            begin: 0,
        }
    }

    /// The same on a host that takes its CPU away: its threads run for so long, and stand still for so long.
    #[must_use]
    pub fn preempted(self, runs: (u64, u64), stands: (u64, u64)) -> Self {
        Self { cpu: Some(Cpu { runs, stands }), ..self }
    }

    /// The same, with operations of which so many wait for each other.
    #[must_use]
    pub fn in_groups(self, group: u32) -> Self {
        Self { group, ..self }
    }

    /// A load of batches with pauses.
    #[must_use]
    pub fn pausing(self, batch: u32, think: (u64, u64)) -> Self {
        Self { batch, think, ..self }
    }
}

/// Times for which all threads of a tenant run and then stand still, shortest and longest, nanoseconds. What is in flight
/// goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Run.
    pub runs: (u64, u64),
    /// Stand still.
    pub stands: (u64, u64),
}

/// A change during the simulation, of the tenant at this place in the list of loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Another share.
    Share(usize, Share),
    /// Its processes die; they do not come back.
    Kill(usize),
    /// Its processes are stopped: nothing is launched or reported; what is in flight goes on.
    Stop(usize),
    /// Its stopped processes go on.
    Continue(usize),
    /// It leaves with what it has in flight.
    Leave(usize),
}

/// Threads that the host wakes late, as virtual machines do whose processors others use: some messages,
/// commands and timers take longer than [`Scenario::delay`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateWakes {
    /// One of so many is late.
    pub one_in: u64,
    /// Shortest and longest time by which it is late, nanoseconds.
    pub ns: (u64, u64),
}

/// A simulation.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The policy's constants.
    pub settings: Settings,
    /// The tenants.
    pub loads: Vec<Load>,
    /// Changes and their times, ascending.
    pub changes: Vec<(u64, Change)>,
    /// Shortest and longest delay of a message or command, nanoseconds.
    pub delay: (u64, u64),
    /// Threads that the host wakes late.
    pub late_wakes: Option<LateWakes>,
    /// Nobody arbitrates: the GPU serves all that the tenants launch.
    pub bare: bool,
    /// What a change of the GPU to another tenant's work takes, nanoseconds.
    pub switch: u64,
    /// The seed.
    pub seed: u64,
    /// Nanoseconds to simulate.
    pub until: u64,
}

/// Runs the simulation.
#[must_use]
pub fn simulate(scenario: &Scenario) -> Figures {
    let mut world = World::new(scenario);
    world.run();
    world.figures()
}
