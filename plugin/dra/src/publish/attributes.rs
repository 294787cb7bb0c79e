//! What a device says of itself, for selectors in CEL and for `matchAttribute`.

use std::collections::BTreeMap;

use tessera_cluster::k8s_openapi::api::resource::v1::DeviceAttribute;
use tessera_model::gpu::Gpu;

use super::Published;

/// Longest string that an attribute may have, in bytes.
const LONGEST: usize = 64;
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
    let mut end = text.len().min(LONGEST);
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

/// NVIDIA's brand, by the product's name.
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

/// NVML writes `00000000:65:00.0`, the standard attribute `0000:65:00.0`; `None` for what is no address.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{gpu, mig};

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
}
