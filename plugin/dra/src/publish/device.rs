//! The parts of a device: its capacities with what a claim may ask of them, its attributes for selectors in CEL and for
//! `matchAttribute`, and health and cordons as taints.
//!
//! The scheduler rounds by these policies: less than `min` becomes `min`, what is between two steps is rounded up,
//! what is not said becomes `default`, and more than `max` or the value finds no device. What is counted then is
//! what is enforced, so a share never gets less than it asked for.

use std::collections::BTreeMap;

use tessera_cluster::k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity,
    DeviceTaint, ResourceSlice,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_config::{Config, NoExecute};
use tessera_model::gpu::Gpu;

use super::Published;

/// Hundredths in a GPU: the unit of the capacity `cores`.
pub const WHOLE_CORES: u64 = 100;

/// A capacity and what may be asked of it, in bytes or hundredths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    pub value: u64,
    pub default: u64,
    pub min: u64,
    /// Requests are rounded up to `min` and a multiple of this.
    pub step: u64,
}

impl Policy {
    /// Memory of a GPU; `None` where there is less than one step of it.
    pub fn memory(gpu: &Published, config: &Config) -> Option<Self> {
        let step = config.dra.memory_step_bytes;
        let floor = |bytes: u64| bytes - bytes % step;
        let whole = floor(gpu.memory_bytes);
        let value = floor(gpu.memory_bytes.saturating_sub(gpu.grown_bytes));
        if value == 0 {
            return None;
        }
        let default = floor(gpu.sold.default_share.memory_bytes).clamp(step, whole);
        // One context, and something to use it for.
        let min = gpu
            .sold
            .context_overhead_bytes
            .saturating_add(step)
            .div_ceil(step)
            .saturating_mul(step)
            .min(default);
        Some(Policy { value, default, min, step })
    }

    pub fn cores(gpu: &Published) -> Self {
        let default = u64::from(gpu.sold.default_share.cores_millis / 10).clamp(1, WHOLE_CORES);
        Policy { value: WHOLE_CORES, default, min: 1, step: 1 }
    }

    pub fn capacity(self) -> DeviceCapacity {
        let policy = if self.value < self.min + self.step {
            // A range must have room for one step.
            CapacityRequestPolicy {
                default: Some(quantity(self.value)),
                valid_values: Some(vec![quantity(self.value)]),
                valid_range: None,
            }
        } else {
            CapacityRequestPolicy {
                default: Some(quantity(self.default.min(self.most()))),
                valid_range: Some(CapacityRequestPolicyRange {
                    min: quantity(self.min),
                    max: Some(quantity(self.most())),
                    step: Some(quantity(self.step)),
                }),
                valid_values: None,
            }
        };
        DeviceCapacity { value: quantity(self.value), request_policy: Some(policy) }
    }

    /// The most that one request may ask: the last multiple of a step above `min`.
    fn most(self) -> u64 {
        self.value - (self.value - self.min) % self.step
    }
}

