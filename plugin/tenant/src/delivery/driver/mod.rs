//! The host's parts of the driver, where no toolkit brings it: libraries and device nodes.

mod root;

pub use root::LIBRARIES;

use std::path::{Path, PathBuf};

use tessera_config::{CONTAINER_DRIVER_DIR, Config, DeviceListStrategy, Mount};
use tessera_model::gpu::Gpu;

/// What there is for one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    pub libraries: Vec<Mount>,
    /// Device nodes that kubelet or a CDI spec of ours has to name.
    pub nodes: Vec<Node>,
}

/// A device node.
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
    NoLibraries {
        /// `driver.root`.
        root: PathBuf,
    },
    /// The driver does not list a MIG instance's capability.
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
///
/// # Errors
/// See [`DriverError`]: without it the container would have no GPU.
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
        let found = root::libraries(root)?;
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
    let libraries = root::libraries(root).ok()?;
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

/// The nodes of `driver.device_nodes` for these GPUs.
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
///
/// # Errors
/// The driver does not know the instance.
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

#[cfg(test)]
mod tests;
