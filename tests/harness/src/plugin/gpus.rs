//! GPUs that a test can take away or make sick.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use tessera_gpu::health::Observation;
use tessera_gpu::{self as device, Discovery, DiscoveryError, GpuProcess, SilentGpu};
use tessera_model::gpu::Gpu;

use crate::GIB;

/// GPUs that a test can take away or make sick.
#[derive(Debug, Default)]
pub struct FakeGpus {
    /// What the driver finds.
    pub gpus: Mutex<Vec<Gpu>>,
    /// What the driver says of processes, by GPU.
    pub processes: Mutex<BTreeMap<String, Vec<GpuProcess>>>,
    /// Indexes of those that it calls lost.
    pub lost: Mutex<Vec<u32>>,
    /// How often it was asked.
    pub looks: AtomicU64,
    /// While it is set, the driver does not say how much memory is in use.
    pub hangs: AtomicBool,
    observations: Mutex<VecDeque<Observation>>,
    news: Condvar,
}

impl FakeGpus {
    /// Something happens to a GPU.
    pub fn report(&self, observation: Observation) {
        self.observations.lock().unwrap().push_back(observation);
        self.news.notify_all();
    }

    /// What the driver says of GPU 0 from now on.
    pub fn show(&self, processes: &[GpuProcess]) {
        self.processes.lock().unwrap().insert(gpu(0).uuid, processes.to_vec());
    }
}

/// A process that uses so much, as the driver says it.
pub fn uses(pid: u32, bytes: u64) -> GpuProcess {
    GpuProcess { pid, used_bytes: Some(bytes) }
}

impl Discovery for FakeGpus {
    fn gpus(&self, wanted: &tessera_config::Gpus) -> Result<Vec<Gpu>, DiscoveryError> {
        let mut gpus = self.gpus.lock().unwrap().clone();
        gpus.retain(|gpu| device::selected(gpu, &wanted.include, &wanted.exclude));
        if gpus.is_empty() { Err(DiscoveryError::None { found: Vec::new() }) } else { Ok(gpus) }
    }

    fn silent(&self) -> Vec<SilentGpu> {
        let silent = |index: &u32| SilentGpu {
            gpu: Gpu { uuid: String::new(), memory_bytes: 0, ..gpu(*index) },
            asked: "handle",
            error: "the GPU is lost".to_owned(),
            lost: true,
        };
        self.lost.lock().unwrap().iter().map(silent).collect()
    }

    fn memory_used(&self, _uuid: &str) -> Result<u64, String> {
        while self.hangs.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(0)
    }

    fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, String> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        if !self.gpus.lock().unwrap().iter().any(|gpu| gpu.uuid == uuid) {
            return Err("a query to find an object was unsuccessful".to_owned());
        }
        Ok(self.processes.lock().unwrap().get(uuid).cloned().unwrap_or_default())
    }

    fn watch(
        &self,
        _gpus: &[Gpu],
        _probe: Duration,
        stop: &(dyn Fn() -> bool + Sync),
        sink: &(dyn Fn(Observation) + Sync),
    ) -> Result<(), String> {
        let mut waiting = self.observations.lock().unwrap();
        while !stop() {
            while let Some(observation) = waiting.pop_front() {
                sink(observation);
            }
            let wait = Duration::from_millis(20);
            waiting = self.news.wait_timeout(waiting, wait).unwrap().0;
        }
        Ok(())
    }
}

/// An ordinary GPU of 40 GiB.
pub fn gpu(index: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index:08}-0000-0000-0000-000000000000"),
        index,
        minor: index,
        name: "Example".into(),
        pci_bus_id: format!("00000000:{index:02x}:00.0"),
        numa_node: None,
        memory_bytes: 40 * GIB,
        driver_bytes: 0,
        context_bytes: None,
        mig: None,
    }
}

pub fn replica(gpu_index: u32, n: u32) -> String {
    format!("{}::{n}", gpu(gpu_index).uuid)
}