/// In Kubernetes' canonical form, so that the server keeps it as it is: with a suffix, where that says it exactly.
fn quantity(units: u64) -> Quantity {
    let suffixes = [(60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
    let fits = |(bits, _): &&(u32, &str)| units > 0 && units.trailing_zeros() >= *bits;
    let found = suffixes.iter().find(fits);
    Quantity(found.map_or(units.to_string(), |(bits, suffix)| format!("{}{suffix}", units >> bits)))
}

// === Attributes ===

const LONGEST_STRING: usize = 64;
/// What holds a share to its limits: pages and shim for memory, leases for time.
const ENGINE: &str = "shim";

/// The attributes of a device, by name. What is not known is left out.
pub fn attributes(published: &Published) -> BTreeMap<String, DeviceAttribute> {
    let device = &published.sold.gpu;
    let (capability, cuda) = (published.compute_capability, published.cuda_version);
    let two = |(major, minor): (u32, u32)| format!("{major}.{minor}.0");
    let mut found = BTreeMap::new();
    let mut put = |name: &str, attribute: Option<DeviceAttribute>| {
        found.extend(attribute.map(|attribute| (name.to_owned(), attribute)));
    };
    put("uuid", string(&device.uuid));
    put("productName", string(product(&device.name)));
    put("brand", string(brand(&device.name)));
    put("architecture", capability.and_then(architecture).and_then(string));
    put("cudaComputeCapability", capability.map(two).and_then(version));
    put("driverVersion", published.driver_version.as_deref().and_then(semver).and_then(version));
    put("cudaDriverVersion", cuda.map(two).and_then(version));
    put("index", int(device.mig.as_ref().map_or(device.index, |mig| mig.index)));
    put("engine", string(ENGINE));
    if let Some(mig) = &device.mig {
        put("parentUUID", string(&mig.parent_uuid));
        put("parentIndex", int(mig.parent_index));
        put("profile", profile(device).and_then(string));
    }
    put("resource.kubernetes.io/pcieRoot", published.pcie_root.as_deref().and_then(string));
    put(
        "resource.kubernetes.io/pciBusID",
        pci_bus_id(&device.pci_bus_id).as_deref().and_then(string),
    );
    put("resource.kubernetes.io/numaNode", device.numa_node.and_then(int));
    found
}

fn string(text: &str) -> Option<DeviceAttribute> {
    let mut end = text.len().min(LONGEST_STRING);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = text[..end].trim();
    (!text.is_empty())
        .then(|| DeviceAttribute { string: Some(text.to_owned()), ..DeviceAttribute::default() })
}

fn int(number: u32) -> Option<DeviceAttribute> {
    Some(DeviceAttribute { int: Some(number.into()), ..DeviceAttribute::default() })
}

fn version(text: String) -> Option<DeviceAttribute> {
    Some(DeviceAttribute { version: Some(text), ..DeviceAttribute::default() })
}

/// A driver's version as Semantic Versioning 2.0.0 has it: three numbers without leading zeros.
fn semver(text: &str) -> Option<String> {
    let number = |part: &str| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    let mut parts = text.trim().split('.');
    let major = number(parts.next()?)?;
    let mut rest = || parts.next().and_then(number).unwrap_or(0);
    Some(format!("{major}.{}.{}", rest(), rest()))
}

/// The product without the instance that NVML adds to it.
fn product(name: &str) -> &str {
    name.split_once(" MIG ").map_or(name, |(product, _)| product)
}

/// A MIG instance's profile, `1g.10gb`, by the name that NVML gives the instance.
fn profile(gpu: &Gpu) -> Option<&str> {
    Some(gpu.name.split_once(" MIG ")?.1.trim()).filter(|profile| !profile.is_empty())
}

fn brand(name: &str) -> &'static str {
    let brands = ["Tesla", "GeForce", "Quadro", "TITAN", "GRID"];
    let has = |brand: &&&str| name.split([' ', '-']).any(|word| word.eq_ignore_ascii_case(brand));
    let rtx = || name.split(' ').any(|word| word == "RTX").then_some("NvidiaRTX");
    brands.iter().find(has).copied().or_else(rtx).unwrap_or("Nvidia")
}

/// What NVIDIA calls the generation, by its compute capability.
fn architecture((major, minor): (u32, u32)) -> Option<&'static str> {
    Some(match (major, minor) {
        (5, _) => "Maxwell",
        (6, _) => "Pascal",
        (7, 5..) => "Turing",
        (7, _) => "Volta",
        (8, 9) => "Ada Lovelace",
        (8, _) => "Ampere",
        (9, _) => "Hopper",
        (10..=12, _) => "Blackwell",
        _ => return None,
    })
}

