//! Bytes that each CUDA context is charged before anything is observed, and where the figure comes from.

use super::gpu::Gpu;

/// Where the GPU does not tell how many multiprocessors it has: enough for most.
const UNKNOWN_BYTES: u64 = 512 << 20;
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
    pub fn context_constant(&self, configured: Option<u64>) -> (u64, ContextSource) {
        let measured =
            self.context_measured_bytes.filter(|bytes| self.is_plausible_context(*bytes));
        let said = [
            (configured, ContextSource::Configured),
            (measured, ContextSource::Measured),
            (self.context_bytes, ContextSource::Formula),
        ];
        let said = said.into_iter().find_map(|(bytes, source)| Some((bytes?, source)));
        said.unwrap_or((UNKNOWN_BYTES, ContextSource::Default))
    }

    /// Bytes that each context is charged.
    pub fn context_overhead(&self, configured: Option<u64>) -> u64 {
        self.context_constant(configured).0
    }

    /// Whether a context of this GPU may take so many bytes: from three quarters of what the formula
    /// says to one and a half of it. What is measured is measured of containers' processes, which may
    /// make a context look larger or, by a smaller stack, be smaller than others will be.
    pub fn is_plausible_context(&self, bytes: u64) -> bool {
        let Some(formula) = self.context_bytes else { return false };
        (formula / 4 * 3..=formula.saturating_add(formula / 2)).contains(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_configuration_comes_first() {
        let gpu = |context_bytes| Gpu { context_bytes, ..Gpu::example("GPU-a", 0) };
        assert_eq!(gpu(Some(174 * MIB)).context_overhead(None), 174 * MIB);
        assert_eq!(gpu(None).context_overhead(None), 512 * MIB);
        assert_eq!(gpu(Some(174 * MIB)).context_overhead(Some(300 * MIB)), 300 * MIB);
    }

    #[test]
    fn what_was_measured_goes_before_the_formula_where_it_is_plausible() {
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
            let (bytes, source) = gpu(formula, measured).context_constant(None);
            assert_eq!((bytes / MIB, source), expected, "{formula:?} {measured}");
        }
        let wild = Gpu { context_measured_bytes: Some(u64::MAX), ..gpu(Some(200), 0) };
        assert_eq!(wild.context_constant(None).1, ContextSource::Formula);
        let stated = gpu(Some(200), 180).context_constant(Some(64 * MIB));
        assert_eq!(stated, (64 * MIB, ContextSource::Configured));
    }
}
