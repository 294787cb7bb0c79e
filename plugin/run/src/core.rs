//! The core of a machine without a plugin: one tenant, whose record is in memory alone. It answers
//! [`FrontDoor`] as the agent does, with the user's private pages and the arbiter that the user's runs share.

use std::sync::{Arc, Mutex};

use tessera_agent::engines::EngineError;
use tessera_agent::front_end::{AllocateError, ContainerAllocateResponse, FrontDoor};
use tessera_config::{Config, Leases};
use tessera_model::allocation_id::AllocationId;
use tessera_model::clock::{monotonic_ns, unix_ms};
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_model::sharing::Compute;
use tessera_region::layout::PAGES_DIR_ENV;
use tessera_region::quota::QuotaSpec;
use tessera_rules::allocate::Catalogue;
use tessera_rules::ask::{self, Ask};
use tessera_rules::refusal::Refusal;
use tessera_system::locks::lock;
use tessera_tenant::regions;

use crate::keeper::Keeper;
use crate::pages::{self, Pages};
use crate::root::Root;

/// See the module's documentation.
pub(super) struct PrivateCore {
    catalogue: Catalogue,
    leases: Leases,
    /// Of this run, in the pages and among those of this user: see [`crate::nesting`].
    name: String,
    state: Mutex<State>,
}

struct State {
    /// Until there are pages.
    root: Option<Root>,
    held: Option<Held>,
}

/// What holds the tenant; taken down in this order.
struct Held {
    id: AllocationId,
    pages: Arc<Pages>,
    keeper: Keeper,
}

impl PrivateCore {
    /// Over these GPUs, below `root`.
    pub(super) fn new(root: Root, gpus: &[Gpu], config: &Config) -> Self {
        PrivateCore {
            catalogue: Catalogue::new(gpus, config),
            leases: config.compute.clone(),
            // Pids come again, and what a killed run has left may still be served.
            name: format!("run-{}-{:x}", std::process::id(), monotonic_ns()),
            state: Mutex::new(State { root: Some(root), held: None }),
        }
    }

    /// The name of the one allocation that there will be.
    pub(super) fn id(&self) -> AllocationId {
        AllocationId::of("run", [self.name.as_str()])
    }

    /// The tenant's pages, once they are made.
    pub(super) fn pages(&self) -> Option<Arc<Pages>> {
        lock(&self.state).held.as_ref().map(|held| Arc::clone(&held.pages))
    }

    fn make(&self, root: &mut Root, record: &Record) -> Result<Arc<Pages>, AllocateError> {
        pages::sweep(root);
        let spec = QuotaSpec { allocation: self.name.clone(), ..regions::spec(record) };
        let made = Pages::create(root, &spec);
        Ok(Arc::new(made.map_err(|error| EngineError(format!("{error:#}")))?))
    }
}

impl FrontDoor for PrivateCore {
    fn grant(&self, asks: &[Ask]) -> Result<Vec<ContainerAllocateResponse>, AllocateError> {
        let planned = asks.iter().map(|ask| match ask {
            Ask::Share(share) => ask::plan(&self.catalogue, share),
            // Kubelet's alone, and of what is kept longer than a run.
            Ask::Replicas { .. } | Ask::Recorded(_) => Err(Refusal::Empty),
        });
        let planned = planned.collect::<Result<Vec<Record>, _>>()?;
        let mut state = lock(&self.state);
        let mut delivered = Vec::new();
        for planned in planned {
            let record = Record { generation: 1, allocated_unix_ms: unix_ms(), ..planned };
            let Some(mut root) = state.root.take() else {
                return Err(Refusal::Ended(record.id.clone()).into());
            };
            let pages = self.make(&mut root, &record)?;
            let keeper = Keeper::start(root, &self.leases);
            if record.grants.iter().any(|grant| grant.compute != Compute::None) {
                keeper.wait_for(pages.dir());
            }
            let dir = pages.dir().to_string_lossy().into_owned();
            let envs = [(PAGES_DIR_ENV.to_owned(), dir)].into();
            delivered.push(ContainerAllocateResponse { envs, ..Default::default() });
            state.held = Some(Held { id: record.id.clone(), pages, keeper });
        }
        Ok(delivered)
    }

    fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError> {
        let mut state = lock(&self.state);
        let held = state.held.take_if(|held| ids.contains(&held.id));
        drop(state);
        if let Some(Held { pages, keeper, .. }) = held {
            drop(pages);
            // After the pages, whose directory is then gone.
            keeper.end();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::origin::Origin;
    use tessera_region::quota::QuotaReader;
    use tessera_rules::ask::{ShareAsk, SharePart};

    fn core(base: &std::path::Path) -> PrivateCore {
        let gpus: Vec<Gpu> =
            [("GPU-b", 0), ("GPU-a", 1)].map(|(uuid, index)| Gpu::example(uuid, index)).into();
        PrivateCore::new(Root::open_in(base, "").unwrap(), &gpus, &Config::default())
    }

    fn ask(core: &PrivateCore, uuids: &[&str]) -> Ask {
        let part = |uuid: &&str| SharePart {
            uuid: (*uuid).to_owned(),
            memory_bytes: 2 << 30,
            cores_millis: 300,
            compute: Compute::None,
        };
        let parts = uuids.iter().map(part).collect();
        Ask::Share(ShareAsk { id: core.id(), origin: Origin::Run, parts })
    }

    #[test]
    fn a_run_gets_pages_by_the_same_door_and_leaves_nothing() {
        let base = tempfile::tempdir().unwrap();
        let core = core(base.path());
        let granted = core.grant(&[ask(&core, &["GPU-b", "GPU-a"])]).unwrap();
        let pages = core.pages().unwrap();
        let dir = std::path::PathBuf::from(&granted[0].envs[PAGES_DIR_ENV]);
        assert_eq!(dir, pages.dir());
        let quota = QuotaReader::attach(&dir).unwrap();
        let uuids: Vec<String> = (0..2).map(|gpu| quota.uuid(gpu).to_string()).collect();
        assert_eq!(uuids, ["GPU-a", "GPU-b"]);
        assert_eq!((quota.memory_limit(0), quota.gpu_count()), (2 << 30, 2));
        drop((quota, pages));
        core.release(&[core.id()]).unwrap();
        assert!(!dir.exists() && core.pages().is_none());
        core.release(&[core.id()]).unwrap();
    }

    #[test]
    fn what_no_gpu_here_can_give_is_refused_before_anything_is_made() {
        let base = tempfile::tempdir().unwrap();
        let core = core(base.path());
        let error = core.grant(&[ask(&core, &["GPU-z"])]).unwrap_err().to_string();
        assert!(error.contains("GPU-z is not shared"), "{error}");
        assert!(core.pages().is_none());
    }
}
