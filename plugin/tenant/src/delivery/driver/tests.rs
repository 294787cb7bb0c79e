use std::os::unix::fs::symlink;

use super::*;
use crate::delivery::tests::instance;

fn file(root: &Path, path: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, b"\x7fELF").unwrap();
}

fn link(root: &Path, at: &str, target: &str) {
    let path = root.join(at);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

fn config(text: &str) -> Config {
    Config::parse(text).unwrap()
}

#[test]
fn libraries_below_a_root_are_found_with_their_links_followed_inside_it() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let lib = "usr/lib/x86_64-linux-gnu";
    file(root, &format!("{lib}/libcuda.so.550.54.15"));
    // Relative, absolute (within the root), and through a directory that is a link.
    link(root, &format!("{lib}/libcuda.so.1"), "libcuda.so.550.54.15");
    link(root, &format!("{lib}/libcuda.so"), "libcuda.so.1");
    file(root, "opt/nvidia/libnvidia-ml.so.550.54.15");
    link(root, &format!("{lib}/libnvidia-ml.so.1"), "/alt/libnvidia-ml.so.550.54.15");
    link(root, "alt", "../../../../opt/nvidia");
    // Not ours, not a version, leading nowhere, in a circle, out of the root.
    file(root, &format!("{lib}/libc.so.6"));
    file(root, &format!("{lib}/libcuda.so.1.bak"));
    // A driver of its own that nobody limits.
    file(root, &format!("{lib}/libnvidia-opencl.so.1"));
    link(root, &format!("{lib}/libnvidia-nvvm.so.4"), "absent");
    link(root, &format!("{lib}/libnvidia-cfg.so.1"), "libnvidia-cfg.so.1");
    link(root, &format!("{lib}/libnvidia-pkcs11.so.1"), "/../../../../../../etc/passwd");
    // A second place comes second.
    file(root, "usr/lib64/libcuda.so.1");
    file(root, "usr/lib64/libnvidia-ptxjitcompiler.so.1");

    let text = format!("[driver]\nroot = \"{}\"\n", root.display());
    let parts = parts(&config(&text), &[], false).unwrap();
    let found: Vec<(&str, &str)> = parts
        .libraries
        .iter()
        .map(|mount| {
            assert!(mount.read_only);
            let name = mount.container.strip_prefix(CONTAINER_DRIVER_DIR).unwrap();
            let host = mount.host.strip_prefix(root).unwrap();
            (name.to_str().unwrap(), host.to_str().unwrap())
        })
        .collect();
    assert_eq!(
        found,
        [
            ("libcuda.so.1", "usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15"),
            ("libcuda.so.550.54.15", "usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15"),
            ("libnvidia-ml.so.1", "opt/nvidia/libnvidia-ml.so.550.54.15"),
            ("libnvidia-ptxjitcompiler.so.1", "usr/lib64/libnvidia-ptxjitcompiler.so.1"),
        ]
    );
    let plugins = nvml(&config(&text)).unwrap();
    assert_eq!(plugins, root.join("opt/nvidia/libnvidia-ml.so.550.54.15"));
}

#[test]
fn a_root_without_a_driver_is_reported_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), "usr/lib64/libnvidia-ml.so.1");
    let text = format!("[driver]\nroot = \"{}\"\n", dir.path().display());
    let error = parts(&config(&text), &[], false).unwrap_err();
    assert!(error.to_string().contains("no libcuda.so.1 below driver.root"), "{error}");
}

