//! GPUs through NVML: NVIDIA's `libnvidia-ml.so.1`, or the simulated one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::context;
use super::health::Observation;
use super::{
    Discovery, DiscoveryError, Facts, GpuProcess, absent, mig, nvml_near, nvml_watch, pci, selected,
};
use tessera_config as config;
use tessera_model::gpu::Gpu;
use tessera_model::topology::Topology;
use tessera_system::files;
use tessera_system::locks::lock;

/// Where the kernel tells a PCI device's NUMA node.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// [`Discovery`] by NVML. Loads the library at the first call, and again until it can.
#[derive(Debug)]
pub struct NvmlDiscovery {
    library: Option<PathBuf>,
    loaded: Mutex<Option<Arc<Nvml>>>,
    unsold: Mutex<Vec<String>>,
    lost: Mutex<Vec<u32>>,
}

impl NvmlDiscovery {
    /// `library` where the loader would not find it.
    #[must_use]
    pub fn new(library: Option<PathBuf>) -> Self {
        NvmlDiscovery {
            library,
            loaded: Mutex::new(None),
            unsold: Mutex::default(),
            lost: Mutex::default(),
        }
    }

    pub(super) fn nvml(&self) -> Result<Arc<Nvml>, DiscoveryError> {
        let mut loaded = lock(&self.loaded);
        if let Some(nvml) = &*loaded {
            return Ok(Arc::clone(nvml));
        }
        // The unversioned name belongs to development packages; drivers ship this one.
        let library = self.library.as_deref().unwrap_or(Path::new("libnvidia-ml.so.1"));
        if let Some(library) = &self.library {
            // The loader would wait for who writes into a pipe.
            let own = library.clone();
            let opened = files::in_time(library, move || files::open(&own).map(drop));
            opened.map_err(files::FileError::from).and_then(|opened| opened).map_err(|error| {
                DiscoveryError::Library(format!("{}: {error}", library.display()))
            })?;
        }
        let nvml =
            Nvml::builder().lib_path(library.as_os_str()).init().map_err(|error| match error {
                NvmlError::LibloadingError(error) => DiscoveryError::Library(error.to_string()),
                other => DiscoveryError::Nvml(other.to_string()),
            })?;
        let nvml = Arc::new(nvml);
        *loaded = Some(Arc::clone(&nvml));
        Ok(nvml)
    }

    /// Releases the library: the next use loads and initialises it again. NVML counts
    /// initialisations, so that happens only once all who use it now are done; gives what tells so.
    pub(super) fn forget(&self) -> Weak<Nvml> {
        let mut loaded = lock(&self.loaded);
        loaded.take().map(|nvml| Arc::downgrade(&nvml)).unwrap_or_default()
    }

