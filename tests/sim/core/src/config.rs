//! The simulator's configuration: TOML, every key optional, unknown keys rejected.

mod mig;
mod raw;

pub use mig::{MAX_INSTANCES, MigConfig};
pub use raw::{MAX_LINKS, NvLinks, peers};

use crate::engine::QUEUES;
use raw::*;
use serde::Deserialize;
use std::fmt;
use std::ops::Range;

const MIB: u64 = 1 << 20;
/// At most this many GPUs (the state file's layout).
pub const MAX_GPUS: usize = crate::layout::MAX_GPUS;
/// At most this many whole GPUs and MIG instances together (the state file's layout).
pub const MAX_UNITS: usize = crate::layout::MAX_UNITS;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// NVML's driver version, such as `580.82.07`.
    pub driver_version: String,
    /// `cuDriverGetVersion`: `1000 * major + 10 * minor`.
    pub cuda_version: u32,
    pub gpus: Vec<GpuConfig>,
    /// What has memory and runs work of its own, by the number that the shared state knows it by:
    /// without MIG one for each GPU, in their order.
    pub units: Vec<Unit>,
    pub nvlinks: Vec<NvLinks>,
    /// Device memory that is used without an allocation call, and the allocator's grain.
    pub memory: MemoryConfig,
    pub costs: Costs,
    pub nvml: NvmlCosts,
    /// What the driver's calls wait for.
    pub driver: DriverConfig,
    /// How long kernels take: the first rule whose name matches counts.
    pub kernels: Vec<KernelRule>,
    /// Duration of kernels that no rule names.
    pub default_kernel: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuConfig {
    pub name: String,
    pub memory_bytes: u64,
    pub sm_count: u32,
    /// Compute capability, (major, minor).
    pub compute_capability: (u32, u32),
    /// UUID bytes; printed as `GPU-…`.
    pub uuid: [u8; 16],
    /// PCI (domain, bus, device).
    pub pci: (u32, u32, u32),
    /// NUMA node, or −1 for none.
    pub numa_node: i32,
    /// GPUs with the same name are behind one PCIe switch.
    pub pcie_switch: Option<String>,
    pub minor: u32,
    /// It is a hypervisor's virtual GPU.
    pub vgpu: bool,
    /// The instances of a GPU in MIG mode, in NVML's order; not in MIG mode: `None`.
    pub mig: Option<Vec<MigConfig>>,
}

/// A GPU, or a compute instance of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Its NVML index.
    pub gpu: usize,
    /// Which of the GPU's instances; a whole GPU: `None`.
    pub instance: Option<usize>,
    /// The units that have their memory in common: itself, and the others of its GPU instance.
    pub memory: Range<usize>,
}

