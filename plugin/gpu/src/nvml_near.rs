//! How near GPUs are to each other and to processors, as NVML and Linux say.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use tessera_model::gpu::Gpu;
use tessera_model::topology::{Nearness, Topology};

/// `NVML_NVLINK_MAX_LINKS`, with room for what comes: asking beyond the last link ends the search.
const MAX_LINKS: u32 = 64;

/// Asks once for each GPU's links and for each pair's place in the PCIe tree.
pub(super) fn topology(nvml: &Nvml, gpus: &[Gpu]) -> Topology {
    let links: BTreeMap<&str, Links> = gpus
        .iter()
        .filter_map(|gpu| Some((gpu.uuid.as_str(), links(&nvml.device_by_uuid(&*gpu.uuid).ok()?))))
        .collect();
    // Also those that are not sold.
    let others: BTreeSet<String> = (0..nvml.device_count().unwrap_or(0))
        .filter_map(|index| nvml.device_by_index(index).ok()?.pci_info().ok())
        .map(|pci| pci.bus_id.to_ascii_uppercase())
        .collect();
    Topology::of(gpus, |a, b| {
        if a.pci_bus_id == b.pci_bus_id {
            return Nearness::Board;
        }
        let linked = match (links.get(&*a.uuid), links.get(&*b.uuid)) {
            (Some(from), Some(to)) => between(from, to, [&a.pci_bus_id, &b.pci_bus_id], &others),
            _ => 0,
        };
        if linked > 0 { Nearness::NvLink(linked) } else { ancestor(nvml, a, b) }
    })
}

/// Active links by the PCI address at their other end: a GPU, or an NVSwitch.
type Links = BTreeMap<String, u32>;

fn links(device: &Device<'_>) -> Links {
    let mut links = Links::new();
    for index in 0..MAX_LINKS {
        let link = device.link_wrapper_for(index);
        match link.is_active() {
            Ok(true) => {}
            Ok(false) => continue,
            // No such link, or no NVLink at all.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Err(_) => continue,
        }
        if let Ok(remote) = link.remote_pci_info() {
            *links.entry(remote.bus_id.to_ascii_uppercase()).or_default() += 1;
        }
    }
    links
}

/// Links from one GPU to the other, and to switches that both are linked to: through those, each
/// reaches the other with as many links as the one with fewer has. A third GPU is no switch.
fn between(a: &Links, b: &Links, buses: [&str; 2], gpus: &BTreeSet<String>) -> u32 {
    let to = |links: &Links, bus: &str| links.get(&bus.to_ascii_uppercase()).copied().unwrap_or(0);
    let direct = to(a, buses[1]).max(to(b, buses[0]));
    let switched = a
        .iter()
        .filter(|(bus, _)| !gpus.contains(*bus))
        .filter_map(|(bus, count)| b.get(bus).map(|other| *count.min(other)));
    direct + switched.sum::<u32>()
}

fn ancestor(nvml: &Nvml, a: &Gpu, b: &Gpu) -> Nearness {
    let level = nvml.device_by_uuid(&*a.uuid).and_then(|from| {
        let to = nvml.device_by_uuid(&*b.uuid)?;
        from.topology_common_ancestor(to)
    });
    match level {
        Ok(TopologyLevel::Internal) => Nearness::Board,
        Ok(TopologyLevel::Single) => Nearness::Switch,
        Ok(TopologyLevel::Multiple) => Nearness::Switches,
        Ok(TopologyLevel::HostBridge) => Nearness::HostBridge,
        Ok(TopologyLevel::Node) => Nearness::Node,
        Ok(TopologyLevel::System) => Nearness::System,
        Err(_) => Nearness::Unknown,
    }
}

