//! What a CUDA context takes of a GPU before anything is allocated.
//!
//! It keeps a stack for every thread that the GPU can have resident, of 1 KiB by default, and about
//! 1.5 MiB for each multiprocessor. So contexts of GPUs with 34, 82, 142 and 188 multiprocessors, all
//! of 1,536 threads, were seen to take 107, 256, 426 and 555 MiB: 3.0 to 3.1 MiB for each.
//!
//! That is a formula. What a driver's contexts really take is measured where one is seen bare
//! (`tessera_agent::observe::context`) and then goes before it.

use nvml_wrapper::Device;

/// Of each resident thread.
const STACK_BYTES: u64 = 1 << 10;
/// Of each multiprocessor.
const STATE_BYTES: u64 = 3 << 19;

/// Compute capability, major and minor.
pub(super) type Capability = (i32, i32);

/// What a context takes of a device, or of an instance of a GPU of this `capability`; `None` where NVML
/// does not tell. NVML counts the cores of whole GPUs, and the multiprocessors of instances.
pub(super) fn bytes_of(
    device: &Device<'_>,
    is_instance: bool,
    capability: Option<Capability>,
) -> Option<u64> {
    let capability = capability?;
    let multiprocessors = if is_instance {
        device.attributes().ok()?.multiprocessor_count
    } else {
        device.num_cores().ok()?.checked_div(cores_of_each(capability))?
    };
    (multiprocessors > 0).then(|| bytes(multiprocessors, capability))
}

/// What a context takes of a GPU with so many multiprocessors.
fn bytes(multiprocessors: u32, capability: Capability) -> u64 {
    u64::from(multiprocessors) * (threads_of_each(capability) * STACK_BYTES + STATE_BYTES)
}

/// FP32 cores of a multiprocessor, which is what NVML counts: CUDA Programming Guide, "Arithmetic
/// Instructions".
fn cores_of_each(capability: Capability) -> u32 {
    match capability {
        (..=6, _) | (8, 6..) | (9.., _) => 128,
        _ => 64,
    }
}

/// Threads that a multiprocessor can have resident: CUDA Programming Guide, "Technical Specifications
/// per Compute Capability".
fn threads_of_each(capability: Capability) -> u64 {
    match capability {
        (7, 5) => 1024,
        (8, 6..) | (11.., _) => 1536,
        _ => 2048,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Multiprocessors, capability, and MiB as others saw or as is expected of the GPU.
    #[test]
    fn contexts_take_what_was_seen() {
        for (name, multiprocessors, capability, seen) in [
            ("RTX 4060 Ti", 34, (8, 9), 107),
            ("RTX 3090", 82, (8, 6), 256),
            ("RTX 6000 Ada", 142, (8, 9), 426),
            ("RTX PRO 6000", 188, (12, 0), 555),
            ("L4", 58, (8, 9), 175),
            ("A100", 108, (8, 0), 380),
            ("H100", 132, (9, 0), 460),
        ] {
            let bytes = bytes(multiprocessors, capability);
            let seen = seen * MIB;
            assert!(bytes.abs_diff(seen) <= seen / 20, "{name}: {} MiB", bytes / MIB);
        }
    }

    #[test]
    fn cores_are_counted_by_architecture() {
        for (cores, capability, multiprocessors) in [
            (3840, (6, 1), 30),
            (5120, (7, 0), 80),
            (2560, (7, 5), 40),
            (6912, (8, 0), 108),
            (7424, (8, 9), 58),
            (16896, (9, 0), 132),
            (24064, (12, 0), 188),
        ] {
            assert_eq!(cores / cores_of_each(capability), multiprocessors, "{capability:?}");
        }
    }
}
