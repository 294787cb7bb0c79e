//! GPUs of which NVML does not tell what it takes to sell them.

use std::fmt;

use nvml_wrapper::error::NvmlError;
use tessera_model::gpu::Gpu;

/// A GPU, or a MIG instance, that is left out because NVML did not answer a question about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentGpu {
    /// What is known of it: what NVML did not tell is empty or 0.
    pub gpu: Gpu,
    /// What it was asked for.
    pub asked: &'static str,
    /// The driver's word.
    pub error: String,
    /// The driver calls it lost: a new initialisation of NVML may find it again.
    pub lost: bool,
}

impl SilentGpu {
    pub(crate) fn new(gpu: &Gpu, unanswered: &Unanswered) -> Self {
        SilentGpu {
            gpu: gpu.clone(),
            asked: unanswered.asked,
            error: match (&unanswered.error, unanswered.asked) {
                (NvmlError::NotSupported, MEMORY) => format!("{}{SHARED}", unanswered.error),
                (error, _) => error.to_string(),
            },
            lost: matches!(unanswered.error, NvmlError::GpuLost | NvmlError::NotFound),
        }
    }

    /// Why it is not sold.
    pub fn reason(&self) -> String {
        format!("NVML: {}, asked for its {}", self.error, self.asked)
    }

    /// That a command cannot use it, in a sentence.
    pub fn unusable(&self) -> String {
        format!("{} cannot be used: {}", self.name(), self.reason())
    }

    /// By index, and by what else is known of it.
    fn name(&self) -> String {
        let names = [&self.gpu.name, &self.gpu.uuid, &self.gpu.pci_bus_id];
        let names: Vec<&str> =
            names.into_iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
        let name = match &self.gpu.mig {
            None => format!("GPU {}", self.gpu.index),
            Some(instance) => format!("GPU {instance}"),
        };
        if names.is_empty() { name } else { format!("{name} ({})", names.join(", ")) }
    }

    /// Whether this is the same GPU or instance, by its place.
    pub fn is(&self, gpu: &Gpu) -> bool {
        let number = |gpu: &Gpu| gpu.mig.as_ref().map(|mig| mig.index);
        // Of a GPU that does not say whether it is in MIG mode, every instance.
        self.gpu.index == gpu.index && (self.gpu.mig.is_none() || number(&self.gpu) == number(gpu))
    }

    /// Whether NVML has told all that names it.
    pub(crate) fn has_names(&self) -> bool {
        [&self.gpu.uuid, &self.gpu.name, &self.gpu.pci_bus_id].iter().all(|name| !name.is_empty())
    }
}

impl fmt::Display for SilentGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.lost { "is lost and not sold" } else { "is not sold" };
        let (name, reason) = (self.name(), self.reason());
        write!(f, "{name} {how}: {reason}; it is asked again, and sold when it answers")
    }
}

/// Asked for how much memory there is.
pub(crate) const MEMORY: &str = "memory";
/// NVML answers so for good where CPU and GPU have one memory (DGX Spark User Guide, "Known Issues": "Memory-Usage: Not Supported").
const SHARED: &str = " (a GPU whose memory is also the CPU's, as Tegra's and GB10's, has no such figure, and cannot be shared)";

/// A question that NVML did not answer.
#[derive(Debug)]
pub(crate) struct Unanswered {
    /// What was asked for.
    pub asked: &'static str,
    /// The driver's word.
    pub error: NvmlError,
}

/// Names what was asked for in an error.
pub(crate) trait Asked<T> {
    /// This answer to a question for `what`.
    fn asked(self, what: &'static str) -> Result<T, Unanswered>;
}

impl<T> Asked<T> for Result<T, NvmlError> {
    fn asked(self, what: &'static str) -> Result<T, Unanswered> {
        self.map_err(|error| Unanswered { asked: what, error })
    }
}
