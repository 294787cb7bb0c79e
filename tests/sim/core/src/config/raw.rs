//! The configuration as it is written, with its defaults, and the values of its keys.

use super::{ConfigError, DriverConfig, MIB, err};
use crate::links::NvLinks;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Raw {
    pub(super) driver_version: String,
    pub(super) cuda_version: String,
    pub(super) gpu: Vec<RawGpu>,
    pub(super) nvlink: Vec<NvLinks>,
    pub(super) memory: RawMemory,
    pub(super) costs: RawCosts,
    pub(super) nvml: RawNvml,
    pub(super) driver: DriverConfig,
    pub(super) kernel: Vec<RawKernel>,
    pub(super) default_kernel_us: f64,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawGpu {
    pub(super) name: Option<String>,
    pub(super) memory: Option<Quantity>,
    pub(super) sm_count: Option<u32>,
    pub(super) compute_capability: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) pci_bus_id: Option<String>,
    pub(super) numa_node: Option<i32>,
    pub(super) pcie_switch: Option<String>,
    pub(super) minor: Option<u32>,
    pub(super) serial: Option<String>,
    pub(super) vgpu: Option<bool>,
    pub(super) mig: Option<Vec<toml::Value>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawMemory {
    pub(super) reserved: Quantity,
    pub(super) context_overhead: Quantity,
    pub(super) module_overhead: Quantity,
    pub(super) code: String,
    pub(super) function_overhead: Quantity,
    pub(super) granularity: Quantity,
    pub(super) pool_chunk: Quantity,
    pub(super) teardown_ms: f64,
    pub(super) teardown_ms_per_gib: f64,
    pub(super) teardown_ms_per_pinned_gib: f64,
    pub(super) managed: String,
    pub(super) imports: String,
    pub(super) descriptors: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawCosts {
    pub(super) launch_ns: u64,
    pub(super) launch_cpu_ns: u64,
    pub(super) record_cpu_ns: u64,
    pub(super) query_cpu_ns: u64,
    pub(super) pointer_query_cpu_ns: u64,
    pub(super) pin_ms_per_gib: f64,
    pub(super) load_us: f64,
    pub(super) event_ns: u64,
    pub(super) marker_ns: u64,
    pub(super) context_switch_us: f64,
    pub(super) cold_us: f64,
    pub(super) time_slice_us: f64,
    pub(super) copy_ns: u64,
    pub(super) pcie_gb_per_s: f64,
    pub(super) device_gb_per_s: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawNvml {
    pub(super) process_list_us: f64,
    pub(super) handle_ns: u64,
    pub(super) memory_info_us: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawKernel {
    pub(super) name: String,
    pub(super) us: Option<f64>,
    pub(super) parameter: Option<u32>,
    pub(super) word: Option<u32>,
    pub(super) us_per_wave: Option<f64>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Quantity {
    Bytes(u64),
    Text(String),
}

impl Default for Raw {
    fn default() -> Self {
        Raw {
            driver_version: "580.82.07".into(),
            cuda_version: "13.0".into(),
            gpu: vec![RawGpu::default(), RawGpu::default()],
            nvlink: Vec::new(),
            memory: RawMemory::default(),
            costs: RawCosts::default(),
            nvml: RawNvml::default(),
            driver: DriverConfig::default(),
            kernel: Vec::new(),
            default_kernel_us: 10.0,
        }
    }
}

impl Default for RawMemory {
    fn default() -> Self {
        RawMemory {
            reserved: Quantity::Text("auto".into()),
            context_overhead: Quantity::Bytes(128 * MIB),
            module_overhead: Quantity::Bytes(2 * MIB),
            code: "image".into(),
            function_overhead: Quantity::Bytes(0),
            granularity: Quantity::Bytes(2 * MIB),
            pool_chunk: Quantity::Bytes(32 * MIB),
            teardown_ms: 10.0,
            teardown_ms_per_gib: 8.0,
            teardown_ms_per_pinned_gib: 110.0,
            managed: "nobody".into(),
            imports: "maker".into(),
            descriptors: "keep".into(),
        }
    }
}

impl Default for DriverConfig {
    fn default() -> Self {
        DriverConfig {
            context_lock: true,
            loads_drain: true,
            creations_lock: true,
            host_frees_drain: true,
            concurrent_kernels: true,
            chained_kernels: true,
            lazy_loading: true,
            queues: 8,
        }
    }
}

impl Default for RawCosts {
    fn default() -> Self {
        RawCosts {
            launch_ns: 1_000,
            launch_cpu_ns: 0,
            record_cpu_ns: 450,
            query_cpu_ns: 200,
            pointer_query_cpu_ns: 300,
            pin_ms_per_gib: 100.0,
            load_us: 100.0,
            event_ns: 500,
            marker_ns: 500,
            context_switch_us: 50.0,
            cold_us: 100.0,
            time_slice_us: 2_000.0,
            copy_ns: 1_500,
            pcie_gb_per_s: 25.0,
            device_gb_per_s: 2_000.0,
        }
    }
}

impl Default for RawNvml {
    fn default() -> Self {
        RawNvml { process_list_us: 4_500.0, handle_ns: 200, memory_info_us: 12.0 }
    }
}

/// `value` in a unit of `unit_ns` nanoseconds; at most an hour, never negative.
pub(super) fn nanos(value: f64, unit_ns: f64, key: &str) -> Result<u64, ConfigError> {
    let ns = value * unit_ns;
    if !(0.0..=3.6e12).contains(&ns) {
        return err(format!("{key} = {value}: out of range"));
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range checked")]
    Ok(ns.round() as u64)
}

pub(super) fn two(text: &str, key: &str, expected: &str) -> Result<(u32, u32), ConfigError> {
    text.split_once('.')
        .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)))
        .filter(|&(a, b): &(u32, u32)| a < 1000 && b < 100)
        .ok_or_else(|| ConfigError(format!("{key} = {text:?}: expected {expected}")))
}

/// Whether it is the second of two words.
pub(super) fn either(said: &str, words: [&str; 2], key: &str) -> Result<bool, ConfigError> {
    let at = words.iter().position(|word| *word == said);
    at.map(|at| at == 1).ok_or_else(|| {
        ConfigError(format!("{key} = {said:?}: expected {:?} or {:?}", words[0], words[1]))
    })
}

/// `None`: "auto".
pub(super) fn quantity_or_auto(q: &Quantity, key: &str) -> Result<Option<u64>, ConfigError> {
    match q {
        Quantity::Text(text) if text == "auto" => Ok(None),
        said => quantity(said, key).map(Some),
    }
}

pub(super) fn quantity(q: &Quantity, key: &str) -> Result<u64, ConfigError> {
    let text = match q {
        Quantity::Bytes(n) => return Ok(*n),
        Quantity::Text(text) => text.trim(),
    };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" | "B" => 1,
        "K" | "Ki" | "KiB" => 1 << 10,
        "M" | "Mi" | "MiB" => MIB,
        "G" | "Gi" | "GiB" => 1 << 30,
        "T" | "Ti" | "TiB" => 1 << 40,
        _ => 0,
    };
    digits
        .trim()
        .parse::<u64>()
        .ok()
        .filter(|_| factor != 0)
        .and_then(|n| n.checked_mul(factor))
        .filter(|&n| n < 1 << 48)
        .ok_or_else(|| {
            ConfigError(format!(
                "{key} = {text:?}: expected bytes, or such as \"16GiB\", \"512MiB\""
            ))
        })
}
