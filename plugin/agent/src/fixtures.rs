//! A node for tests, with a GPU that four replicas share, and what kubelet and people may do to it: views above the agent
//! are asked beside the same storm as the agent itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::Actor;
use tessera_model::gpu::Gpu;
use tessera_model::replica::Replica;
use tessera_tenant::delivery::Delivery;
use tessera_tenant::shim_install::{PRELOAD, SHIM};
use tessera_view::change::{ResetQuotaRequest, SetQuotaRequest, Target};

use crate::Agent;
use crate::engines::Engine;

pub const GIB: u64 = 1 << 30;
pub const GPU: &str = "GPU-a";
pub const RESOURCE: &str = "tessera.dev/gpu";
/// All that is sold of it, in bytes.
pub const MEMORY: u64 = 16 * GIB;

pub fn config(dir: &Path, sells_claims: bool) -> Config {
    let at = |name: &str| dir.join(name).display().to_string();
    Config::parse(&format!(
        "[paths]\nledger = \"{}\"\npages = \"{}\"\nshim = \"{}\"\nadmin = \"{}\"\n\
         [cdi]\ndirectory = \"{}\"\ngpu_kind = \"nvidia.com/gpu\"\n\
         [container]\ndevice_list_strategy = \"cdi-cri\"\n\
         [gpus]\nreserve = 0\n[share]\nreplicas = 4\n\
         [dra]\nenabled = {sells_claims}\n",
        at("ledger"),
        at("pages"),
        at("shim"),
        at("admin"),
        at("cdi"),
    ))
    .expect("a configuration")
}

/// The node's agent, whose GPU is sold by replicas, or by claims. Call it within a runtime.
pub fn open(dir: &Path, engines: Vec<Arc<dyn Engine>>, sells_claims: bool) -> Arc<Agent> {
    let config = config(dir, sells_claims);
    let home = config.paths.shim.join("v1");
    std::fs::create_dir_all(&home).expect("a directory");
    std::fs::create_dir_all(&config.paths.pages).expect("a directory");
    let delivery = Delivery { shim: home.join(SHIM), preload: home.join(PRELOAD) };
    std::fs::write(&delivery.shim, "a library").expect("a file");
    std::fs::write(&delivery.preload, "a line").expect("a file");
    let gpu = Gpu { memory_bytes: MEMORY, ..Gpu::example(GPU, 0) };
    Agent::open_with(config, &[gpu], delivery, Arc::default(), engines).expect("an agent")
}

/// What may happen to the GPU. Sets of replicas have a bit for each.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Allocate(u8),
    /// A container starts with a set that was allocated at some time.
    Start(u8),
    /// Somebody sets a quota, in bytes.
    Quota(u8, u64),
    Reset(u8),
    Release(u8),
}

impl Step {
    /// The step that a number stands for: any number is one.
    pub fn of(number: u64) -> Self {
        let mut rest = number;
        let mut next = |most: u64| {
            let next = rest % most;
            rest /= most;
            next
        };
        let kind = next(14);
        // Of an init container and its app, and two beside them.
        let set = [0b0001, 0b0011, 0b0100, 0b1100][usize::try_from(next(4)).unwrap_or_default()];
        match kind {
            0..4 => Step::Allocate(set),
            4..8 => Step::Start(set),
            // The sizes of one and of two replicas, of all that there is, and others.
            8..10 => Step::Quota(set, (next(8) + 1) * 2 * GIB),
            10..12 => Step::Quota(set, GIB / 2 + next(MEMORY - GIB / 2)),
            12 => Step::Reset(set),
            _ => Step::Release(set),
        }
    }

    /// Does it; what is refused changes nothing. `known` has a bit for each set that was allocated at some time. Call it
    /// within a runtime.
    pub fn take(self, agent: &Agent, known: &AtomicU64) {
        match self {
            Step::Allocate(set) => {
                if agent.allocate(RESOURCE, &[ids(set)]).is_ok() {
                    known.fetch_or(1 << set, Ordering::Relaxed);
                }
            }
            Step::Start(set) if known.load(Ordering::Relaxed) >> set & 1 == 1 => {
                let _ = agent.pre_start(RESOURCE, &ids(set));
            }
            Step::Start(_) => {}
            Step::Quota(set, bytes) => {
                let (target, memory_limit_bytes) = (target(set), Some(bytes));
                let request =
                    SetQuotaRequest { target, memory_limit_bytes, ..SetQuotaRequest::default() };
                let _ = agent.set_quota(&request, Actor::Plugin);
            }
            Step::Reset(set) => {
                let target = target(set);
                let request = ResetQuotaRequest { target, ..ResetQuotaRequest::default() };
                let _ = agent.reset_quota(&request, Actor::Plugin);
            }
            Step::Release(set) => agent.release(&[id(set)]).expect("a release"),
        }
    }
}

pub fn ids(set: u8) -> Vec<String> {
    (0..4).filter(|bit| set >> bit & 1 == 1).map(|bit| Replica::id(GPU, bit)).collect()
}

fn id(set: u8) -> AllocationId {
    AllocationId::of(RESOURCE, ids(set).iter().map(String::as_str))
}

fn target(set: u8) -> Target {
    Target { name: id(set).to_string(), ..Target::default() }
}

/// Asks `look` again and again, beside threads that take the steps. Returns how often it was asked.
pub fn storm(
    agent: &Agent,
    runtime: &tokio::runtime::Handle,
    steps: Vec<Vec<Step>>,
    mut look: impl FnMut(),
) -> u64 {
    let known = AtomicU64::new(0);
    let take = |steps: Vec<Step>| {
        let _in = runtime.enter();
        steps.into_iter().for_each(|step| step.take(agent, &known));
    };
    let take = &take;
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            steps.into_iter().map(|steps| scope.spawn(move || take(steps))).collect();
        let mut looks = 0;
        while workers.iter().any(|worker| !worker.is_finished()) {
            look();
            looks += 1;
        }
        looks
    })
}
