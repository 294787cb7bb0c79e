//! Thread block clusters: CUDA Driver API, `cuOccupancyMaxActiveClusters`,
//! `cuOccupancyMaxPotentialClusterSize`. A cluster's blocks run within one group of 16 multiprocessors.

use crate::abi::{exports, get, put};
use crate::errors::Result;
use crate::handle::resolve;
use crate::launch::{Shape, occupancy};
use crate::module::Function;
use crate::stream::{Flavour, peek};
use std::ffi::{c_int, c_uint};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUfunction, CUlaunchConfig, CUresult};

const CUDA_ERROR_INVALID_CLUSTER_SIZE: CUresult = 912;
/// Multiprocessors that can run one cluster together.
const GROUP: u32 = 16;
/// The largest cluster that every GPU of compute capability 9.0 launches, and the largest of these.
const PORTABLE: u32 = 8;
const NON_PORTABLE: u32 = 16;

/// `CUlaunchAttribute`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Attribute {
    id: c_uint,
    pad: c_uint,
    value: [c_uint; 16],
}
const CLUSTER_DIMENSION: c_uint = 4;

/// The blocks of a cluster that a configuration asks for.
fn asked(config: &CUlaunchConfig) -> Result<Option<u32>> {
    let attributes = config.attrs.cast::<Attribute>();
    for i in 0..config.numAttrs as usize {
        let attribute: Attribute = get(attributes.wrapping_add(i))?;
        if attribute.id == CLUSTER_DIMENSION {
            let blocks = attribute.value[..3].iter().map(|&n| u64::from(n)).product::<u64>();
            let blocks = u32::try_from(blocks).ok().filter(|n| *n > 0);
            return blocks.map(Some).ok_or(CUDA_ERROR_INVALID_CLUSTER_SIZE);
        }
    }
    Ok(None)
}

/// The most blocks that a cluster of this kernel may have.
fn most(function: &Function, capability: u32) -> u32 {
    match (capability >= 9, function.allows_non_portable_clusters()) {
        (false, _) => 1,
        (true, false) => PORTABLE,
        (true, true) => NON_PORTABLE,
    }
}

/// The kernel, the blocks that a multiprocessor runs of it, multiprocessors and compute capability.
fn launched(
    f: CUfunction,
    config: *const CUlaunchConfig,
) -> Result<(&'static Function, u32, u32, u32, CUlaunchConfig)> {
    let config = get(config)?;
    let function: &'static Function = resolve(f)?;
    let context = peek(config.hStream, Flavour::Legacy)?.context();
    let shape =
        Shape { grid: [1, 1, 1], block: [config.blockDimX, config.blockDimY, config.blockDimZ] };
    shape.check()?;
    let threads = shape.block.iter().map(|&n| u64::from(n)).product::<u64>();
    let threads = c_int::try_from(threads).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    let blocks = occupancy(f, threads, config.sharedMemBytes as usize)?;
    let capability = context.device.config.compute_capability.0;
    Ok((function, blocks.cast_unsigned(), context.sm_count(), capability, config))
}

exports! {
    fn cuOccupancyMaxActiveClusters(out: *mut c_int, f: CUfunction, config: *const CUlaunchConfig) {
        let (function, blocks, sms, capability, config) = launched(f, config)?;
        // "Without required sizes, the cluster size must be specified in config".
        let size = asked(&config)?.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if size > most(function, capability) {
            return Err(CUDA_ERROR_INVALID_CLUSTER_SIZE);
        }
        let in_groups = sms / GROUP * (GROUP * blocks / size);
        let in_rest = sms % GROUP * blocks / size;
        put(out, c_int::try_from(in_groups + in_rest).unwrap_or(c_int::MAX))
    }
    // "The cluster dimensions in config are ignored."
    fn cuOccupancyMaxPotentialClusterSize(out: *mut c_int, f: CUfunction, config: *const CUlaunchConfig) {
        let (function, blocks, sms, capability, _) = launched(f, config)?;
        let room = blocks.saturating_mul(sms.min(GROUP));
        put(out, most(function, capability).min(room).max(1).cast_signed())
    }
}