/// The NUMA node of a device, below the directory `root`; −1 there means no node.
pub(super) fn numa_node(root: &Path, pci_bus_id: &str) -> Option<u32> {
    let file = root.join(name(pci_bus_id)?).join("numa_node");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The PCIe root complex that a device hangs on, `pci0000:16`: the first part that says so of where its link below
/// the directory `root` (`/sys/bus/pci/devices`) leads. Devices with the same one reach each other without
/// passing through a processor's interconnect.
pub fn pcie_root(root: &Path, pci_bus_id: &str) -> Option<String> {
    let target = std::fs::read_link(root.join(name(pci_bus_id)?)).ok()?;
    let parts = target.components().filter_map(|part| part.as_os_str().to_str());
    parts.into_iter().find(|part| is_root(part)).map(str::to_owned)
}

/// `pci0000:16`: a domain and a bus.
fn is_root(part: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let numbers = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    numbers.is_some_and(|(domain, bus)| hex(domain) && hex(bus))
}

/// NVML writes `00000000:65:00.0`, sysfs `0000:65:00.0`.
fn name(pci_bus_id: &str) -> Option<String> {
    let id = pci_bus_id.to_ascii_lowercase();
    let short = id.get(id.len().checked_sub("0000:00:00.0".len())?..)?;
    short
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
        .then(|| short.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const A: &str = "00000000:1a:00.0";
    const B: &str = "00000000:1B:00.0";

    fn links(list: &[(&str, u32)]) -> Links {
        list.iter().map(|(bus, count)| (bus.to_ascii_uppercase(), *count)).collect()
    }

    #[test]
    fn links_count_direct_or_through_switches() {
        let third = "00000000:1C:00.0";
        let gpus: BTreeSet<String> = [A, B, third].map(str::to_ascii_uppercase).into();
        let count = |a: &Links, b: &Links| between(a, b, [A, B], &gpus);
        assert_eq!(count(&links(&[]), &links(&[])), 0);
        assert_eq!(count(&links(&[(B, 4)]), &links(&[(A, 4)])), 4);
        // Two switches, and one that only the first GPU has.
        let first = links(&[("S1", 4), ("S2", 2), ("S3", 9)]);
        let second = links(&[("S1", 4), ("S2", 5)]);
        assert_eq!(count(&first, &second), 6);
        assert_eq!(count(&links(&[(third, 4)]), &links(&[(third, 4)])), 0);
    }

    #[test]
    fn numa_nodes_are_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        for (id, node) in [("0000:65:00.0", "1\n"), ("0000:66:00.0", "-1\n")] {
            std::fs::create_dir(root.path().join(id)).unwrap();
            std::fs::write(root.path().join(id).join("numa_node"), node).unwrap();
        }
        assert_eq!(numa_node(root.path(), "00000000:65:00.0"), Some(1));
        assert_eq!(numa_node(root.path(), "00000000:66:00.0"), None);
        assert_eq!(numa_node(root.path(), "00000000:67:00.0"), None);
        assert_eq!(numa_node(root.path(), "x"), None);
        assert_eq!(numa_node(root.path(), "/../../etc/0"), None);
    }

    #[test]
    fn the_pcie_root_is_the_first_part_of_the_link() {
        let root = tempfile::tempdir().unwrap();
        for (id, target) in [
            ("0000:1b:00.0", "../../../devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:1b:00.0"),
            ("0001:65:00.0", "../../../devices/pci0001:64/0001:64:00.0/0001:65:00.0"),
            ("0000:66:00.0", "../../../devices/platform/x/0000:66:00.0"),
        ] {
            symlink(target, root.path().join(id)).unwrap();
        }
        let found = |id: &str| pcie_root(root.path(), id);
        assert_eq!(found("00000000:1B:00.0").as_deref(), Some("pci0000:16"));
        assert_eq!(found("00000001:65:00.0").as_deref(), Some("pci0001:64"));
        for none in ["00000000:66:00.0", "00000000:67:00.0", "", "../x"] {
            assert_eq!(found(none), None, "{none}");
        }
    }
}
