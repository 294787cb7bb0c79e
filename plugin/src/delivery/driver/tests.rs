use std::os::unix::fs::symlink;

use super::*;

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
    link(root, &format!("{lib}/libnvidia-nvvm.so.4"), "absent");
    link(root, &format!("{lib}/libnvidia-cfg.so.1"), "libnvidia-cfg.so.1");
    link(root, &format!("{lib}/libnvidia-opencl.so.1"), "/../../../../../../etc/passwd");
    // A second place comes second.
    file(root, "usr/lib64/libcuda.so.1");
    file(root, "usr/lib64/libnvidia-ptxjitcompiler.so.1");

    let text = format!("[driver]\nroot = \"{}\"\n", root.display());
    let parts = parts(&config(&text), &[]).unwrap();
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
fn a_root_without_a_driver_is_told_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    file(dir.path(), "usr/lib64/libnvidia-ml.so.1");
    let text = format!("[driver]\nroot = \"{}\"\n", dir.path().display());
    let error = parts(&config(&text), &[]).unwrap_err();
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
    let nodes = |text: &str| parts(&config(text), &gpus.each_ref()).unwrap().nodes;
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
    assert!(nodes(&text.replace("device-nodes", "envvar")).is_empty());
    let own = format!("{}[cdi]\ngpu_kind = \"\"\n", text.replace("device-nodes", "cdi-cri"));
    assert_eq!(nodes(&own).len(), 3);
}
