//! For the tests: GPUs, records, and a core in memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_agent::front_end::{AllocateError, Committed, Delivered, FrontDoor, Transaction};
use tessera_config::Config;
use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;
use tessera_model::origin::{ClaimResult, ClaimShare, Origin};
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_rules::ask::{Ask, Plan};
use tessera_rules::refusal::Refusal;
use tokio::sync::watch;

use crate::door::{Core, DraGpu};

/// A GPU with so many GiB to share; a replica is a quarter of it.
pub fn gpu(uuid: &str, gib: u64) -> DraGpu {
    DraGpu {
        gpu: Gpu { memory_bytes: gib << 30, ..Gpu::example(uuid, 0) },
        driver_version: Some("580.65.06".into()),
        cuda_version: Some((13, 0)),
        compute_capability: Some((9, 0)),
        memory_bytes: gib << 30,
        grown_bytes: 0,
        free_bytes: gib << 30,
        default_memory_bytes: gib << 28,
        default_cores_millis: 250,
        default_compute: Compute::Burst,
        context_bytes: 0,
        sick: None,
        cordon: None,
        moving: false,
    }
}

/// The record of a claim's request with these devices, and nothing granted.
pub fn claim_record(uid: &str, request: &str, devices: &[(&str, Option<&str>)]) -> Arc<Record> {
    let result = |(device, share): &(&str, Option<&str>)| ClaimResult {
        device: (*device).to_owned(),
        share_id: share.map(str::to_owned),
    };
    let share = ClaimShare {
        uid: uid.into(),
        namespace: "team".into(),
        name: format!("claim-{uid}"),
        request: request.into(),
        pool: "node".into(),
        results: devices.iter().map(result).collect(),
        asked: BTreeMap::new(),
    };
    let record = Record::new(share.allocation_id(), 1, Vec::new());
    Arc::new(Record { origin: Origin::Claim(Box::new(share)), cdi: true, ..record })
}

/// What outlives a plugin: ledger, pages and CDI files, as far as the tests look at them.
#[derive(Debug, Default)]
pub struct Disk {
    /// The ledger.
    pub records: BTreeMap<AllocationId, Arc<Record>>,
    /// How often the pages of an allocation were made.
    pub pages: BTreeMap<AllocationId, u32>,
    generation: u64,
    /// Commits that will fail.
    pub refuse_commits: u32,
    /// Deliveries that will fail, as with a CDI directory that is read-only.
    pub refuse_deliveries: u32,
}

/// A core in memory, over a disk that outlives it.
#[derive(Debug)]
pub struct FakeCore {
    disk: Arc<Mutex<Disk>>,
    gpus: Mutex<Vec<DraGpu>>,
    events: watch::Sender<u64>,
}

impl FakeCore {
    /// With these GPUs, over what an earlier one left.
    pub fn new(gpus: Vec<DraGpu>, disk: Arc<Mutex<Disk>>) -> Self {
        FakeCore { disk, gpus: Mutex::new(gpus), events: watch::Sender::new(0) }
    }

    /// What outlives it.
    pub fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a GPU, and says so.
    pub fn change(&self, uuid: &str, change: impl FnOnce(&mut DraGpu)) {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.gpu.uuid == uuid) {
            change(gpu);
        }
        drop(gpus);
        self.events.send_modify(|number| *number += 1);
    }

    fn gpu(&self, uuid: &str) -> Option<DraGpu> {
        self.gpus().into_iter().find(|gpu| gpu.gpu.uuid == uuid)
    }

    /// The capacity rule, simply: what is live and these fit into the GPU.
    fn check_room(&self, disk: &Disk, plans: &[Plan]) -> Result<(), Refusal> {
        let live = disk.records.values().flat_map(|record| &record.grants);
        for asked in plans.iter().flat_map(|plan| &plan.grants) {
            let uuid = &asked.uuid;
            let gpu = self.gpu(uuid).ok_or_else(|| Refusal::UnknownGpu(uuid.clone()))?;
            if let Some(reason) = gpu.cordon {
                return Err(Refusal::Cordoned { uuid: uuid.clone(), reason });
            }
            let held = live.clone().filter(|grant| grant.uuid == *uuid);
            let (bytes, millis) = held.fold((0, 0), |(bytes, millis), grant| {
                (bytes + grant.memory_limit_bytes, millis + grant.cores_millis)
            });
            let all = plans.iter().flat_map(|plan| &plan.grants).filter(|g| g.uuid == *uuid);
            let (more, time) = all.fold((0, 0), |(bytes, millis), grant| {
                (bytes + grant.memory_limit_bytes, millis + grant.cores_millis)
            });
            if bytes + more > gpu.memory_bytes {
                return Err(Refusal::MemoryOversold {
                    uuid: uuid.clone(),
                    asked_bytes: more,
                    held_bytes: bytes,
                    grown_bytes: 0,
                    sellable_bytes: gpu.memory_bytes,
                });
            }
            if millis + time > 1000 {
                let (asked_millis, held_millis) = (time, millis);
                let uuid = uuid.clone();
                return Err(Refusal::CoresOversold { uuid, asked_millis, held_millis });
            }
        }
        Ok(())
    }
}