#[test]
fn nodes_are_those_of_the_gpus_each_once_and_below_the_root_where_the_driver_has_them() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), "lib64/libcuda.so.1");
    let gpus = [Gpu::example("GPU-a", 3), Gpu::example("GPU-b", 5), Gpu::example("GPU-c", 3)];
    let text = format!(
        "[container]\ndevice_list_strategy = \"device-nodes\"\n[driver]\nroot = \"{}\"\n\
         device_nodes = [\"/dev/nvidia{{minor}}\", \"/dev/nvidiactl\"]\n",
        dir.path().display()
    );
    let nodes = |text: &str| parts(&config(text), &gpus.each_ref(), false).unwrap().nodes;
    let plain = nodes(&text);
    let paths: Vec<&str> = plain.iter().map(|node| node.container.as_str()).collect();
    assert_eq!(paths, ["/dev/nvidia3", "/dev/nvidia5", "/dev/nvidiactl"]);
    assert!(plain.iter().all(|node| node.host == node.container));

    file(dir.path(), "dev/nvidiactl");
    let below = nodes(&text);
    assert_eq!(below[0].container, "/dev/nvidia3");
    assert_eq!(below[0].host, dir.path().join("dev/nvidia3").display().to_string());

    // NVIDIA's spec has the GPU, or its toolkit.
    assert!(nodes(&text.replace("device-nodes", "cdi-cri")).is_empty());
    let toolkit = nodes(&text.replace("device-nodes", "envvar"));
    assert_eq!(toolkit.len(), 1, "of those that are there kubelet is told: {toolkit:?}");
    let own = format!("{}[cdi]\ngpu_kind = \"\"\n", text.replace("device-nodes", "cdi-cri"));
    assert_eq!(nodes(&own).len(), 3);
}

const NODES: &str = "[container]\ndevice_list_strategy = \"device-nodes\"\n\
                     [driver]\ndevice_nodes = [\"/dev/nvidia{minor}\", \"/dev/nvidiactl\"]\n";

#[test]
fn a_mig_instance_comes_with_its_capabilities() {
    let proc = tempfile::tempdir().unwrap();
    let access = |of: &str, minor: u32| {
        let path = proc.path().join("proc/driver/nvidia/capabilities").join(of).join("access");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // As the MIG User Guide shows it.
        let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        std::fs::write(path, text).unwrap();
    };
    access("gpu2/mig/gi1", 12);
    access("gpu2/mig/gi1/ci0", 13);
    access("gpu2/mig/gi1/ci1", 14);
    let (first, second) = (instance("MIG-a", 2, (1, 0)), instance("MIG-b", 2, (1, 1)));
    let found = parts_in(&config(NODES), &[&first, &second], false, proc.path()).unwrap();
    let paths: Vec<&str> = found.nodes.iter().map(|node| node.container.as_str()).collect();
    let caps = [12, 13, 14].map(|n| format!("/dev/nvidia-caps/nvidia-cap{n}"));
    assert_eq!(paths, ["/dev/nvidia2", "/dev/nvidiactl", &caps[0], &caps[1], &caps[2]]);

    let gone =
        parts_in(&config(NODES), &[&instance("MIG-c", 2, (7, 0))], false, proc.path()).unwrap_err();
    assert_eq!(gone, DriverError::NoCapability("gpu2/mig/gi7".into()));
    // NVIDIA's toolkit knows them, and says so.
    let envvar = config("");
    assert!(
        parts_in(&envvar, &[&instance("MIG-c", 2, (7, 0))], false, proc.path())
            .unwrap()
            .nodes
            .is_empty()
    );
}

#[test]
fn capabilities_are_read_from_the_list_where_the_directory_is_covered() {
    let proc = tempfile::tempdir().unwrap();
    file(proc.path(), "proc/driver/nvidia-caps/mig-minors");
    let list = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi1/access 21\n\
                gpu0/gi1/ci0/access 22\ngpu0/gi11/access 201\ngpu10/gi1/access 999\n";
    std::fs::write(proc.path().join("proc/driver/nvidia-caps/mig-minors"), list).unwrap();
    let found =
        parts_in(&config(NODES), &[&instance("MIG-a", 0, (1, 0))], false, proc.path()).unwrap();
    let hosts: Vec<&str> = found.nodes.iter().map(|node| node.host.as_str()).collect();
    assert_eq!(hosts[2..], ["/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]);
    let odd = "gpu0/gi1/access x\ngpu0/gi1/ci0/access\n";
    std::fs::write(proc.path().join("proc/driver/nvidia-caps/mig-minors"), odd).unwrap();
    assert!(
        parts_in(&config(NODES), &[&instance("MIG-a", 0, (1, 0))], false, proc.path()).is_err()
    );
}
