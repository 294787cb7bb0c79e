//! The configuration as it is written, with its defaults, and the values of its keys.

use super::{ConfigError, Costs, DriverConfig, MIB, MemoryConfig, NvmlCosts};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Raw {
    pub(super) driver_version: String,
    pub(super) cuda_version: String,
    pub(super) gpu: Vec<RawGpu>,
    pub(super) nvlink: Vec<NvLinks>,
    pub(super) memory: MemoryConfig,
    pub(super) costs: Costs,
    pub(super) nvml: NvmlCosts,
    pub(super) driver: DriverConfig,
    pub(super) kernel: Vec<RawKernel>,
    #[serde(rename = "default_kernel_us", deserialize_with = "micros")]
    pub(super) default_kernel_ns: u64,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawGpu {
    pub(super) name: Option<String>,
    #[serde(deserialize_with = "some_bytes")]
    pub(super) memory: Option<u64>,
    pub(super) sm_count: Option<u32>,
    pub(super) compute_capability: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) pci_bus_id: Option<String>,
    pub(super) numa_node: Option<i32>,
    pub(super) pcie_switch: Option<String>,
    pub(super) minor: Option<u32>,
    pub(super) vgpu: Option<bool>,
    pub(super) mig: Option<Vec<toml::Value>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawKernel {
    pub(super) name: String,
    #[serde(default, deserialize_with = "some_micros")]
    pub(super) us: Option<u64>,
    pub(super) parameter: Option<u32>,
    pub(super) word: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Quantity {
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
            memory: MemoryConfig::default(),
            costs: Costs::default(),
            nvml: NvmlCosts::default(),
            driver: DriverConfig::default(),
            kernel: Vec::new(),
            default_kernel_ns: 10_000,
        }
    }
}

/// A time in a unit of `unit_ns` nanoseconds; at most an hour, never negative.
fn nanos<'de, D: Deserializer<'de>>(d: D, unit_ns: f64) -> Result<u64, D::Error> {
    let value = f64::deserialize(d)?;
    let ns = value * unit_ns;
    if !(0.0..=3.6e12).contains(&ns) {
        return Err(D::Error::custom(format!("{value}: out of range")));
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range checked")]
    Ok(ns.round() as u64)
}

pub(super) fn millis<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    nanos(d, 1e6)
}

/// Microseconds; or GB/s, in bytes per microsecond.
pub(super) fn micros<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    nanos(d, 1e3)
}

pub(super) fn two(text: &str, key: &str, expected: &str) -> Result<(u32, u32), ConfigError> {
    text.split_once('.')
        .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)))
        .filter(|&(a, b): &(u32, u32)| a < 1000 && b < 100)
        .ok_or_else(|| ConfigError(format!("{key} = {text:?}: expected {expected}")))
}

/// Whether it is the second of two words.
fn either<'de, D: Deserializer<'de>>(d: D, words: [&str; 2]) -> Result<bool, D::Error> {
    let said = String::deserialize(d)?;
    let at = words.iter().position(|word| *word == said);
    at.map(|at| at == 1).ok_or_else(|| {
        D::Error::custom(format!("{said:?}: expected {:?} or {:?}", words[0], words[1]))
    })
}

pub(super) fn is_process<'de, D: Deserializer<'de>>(d: D) -> Result<bool, D::Error> {
    either(d, ["nobody", "process"])
}

pub(super) fn is_both<'de, D: Deserializer<'de>>(d: D) -> Result<bool, D::Error> {
    either(d, ["maker", "both"])
}

pub(super) fn bytes<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    quantity(&Quantity::deserialize(d)?).map_err(D::Error::custom)
}

pub(super) fn some_bytes<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    bytes(d).map(Some)
}

pub(super) fn some_micros<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    micros(d).map(Some)
}

/// `None`: "auto".
pub(super) fn bytes_or_auto<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    match Quantity::deserialize(d)? {
        Quantity::Text(text) if text == "auto" => Ok(None),
        said => quantity(&said).map(Some).map_err(D::Error::custom),
    }
}

fn quantity(q: &Quantity) -> Result<u64, String> {
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
        .ok_or_else(|| format!("{text:?}: expected bytes, or such as \"16GiB\", \"512MiB\""))
}

// `[[nvlink]]`: which GPUs are linked, and how many links each pair has.

/// `NVML_NVLINK_MAX_LINKS`.
pub const MAX_LINKS: usize = 18;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinks {
    /// NVML indexes; each is linked to each of the others.
    pub gpus: Vec<usize>,
    pub links: usize,
}

/// What is wrong with the tables, if anything.
pub(super) fn check_links(tables: &[NvLinks], gpus: usize) -> Result<(), String> {
    for (i, table) in tables.iter().enumerate() {
        if let Some(gpu) = table.gpus.iter().find(|&&gpu| gpu >= gpus) {
            return Err(format!("nvlink {i}: gpus names {gpu}, but there are {gpus} GPUs"));
        }
        let mut distinct = table.gpus.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() != table.gpus.len() || distinct.len() < 2 || table.links == 0 {
            return Err(format!("nvlink {i}: two or more different gpus, and links of at least 1"));
        }
    }
    for gpu in 0..gpus {
        let count = peers(tables, gpu).count();
        if count > MAX_LINKS {
            return Err(format!("nvlink: GPU {gpu} has {count} links, at most {MAX_LINKS}"));
        }
    }
    Ok(())
}

/// The GPU at the other end of each of a GPU's links, by link.
pub fn peers(tables: &[NvLinks], gpu: usize) -> impl Iterator<Item = usize> + '_ {
    tables
        .iter()
        .filter(move |table| table.gpus.contains(&gpu))
        .flat_map(move |table| table.gpus.iter().map(|&peer| (peer, table.links)))
        .filter(move |&(peer, _)| peer != gpu)
        .flat_map(|(peer, links)| std::iter::repeat_n(peer, links))
}