/// A table of the configuration: a setting's type, its default and, where they are not those of the
/// field, its key and its reader.
macro_rules! settings {
    (pub struct $name:ident {
        $($(#[$about:meta])* $field:ident: $type:ty = $default:expr $(, $key:literal by $reader:literal)?;)*
    }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $(
                $(#[$about])*
                $(#[serde(rename = $key, deserialize_with = $reader)])?
                pub $field: $type,
            )*
        }
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

settings! {
    pub struct MemoryConfig {
        /// Memory of each GPU that the driver keeps for itself; `None`: [`GpuConfig::reserved_bytes`].
        reserved_bytes: Option<u64> = None, "reserved" by "bytes_or_auto";
        /// Charged per context; `None`: [`GpuConfig::context_bytes`].
        context_overhead_bytes: Option<u64> = Some(128 * MIB), "context_overhead" by "bytes_or_auto";
        /// Charged per loaded module or library.
        module_overhead_bytes: u64 = 2 * MIB, "module_overhead" by "bytes";
        /// Device memory is handed out in chunks of this size; small allocations share one.
        granularity_bytes: u64 = 2 * MIB, "granularity" by "bytes";
        /// Memory pools take device memory in chunks of this.
        pool_chunk_bytes: u64 = 32 * MIB, "pool_chunk" by "bytes";
        /// How long a dead process's memory stays in use after its death was seen: at least this long,
        teardown_ns: u64 = 10_000_000, "teardown_ms" by "millis";
        /// and for each GiB of device memory that it had so much longer,
        teardown_ns_per_gib: u64 = 8_000_000, "teardown_ms_per_gib" by "millis";
        /// and for each GiB of host memory that it had pinned.
        teardown_ns_per_pinned_gib: u64 = 110_000_000, "teardown_ms_per_pinned_gib" by "millis";
        /// Whether NVML counts managed memory for its process.
        managed_is_its_processes: bool = false, "managed" by "is_process";
        /// Whether NVML counts imported memory for its importers, too.
        imports_are_both_processes: bool = false, "imports" by "is_both";
    }
}

settings! {
    pub struct DriverConfig {
        /// Calls of a context exclude each other; loading code and freeing pinned host memory wait for its work.
        context_lock: bool = true;
        /// Queues that the streams of a process share on a GPU: `CUDA_DEVICE_MAX_CONNECTIONS` may say fewer.
        queues: u32 = 8;
        /// A kernel's code is loaded at its first launch, where `CUDA_MODULE_LOADING` does not say.
        lazy_loading: bool = true;
    }
}

settings! {
    pub struct Costs {
        /// GPU time added to every kernel.
        launch_ns: u64 = 1_000;
        /// CPU time that recording an event takes at least, busy.
        record_cpu_ns: u64 = 450;
        /// CPU time that asking about an event or a stream takes at least, busy.
        query_cpu_ns: u64 = 200;
        /// CPU time that asking what a pointer is takes at least, busy.
        pointer_query_cpu_ns: u64 = 300;
        /// How long pinning a GiB of host memory holds the driver's lock; see [`crate::session::Session::pin`].
        pin_ns_per_gib: u64 = 100_000_000, "pin_ms_per_gib" by "millis";
        /// How long loading a kernel's code takes.
        load_ns: u64 = 100_000, "load_us" by "micros";
        /// GPU time of recording an event.
        event_ns: u64 = 500;
        /// GPU time of a memory write by a stream (`cuStreamWriteValue`).
        marker_ns: u64 = 500;
        /// GPU time lost at a switch between processes.
        context_switch_ns: u64 = 50_000, "context_switch_us" by "micros";
        /// For so long after it kernels run at half their speed.
        cold_ns: u64 = 100_000, "cold_us" by "micros";
        /// How long a process runs while others wait.
        time_slice_ns: u64 = 2_000_000, "time_slice_us" by "micros";
        copy_ns: u64 = 1_500;
        /// Host ↔ device bandwidth: a thousand of them are a GB/s.
        pcie_bytes_per_us: u64 = 25_000, "pcie_gb_per_s" by "micros";
        /// Device memory bandwidth (device-to-device copies, memset).
        device_bytes_per_us: u64 = 2_000_000, "device_gb_per_s" by "micros";
    }
}

settings! {
    pub struct NvmlCosts {
        /// How long a list of a GPU's processes holds the driver's lock; see [`crate::session::Session::occupy`].
        process_list_ns: u64 = 4_500_000, "process_list_us" by "micros";
        /// How much longer for each physical allocation that a process has a handle of.
        handle_ns: u64 = 200;
        /// How long a question for a GPU's memory takes. It needs no lock.
        memory_info_ns: u64 = 12_000, "memory_info_us" by "micros";
    }
}

/// `[[kernel]]`: which kernels, and how long they take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRule {
    /// Exact name, or a prefix if it ends in `*`.
    pub name: String,
    pub duration: Duration,
}

/// The kernel of `tessera-tenant`: machines that did not name it gave it the default, and judged other work than they said.
const TENANT: &str = "spin_ns";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duration {
    /// Always the same, in nanoseconds.
    Fixed(u64),
    /// The kernel's parameter of this index is a `u64` in nanoseconds.
    Parameter(u32),
    /// Until the 32-bit word at the address in the parameter of this index is no less than the next
    /// parameter, cyclically: a kernel that the host feeds.
    Word(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Parses and validates; the error names the key and says what would be accepted.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let raw: Raw = toml::from_str(text).map_err(|e| ConfigError(e.to_string()))?;
        let (major, minor) = two(&raw.cuda_version, "cuda_version", "such as \"13.0\"")?;
        let cuda_version = major * 1000 + minor * 10;
        if !(11_040..=13_990).contains(&cuda_version) {
            return err(format!(
                "cuda_version = {:?}: the simulator speaks 11.4 to 13.x",
                raw.cuda_version
            ));
        }
        if raw.gpu.len() > MAX_GPUS {
            return err(format!("{} [[gpu]] tables: at most {MAX_GPUS}", raw.gpu.len()));
        }
        let gpus =
            raw.gpu.iter().enumerate().map(|(i, g)| gpu(i, g)).collect::<Result<Vec<_>, _>>()?;
        for (i, g) in gpus.iter().enumerate() {
            if gpus[..i].iter().any(|o| o.uuid == g.uuid || o.pci == g.pci || o.minor == g.minor) {
                return err(format!("gpu {i}: uuid, pci_bus_id and minor must be unique"));
            }
        }
        let units = units(&gpus);
        if units.len() > MAX_UNITS {
            return err(format!("{} GPUs and MIG instances: at most {MAX_UNITS}", units.len()));
        }
        check_links(&raw.nvlink, gpus.len()).map_err(ConfigError)?;
        for (i, g) in gpus.iter().enumerate() {
            let apart = |o: &&GpuConfig| g.pcie_switch.is_some() && o.pcie_switch == g.pcie_switch;
            if gpus[..i].iter().filter(apart).any(|o| o.numa_node != g.numa_node) {
                return err(format!("gpu {i}: pcie_switch is on another numa_node already"));
            }
        }
        let (memory, costs) = (raw.memory, raw.costs);
        if !memory.granularity_bytes.is_power_of_two() || memory.granularity_bytes < 512 {
            return err("memory.granularity: a power of two, at least 512");
        }
        if memory.pool_chunk_bytes == 0
            || !memory.pool_chunk_bytes.is_multiple_of(memory.granularity_bytes)
        {
            return err("memory.pool_chunk: a multiple of memory.granularity");
        }
        for g in &gpus {
            let reserved = memory.reserved_bytes.unwrap_or_else(|| g.reserved_bytes());
            if g.memory_bytes <= reserved {
                return err(format!(
                    "gpu {:?}: memory {} is not more than memory.reserved {reserved}",
                    g.name, g.memory_bytes
                ));
            }
        }
        if !(1..=QUEUES).contains(&(raw.driver.queues as usize)) {
            return err(format!("driver.queues: 1 to {QUEUES}"));
        }
        if costs.time_slice_ns < 10_000 {
            return err("costs.time_slice_us: at least 10");
        }
        if costs.pcie_bytes_per_us == 0 || costs.device_bytes_per_us == 0 {
            return err("costs.pcie_gb_per_s and costs.device_gb_per_s: more than 0");
        }
        Ok(Config {
            driver_version: raw.driver_version,
            cuda_version,
            gpus,
            units,
            nvlinks: raw.nvlink,
            memory,
            costs,
            nvml: raw.nvml,
            driver: raw.driver,
            kernels: raw.kernel.iter().map(kernel).collect::<Result<_, _>>()?,
            default_kernel: Duration::Fixed(raw.default_kernel_ns),
        })
    }

    pub fn units_of(&self, gpu: usize) -> Range<usize> {
        let first = self.units.iter().take_while(|u| u.gpu < gpu).count();
        first..first + self.units.iter().filter(|u| u.gpu == gpu).count()
    }

    /// The instance that a unit is; a whole GPU: `None`.
    pub fn instance(&self, unit: usize) -> Option<&MigConfig> {
        let unit = self.units.get(unit)?;
        self.gpus.get(unit.gpu)?.mig.as_ref()?.get(unit.instance?)
    }

    /// Total and usable memory of a unit in bytes. An instance's memory is what its profile says;
    /// what the driver keeps comes out of what no instance has.
    pub fn memory_of(&self, unit: usize) -> (u64, u64) {
        match (self.instance(unit), self.units.get(unit).and_then(|u| self.gpus.get(u.gpu))) {
            (Some(mig), _) => (mig.memory_bytes, mig.memory_bytes),
            (None, Some(gpu)) => {
                (gpu.memory_bytes, gpu.memory_bytes.saturating_sub(self.reserved_bytes(gpu)))
            }
            (None, None) => (0, 0),
        }
    }

    /// What the driver keeps of this GPU.
    pub fn reserved_bytes(&self, gpu: &GpuConfig) -> u64 {
        self.memory.reserved_bytes.unwrap_or_else(|| gpu.reserved_bytes())
    }

    pub fn context_bytes(&self, gpu: &GpuConfig) -> u64 {
        self.memory.context_overhead_bytes.unwrap_or_else(|| gpu.context_bytes())
    }

    /// How long a kernel of this name takes: the first matching rule, else as long as `tessera-tenant` asks of its own, else
    /// the default.
    pub fn kernel_duration(&self, name: &str) -> Duration {
        let other = if name == TENANT { Duration::Parameter(0) } else { self.default_kernel };
        self.kernels
            .iter()
            .find(|rule| match rule.name.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => name == rule.name,
            })
            .map_or(other, |rule| rule.duration)
    }
}

impl Default for Config {
    fn default() -> Self {
        Config::parse("").unwrap_or_else(|e| unreachable!("built-in defaults are valid: {e}"))
    }
}

impl GpuConfig {
    /// Threads that a multiprocessor can have resident: CUDA Programming Guide, "Technical
    /// Specifications per Compute Capability".
    pub fn threads_per_sm(&self) -> u32 {
        match self.compute_capability {
            (7, 5) => 1024,
            (8, 6..=9) | (11.., _) => 1536,
            _ => 2048,
        }
    }

    /// FP32 cores of a multiprocessor: CUDA Programming Guide, "Arithmetic Instructions".
    pub fn cores_per_sm(&self) -> u32 {
        match self.compute_capability {
            (7, _) | (8, 0..=5) => 64,
            _ => 128,
        }
    }

    /// Device memory that a context of it takes: the stacks of all threads that can be resident, and
    /// 1.5 MiB for each multiprocessor, which is what contexts of GPUs with 34 to 188 of them took.
    pub fn context_bytes(&self) -> u64 {
        u64::from(self.sm_count) * (u64::from(self.threads_per_sm()) * 1024 + 3 * MIB / 2)
    }

    /// Device memory that the driver keeps of it, as `nvidia-smi -q` shows for idle ones: an H200 700 MiB, an L4
    /// 556, an H100 from 328 to 551 by driver, which is taken for all others, too.
    pub fn reserved_bytes(&self) -> u64 {
        let is = |product| self.name.split_whitespace().any(|word| word == product);
        MIB * if is("H200") {
            700
        } else if is("L4") {
            556
        } else {
            551
        }
    }

    /// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    pub fn uuid_text(&self) -> String {
        format!("GPU-{}", hex_uuid(&self.uuid))
    }
}

fn hex_uuid(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A unit for each whole GPU and each instance; none for a GPU in MIG mode as such.
fn units(gpus: &[GpuConfig]) -> Vec<Unit> {
    let mut units = Vec::new();
    for (gpu, config) in gpus.iter().enumerate() {
        let Some(mig) = &config.mig else {
            let at = units.len();
            units.push(Unit { gpu, instance: None, memory: at..at + 1 });
            continue;
        };
        let first = units.len();
        for (i, m) in mig.iter().enumerate() {
            let same = |o: &&MigConfig| o.gpu_instance == m.gpu_instance;
            let begin = mig.iter().position(|o| same(&o)).unwrap_or(i);
            let memory = first + begin..first + begin + mig.iter().filter(same).count();
            units.push(Unit { gpu, instance: Some(i), memory });
        }
    }
    units
}

fn err<T>(text: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError(text.into()))
}

fn gpu(index: usize, raw: &RawGpu) -> Result<GpuConfig, ConfigError> {
    let key = |k: &str| format!("gpu {index}: {k}");
    let i = u32::try_from(index).unwrap_or(0);
    let uuid = match &raw.uuid {
        None => {
            let mut uuid = *b"\x5e\x55\xe4\xa0\x00\x00\x40\x00\x80\x00\x00\x00\x00\x00\x00\x00";
            uuid[15] = u8::try_from(index).unwrap_or(0);
            uuid
        }
        Some(text) => parse_uuid(text).ok_or_else(|| {
            ConfigError(key(&format!(
                "uuid = {text:?}: expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
            )))
        })?,
    };
    let pci = match &raw.pci_bus_id {
        None => (0, 0x17 + 0x20 * i, 0),
        Some(text) => parse_pci(text).ok_or_else(|| {
            ConfigError(key(&format!("pci_bus_id = {text:?}: expected 0000:17:00.0")))
        })?,
    };
    let sm_count = raw.sm_count.unwrap_or(132);
    if sm_count == 0 {
        return err(key("sm_count: at least 1"));
    }
    let mut gpu = GpuConfig {
        name: raw.name.clone().unwrap_or_else(|| "Simulated H200".into()),
        memory_bytes: raw.memory.unwrap_or(16 << 30),
        sm_count,
        compute_capability: match &raw.compute_capability {
            None => (9, 0),
            Some(text) => two(text, &key("compute_capability"), "such as \"9.0\"")?,
        },
        uuid,
        pci,
        numa_node: raw.numa_node.unwrap_or(0),
        pcie_switch: raw.pcie_switch.clone(),
        minor: raw.minor.unwrap_or(i),
        vgpu: raw.vgpu.unwrap_or(false),
        mig: None,
    };
    if let Some(list) = &raw.mig {
        gpu.mig = Some(mig::instances(&gpu, list, &key("mig"))?);
    }
    Ok(gpu)
}

fn kernel(raw: &RawKernel) -> Result<KernelRule, ConfigError> {
    let duration = match (raw.us, raw.parameter, raw.word) {
        (Some(ns), None, None) => Duration::Fixed(ns),
        (None, Some(index), None) => Duration::Parameter(index),
        (None, None, Some(index)) => Duration::Word(index),
        _ => {
            return err(format!("kernel {:?}: exactly one of us, parameter, word", raw.name));
        }
    };
    Ok(KernelRule { name: raw.name.clone(), duration })
}

/// Parses `GPU-…` (or the bare hexadecimal form) into bytes.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let text = text.strip_prefix("GPU-").unwrap_or(text);
    let shape: Vec<usize> = text.split('-').map(str::len).collect();
    if shape != [8, 4, 4, 4, 12] || !text.is_ascii() {
        return None;
    }
    let hex: String = text.split('-').collect();
    let mut out = [0u8; 16];
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(out)
}

/// Parses `[domain:]bus:device[.function]`, hexadecimal.
pub fn parse_pci(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.split_once('.').map_or(text, |(a, _)| a);
    let mut parts: Vec<u32> =
        text.split(':').map(|p| u32::from_str_radix(p, 16).ok()).collect::<Option<Vec<_>>>()?;
    if parts.len() == 2 {
        parts.insert(0, 0);
    }
    match parts[..] {
        [domain, bus, device] if bus < 256 && device < 32 => Some((domain, bus, device)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_configurations_are_valid_and_the_first_is_the_default() {
        let text = include_str!("../../../../docs/internals/simulator.md");
        let blocks: Vec<&str> =
            text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
        assert_eq!(Config::parse(blocks[0]).unwrap(), Config::default());
        assert_eq!(blocks.len(), 3);
        assert_eq!(Config::parse(blocks[1]).unwrap().units.len(), 4);
        let third = Config::parse(blocks[2]).unwrap();
        assert_eq!((third.kernels.len(), third.nvlinks.len()), (3, 1));
    }

    #[test]
    fn unknown_key_is_named() {
        let e = Config::parse("tiem_slice = 1").unwrap_err();
        assert!(e.0.contains("tiem_slice"), "{e}");
    }

    #[test]
    fn bad_values_are_refused() {
        for (text, part) in [
            ("[[gpu]]\nmemory = \"16 furlongs\"", "16 furlongs"),
            ("[[gpu]]\nuuid = \"GPU-1\"", "gpu 0: uuid"),
            (
                "[[gpu]]\npcie_switch = \"a\"\n[[gpu]]\npcie_switch = \"a\"\nnuma_node = 1",
                "on another",
            ),
            ("[[gpu]]\nminor = 3\n[[gpu]]\nminor = 3", "unique"),
            ("cuda_version = \"9.0\"", "11.4"),
            ("[costs]\ntime_slice_us = -1.0", "out of range"),
            ("[costs]\ntime_slice_us = 0.1", "at least 10"),
            ("[[kernel]]\nname = \"k\"", "exactly one of"),
            ("[memory]\nreserved = \"1TiB\"", "not more than"),
            ("[memory]\nimports = \"none\"", r#""maker" or "both""#),
            ("[memory]\npool_chunk = \"3MiB\"", "a multiple of memory.granularity"),
        ] {
            let e = Config::parse(text).unwrap_err();
            assert!(e.0.contains(part), "{text:?} gave {e}");
        }
    }

    #[test]
    fn first_matching_kernel_rule_counts() {
        let c = Config::parse(
            "[[kernel]]\nname = \"gemm_big\"\nus = 100.0\n[[kernel]]\nname = \"gemm*\"\nus = 2.5\n\
             [[kernel]]\nname = \"spin\"\nparameter = 1",
        )
        .unwrap();
        assert_eq!(c.kernel_duration("gemm_big"), Duration::Fixed(100_000));
        assert_eq!(c.kernel_duration("gemm_small"), Duration::Fixed(2_500));
        assert_eq!(c.kernel_duration("spin"), Duration::Parameter(1));
        assert_eq!(c.kernel_duration("other"), Duration::Fixed(10_000));
        assert_eq!(c.kernel_duration("spin_ns"), Duration::Parameter(0));
    }

    #[test]
    fn the_driver_keeps_of_a_gpu_as_much_as_its_product_says() {
        let c = Config::parse("[[gpu]]\n[[gpu]]\nname = \"NVIDIA L4\"\n[[gpu]]\nname = \"A\"");
        let c = c.unwrap();
        let kept = |c: &Config| [0, 1, 2].map(|i| (c.memory_of(i).0 - c.memory_of(i).1) / MIB);
        assert_eq!(kept(&c), [700, 556, 551]);
        let said = "[memory]\nreserved = \"256MiB\"\n[[gpu]]\n[[gpu]]\n[[gpu]]";
        assert_eq!(kept(&Config::parse(said).unwrap()), [256; 3]);
    }

    #[test]
    fn contexts_may_follow_the_gpu() {
        let of = |overhead: &str| {
            let c = Config::parse(&format!(
                "[memory]\ncontext_overhead = {overhead}\n[[gpu]]\nsm_count = 58\n\
                 compute_capability = \"8.9\"\n[[gpu]]"
            ))
            .unwrap();
            [c.context_bytes(&c.gpus[0]), c.context_bytes(&c.gpus[1])]
        };
        assert_eq!(of("\"auto\""), [174 * MIB, 462 * MIB]);
        assert_eq!(of("\"64MiB\""), [64 * MIB; 2]);
    }

    #[test]
    fn each_of_a_table_is_linked_to_each_other() {
        let tables =
            [NvLinks { gpus: vec![0, 1, 2], links: 2 }, NvLinks { gpus: vec![2, 3], links: 1 }];
        let peers = |gpu| peers(&tables, gpu).collect::<Vec<_>>();
        assert_eq!(peers(0), [1, 1, 2, 2]);
        assert_eq!(peers(2), [0, 0, 1, 1, 3]);
        assert_eq!(peers(3), [2]);
        assert!(peers(4).is_empty());
    }

    #[test]
    fn impossible_links_are_refused() {
        for (text, part) in [
            ("[[nvlink]]\ngpus = [0, 2]\nlinks = 1", "there are 2 GPUs"),
            ("[[nvlink]]\ngpus = [0, 0]\nlinks = 1", "two or more different"),
            ("[[nvlink]]\ngpus = [0, 1]\nlinks = 0", "at least 1"),
            ("[[nvlink]]\ngpus = [0, 1]\nlinks = 19", "at most 18"),
            ("[[nvlink]]\ngpus = [0, 1]", "links"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.0.contains(part), "{text:?} gave {error}");
        }
    }
}
