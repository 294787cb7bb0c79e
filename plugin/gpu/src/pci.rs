//! What Linux says of a PCI device.

use std::path::Path;

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
