//! What the DRA front end may publish, and how its driver stands.

use std::sync::Arc;

use tessera_gpu::Facts;
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_model::sharing::Compute;
use tessera_rules::capacity::Capacity;
use tessera_rules::front_end::FrontEnd;
use tessera_rules::room::Left;

use super::AllocateError;
use crate::Agent;

/// How the DRA driver stands, for views.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraStatus {
    /// The driver's name.
    pub driver: String,
    /// Kubelet has registered it.
    pub registered: bool,
    /// Why kubelet has not; empty where it has.
    pub registration_error: String,
    /// The pool, which is the node's name; empty while that is not known.
    pub pool: String,
    /// What the API server has, in a word.
    pub publication: &'static str,
    /// Devices that should be published.
    pub devices: usize,
    /// ResourceSlices that they take.
    pub slices: usize,
    /// The pool's generation.
    pub generation: i64,
    /// Writes of slices since the start.
    pub writes: u64,
    /// Times that another removed slices.
    pub wipes: u64,
}

/// A GPU or MIG instance that the configuration has sold by claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraGpu {
    /// The device.
    pub gpu: Gpu,
    /// The driver's version, as NVML prints it, where it is known.
    pub driver_version: Option<String>,
    /// The CUDA version that the driver speaks, major and minor, where it is known.
    pub cuda_version: Option<(u32, u32)>,
    /// CUDA compute capability, major and minor, where it is known.
    pub compute_capability: Option<(u32, u32)>,
    /// Bytes that shares may add up to: what the capacity rule leaves.
    pub memory_bytes: u64,
    /// Bytes of those that quotas gave to claims beyond what was allocated: the scheduler must not give them again.
    pub grown_bytes: u64,
    /// Bytes that count for no share.
    pub free_bytes: u64,
    /// Bytes of one replica's share: what a claim gets that states no memory.
    pub default_memory_bytes: u64,
    /// Thousandths of GPU time of one replica's share.
    pub default_cores_millis: u32,
    /// What a share of GPU time means where a claim's parameters do not say.
    pub default_compute: Compute,
    /// Bytes that the first CUDA context in a share takes.
    pub context_bytes: u64,
    /// Why nothing of it can be had now.
    pub sick: Option<String>,
    /// The cordon: originator and reason.
    pub cordon: Option<String>,
    /// The device plugin still has allocations on it: it is not published yet.
    pub moving: bool,
}

impl Agent {
    /// The GPUs that are sold by claims, in NVML's order. `facts` is what the driver says of them.
    pub fn dra_gpus(&self, facts: &Facts) -> Vec<DraGpu> {
        let (catalogue, config) = (self.inventory().catalogue(), self.config());
        let sold = catalogue.gpus.values().filter(|sold| sold.seller == FrontEnd::Dra);
        // All of one moment.
        let mut records = self.allocations().records();
        records.retain(|record| record.is_live());
        let left =
            |capacity, uuid: &str| Left::beside(capacity, uuid, records.iter().map(|one| &**one));
        let grown = |uuid: &str| {
            records.iter().map(|one| one.grown_bytes(uuid)).fold(0, u64::saturating_add)
        };
        let mut gpus: Vec<DraGpu> = sold
            .map(|sold| (sold, Capacity::of(&sold.gpu, &config)))
            .map(|(sold, capacity)| DraGpu {
                gpu: sold.gpu.clone(),
                driver_version: facts.driver_version.clone(),
                cuda_version: facts.cuda_version,
                compute_capability: facts.compute_capability.get(&sold.gpu.uuid).copied(),
                memory_bytes: capacity.sellable(),
                grown_bytes: grown(&sold.gpu.uuid),
                free_bytes: left(capacity, &sold.gpu.uuid).memory_bytes,
                default_memory_bytes: sold.default_share.limit.memory_bytes,
                default_cores_millis: sold.default_share.limit.cores_millis,
                default_compute: sold.default_share.compute,
                context_bytes: sold.context_overhead_bytes,
                sick: sold.sick.clone(),
                cordon: self.inventory().cordon_of(&sold.gpu.uuid),
                moving: self.allocations().is_moving(sold),
            })
            .collect();
        gpus.sort_by(|a, b| (a.gpu.index, &a.gpu.uuid).cmp(&(b.gpu.index, &b.gpu.uuid)));
        gpus
    }

    /// Live records of claims.
    pub fn dra_records(&self) -> Vec<Arc<Record>> {
        let mut records = self.allocations().records();
        records.retain(|record| record.is_live() && record.origin.claim().is_some());
        records
    }

    /// Names of CDI devices that show a GPU to a container and grant nothing of it: for monitors. What they need is
    /// on disk then, and stays. Blocking.
    ///
    /// # Errors
    /// A GPU that is not here, a driver that cannot be delivered, or a CDI directory that cannot be written.
    pub fn dra_view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        self.allocations().view(uuid)
    }
}