    /// The selected devices: whole GPUs, and the instances of those in MIG mode.
    fn selected<'n>(nvml: &'n Nvml, wanted: &config::Gpus) -> Result<Found<'n>, NvmlError> {
        let (include, exclude) = (&wanted.include, &wanted.exclude);
        let (mut all, mut unsold, mut cut) = (Vec::new(), Vec::new(), Vec::new());
        let mut lost = Vec::new();
        for index in 0..nvml.device_count()? {
            let described = nvml.device_by_index(index).and_then(|device| {
                let mut whole = describe(&device, None, index)?;
                let capability = device.cuda_compute_capability().ok();
                let capability = capability.map(|of| (of.major, of.minor));
                whole.context_bytes = context::bytes_of(&device, false, capability);
                Ok((device, whole, capability))
            });
            let (device, whole, capability) = match described {
                // No reason to leave the others unsold.
                Err(NvmlError::GpuLost) => {
                    lost.push(index);
                    unsold.push(format!(
                        "GPU {index} is lost; when it is back, restart the plugin to sell it"
                    ));
                    continue;
                }
                described => described?,
            };
            if !device.mig_mode().is_ok_and(|mode| mode.current == 1) {
                all.push((whole, device));
                continue;
            }
            match mig::instances(nvml, &device, &whole)? {
                Ok(instances) => {
                    for (instance, device) in instances {
                        let gpu = describe(&device, Some(&whole), index)?;
                        // An instance does not tell its GPU's capability.
                        let context_bytes = context::bytes_of(&device, true, capability);
                        all.push((Gpu { mig: Some(instance), context_bytes, ..gpu }, device));
                    }
                }
                Err(why) if selected(&whole, include, exclude) => unsold.push(why),
                Err(_) => {}
            }
            cut.push(whole);
        }
        let found = all.iter().map(|(gpu, _)| gpu.clone()).collect();
        let here: Vec<&Gpu> = all.iter().map(|(gpu, _)| gpu).chain(&cut).collect();
        let lists = [("gpus.include", include), ("gpus.exclude", exclude)];
        let absent = lists.into_iter().flat_map(|(key, list)| absent(key, list, &here)).collect();
        all.retain(|(gpu, _)| selected(gpu, include, exclude));
        // AdvertisedGpu twice, memory in common would be oversold.
        let sharers: Vec<u64> =
            all.iter().map(|(gpu, _)| mig::sharers(gpu, all.iter().map(|(gpu, _)| gpu))).collect();
        for ((gpu, _), sharers) in all.iter_mut().zip(sharers) {
            gpu.memory_bytes /= sharers;
        }
        Ok(Found { gpus: all, found, unsold, absent, lost })
    }
}

struct Found<'n> {
    gpus: Vec<(Gpu, Device<'n>)>,
    /// GPUs before the filter.
    found: Vec<Gpu>,
    /// See [`Discovery::unsold`].
    unsold: Vec<String>,
    /// What the configuration names and this machine does not have. One configuration often serves many
    /// nodes, so this is no error; but it may be a mistake.
    absent: Vec<String>,
    /// See [`Discovery::lost`].
    lost: Vec<u32>,
}

fn describe(device: &Device<'_>, parent: Option<&Gpu>, index: u32) -> Result<Gpu, NvmlError> {
    let pci_bus_id = match (device.pci_info(), parent) {
        (Ok(pci), _) => pci.bus_id,
        (Err(_), Some(parent)) => parent.pci_bus_id.clone(),
        (Err(error), None) => return Err(error),
    };
    let numa_node =
        pci::numa_node(Path::new(PCI_DEVICES), &pci_bus_id).or_else(|| device.numa_node_id().ok());
    Ok(Gpu {
        uuid: device.uuid()?,
        index,
        minor: device.minor_number().unwrap_or_else(|_| parent.map_or(index, |gpu| gpu.minor)),
        name: device.name()?,
        numa_node: numa_node.or_else(|| parent.and_then(|gpu| gpu.numa_node)),
        pci_bus_id,
        memory_bytes: device.memory_info()?.total,
        context_bytes: None,
        context_measured_bytes: None,
        mig: None,
    })
}

impl Discovery for NvmlDiscovery {
    fn gpus(&self, wanted: &config::Gpus) -> Result<Vec<Gpu>, DiscoveryError> {
        let nvml = self.nvml()?;
        let Found { gpus, found, unsold, absent, lost } = Self::selected(&nvml, wanted)
            .map_err(|error| DiscoveryError::Nvml(error.to_string()))?;
        *lock(&self.unsold) = unsold.iter().cloned().chain(absent).collect();
        *lock(&self.lost) = lost;
        if gpus.is_empty() && !unsold.is_empty() {
            return Err(DiscoveryError::Unsellable(unsold.join("; ")));
        }
        if gpus.is_empty() {
            return Err(DiscoveryError::None { found });
        }
        Ok(gpus.into_iter().map(|(gpu, _)| gpu).collect())
    }

    fn unsold(&self) -> Vec<String> {
        lock(&self.unsold).clone()
    }

    fn lost(&self) -> Vec<u32> {
        lock(&self.lost).clone()
    }

    fn memory_used(&self, uuid: &str) -> Result<u64, String> {
        let nvml = self.nvml().map_err(|error| error.to_string())?;
        let used = nvml.device_by_uuid(uuid).and_then(|device| device.memory_info());
        used.map(|memory| memory.used).map_err(|error| error.to_string())
    }

    fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, String> {
        let nvml = self.nvml().map_err(|error| error.to_string())?;
        let device = nvml.device_by_uuid(uuid).map_err(|error| error.to_string())?;
        let compute = device.running_compute_processes().map_err(|error| error.to_string())?;
        // Compute-only drivers and simulators need not know the second list.
        let graphics = device.running_graphics_processes().unwrap_or_default();
        Ok(merged(compute.into_iter().chain(graphics)))
    }

    fn topology(&self, gpus: &[Gpu]) -> Topology {
        match self.nvml() {
            Ok(nvml) => nvml_near::topology(&nvml, gpus),
            Err(_) => Topology::by_numa(gpus),
        }
    }

    fn facts(&self, gpus: &[Gpu]) -> Facts {
        let Ok(nvml) = self.nvml() else { return Facts::default() };
        let capability = |gpu: &Gpu| {
            // An instance has its GPU's, and does not tell.
            let uuid = gpu.mig.as_ref().map_or(&gpu.uuid, |mig| &mig.parent_uuid);
            let capability =
                nvml.device_by_uuid(uuid.as_str()).ok()?.cuda_compute_capability().ok()?;
            let number = |part: i32| u32::try_from(part).ok();
            Some((gpu.uuid.clone(), (number(capability.major)?, number(capability.minor)?)))
        };
        // As NVML counts: 1000 × major + 10 × minor (`nvmlSystemGetCudaDriverVersion_v2`).
        let cuda = nvml.sys_cuda_driver_version().ok();
        let cuda = cuda.and_then(|version| u32::try_from(version).ok());
        Facts {
            driver_version: nvml.sys_driver_version().ok(),
            cuda_version: cuda.map(|version| (version / 1000, version % 1000 / 10)),
            compute_capability: gpus.iter().filter_map(capability).collect(),
        }
    }

    fn watch(
        &self,
        gpus: &[Gpu],
        probe: Duration,
        stop: &(dyn Fn() -> bool + Sync),
        sink: &(dyn Fn(Observation) + Sync),
    ) -> Result<(), String> {
        nvml_watch::watch(self, gpus, probe, stop, sink)
    }
}

/// Each process once: one that computes and draws is in both lists, each time with all its memory
/// ("The usedGpuMemory field returned is all of the memory used by the application", NVML API,
/// "Device Queries").
fn merged(list: impl Iterator<Item = ProcessInfo>) -> Vec<GpuProcess> {
    let mut processes: Vec<GpuProcess> = Vec::new();
    for process in list {
        let used_bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        match processes.iter_mut().find(|known| known.pid == process.pid) {
            Some(known) => known.used_bytes = known.used_bytes.max(used_bytes),
            None => processes.push(GpuProcess { pid: process.pid, used_bytes }),
        }
    }
    processes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_do() {
        let gpus = config::Config::default().gpus;
        let discovery = NvmlDiscovery::new(Some("/nonexistent/libnvidia-ml.so.1".into()));
        let error = discovery.gpus(&gpus).unwrap_err();
        assert!(matches!(error, DiscoveryError::Library(_)), "{error:?}");
        assert!(error.to_string().contains("paths.nvml"), "{error}");
    }

    #[test]
    fn a_process_in_both_lists_counts_once() {
        let process = |pid, used_gpu_memory| ProcessInfo {
            pid,
            used_gpu_memory,
            gpu_instance_id: None,
            compute_instance_id: None,
        };
        let list = [
            process(1, UsedGpuMemory::Used(5)),
            process(2, UsedGpuMemory::Unavailable),
            process(1, UsedGpuMemory::Used(7)),
            process(2, UsedGpuMemory::Unavailable),
        ];
        let one = GpuProcess { pid: 1, used_bytes: Some(7) };
        let two = GpuProcess { pid: 2, used_bytes: None };
        assert_eq!(merged(list.into_iter()), [one, two]);
    }
}
