//! How near GPUs are to each other, as NVML says.

use std::collections::{BTreeMap, BTreeSet};

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

#[cfg(test)]
mod tests {
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
}
