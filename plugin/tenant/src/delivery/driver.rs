//! The host's parts of the driver, where no toolkit brings it: libraries and device nodes.
//! The libraries are below the root of its installation: `/` of a host, or the root file system of a container that
//! installed the driver (`/run/nvidia/driver` of NVIDIA's GPU operator).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use tessera_config::{CONTAINER_DRIVER_DIR, Config, DeviceListStrategy, Mount};
use tessera_model::gpu::Gpu;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    pub libraries: Vec<Mount>,
    pub nodes: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub host: String,
    pub container: String,
}

/// What is missing. Each message says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    #[error(
        "no libcuda.so.1 below driver.root {root}; is the driver installed there, and the directory \
         mounted into the plugin at the same path? (A directory with nothing but the driver's \
         libraries is driver.libraries.)"
    )]
    NoLibraries { root: PathBuf },
    #[error(
        "the driver lists no capability {0}, so no container could use the MIG instance; was it \
         destroyed? `nvidia-smi mig -lci` lists those there are"
    )]
    NoCapability(String),
}

/// Whether containers are to get device nodes of ours; `by_cdi`: by the name of a CDI device, as those of a claim
/// are whatever the strategy.
fn wants_nodes(config: &Config, by_cdi: bool) -> bool {
    let strategy = config.container.device_list_strategy;
    let is_cdi = strategy.is_cdi() || by_cdi && strategy != DeviceListStrategy::None;
    strategy == DeviceListStrategy::DeviceNodes || is_cdi && config.cdi.gpu_kind.is_none()
}

/// Whether kubelet is told of the nodes that NVIDIA's toolkit brings. The toolkit opens them by itself, behind the
/// runtime's back, so whoever writes the container's device rules again from what the runtime knows (`systemctl
/// daemon-reload`, a resize in place) closes them.
fn passes_nodes(config: &Config, by_cdi: bool) -> bool {
    let strategy = config.container.device_list_strategy;
    let by_toolkit =
        matches!(strategy, DeviceListStrategy::Envvar | DeviceListStrategy::VolumeMounts);
    by_toolkit && !by_cdi && config.container.pass_device_specs
}

/// Looks for what a container with these GPUs needs. `by_cdi`: it is given them by the name of a CDI device.
pub fn parts(config: &Config, gpus: &[&Gpu], by_cdi: bool) -> Result<Parts, DriverError> {
    parts_in(config, gpus, by_cdi, Path::new("/"))
}

/// As [`parts`], with the `/proc` and the device nodes below `root`.
pub(super) fn parts_in(
    config: &Config,
    gpus: &[&Gpu],
    by_cdi: bool,
    root: &Path,
) -> Result<Parts, DriverError> {
    let mut parts = Parts::default();
    let at = |host: PathBuf, container: &Path| Mount {
        host,
        container: container.to_owned(),
        read_only: true,
    };
    let inside = Path::new(CONTAINER_DRIVER_DIR);
    if let Some(directory) = &config.driver.libraries {
        parts.libraries.push(at(directory.clone(), inside));
    }
    if let Some(root) = &config.driver.root {
        let found = libraries(root)?;
        parts.libraries.extend(found.into_iter().map(|(name, host)| at(host, &inside.join(name))));
    }
    let proc = root.join("proc");
    if wants_nodes(config, by_cdi) {
        parts.nodes = nodes(config, gpus, &proc)?;
    } else if passes_nodes(config, by_cdi) {
        // A node that is not there would keep the container from starting; the toolkit knows them all.
        let is_there = |node: &Node| root.join(node.host.trim_start_matches('/')).exists();
        parts.nodes = passed(config, gpus, &proc).into_iter().filter(is_there).collect();
    }
    Ok(parts)
}

/// The NVML that the plugin loads: `paths.nvml`, or the driver's own below `driver.root`; `None` lets the
/// loader find it.
pub fn nvml(config: &Config) -> Option<PathBuf> {
    if let Some(path) = &config.paths.nvml {
        return Some(path.clone());
    }
    let root = config.driver.root.as_ref()?;
    let libraries = libraries(root).ok()?;
    libraries.into_iter().find(|(name, _)| name == "libnvidia-ml.so.1").map(|(_, path)| path)
}

