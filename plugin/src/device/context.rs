//! What a CUDA context takes of a GPU before anything is allocated.
//!
//! It keeps a stack for every thread that the GPU can have resident, of 1 KiB by default, and about
//! 1.5 MiB for each multiprocessor. So contexts of GPUs with 34, 82, 142 and 188 multiprocessors, all
//! of 1,536 threads, were seen to take 107, 256, 426 and 555 MiB: 3.0 to 3.1 MiB for each.
//!
//! That is a formula. What a driver's contexts really take is measured where one is seen bare
//! ([`crate::observe::context`]) and then goes before it.

use nvml_wrapper::Device;

use super::Gpu;
use crate::config;

/// Where the GPU does not tell how many multiprocessors it has: enough for most.
const UNKNOWN_BYTES: u64 = 512 << 20;
/// Of each resident thread.
const STACK_BYTES: u64 = 1 << 10;
/// Of each multiprocessor.
const STATE_BYTES: u64 = 3 << 19;

/// Compute capability, major and minor.
type Capability = (i32, i32);

/// Where a context's constant comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextSource {
    /// `gpus.context_overhead` says it.
    Configured,
    /// A bare context of this GPU and driver was seen to take it.
    Measured,
    /// By the GPU's multiprocessors and their threads.
    Formula,
    /// For GPUs whose multiprocessors nobody tells.
    Default,
}

impl ContextSource {
    /// As `status`, `explain` and metrics call it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ContextSource::Configured => "configured",
            ContextSource::Measured => "measured",
            ContextSource::Formula => "formula",
            ContextSource::Default => "default",
        }
    }
}

impl Gpu {
    /// Bytes that each context is charged, and where the figure comes from: what the configuration
    /// says, else what was measured, else what the GPU's size suggests.
    #[must_use]
    pub fn context_constant(&self, gpus: &config::Gpus) -> (u64, ContextSource) {
        let measured =
            self.context_measured_bytes.filter(|bytes| self.is_plausible_context(*bytes));
        let said = [
            (gpus.context_overhead_bytes, ContextSource::Configured),
            (measured, ContextSource::Measured),
            (self.context_bytes, ContextSource::Formula),
        ];
        let said = said.into_iter().find_map(|(bytes, source)| Some((bytes?, source)));
        said.unwrap_or((UNKNOWN_BYTES, ContextSource::Default))
    }

    /// Bytes that each context is charged.
    #[must_use]
    pub fn context_overhead(&self, gpus: &config::Gpus) -> u64 {
        self.context_constant(gpus).0
    }

    /// Whether a context of this GPU may take so many bytes: from three quarters of what the formula
    /// says to one and a half of it. What is measured is measured of containers' processes, which may
    /// make a context look larger or, by a smaller stack, be smaller than others will be.
    #[must_use]
    pub fn is_plausible_context(&self, bytes: u64) -> bool {
        let Some(formula) = self.context_bytes else { return false };
        (formula / 4 * 3..=formula.saturating_add(formula / 2)).contains(&bytes)
    }
}

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

    #[test]
    fn the_configuration_comes_first() {
        let mut gpus = config::Config::default().gpus;
        let gpu = |context_bytes| Gpu { context_bytes, ..Gpu::example("GPU-a", 0) };
        assert_eq!(gpu(Some(174 * MIB)).context_overhead(&gpus), 174 * MIB);
        assert_eq!(gpu(None).context_overhead(&gpus), 512 * MIB);
        gpus.context_overhead_bytes = Some(300 * MIB);
        assert_eq!(gpu(Some(174 * MIB)).context_overhead(&gpus), 300 * MIB);
    }

    #[test]
    fn what_was_measured_goes_before_the_formula_where_it_is_plausible() {
        let mut gpus = config::Config::default().gpus;
        let gpu = |formula: Option<u64>, measured| Gpu {
            context_bytes: formula.map(|mib| mib * MIB),
            context_measured_bytes: Some(measured * MIB),
            ..Gpu::example("GPU-a", 0)
        };
        for (formula, measured, expected) in [
            (Some(200), 150, (150, ContextSource::Measured)),
            (Some(200), 300, (300, ContextSource::Measured)),
            (Some(200), 149, (200, ContextSource::Formula)),
            (Some(200), 301, (200, ContextSource::Formula)),
            (Some(200), 0, (200, ContextSource::Formula)),
            (None, 200, (512, ContextSource::Default)),
        ] {
            let (bytes, source) = gpu(formula, measured).context_constant(&gpus);
            assert_eq!((bytes / MIB, source), expected, "{formula:?} {measured}");
        }
        let wild = Gpu { context_measured_bytes: Some(u64::MAX), ..gpu(Some(200), 0) };
        assert_eq!(wild.context_constant(&gpus).1, ContextSource::Formula);
        gpus.context_overhead_bytes = Some(64 * MIB);
        let stated = gpu(Some(200), 180).context_constant(&gpus);
        assert_eq!(stated, (64 * MIB, ContextSource::Configured));
    }
}
