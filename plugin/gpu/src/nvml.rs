//! GPUs through NVML: NVIDIA's `libnvidia-ml.so.1`, or the simulated one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::health::Observation;
use super::list::{self, Found, SilentGpu};
use super::{Discovery, DiscoveryError, Facts, GpuProcess, nvml_near, nvml_watch};
use tessera_config as config;
use tessera_model::gpu::Gpu;
use tessera_model::topology::Topology;
use tessera_system::files;
use tessera_system::locks::lock;

/// [`Discovery`] by NVML. Loads the library at the first call, and again until it can.
#[derive(Debug)]
pub struct NvmlDiscovery {
    library: Option<PathBuf>,
    loaded: Mutex<Option<Arc<Nvml>>>,
    unsold: Mutex<Vec<String>>,
    silent: Mutex<Vec<SilentGpu>>,
}

impl NvmlDiscovery {
    /// `library` where the loader would not find it.
    pub fn new(library: Option<PathBuf>) -> Self {
        NvmlDiscovery {
            library,
            loaded: Mutex::new(None),
            unsold: Mutex::default(),
            silent: Mutex::default(),
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
        if let Ok(driver) = nvml.sys_driver_version()
            && writes_longer_lists(&driver)
        {
            return Err(DiscoveryError::Nvml(format!(
                "driver {driver} writes lists of processes in another layout than its headers before and after: \
                 pids and memory would be garbage. Install 535.104.05 or newer"
            )));
        }
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
}

impl Discovery for NvmlDiscovery {
    fn gpus(&self, wanted: &config::Gpus) -> Result<Vec<Gpu>, DiscoveryError> {
        let nvml = self.nvml()?;
        let Found { gpus, all, mut unsold, absent, silent } =
            list::list(&nvml, wanted).map_err(|error| DiscoveryError::Nvml(error.to_string()))?;
        *lock(&self.unsold) = unsold.iter().cloned().chain(absent).collect();
        unsold.extend(silent.iter().map(ToString::to_string));
        let is_missing = silent.iter().any(|gpu| gpu.lost);
        *lock(&self.silent) = silent;
        if !gpus.is_empty() {
            return Ok(gpus);
        }
        if is_missing {
            // Nothing is watched that would have it initialised again.
            self.forget();
        }
        match unsold.as_slice() {
            [] => Err(DiscoveryError::None { found: all }),
            unsold => Err(DiscoveryError::Unsellable(unsold.join("; "))),
        }
    }

    fn unsold(&self) -> Vec<String> {
        lock(&self.unsold).clone()
    }

    fn silent(&self) -> Vec<SilentGpu> {
        lock(&self.silent).clone()
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

    fn utilisation(&self, uuid: &str, time: Option<Duration>) -> Result<Vec<(u32, u32)>, String> {
        let nvml = self.nvml().map_err(|error| error.to_string())?;
        let device = nvml.device_by_uuid(uuid).map_err(|error| error.to_string())?;
        // "The CPU timestamp in microseconds at which utilization samples were last read": Unix time.
        let since = time
            .and_then(|time| SystemTime::now().checked_sub(time)?.duration_since(UNIX_EPOCH).ok());
        let since_us = since.and_then(|since| u64::try_from(since.as_micros()).ok());
        match device.process_utilization_stats(since_us) {
            Ok(samples) => Ok(samples.iter().map(|of| (of.pid, of.sm_util.min(100))).collect()),
            // Nobody has used it since.
            Err(NvmlError::NotFound) => Ok(Vec::new()),
            Err(error) => Err(error.to_string()),
        }
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

/// Whether `nvmlDeviceGetComputeRunningProcesses_v3` of this driver writes entries of 40 bytes, with a field that was
/// taken out again, in place of 24: R535's before 535.98 (XuehaiPan/nvitop#79, NVIDIA/go-nvml#75).
fn writes_longer_lists(driver: &str) -> bool {
    let mut parts = driver.split('.').map(str::parse::<u32>);
    matches!((parts.next(), parts.next()), (Some(Ok(535)), Some(Ok(minor))) if minor < 98)
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
    fn drivers_with_longer_lists_are_told_by_their_version() {
        for driver in ["535.43.02", "535.54.03", "535.86.10"] {
            assert!(writes_longer_lists(driver), "{driver}");
        }
        for driver in ["530.30.02", "535.98", "535.104.05", "535.288.01", "550.54.15", "580", "x"] {
            assert!(!writes_longer_lists(driver), "{driver}");
        }
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