/// NVML writes `00000000:65:00.0`, the standard attribute `0000:65:00.0`; `None` where it is not an address.
fn pci_bus_id(address: &str) -> Option<String> {
    let address = address.to_ascii_lowercase();
    let mut parts = address.split([':', '.']);
    let mut number = |digits: usize, least: usize| {
        let part = parts.next()?;
        let value = u32::from_str_radix(part, 16).ok()?;
        let fits = value < 1u32.checked_shl(u32::try_from(digits).ok()? * 4).unwrap_or(u32::MAX);
        (fits && part.len() >= least).then_some(value)
    };
    let (domain, bus) = (number(4, 4)?, number(2, 2)?);
    let (device, function) = (number(2, 2)?, number(1, 1)?);
    let rest = parts.next();
    rest.is_none().then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

// === Taints ===

pub const UNHEALTHY: &str = "gpu.tessera.dev/unhealthy";
pub const CORDONED: &str = "gpu.tessera.dev/cordoned";
pub const NO_SCHEDULE: &str = "NoSchedule";
/// No new claims, and pods that have claimed it are evicted.
pub const NO_EXECUTE: &str = "NoExecute";
const LONGEST_VALUE: usize = 63;

/// The taints of a GPU. When they were added is not said yet; see [`Since`].
pub fn taints(gpu: &Published, config: &Config) -> Vec<DeviceTaint> {
    let effect = |cause: NoExecute| match config.dra.no_execute.contains(&cause) {
        true => NO_EXECUTE,
        false => NO_SCHEDULE,
    };
    let sick = gpu.sold.sick.as_ref();
    let sick = sick.map(|why| (UNHEALTHY, label_value(why), effect(NoExecute::Unhealthy)));
    // Slices are for everybody who may read them: who cordoned it and why is the operators'.
    let cordon = (CORDONED, String::new(), effect(NoExecute::Cordoned));
    let cordon = gpu.is_cordoned.then_some(cordon);
    let taint = |(key, value, effect): (&str, String, &str)| DeviceTaint {
        key: key.to_owned(),
        value: Some(value).filter(|value| !value.is_empty()),
        effect: effect.to_owned(),
        time_added: None,
    };
    sick.into_iter().chain(cordon).map(taint).collect()
}

fn label_value(text: &str) -> String {
    let mut value = String::new();
    for c in text.chars() {
        let c = if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
        if !(c == '-' && value.ends_with('-')) {
            value.push(c);
        }
    }
    let is_edge = |c: char| !c.is_ascii_alphanumeric();
    let value = value.trim_matches(is_edge);
    value[..value.len().min(LONGEST_VALUE)].trim_end_matches(is_edge).to_owned()
}

/// Since when each taint is there: pods that tolerate one for a while are evicted by this time, so it must not
/// begin again with each write, or with another plugin.
#[derive(Clone, Debug, Default)]
pub struct Since(BTreeMap<(String, String, String), Timestamp>);

impl Since {
    /// Takes over what is published.
    pub fn learn(&mut self, slices: &[ResourceSlice]) {
        let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        for device in devices {
            for taint in device.taints.iter().flatten() {
                if let Some(Time(added)) = taint.time_added {
                    let since = self.0.entry(key(device, taint)).or_insert(added);
                    *since = added.min(*since);
                }
            }
        }
    }

    /// Says of each taint when it was added: `now`, seconds, where it is new. Those that are gone are forgotten.
    pub fn stamp<'d>(&mut self, devices: impl IntoIterator<Item = &'d mut Device>, now: Timestamp) {
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
        let mut kept = BTreeMap::new();
        for device in devices {
            let name = device.name.clone();
            for taint in device.taints.iter_mut().flatten() {
                let key = (name.clone(), taint.key.clone(), taint.effect.clone());
                let since = self.0.get(&key).copied().unwrap_or(now);
                taint.time_added = Some(Time(since));
                kept.insert(key, since);
            }
        }
        self.0 = kept;
    }
}

