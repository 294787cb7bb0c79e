//! `[cdi]`: the Container Device Interface, where `container.device_list_strategy` asks for it.

use std::path::PathBuf;

/// Where specs go, and whose spec has the GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cdi {
    /// Directory of the specs, one that the container runtime reads.
    pub directory: PathBuf,
    /// Kind of the devices in NVIDIA's spec, `nvidia.com/gpu`; `None` puts device nodes and
    /// libraries of `[driver]` into our own.
    pub gpu_kind: Option<String>,
    /// What NVIDIA's spec calls a GPU.
    pub gpu_names: GpuNames,
}

/// What a GPU is called in NVIDIA's spec, as `nvidia-ctk cdi generate --device-name-strategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuNames {
    /// By UUID.
    Uuid,
    /// By NVML's index.
    Index,
}

impl Default for Cdi {
    fn default() -> Self {
        Cdi {
            directory: "/var/run/cdi".into(),
            gpu_kind: Some("nvidia.com/gpu".into()),
            gpu_names: GpuNames::Uuid,
        }
    }
}