/// Which `/dev/nvidia*` a container may open besides those of `driver.device_nodes` where its image asks the toolkit
/// for more than compute.
const MODESET: &str = "/dev/nvidia-modeset";

fn nodes(config: &Config, gpus: &[&Gpu], proc: &Path) -> Result<Vec<Node>, DriverError> {
    let mut paths = general(config, gpus);
    for (gpu, mig) in gpus.iter().filter_map(|gpu| Some((gpu, gpu.mig.as_ref()?))) {
        let of = instance_nodes(proc, gpu.minor, mig.gpu_instance, mig.compute_instance)?;
        of.into_iter().for_each(|path| add(&mut paths, path));
    }
    Ok(on_host(config, paths))
}

/// As far as they are known: what is missing here is the toolkit's to say.
fn passed(config: &Config, gpus: &[&Gpu], proc: &Path) -> Vec<Node> {
    nodes(config, gpus, proc)
        .unwrap_or_else(|_| on_host(config, general(config, gpus)))
        .into_iter()
        .chain(on_host(config, vec![MODESET.to_owned()]))
        .collect()
}

/// Two MIG instances share their GPU's node.
fn add(paths: &mut Vec<String>, path: String) {
    if !paths.contains(&path) {
        paths.push(path);
    }
}

fn general(config: &Config, gpus: &[&Gpu]) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for pattern in &config.driver.device_nodes {
        if pattern.contains("{minor}") {
            let of = |gpu: &&Gpu| pattern.replace("{minor}", &gpu.minor.to_string());
            gpus.iter().for_each(|gpu| add(&mut paths, of(gpu)));
        } else {
            add(&mut paths, pattern.clone());
        }
    }
    paths
}

fn on_host(config: &Config, paths: Vec<String>) -> Vec<Node> {
    // A driver that runs in a container of its own has its nodes below its root.
    let base = config.driver.root.as_ref().filter(|root| root.join("dev/nvidiactl").exists());
    let host = |path: &str| match base {
        Some(root) => root.join(path.trim_start_matches('/')).to_string_lossy().into_owned(),
        None => path.to_owned(),
    };
    paths.into_iter().map(|path| Node { host: host(&path), container: path }).collect()
}

/// The nodes of one instance: of the GPU instance, of the compute instance. `proc` is `/proc`. To use an
/// instance, a process needs, beside the GPU's own node, access to the capabilities of both: `/dev/nvidia-caps/nvidia-capN`,
/// N as `/proc` says. (MIG User Guide, "Device Nodes and Capabilities".)
fn instance_nodes(
    proc: &Path,
    gpu_minor: u32,
    gpu_instance: u32,
    compute_instance: u32,
) -> Result<[String; 2], DriverError> {
    let gpu_instance = format!("gi{gpu_instance}");
    let compute_instance = format!("{gpu_instance}/ci{compute_instance}");
    let node = |instance: String| {
        minor(proc, gpu_minor, &instance)
            .map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"))
            .ok_or_else(|| DriverError::NoCapability(format!("gpu{gpu_minor}/mig/{instance}")))
    };
    Ok([node(gpu_instance)?, node(compute_instance)?])
}

fn minor(proc: &Path, gpu: u32, instance: &str) -> Option<u32> {
    let of = format!("driver/nvidia/capabilities/gpu{gpu}/mig/{instance}/access");
    if let Ok(text) = std::fs::read_to_string(proc.join(of)) {
        let line = text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:"))?;
        return line.trim().parse().ok();
    }
    // Where NVIDIA's toolkit covers the directory, there is still the list of all minor numbers.
    let list = std::fs::read_to_string(proc.join("driver/nvidia-caps/mig-minors")).ok()?;
    let wanted = format!("gpu{gpu}/{instance}/access");
    list.lines().find_map(|line| {
        let (name, minor) = line.split_once(' ')?;
        if name == wanted { minor.trim().parse().ok() } else { None }
    })
}