struct FakeTransaction<'a> {
    core: &'a FakeCore,
    committed: Vec<Committed>,
}

impl Transaction for FakeTransaction<'_> {
    fn committed(&self) -> &[Committed] {
        &self.committed
    }

    fn materialise(self: Box<Self>) -> Result<Vec<Delivered>, AllocateError> {
        let FakeTransaction { core, committed } = *self;
        let mut disk = core.disk();
        if disk.refuse_deliveries > 0 {
            disk.refuse_deliveries -= 1;
            for one in committed.iter().filter(|one| one.is_new) {
                disk.records.remove(&one.record.id);
            }
            return Err(Refusal::NoRoom { uuid: "GPU-read-only-cdi".into() }.into());
        }
        let deliver = |one: &Committed| {
            if one.is_new {
                *disk.pages.entry(one.record.id.clone()).or_default() += 1;
            }
            let cdi_devices = vec![format!("tessera.dev/share={}", one.record.id)];
            Delivered { response: ContainerAllocateResponse::default(), cdi_devices }
        };
        Ok(committed.iter().map(deliver).collect())
    }
}

impl FrontDoor for FakeCore {
    fn plan(&self, ask: &Ask) -> Result<Plan, Refusal> {
        let ask = match ask {
            Ask::Share(ask) => ask,
            Ask::Recorded(id) => {
                let record = self.disk().records.get(id).cloned();
                let record = record.ok_or_else(|| Refusal::Ended(id.clone()))?;
                return Ok(Plan::of(&record));
            }
            Ask::Replicas { .. } => return Err(Refusal::Empty),
        };
        let mut grants: BTreeMap<&str, Grant> = BTreeMap::new();
        for part in &ask.parts {
            let gpu = self.gpu(&part.uuid).ok_or_else(|| Refusal::UnknownGpu(part.uuid.clone()))?;
            if let Some(reason) = gpu.sick {
                return Err(Refusal::Dead { uuid: part.uuid.clone(), reason });
            }
            let grant = grants.entry(&part.uuid).or_insert_with(|| Grant {
                uuid: part.uuid.clone(),
                memory_limit_bytes: 0,
                context_overhead_bytes: 0,
                cores_millis: 0,
                compute: part.compute,
            });
            grant.memory_limit_bytes += part.memory_bytes;
            grant.cores_millis += part.cores_millis;
        }
        Ok(Plan {
            id: ask.id.clone(),
            resource: String::new(),
            replicas: Vec::new(),
            grants: grants.into_values().collect(),
            origin: ask.origin.clone(),
        })
    }

    fn commit(&self, plans: &[Plan]) -> Result<Box<dyn Transaction + '_>, AllocateError> {
        let mut disk = self.disk();
        let is_new = |plan: &&Plan| !disk.records.contains_key(&plan.id);
        let new: Vec<Plan> = plans.iter().filter(is_new).cloned().collect();
        self.check_room(&disk, &new)?;
        if disk.refuse_commits > 0 {
            disk.refuse_commits -= 1;
            return Err(Refusal::NoRoom { uuid: "GPU-full-disk".into() }.into());
        }
        let commit = |plan: &Plan| {
            if let Some(record) = disk.records.get(&plan.id) {
                return Committed { record: Arc::clone(record), is_new: false };
            }
            disk.generation += 1;
            let record = Record::new(plan.id.clone(), disk.generation, plan.grants.clone());
            let record = Arc::new(Record { origin: plan.origin.clone(), cdi: true, ..record });
            disk.records.insert(plan.id.clone(), Arc::clone(&record));
            Committed { record, is_new: true }
        };
        let committed = plans.iter().map(commit).collect();
        drop(disk);
        self.events.send_modify(|number| *number += 1);
        Ok(Box::new(FakeTransaction { core: self, committed }))
    }

    fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError> {
        let mut disk = self.disk();
        for id in ids {
            disk.records.remove(id);
            disk.pages.remove(id);
        }
        drop(disk);
        self.events.send_modify(|number| *number += 1);
        Ok(())
    }

    fn events(&self) -> watch::Receiver<u64> {
        self.events.subscribe()
    }
}

impl Core for FakeCore {
    fn gpus(&self) -> Vec<DraGpu> {
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn config(&self) -> Arc<Config> {
        Arc::new(Config::parse("[dra]\nenabled = true").expect("a valid configuration"))
    }

    fn claims(&self) -> Vec<Arc<Record>> {
        self.disk().records.values().cloned().collect()
    }

    fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        Ok(vec![format!("tessera.dev/view={}", crate::names::device(uuid))])
    }
}
