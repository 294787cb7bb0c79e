//! GPUs for tests.

use tessera_model::gpu::Gpu;
use tessera_model::mig::MigInstance;
use tessera_model::sharing::Compute;

use super::Published;
use tessera_agent::front_end::dra::DraGpu;

pub(super) const MIB: u64 = 1 << 20;

/// A GPU of 80 GiB, a quarter of which is a replica's share.
pub(super) fn gpu(uuid: &str, index: u32) -> DraGpu {
    DraGpu {
        gpu: Gpu::example(uuid, index),
        driver_version: Some("580.65.06".to_owned()),
        cuda_version: Some((13, 0)),
        compute_capability: Some((9, 0)),
        memory_bytes: 81_408 * MIB,
        grown_bytes: 0,
        free_bytes: 81_408 * MIB,
        default_memory_bytes: 20_352 * MIB,
        default_cores_millis: 250,
        default_compute: Compute::Burst,
        context_bytes: 512 * MIB,
        sick: None,
        cordon: None,
        moving: false,
    }
}

/// An instance of GPU 0.
pub(super) fn mig(uuid: &str, index: u32) -> DraGpu {
    let mut instance = gpu(uuid, 0);
    instance.gpu.name = "NVIDIA A100-SXM4-80GB MIG 1g.10gb".to_owned();
    instance.gpu.mig = Some(MigInstance {
        parent_uuid: "GPU-parent".to_owned(),
        parent_index: 0,
        index,
        gpu_instance: index + 7,
        compute_instance: 0,
    });
    instance.memory_bytes = 9216 * MIB;
    instance.default_memory_bytes = 2304 * MIB;
    instance
}

/// Nothing of it is held.
pub(super) fn published(gpu: DraGpu) -> Published {
    let gpu = DraGpu { free_bytes: gpu.memory_bytes, ..gpu };
    Published { pcie_root: Some("pci0000:00".to_owned()), gpu }
}