/// Where distributions put libraries, those of the driver first. As NVIDIA's container toolkit looks
/// for them, and the root itself, for a flat directory.
const DIRECTORIES: [&str; 13] = [
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "lib",
    "usr/local/lib",
    "usr/local/lib64",
    "",
];

/// The libraries of NVIDIA's driver capabilities `compute` and `utility`, as libnvidia-container and NVIDIA's
/// container toolkit list them, without version. All but the first may be missing. Not OpenCL's: it is a second
/// driver, which opens the devices itself, past every limit.
pub const LIBRARIES: [&str; 15] = [
    "libcuda.so",
    "libnvidia-ml.so",
    "libnvidia-ptxjitcompiler.so",
    "libnvidia-nvvm.so",
    "libnvidia-nvvm70.so",
    "libnvidia-tileiras.so",
    "libnvidia-sandboxutils.so",
    "libnvidia-gpucomp.so",
    "libnvidia-fatbinaryloader.so",
    "libnvidia-compiler.so",
    "libnvidia-allocator.so",
    "libnvidia-pkcs11.so",
    "libnvidia-pkcs11-openssl3.so",
    "libnvidia-cfg.so",
    "libcudadebugger.so",
];

/// More links than this in one path are a loop, as for the kernel.
const MOST_LINKS: usize = 40;

/// Every name that a program may load one of them by (`libcuda.so.1`, and with the full version), and
/// the file on the host that it means.
///
/// Not the directory as a whole: a host's other libraries would come before the container's own.
fn libraries(root: &Path) -> Result<BTreeMap<String, PathBuf>, DriverError> {
    let mut found: BTreeMap<&str, BTreeMap<String, PathBuf>> = BTreeMap::new();
    for directory in DIRECTORIES {
        for (library, files) in versions(root, directory) {
            found.entry(library).or_insert(files);
        }
    }
    let found: BTreeMap<String, PathBuf> = found.into_values().flatten().collect();
    if found.contains_key("libcuda.so.1") {
        Ok(found)
    } else {
        Err(DriverError::NoLibraries { root: root.to_owned() })
    }
}

/// Of each library the names in `directory` that are it and a version, with their files. Reads the
/// directory once: it may have thousands of others.
fn versions(root: &Path, directory: &str) -> BTreeMap<&'static str, BTreeMap<String, PathBuf>> {
    let mut found: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    let Some(directory) = resolve(root, Path::new(directory)) else { return found };
    let entries = std::fs::read_dir(root.join(&directory)).into_iter().flatten().flatten();
    for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
        let Some(library) = library(&name) else { continue };
        let Some(file) = resolve(root, &directory.join(&name)) else { continue };
        let file = root.join(file);
        if file.is_file() {
            found.entry(library).or_default().insert(name, file);
        }
    }
    found
}

fn library(name: &str) -> Option<&'static str> {
    LIBRARIES.into_iter().find(|library| {
        let version = name.strip_prefix(library).and_then(|rest| rest.strip_prefix('.'));
        version.is_some_and(|text| text.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
    })
}

/// Follows the links of `path`, which is relative to `root`, as a process whose root that is would:
/// an absolute link begins at `root`, and nothing leads out of it. The result is relative to `root`.
fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut links = 0;
    let mut done = PathBuf::new();
    let mut rest: Vec<OsString> = names(path);
    while let Some(next) = rest.pop() {
        if next == ".." {
            done.pop();
            continue;
        }
        let step = done.join(&next);
        match std::fs::read_link(root.join(&step)) {
            Ok(target) => {
                links += 1;
                if links > MOST_LINKS {
                    return None;
                }
                if target.is_absolute() {
                    done = PathBuf::new();
                }
                rest.extend(names(&target));
            }
            Err(_) => done = step,
        }
    }
    Some(done)
}

fn names(path: &Path) -> Vec<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .rev()
        .collect()
}

#[cfg(test)]
mod tests {
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
            let text =
                format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
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

        let gone = parts_in(&config(NODES), &[&instance("MIG-c", 2, (7, 0))], false, proc.path())
            .unwrap_err();
        assert_eq!(gone, DriverError::NoCapability("gpu2/mig/gi7".into()));
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
}