fn key(device: &Device, taint: &DeviceTaint) -> (String, String, String) {
    (device.name.clone(), taint.key.clone(), taint.effect.clone())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures::{MIB, consumed, gpu, gpu_of, mig, units};

    fn text(capacity: &DeviceCapacity) -> [String; 5] {
        let policy = capacity.request_policy.as_ref().unwrap();
        let range = policy.valid_range.as_ref().unwrap();
        let quantity = |quantity: Option<&Quantity>| quantity.unwrap().0.clone();
        [
            capacity.value.0.clone(),
            quantity(policy.default.as_ref()),
            range.min.0.clone(),
            quantity(range.max.as_ref()),
            quantity(range.step.as_ref()),
        ]
    }

    #[test]
    fn the_default_is_one_replicas_share_and_memory_comes_in_steps() {
        let config = Config::default();
        let gpu = gpu_of(79_900 * MIB, 19_975 * MIB);
        let memory = Policy::memory(&gpu, &config).unwrap().capacity();
        // 512 MiB for a context of a GPU that does not tell, and a step.
        assert_eq!(text(&memory), ["78Gi", "19968Mi", "576Mi", "78Gi", "64Mi"]);
        let cores = Policy::cores(&gpu).capacity();
        assert_eq!(text(&cores), ["100", "25", "1", "100", "1"]);
    }

    #[test]
    fn a_share_that_is_no_larger_than_a_context_is_the_least() {
        let config = Config::parse("[dra]\nmemory_step = \"256Mi\"").unwrap();
        let small = gpu_of(1024 * MIB, 600 * MIB);
        let memory = Policy::memory(&small, &config).unwrap();
        assert_eq!(
            memory,
            Policy { value: 1024 * MIB, default: 512 * MIB, min: 512 * MIB, step: 256 * MIB }
        );
        // No room for two steps: all or nothing.
        let tiny = Published { memory_bytes: 300 * MIB, ..small.clone() };
        let policy = Policy::memory(&tiny, &config).unwrap().capacity().request_policy;
        assert_eq!(policy.unwrap().valid_values, Some(vec![Quantity("256Mi".to_owned())]));
        assert_eq!(Policy::memory(&Published { memory_bytes: 100 * MIB, ..small }, &config), None);
    }

    proptest! {
        #[test]
        fn whatever_is_counted_is_enough_and_sums_fit(
            memory in MIB..200 * 1024 * MIB,
            replicas in 1u64..16,
            step in 1u64..2048,
            asks in prop::collection::vec(prop::option::of(0u64..100 * 1024 * MIB), 1..40),
        ) {
            let config = Config::parse(&format!("[dra]\nmemory_step = \"{step}Mi\"")).unwrap();
            let gpu = gpu_of(memory, memory / replicas);
            let Some(policy) = Policy::memory(&gpu, &config) else {
                prop_assert!(memory < step * MIB);
                return Ok(());
            };
            let capacity = policy.capacity();
            prop_assert!(policy.value <= memory);
            // As the API server wants a range.
            if let Some(range) = &capacity.request_policy.as_ref().unwrap().valid_range {
                let [min, max] = [&range.min, range.max.as_ref().unwrap()].map(units);
                let default = consumed(&capacity, None).unwrap();
                prop_assert!(min <= default && default <= max && max <= policy.value);
                prop_assert!([default - min, max - min].iter().all(|part| part % (step * MIB) == 0));
            }
            let mut free = policy.value;
            for ask in asks {
                let Some(bytes) = consumed(&capacity, ask) else {
                    prop_assert!(ask.unwrap() > policy.value - step * MIB);
                    continue;
                };
                prop_assert!(bytes >= ask.unwrap_or(policy.default.min(bytes)));
                prop_assert_eq!(bytes % (step * MIB), 0);
                free = free.checked_sub(bytes).unwrap_or(free);
            }
        }
    }

    proptest! {
        /// The API server takes strings of 64 bytes, versions of three numbers, and labels as a taint's value.
        #[test]
        fn words_of_a_driver_fit_into_attributes_and_taints(text in r"\PC{0,90}|[0-9.]{0,20}") {
            let attribute = string(&text).and_then(|attribute| attribute.string).unwrap_or_default();
            prop_assert!(attribute.len() <= 64, "{}", attribute);
            if let Some(version) = semver(&text) {
                let numbers: Vec<&str> = version.split('.').collect();
                let is_plain = |number: &&str| *number == "0" || !number.starts_with('0');
                prop_assert!(numbers.len() == 3 && numbers.iter().all(is_plain), "{}", version);
            }
            let value = label_value(&text);
            let is_edge = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
            prop_assert!(value.len() <= 63 && is_edge(value.chars().next()) && is_edge(value.chars().last()));
            prop_assert!(value.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)), "{}", value);
        }
    }

    fn shown(published: &Published) -> Vec<String> {
        let show = |(name, attribute): (String, DeviceAttribute)| {
            let DeviceAttribute { string, int, version, .. } = attribute;
            let value = string.or(version.map(|v| format!("v{v}"))).or(int.map(|i| i.to_string()));
            format!("{name}={}", value.unwrap())
        };
        attributes(published).into_iter().map(show).collect()
    }

    #[test]
    fn a_gpu_says_what_it_is_and_where() {
        let mut published =
            Published { pcie_root: Some("pci0000:16".to_owned()), ..gpu("GPU-a", 3) };
        published.sold.gpu.name = "NVIDIA H100 80GB HBM3".to_owned();
        published.sold.gpu.pci_bus_id = "00000000:1B:00.0".to_owned();
        published.sold.gpu.numa_node = Some(1);
        assert_eq!(
            shown(&published),
            [
                "architecture=Hopper",
                "brand=Nvidia",
                "cudaComputeCapability=v9.0.0",
                "cudaDriverVersion=v13.0.0",
                "driverVersion=v580.65.6",
                "engine=shim",
                "index=3",
                "productName=NVIDIA H100 80GB HBM3",
                "resource.kubernetes.io/numaNode=1",
                "resource.kubernetes.io/pciBusID=0000:1b:00.0",
                "resource.kubernetes.io/pcieRoot=pci0000:16",
                "uuid=GPU-a",
            ]
        );
    }

    #[test]
    fn an_instance_names_its_gpu_and_profile() {
        let published = mig("MIG-a", 2);
        let shown = shown(&published);
        for want in ["parentUUID=GPU-parent", "profile=1g.10gb", "index=2", "parentIndex=0"] {
            assert!(shown.iter().any(|line| line == want), "{want}: {shown:?}");
        }
        assert!(shown.contains(&"productName=NVIDIA A100-SXM4-80GB".to_owned()), "{shown:?}");
    }

    #[test]
    fn versions_are_strict() {
        for (driver, want) in [
            ("550.54.15", Some("550.54.15")),
            ("580.65.06", Some("580.65.6")),
            ("535.104", Some("535.104.0")),
            ("470.256.02-grid", Some("470.256.2")),
            ("615.71.09.01", Some("615.71.9")),
            ("", None),
            ("unknown", None),
        ] {
            assert_eq!(semver(driver).as_deref(), want, "{driver}");
        }
    }

    #[test]
    fn brands_and_generations_are_nvidias() {
        for (name, want) in [
            ("Tesla T4", "Tesla"),
            ("NVIDIA L4", "Nvidia"),
            ("NVIDIA GeForce RTX 4090", "GeForce"),
            ("NVIDIA RTX 6000 Ada Generation", "NvidiaRTX"),
            ("Quadro RTX 8000", "Quadro"),
        ] {
            assert_eq!(brand(name), want, "{name}");
        }
        let names = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];
        let names: Vec<_> = names.into_iter().filter_map(architecture).collect();
        let want = ["Volta", "Turing", "Ampere", "Ampere", "Ada Lovelace", "Hopper"];
        assert_eq!(names, [&want[..], &["Blackwell"; 2]].concat());
        assert_eq!(architecture((99, 0)), None);
    }

    #[test]
    fn pci_addresses_are_the_standard_ones() {
        for (address, want) in [
            ("00000000:65:00.0", Some("0000:65:00.0")),
            ("0001:FF:1f.7", Some("0001:ff:1f.7")),
            ("00010000:65:00.0", None),
            ("65:00.0", None),
            ("0000:65:00", None),
            ("x", None),
        ] {
            assert_eq!(pci_bus_id(address).as_deref(), want, "{address}");
        }
    }

    fn sick() -> Published {
        let mut sick = Published { is_cordoned: true, ..gpu("GPU-a", 0) };
        sick.sold.sick = Some("XID 79, number 3 within 10m".to_owned());
        sick
    }

    #[test]
    fn trouble_keeps_new_pods_away_and_evicts_only_where_configured() {
        assert_eq!(taints(&gpu("GPU-a", 0), &Config::default()), []);
        let value = "XID-79-number-3-within-10m";
        let said = taints(&sick(), &Config::default()).into_iter();
        let rows: Vec<_> = said.map(|taint| (taint.key, taint.value, taint.effect)).collect();
        let row = |key: &str, value: Option<&str>| {
            (key.to_owned(), value.map(str::to_owned), NO_SCHEDULE.to_owned())
        };
        assert_eq!(rows, [row(UNHEALTHY, Some(value)), row(CORDONED, None)]);
        let config = Config::parse("[dra]\nno_execute = [\"unhealthy\"]").unwrap();
        let effects: Vec<_> = taints(&sick(), &config).into_iter().map(|t| t.effect).collect();
        assert_eq!(effects, [NO_EXECUTE, NO_SCHEDULE]);
    }
}
