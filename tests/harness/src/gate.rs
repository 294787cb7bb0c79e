//! A tenant of `tests/programs/gate_work.c` and an arbiter of the test's, on a machine with one GPU.

use crate::{Arbiter, Conversation, MIB, Pages, Preloaded, SimGpu, compile_c};

/// Its configuration.
pub const SIM: &str = r#"
[memory]
context_overhead = "1MiB"
[costs]
device_gb_per_s = 100
[[kernel]]
name = "spin"
parameter = 0
[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000000"
memory = "8GiB"
"#;

/// A machine and the pages of one allocation.
#[derive(Debug)]
pub struct Stage {
    pub sim: SimGpu,
    /// Of an allocation that has a gigabyte of it.
    pub pages: Pages,
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

impl Stage {
    /// A machine on which nobody works.
    pub fn new() -> Self {
        let sim = SimGpu::start(SIM).that_writes();
        let pages = Pages::create(&[(sim.uuid(0), 1024 * MIB)]);
        Self { sim, pages }
    }

    /// The arbiter of the pages, with the gate closed.
    pub fn arbiter(&self) -> Arbiter {
        Arbiter::start(&self.pages)
    }

    /// A process of the tenant that is ready to work.
    pub fn tenant(&self) -> Conversation {
        self.tenant_of(Preloaded::new(compile_c("gate_work")))
    }

    pub fn tenant_of(&self, program: Preloaded) -> Conversation {
        let mut tenant = Conversation::start(program.sim(&self.sim).pages(&self.pages));
        tenant.must("init");
        tenant
    }

    /// GPU time that a tenant's process has used, markers aside.
    pub fn worked_ns(&self, tenant: &Conversation) -> u64 {
        self.sim.worked(0, tenant.pid()).ns
    }
}

/// Whether what a worker of the program began is over.
pub fn is_over(tenant: &mut Conversation, worker: usize) -> bool {
    tenant.must(&format!("state {worker}")) == 1
}
